"""Compress gradients for slow networks: DDP's communication hooks by name. Called by prepare and accelerator."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HALF_PRECISION_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
HOOKS = (*HALF_PRECISION_HOOKS, "powersgd")
# PowerSGD sends two messages in turn. Over gloo those of two buckets may be mixed up, so there is one bucket.
BUCKET_MB = {"powersgd": 2**14}
DDP_BUCKET_MB = 25  # DDP's default
POWERSGD_RANK = 2  # of PowerSGD's approximation of each gradient matrix


def register_comm_hook(model: DistributedDataParallel, hook: str, warmup: int) -> None:
    """Register one of `HOOKS` for the gradients of `model`.

    fp16 and bf16 halve their size. PowerSGD (Vogels et al. 2019) sends two low-rank factors of each weight's gradient
    and adds the residual to the next step's gradient; the first `warmup` optimizer steps are not compressed.
    """
    if hook in HALF_PRECISION_HOOKS:
        model.register_comm_hook(None, HALF_PRECISION_HOOKS[hook])
    else:
        state = PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=max(warmup, 2))
        model.register_comm_hook(state, powerSGD_hook)
