"""Memory that all processes of a machine share. Called by data/cache.py."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from utils.distributed.ranks import ranks
from utils.distributed.store import run_store

reserved_bytes: list[int] = []  # of each call so far: pages count as free until they are written


def shared_memory(size: Callable[[int], int]) -> np.ndarray:
    """Return zeroed bytes, uint8 (n,), shared by all processes of this machine and those that they fork.

    They are freed with the last of these processes. size: returns n for a number of free bytes. All processes must
    make these calls in the same order.
    """
    free = psutil.virtual_memory().available - sum(reserved_bytes)
    store, here, name = run_store(), ranks(), f"memory/{socket.gethostname()}/{len(reserved_bytes)}"
    if store is None or here.local_world_size < 2 or not hasattr(os, "memfd_create"):
        memory: Any = mmap.mmap(-1, max(size(free), 1))
    elif here.local_rank == 0:
        handle = os.memfd_create("lockstep", 0)
        os.ftruncate(handle, max(size(free), 1))
        store.write_once(name, f"/proc/{os.getpid()}/fd/{handle}")
        memory = mmap.mmap(handle, 0)
    else:
        try:
            with open(store.wait_for_value(name), "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except OSError:  # another container with the same host name
            memory = mmap.mmap(-1, max(size(free // here.local_world_size), 1))
    reserved_bytes.append(len(memory))
    return np.frombuffer(memory, np.uint8)
