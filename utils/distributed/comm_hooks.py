"""Smaller gradients on slow links: DDP's communication hooks by name."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HALVES = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
HOOKS = (*HALVES, "powersgd")
# PowerSGD answers one message with the next. Over gloo those of two buckets may cross, so all gradients are one bucket.
BUCKETS = {"powersgd": 2**14}  # MB
BUCKET = 25  # DDP's own
RANK = 2  # of PowerSGD's approximation of each gradient matrix


def bucket_size(how: str) -> int:
    """MB of gradients that travel at a time."""
    return BUCKETS.get(how, BUCKET)


def compress(model: DistributedDataParallel, how: str, warmup: int) -> None:
    """Send the gradients of `model` as `how`, one of `HOOKS`, says.

    fp16 and bf16 halve them. PowerSGD (Vogels et al. 2019) sends two thin factors of each weight's gradient and keeps
    what they miss for the next step; the first `warmup` optimizer steps go uncompressed.
    """
    if how in HALVES:
        model.register_comm_hook(None, HALVES[how])
    else:
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=max(warmup, 2))
        model.register_comm_hook(state, powerSGD_hook)
