"""Threads for the logical processes of this process, which may meet to add up tensors. Called by distributed_model.

On a CPU each thread has one torch thread, and autograd runs in the thread that calls it.
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
    """A repeated joint computation, to which each thread brings its part and waits for the others."""

    def __init__(self, threads: int) -> None:
        self._parts: list[Any] = [None] * threads
        self._barrier = Barrier(threads, self._compute)

    def together(self, number: int, work: Callable[[list[Any]], T], part: Any) -> T:
        """Return the result of `work` on the parts of all threads; one thread calls it.

        Args:
            number: number of the calling thread, from 0
        """
        self._parts[number] = part
        self._work = work
        self._barrier.wait()
        return self._result  # the next result is not computed before this thread calls again

    def _compute(self) -> None:
        self._result = self._work(self._parts)

    def cancel(self) -> None:
        """Raise `BrokenBarrierError` in all threads that wait here now or later."""
        self._barrier.abort()


class LocalThreads:
    """Calls a function in several threads at once.

    Args:
        meeting: the meeting at which the threads may wait for each other
    """

    def __init__(self, threads: int, meeting: Meeting | None = None) -> None:
        self._meeting = meeting
        self._pool = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))

    def map(self, work: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
        """Yield the results of `work` in the order of its arguments. Raises the error of a failed call."""
        calls = [self._pool.submit(self._call, work, *each) for each in zip(*arguments, strict=True)]
        try:
            while calls:
                yield calls.pop(0).result()
        except BrokenBarrierError as broken:
            errors = [call.exception() for call in calls]
            raise next((error for error in errors if error and type(error) is not BrokenBarrierError), broken) from None
        finally:
            wait(calls)  # after an error no call may still run while the caller tries again

    def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return work(*arguments)
        except BaseException:
            if self._meeting:
                self._meeting.cancel()
            raise
