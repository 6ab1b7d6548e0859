"""Where a launcher has put this process, and the store that the processes of a run share."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from torch import distributed

SPREAD = "LOCKSTEP_SPREAD"  # in the environment of processes that `spread` has started


class Place(NamedTuple):
    """This process: its number among all, and among those of its machine."""

    rank: int
    processes: int
    local_rank: int
    local_processes: int

    def __str__(self) -> str:
        return f"process {self.rank} on {socket.gethostname()}"


def place() -> Place:
    """What the launcher has left in the environment; without one, the only process."""
    rank, processes, local_rank = (int(os.environ.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return Place(rank, max(processes, 1), local_rank, local)


def launched() -> bool:
    """Has a launcher of its own started this process, and not `spread`?"""
    return place().processes > 1 and SPREAD not in os.environ


def speaks() -> bool:
    """Is this the process that speaks for its machine while nothing is agreed with the others?"""
    return place().local_rank == 0


def attempt() -> int:
    """How many times the launcher has started the processes anew (`--max_restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def key(name: str) -> str:
    """A name for the run's store, which the next attempt of the launcher may find again."""
    return f"lockstep/{attempt()}/{name}"


def run_store() -> distributed.Store | None:
    """The store of the processes that have met, at its bottom, where all see the same names; None for one alone."""
    if not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store
