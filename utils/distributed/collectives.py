"""Broadcast, gather and shard Python values among the processes of a run.

Called by utils/run.py, launch and utils/checkpoint/resume.py. Every process must call the same functions in the
same order, after `utils.distributed.launch.connect`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from utils.distributed.failure import Stopped
from utils.distributed.ranks import ranks
from utils.errors import UserError

T = TypeVar("T")


def broadcast_from_main(decide: Callable[[], T]) -> T:
    """Return the main process's result of `decide` on every process.

    Other machines may see a new file later, so only one process may decide by files. A `UserError` or `Stopped` of the
    main process is raised on every process.
    """
    if ranks().world_size == 1:
        return decide()
    answer: list[Any] = [None, None]
    if ranks().rank == 0:
        try:
            answer[0] = decide()
        except (UserError, Stopped) as error:
            answer[1] = error
    value, failure = broadcast_object_list(answer)
    if failure is not None:
        PartialState().wait_for_everyone()  # the main process is about to end
        raise failure
    return value


class Collectives:
    """Collective operations on Python values; with one process they return their argument."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def broadcast(self, value: T) -> T:
        """Return the main process's value on every process."""
        return broadcast_object_list([value])[0]

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes, in the order of the ranks, on every process."""
        return gather_object(items)

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return every `world_size`-th item, from this process's rank on."""
        return list(items[self._rank :: self._world_size])

    def local_part(self, items: Sequence[T], count: int) -> Sequence[T]:
        """Return this process's `count` items of all processes' `items`, by rank; () if their number does not fit."""
        start = self._rank * count
        return items[start : start + count] if len(items) == self._world_size * count else ()
