"""The memory that a process keeps after it is freed."""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection

from utils.distributed.allocator import keep_freed_memory

BYTES = 2**26  # of a block, larger than glibc reuses by itself


def count_new_pages(result: Connection) -> None:
    """Send the pages that the system gives to a process for each of two blocks, of which one is freed first."""
    keep_freed_memory()
    pages = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"1" * BYTES
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    result.send(pages)


def test_a_large_block_is_reused() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=count_new_pages, args=(sender,))
    process.start()
    first, second = receiver.recv()
    process.join(60)
    assert second < first / 4
