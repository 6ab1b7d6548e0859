"""Rank and world size of this process, which the launcher or `utils.distributed.spawn` leaves in the environment.

`ranks` and `speaks_for_machine` are for utils/distributed/ and utils/run.py alone. Other modules get by with the
numbers of processes, with `launched`, and with `print_on_main`.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

SPAWNED = "LOCKSTEP_SPAWNED"  # in the environment of processes that `spawn` has started


class Ranks(NamedTuple):
    """The number of this process among all, and among those of its machine, and how many there are."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __str__(self) -> str:
        return f"process {self.rank} on {socket.gethostname()}"


def ranks() -> Ranks:
    """Return what the environment says; without a launcher, the ranks of the only process."""
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
    """Return the threads of each of `processes` of this machine: with more than cores they slow each other down."""
    return max((os.cpu_count() or 1) // processes, 1)


def launched() -> bool:
    """Has a launcher, and not `spawn`, started this process as one of several?"""
    return world_size() > 1 and SPAWNED not in os.environ


def speaks_for_machine() -> bool:
    """Is this the process that prints for its machine before the processes have met, or if they cannot agree?"""
    return ranks().local_rank == 0


def print_on_main(*lines: str) -> None:
    """Print lines on the main process; before there is a `Run`, which prints everything else."""
    if ranks().rank == 0:
        print(*lines, sep="\n", flush=True)
