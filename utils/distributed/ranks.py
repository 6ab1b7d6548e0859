"""Rank and world size of this process, which the launcher or `utils.distributed.spawn` sets in the environment.

`ranks` and `speaks_for_machine` are for utils/distributed/ and utils/run.py only; other modules may use the rest.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

SPAWNED = "LOCKSTEP_SPAWNED"  # environment variable of the processes that `spawn` starts


class Ranks(NamedTuple):
    """Rank of this process and number of processes, among all and on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __str__(self) -> str:
        return f"process {self.rank} on {socket.gethostname()}"


def ranks() -> Ranks:
    """Read the ranks from the environment; without a launcher they are those of a single process."""
    rank, processes, local_rank = (int(os.environ.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return Ranks(rank, max(processes, 1), local_rank, local)


def world_size() -> int:
    """Return the number of processes of the run."""
    return ranks().world_size


def local_world_size() -> int:
    """Return the number of processes of the run on this machine."""
    return ranks().local_world_size


def fair_threads(processes: int) -> int:
    """Return the threads per process for `processes` on this machine; more threads than cores are slower."""
    return max((os.cpu_count() or 1) // processes, 1)


def launched() -> bool:
    """Return whether a launcher, not `spawn`, has started this process as one of several."""
    return world_size() > 1 and SPAWNED not in os.environ


def speaks_for_machine() -> bool:
    """Return whether this process prints for its machine if the processes cannot communicate."""
    return ranks().local_rank == 0
