"""How much fits: a batch into the device, loader batches into shared memory, and what to say where it does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from utils.distributed.ranks import local_world_size, world_size
from utils.errors import UserError

SHARED = "/dev/shm"
IN_FLIGHT = 3  # batches that a loader process holds: two fetched ahead, one that is being trained on
SHARE = 0.8  # of the free memory of a device that AutoBatch takes, as in YOLOv5
ON_CPU = 16  # the batch that --batch-size -1 takes where there is no GPU to measure
# What torch says where it is no error of its own kind: of the machine's memory, of the driver, of cuBLAS.
FULL = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
MIB, GIB = 2**20, 2**30


def fitting_workers(workers: int, batch: int) -> tuple[int, list[str]]:
    """Loader processes whose batches, of so many bytes, fit into shared memory; a sentence where they are fewer.

    Where they would not fit the system would end them with a bus error.
    """
    try:
        disk = os.statvfs(SHARED)
    except (OSError, AttributeError):
        return workers, []
    free = disk.f_bavail * disk.f_frsize
    fit = free // local_world_size() // (IN_FLIGHT * batch)
    if fit >= workers:
        return workers, []
    return fit, [
        f"warning: {SHARED} has {free / MIB:.0f} MiB free, enough for the batches of {fit} loader processes of each "
        f"training process instead of {workers}; make it larger (docker run --shm-size)"
    ]


@contextmanager
def explained(batch_size: int, imgsz: int) -> Iterator[None]:
    """Turn running out of memory into a `UserError` with the batch size to try."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        processes = world_size()
        half = batch_size // processes // 2 * processes
        instead = f"--batch-size {half}" if half else f"a smaller --imgsz than {imgsz}, or a smaller model"
        where = "the machine" if isinstance(error, MemoryError) or FULL[0] in str(error) else "a GPU"
        raise UserError(
            f"out of memory of {where} with --batch-size {batch_size} at {imgsz} pixels; try {instead} (in a new run: "
            "the batch size is part of a curve)"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Is it a lack of memory, of a device or of the machine?"""
    said = any(words in str(error) for words in FULL)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (isinstance(error, RuntimeError) and said)


def largest_batch(peak: Callable[[int], int], free: int, most: int) -> int:
    """AutoBatch: the largest batch, at most `most`, whose peak memory is a share of what is `free` (bytes).

    peak: measures a batch size, in bytes; may raise torch's error for too large ones. Memory grows linearly with the
    batch, so sizes are doubled until half of the share is used, and the line through the last two is followed: not from
    one alone, for the weights may take most of it.
    """
    limit, found = SHARE * free, [(1, peak(1))]
    while (len(found) < 2 or found[-1][1] < limit / 2) and found[-1][0] < most:
        size = min(2 * found[-1][0], most)
        try:
            found.append((size, peak(size)))
        except torch.OutOfMemoryError:
            most = found[-1][0]  # whatever the line says
            break
    if len(found) < 2:
        return 1
    (small, low), (large, high) = found[-2:]
    slope = max((high - low) / (large - small), 1.0)
    return max(min(int(large + (limit - high) / slope), most), 1)
