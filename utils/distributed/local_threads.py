"""Threads for the logical processes of this process, which may meet to add. Called by distributed_model.

On a CPU each has one torch thread, and autograd runs in the thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Meeting:
    """What threads compute together, again and again: each brings its part and waits for the others."""

    def __init__(self, threads: int) -> None:
        self._parts: list[Any] = [None] * threads
        self._barrier = Barrier(threads, self._compute)

    def together(self, number: int, work: Callable[[list[Any]], T], part: Any) -> T:
        """Return what `work` returns for the parts of all threads: one of them calls it. number: of the thread."""
        self._parts[number] = part
        self._work = work
        self._barrier.wait()
        return self._result  # the next one is not computed before this thread comes again

    def _compute(self) -> None:
        self._result = self._work(self._parts)

    def cancel(self) -> None:
        """Raise `BrokenBarrierError` in all threads that wait here, or will."""
        self._barrier.abort()


class LocalThreads:
    """Calls a function in several threads at once. meeting: where they may wait for each other."""

    def __init__(self, threads: int, meeting: Meeting | None = None) -> None:
        self._meeting = meeting
        self._pool = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))

    def map(self, work: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
        """Yield the results of `work` in the order of its arguments. Raises what one of the calls has raised."""
        calls = [self._pool.submit(self._call, work, *each) for each in zip(*arguments, strict=True)]
        try:
            while calls:
                yield calls.pop(0).result()
        except BrokenBarrierError as broken:
            errors = [call.exception() for call in calls]
            raise next((error for error in errors if error and type(error) is not BrokenBarrierError), broken) from None
        finally:
            wait(calls)  # after an error: who tries again must be alone

    def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return work(*arguments)
        except BaseException:
            if self._meeting:
                self._meeting.cancel()
            raise
