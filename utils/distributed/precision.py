"""The precision of a run's autocast, by one rule for every way to launch. Called by accelerator."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from utils.config.options import PRECISIONS
from utils.errors import UserError

# Set by `accelerate launch`, from its file or command line. It is also 'no' if neither names a precision, so 'no' does
# not count as a choice; --mixed-precision no trains in float32.
LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"


class Precision(NamedTuple):
    """The precision of autocast, one of `PRECISIONS`, and the reason for it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"mixed precision {self.name} ({self.reason})"


def choose_precision(requested: str, device: str, by_zero: bool) -> Precision:
    """Return the precision that a flag requests, else the launcher's, else the one in which the device is fast.

    Raises `UserError` for a precision that is not supported.

    Args:
        requested: precision that a flag requests, or ''
        device: kind of device: cpu, cuda or mps
        by_zero: whether DeepSpeed trains the model; its autocast has no loss scaling, so fp16 is never the default
    """
    named = os.environ.get(LAUNCHER_PRECISION, "").lower()
    if requested:
        chosen = Precision(requested, "by a flag")
    elif named not in ("", "no"):
        chosen = Precision(named, f"named by the launcher, {LAUNCHER_PRECISION}")
    else:
        chosen = _of_device(device, by_zero)
    if chosen.name not in PRECISIONS:
        raise UserError(f"{chosen} is not supported; use one of {', '.join(PRECISIONS)}")
    if by_zero and chosen.name == "fp16":
        raise UserError(f"{chosen} is not supported with DeepSpeed; use bf16 or no")
    if device == "cpu" and chosen.name == "fp16":  # Accelerate would silently compute in float32
        raise UserError(f"{chosen} is not supported on the CPU; use bf16 or no")
    return chosen


def _of_device(device: str, by_zero: bool) -> Precision:
    if device != "cuda":
        return Precision("no", f"the default on {'the CPU' if device == 'cpu' else 'an Apple GPU'}")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision("bf16", "the default on this GPU")
    return Precision("no" if by_zero else "fp16", "the default on this GPU, which has no fast bf16")
