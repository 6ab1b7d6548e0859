"""Memory that all processes of a machine share. Called by data/cache.py and data/image_ring.py."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import psutil

from utils.distributed.ranks import ranks
from utils.distributed.store import run_store

CGROUP = Path("/sys/fs/cgroup")  # of a container, version 2
MEMORY_NAME = "lockstep"  # of memory files, as /proc shows it
in_use: WeakSet[SharedMemory] = WeakSet()  # of this process: pages count as free until they are written
_calls = itertools.count()


class SharedMemory:
    """Zeroed bytes, uint8 (n,), of a file without a name; it exists as long as a process that has opened it.

    It can be sent to processes that are being started.
    """

    def __init__(self, file: int) -> None:
        self.file = file  # descriptor, on which parts can be locked
        self.bytes = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        finalize(self, os.close, file)

    @classmethod
    def of_size(cls, size: int) -> SharedMemory:
        """Return `size` new bytes, at least one. Pages take memory once they are written."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create(MEMORY_NAME, 0)
        else:
            with tempfile.TemporaryFile() as temporary:
                file = os.dup(temporary.fileno())
        os.ftruncate(file, max(size, 1))
        return cls(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.file),)


def _received(file: Any) -> SharedMemory:
    return SharedMemory(file.detach())


def shared_memory(size: Callable[[int], int]) -> SharedMemory:
    """Return memory shared by all processes of this machine and those that they start.

    size: returns the number of bytes for a number of free bytes. All processes must make these calls in the same order.
    """
    if in_use:
        gc.collect()  # loaders of an earlier run are in reference cycles
    free = max(available_bytes() - sum(len(memory.bytes) for memory in in_use), 0)
    store, here, name = run_store(), ranks(), f"memory/{socket.gethostname()}/{next(_calls)}"
    if store is None or here.local_world_size < 2 or not hasattr(os, "memfd_create"):
        memory = SharedMemory.of_size(size(free // here.local_world_size))
    elif here.local_rank == 0:
        memory = SharedMemory.of_size(size(free))
        store.write_once(name, [os.getpid(), memory.file])
    else:
        try:
            memory = SharedMemory(_open_shared(store.wait_for_value(name)))
        except (OSError, ValueError):  # another container with the same host name
            memory = SharedMemory.of_size(size(free // here.local_world_size))
    in_use.add(memory)
    return memory


def _open_shared(handle: Any) -> int:
    """Open the memory of another process for a handle from the run's store: its number, and that of a descriptor.

    The store may be reached by anybody on the network, so it is opened only if it is memory that `of_size` has made in
    a process of this user, never a file. Raises OSError, or ValueError for anything else.
    """
    process, descriptor = map(int, handle or ())
    link = f"/proc/{process}/fd/{descriptor}"
    if _is_memory(link) and os.stat(f"/proc/{process}").st_uid == os.geteuid():
        file = os.open(link, os.O_RDWR)
        if _is_memory(f"/proc/self/fd/{file}"):  # still the same
            return file
        os.close(file)
    raise ValueError("not shared memory of this user")


def _is_memory(link: str) -> bool:
    return os.readlink(link).startswith(f"/memfd:{MEMORY_NAME} ")


def available_bytes() -> int:
    """Return the memory that can be used without swapping: of the machine, or of this container if that is less."""
    available: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no container, or one without a limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(stat["inactive_file"]))
    return available
