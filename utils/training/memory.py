"""Memory: the batch that fits the devices, loader batches in shared memory, errors. Called by job.py and train.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch
from torch import nn

from utils.batch import layout
from utils.console import log
from utils.distributed.launch import cores_per_process
from utils.distributed.ranks import launch_number, world_size
from utils.errors import UserError, first_line

if TYPE_CHECKING:
    from utils.distributed.ranks import Collectives

SHARED_MEMORY = "/dev/shm"
BATCHES_PER_WORKER = 3  # batches that a loader process holds: two prefetched, one that is being trained on
AUTO_BATCH_SHARE = 0.8  # share of a device's free memory to use, as in YOLOv5
CPU_BATCH_SIZE = 16  # batch size for --batch-size -1 if there is no GPU to measure
COPIES_OF_WEIGHTS = 3  # copies in addition to the memory of a step: EMA, and at most two of the optimizer (Adam)
# Messages of out-of-memory errors for which torch has no type: of the machine, the driver and cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
BYTES_PER_MIB = 2**20


def loader_processes(limit: int, batch_bytes: int) -> int:
    """Return how many loader processes, up to `limit`, this machine has cores and shared memory for; log if fewer.

    A process whose batches exceed the shared memory ends with a bus error. Raises `UserError` if a single batch exceeds
    the memory of the machine.
    """
    workers, machine = min(limit, cores_per_process()), psutil.virtual_memory().total
    processes = launch_number("LOCAL_WORLD_SIZE", 1)
    if batch_bytes * processes > machine:
        raise UserError(
            f"the images of a batch take {batch_bytes * processes / 2**30:.0f} GiB, more than the "
            f"{machine / 2**30:.0f} GiB memory of this machine; give a smaller --batch-size or --imgsz"
        )
    try:
        disk = os.statvfs(SHARED_MEMORY)
    except (OSError, AttributeError):
        return workers
    free = disk.f_bavail * disk.f_frsize
    fitting = free // processes // (BATCHES_PER_WORKER * batch_bytes)
    if fitting < workers:
        log(
            f"warning: {SHARED_MEMORY} has {free / BYTES_PER_MIB:.0f} MiB free, enough for the batches of {fitting} "
            f"loader processes of each training process instead of {workers}; make it larger (docker run --shm-size)"
        )
    return min(fitting, workers)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the machine is out of memory."""
    typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return typed or any(message in str(error) for message in OUT_OF_MEMORY)


@contextmanager
def explain_out_of_memory(batch_size: int, imgsz: int) -> Iterator[None]:
    """Turn an out-of-memory error of a device or the machine into a `UserError` that names a batch size to try."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        half = batch_size // world_size() // 2 * world_size()
        instead = f"--batch-size {half}" if half else f"a smaller --imgsz than {imgsz}, or a smaller model"
        raise UserError(
            f"out of memory with --batch-size {batch_size} at {imgsz} pixels ({first_line(error, 300)}); try {instead} "
            "(in a new run, because a curve depends on the batch size)"
        ) from None


def fitted_batch(
    batch_size: int,
    train_step: Callable[[int], object],
    model: nn.Module,
    device: torch.device,
    images: int,
    collectives: Collectives,
    logical: int,
) -> tuple[int, int]:
    """Try the memory before the first step. Return the batch size that fits, and how many such batches replace one.

    -1 is replaced by the largest power of two per process that every GPU holds. Any other batch is tried once, and
    halved until it fits every GPU. Nothing is tried on a CPU. The model is moved to `device` and otherwise unchanged:
    `train_step` takes a number of images, runs forward and backward on such a batch, and drops the gradients.
    """
    processes, auto = world_size(), batch_size == -1
    if device.type != "cuda":
        size = max(CPU_BATCH_SIZE // processes, 1) * processes if auto else batch_size
        log(f"--batch-size -1 is measured on GPUs only; taking {size}" if auto else "")
        return size, 1
    model.to(device, memory_format=layout(device)).train()  # type: ignore[call-overload]
    before = copy.deepcopy(model.state_dict())
    copies = COPIES_OF_WEIGHTS * sum(value.numel() * value.element_size() for value in before.values())
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)

    def fits(size: int) -> bool:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            train_step(-(-size // processes))
            peak = torch.cuda.max_memory_allocated(device) + copies
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            peak = 2 * free
        return all(collectives.gather([peak <= free * (AUTO_BATCH_SHARE if auto else 1)]))

    size, parts = processes if auto else batch_size, 1
    while auto and 2 * size <= images and fits(2 * size):
        size *= 2
    while not auto and size % (2 * logical) == 0 and not fits(size):  # the smallest one is not tried
        size, parts = size // 2, 2 * parts
    if auto:
        log(f"--batch-size -1: taking {size}, by measurement")
    elif parts > 1:
        log(f"warning: out of memory: batches of {size} images, and {parts} times as many of them per step")
    model.load_state_dict(before)
    torch.cuda.empty_cache()
    return size, parts
