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

from utils.distributed.ranks import ranks, run_store

CGROUP = Path("/sys/fs/cgroup")  # files of a container's cgroup, version 2
MEMORY_NAME = "lockstep"  # name of memory files in /proc
in_use: WeakSet[SharedMemory] = WeakSet()  # this process's memory, whose pages count as free until they are written
_calls = itertools.count()


class SharedMemory:
    """Zeroed bytes, uint8 (n,), of a nameless file that exists as long as any process has it open.

    The object can be sent to processes that are being started.
    """

    def __init__(self, file: int) -> None:
        self.file = file  # descriptor, through which parts can be locked
        self.bytes = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        finalize(self, os.close, file)

    @classmethod
    def of_size(cls, size: int) -> SharedMemory:
        """Return `size` new bytes, but at least one. Pages take memory only once they are written."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create(MEMORY_NAME, 0)
        else:
            with tempfile.TemporaryFile() as temporary:
                file = os.dup(temporary.fileno())
        os.ftruncate(file, max(size, 1))
        return cls(file)

    @classmethod
    def received(cls, file: Any) -> SharedMemory:
        """Return the memory that another process has sent."""
        return cls(file.detach())

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedMemory.received, (DupFd(self.file),)


def shared_memory(size: Callable[[int], int]) -> SharedMemory:
    """Return memory shared by all processes of this machine and those that they start.

    All processes must make these calls in the same order.

    Args:
        size: maps the number of free bytes to the number of bytes to allocate
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
        except (OSError, ValueError, TypeError):  # the process is in another container with the same host name
            memory = SharedMemory.of_size(size(free // here.local_world_size))
    in_use.add(memory)
    return memory


def _open_shared(handle: Any) -> int:
    """Open another process's memory by a handle from the run's store: the number of the process and of a descriptor.

    Anybody on the network may reach the store, so only memory that `of_size` has made is used, never a file. Raises
    OSError, or ValueError for anything else.
    """
    process, descriptor = map(int, handle)
    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{MEMORY_NAME} "):
        return file
    os.close(file)
    raise ValueError("not shared memory")


def available_bytes() -> int:
    """Return the bytes that this machine, or this container if it has fewer, can use without swapping."""
    available: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # there is no container, or it has no limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(stat["inactive_file"]))
    return available
