"""The C library's allocator. Called by accelerator and loader_processes."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt


def keep_freed_memory(most_bytes: int = -1) -> None:
    """Let this process reuse freed memory instead of returning it to the system each time.

    The system fills the pages of new memory with zeros, which takes a tenth of a training step on the CPU, and as long
    as most of an image's augmentation.

    Args:
        most_bytes: largest amount of free memory to keep at the end of the heap; -1 sets no limit
    """
    with suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)  # large blocks have mappings of their own, which are always returned
        library.mallopt(M_TRIM_THRESHOLD, most_bytes)
