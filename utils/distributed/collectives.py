"""Values that all processes of a run exchange: broadcast, gathered, or dealt out. Called by utils/run.py.

Every process must call the same methods in the same order, after `utils.distributed.accelerator.start`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import nn

T = TypeVar("T")


class Collectives:
    """Collective operations on Python values; with one process they return what they are given."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def broadcast(self, value: T) -> T:
        """Return the main process's value on every process, so that all decide alike."""
        return broadcast_object_list([value])[0]

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes on every process, in the order of the ranks."""
        return gather_object(items)

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this process's part of `items`, which are dealt out one by one, each to one process."""
        return list(items[self._rank :: self._world_size])

    def own_share(self, shares: Sequence[T]) -> T | None:
        """Return this process's item of `shares`, which holds one of each process.

        None if `shares` come from a run with another number of processes.
        """
        return shares[self._rank] if len(shares) == self._world_size else None

    def align(self, model: nn.Module) -> None:
        """Give every process the main process's parameters and buffers of `model`."""
        broadcast(model.state_dict())
