"""Broadcast, gather and shard Python values among the processes of a run. Called by utils/run.py.

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

    def local_share(self, shares: Sequence[T]) -> T | None:
        """Return this process's item of `shares`, a list by rank; None if it is of another number of processes."""
        return shares[self._rank] if len(shares) == self._world_size else None

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the main process's parameters and buffers of `model` to every process."""
        broadcast(model.state_dict())
