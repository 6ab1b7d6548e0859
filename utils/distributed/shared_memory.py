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

_promised: list[int] = []  # bytes of each piece so far; they fill up later, so what is free does not show them


def shared_memory(size: Callable[[int], int]) -> np.ndarray:
    """Return zeroed bytes, uint8 (n,), that all processes of this machine and those that they fork share.

    They are gone with the last of these processes. size: returns the number of bytes to take of those that are free.
    All processes must call this in the same order.
    """
    free = psutil.virtual_memory().available - sum(_promised)
    store, here, name = run_store(), ranks(), f"memory/{socket.gethostname()}/{len(_promised)}"
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
        except OSError:  # another container under the same name
            memory = mmap.mmap(-1, max(size(free // here.local_world_size), 1))
    _promised.append(len(memory))
    return np.frombuffer(memory, np.uint8)
