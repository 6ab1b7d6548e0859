"""The processes of a run: which of them this one is, their store, and collective operations on Python values.

A launcher or `utils.distributed.launch.spawn` sets the ranks in the environment. `ranks` is for utils/distributed/ and
utils/run.py only; other modules may use the rest.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.heap import Arena
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet, finalize

import psutil
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import distributed

from utils.errors import Stopped, UserError, first_line, quoted

T = TypeVar("T")
CGROUP = Path("/sys/fs/cgroup")  # files of a container's cgroup
CPU_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # microseconds; version 2, version 1
MEMORY_NAME = "lockstep"  # name of memory files in /proc
LOOPBACK = "127.0.0.1"
# Variables with the number of tasks that srun and MPI's launchers have started.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_opened: list[RunStore] = []  # the run's store, once `open_store` has reached it


class Ranks(NamedTuple):
    """Rank of this process and number of processes, in the run and on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __str__(self) -> str:
        return f"process {self.rank} on {socket.gethostname()}"


def ranks() -> Ranks:
    """Read the ranks from the environment; without a launcher this is the only process."""
    rank, processes, local_rank = map(launch_number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Ranks(rank, max(processes, 1), local_rank, launch_number("LOCAL_WORLD_SIZE", 1))


def world_size() -> int:
    """Return the number of processes of the run."""
    return ranks().world_size


def main_address() -> tuple[str, int]:
    """Return the address and port of the main process. Raises `UserError` if the port is wrong."""
    return os.environ.get("MASTER_ADDR") or LOOPBACK, launch_number("MASTER_PORT", 29500, 2**16 - 1)


def launch_number(name: str, default: int = 0, maximum: int = 10**6) -> int:
    """Return a number that a launcher sets in the environment. Raises `UserError` if it is none up to `maximum`."""
    text = os.environ.get(name) or str(default)
    check_variable(name, text.isdecimal() and float(text) <= maximum, f"instead of a number up to {maximum}")
    return int(text)


def check_variable(name: str, is_right: bool, reason: str) -> None:
    """Raise `UserError` if an environment variable is not right; `reason` follows its value."""
    if not is_right:
        raise UserError(f"the environment variable {name} is {quoted(os.environ[name])} {reason}; correct or unset it")


@contextmanager
def variables_named() -> Iterator[None]:
    """Raise `UserError` for an error in a block that quotes a variable which Accelerate reads; numbers are right."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for name, value in os.environ.items():
            if name.startswith(("ACCELERATE_", "FORK_", "OMP")) and not value.isdecimal():
                is_quoted = re.search(rf"(?i)('|: |value ){re.escape(value)}(?!\w)", str(error))
                check_variable(name, not is_quoted, f"and refused by Accelerate ({first_line(error)})")
        raise


def check_launch() -> None:
    """Raise `UserError` if the ranks in the environment are wrong or incomplete: each process would train alone.

    WORLD_SIZE=1 says that it should; each trial of a W&B sweep does.
    """
    rank, processes, *_ = ranks()
    tasks = [name for name in TASKS if launch_number(name, 1) > 1]
    forgotten = tasks and not any(map(os.environ.get, ("WORLD_SIZE", "WANDB_SWEEP_ID")))
    if forgotten or rank >= processes or (processes > 1 and not os.environ.get("RANK")):
        variables = [f"{name} {os.environ[name]}" for name in ("RANK", "WORLD_SIZE", *tasks) if os.environ.get(name)]
        raise UserError(
            f"the environment has {', '.join(variables)}, which is not a whole launch; start "
            "accelerate_configs/start.sh on each machine, or set WORLD_SIZE=1 and unset RANK for a run of this process "
            "alone"
        )


# The store


def store_is_hosted() -> bool:
    """Return whether the launcher, or `spawn`, hosts the run's store; else the main process does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_key(name: str) -> str:
    """Return the key of a name in the store; a launcher that hosts it may use it again when it restarts processes."""
    return f"lockstep/{launch_number('TORCHELASTIC_RESTART_COUNT') if store_is_hosted() else 0}/{name}"


class RunStore:
    """Values of the processes of a run, in one of torch's stores.

    Every value is JSON: nothing that arrives is a path or code. The names are:
        names, alarm, present, reason    names of all processes; how they end (failure.py)
        stop, signal                     step and reason of a stop; the signal (GracefulStop)
        memory/<host>/<number>           handles of `shared_memory`
    Its methods raise `DistError` if the store does not answer, after many minutes if the network is down.
    """

    def __init__(self, store: distributed.Store) -> None:
        self._store, self._ranks = store, ranks()

    def write(self, name: str, value: Any) -> None:
        self._store.set(restart_key(f"{name}/{self._ranks.rank}"), json.dumps(value))

    def values(self, name: str) -> dict[int, Any]:
        """Return the values of the processes that have written one, by rank."""
        keys = {rank: restart_key(f"{name}/{rank}") for rank in range(self._ranks.world_size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def write_once(self, name: str, value: Any) -> Any:
        """Write one value for all processes, unless a process has already written one; return the one that counts."""
        return json.loads(self._store.compare_set(restart_key(name), "", json.dumps(value)))

    def value(self, name: str) -> Any:
        """Return the value of `write_once`, None if there is none."""
        return self.wait_for_value(name) if self._store.check([restart_key(name)]) else None

    def wait_for_value(self, name: str) -> Any:
        """Wait for the value of `write_once`. Raises `DistError` after the store's time-out."""
        return json.loads(self._store.get(restart_key(name)))


def open_store(timeout: float) -> distributed.Store:
    """Open the store of all processes. Raises OSError, RuntimeError, or `UserError` if another one has this rank."""
    if world_size() == 1:
        return distributed.HashStore()
    rank, (address, port), end = ranks().rank, main_address(), time.monotonic() + timeout
    hosts, limit, store = rank == 0 and not store_is_hosted(), timedelta(seconds=timeout), None
    while store is None:
        try:
            if not hosts:  # torch would print a warning for each attempt
                socket.create_connection((address, port), timeout=max(end - time.monotonic(), 0.1)).close()
            host = LOOPBACK if hosts else address
            store = distributed.TCPStore(host, port, world_size(), hosts, limit, wait_for_workers=False)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    identity = [str(ranks()), os.getpid()]
    owner = RunStore(store).write_once(f"names/{rank}", identity)
    if owner != identity and not store_is_hosted():  # a launcher may start processes again with its store
        raise UserError(
            f"{owner[0]} (PID {owner[1]}) has rank {rank} too; give each process its rank, each run its port"
        )
    _opened[:] = [RunStore(store)]
    return store


def run_store() -> RunStore | None:
    """Return the run's store, None before `open_store`, and for a process alone."""
    return _opened[0] if _opened else None


# Collective operations: all processes must call them in the same order, after `utils.distributed.launch.connect`


def broadcast_from_main(decide: Callable[[], T]) -> T:
    """Return the main process's result of `decide` on every process.

    Other machines may see a new file later, so only one process may decide by files. A `UserError` or `Stopped` of the
    main process is raised on every process.
    """
    if world_size() == 1:
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

    def broadcast(self, value: T) -> T:
        """Return the main process's value on every process."""
        return broadcast_object_list([value])[0]

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes, in the order of the ranks, on every process."""
        return gather_object(items) if world_size() > 1 else items

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return every `world_size`-th item, from this process's rank on."""
        return list(items[ranks().rank :: world_size()])


in_use: WeakSet[Arena] = WeakSet()  # this process's memory, whose pages count as free until they are written
_memory_calls = itertools.count()


def shared_memory(size: Callable[[int], int]) -> Arena:
    """Return zeroed memory of all processes of this machine and those that they start; `size` maps the free bytes.

    It is a nameless file, which exists as long as any process has it open. Pages take memory only once they are
    written. All processes must make these calls in the same order.
    """
    if in_use and size(available_bytes()) < size(2**60):
        gc.collect()  # loaders of an earlier run are in reference cycles
    free = available_bytes()
    store, here, name = run_store(), ranks(), f"memory/{socket.gethostname()}/{next(_memory_calls)}"
    if store is None or here.local_world_size < 2 or not hasattr(os, "memfd_create"):
        memory = _new_memory(size(free // here.local_world_size))
    elif here.local_rank == 0:
        memory = _new_memory(size(free))
        store.write_once(name, [os.getpid(), memory.fd])
    else:
        try:
            memory = _opened_memory(store.wait_for_value(name))
        except (OSError, ValueError, TypeError):  # the process is in another container with the same host name
            memory = _new_memory(size(free // here.local_world_size))
    in_use.add(memory)
    return memory


def _new_memory(size: int) -> Arena:
    if not hasattr(os, "memfd_create"):
        return Arena(max(size, 1))
    file = os.memfd_create(MEMORY_NAME, 0)
    os.ftruncate(file, max(size, 1))
    return _open_arena(file)


def _opened_memory(handle: Any) -> Arena:
    """Return another process's memory by a handle from the run's store: the numbers of the process and a descriptor.

    Anybody on the network may reach the store, so only memory that `_new_memory` has made is used, never a file. Raises
    OSError, or ValueError or TypeError for anything else.
    """
    process, descriptor = map(int, handle)
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{MEMORY_NAME} "):
        raise ValueError("not shared memory")
    return _open_arena(os.open(path, os.O_RDWR))


def _open_arena(file: int) -> Arena:
    memory = Arena(os.fstat(file).st_size, file)
    finalize(memory, os.close, file)
    return memory


def available_cores() -> int:
    """Return the cores that this process, or its container if it has fewer, may use at the same time; at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for files in CPU_QUOTAS:
        with suppress(OSError, ValueError):  # no container, or no limit: "max"
            quota, period = map(int, " ".join((CGROUP / file).read_text() for file in files).split())
            cores = min(cores, quota / period) if quota > 0 else cores
    return max(int(cores), 1)


def available_bytes() -> int:
    """Return the bytes that this machine or container can use without swapping, without the memory `in_use`."""
    available: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # there is no container, or it has no limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(stat["inactive_file"]))
    return max(available - sum(memory.size for memory in in_use), 0)
