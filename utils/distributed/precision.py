"""The precision of a run's autocast, by one rule for every way to launch. Called by accelerator."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from utils.config.options import PRECISIONS
from utils.distributed.agreement import decide_on_main
from utils.distributed.launcher import launch_command
from utils.errors import UserError

LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"  # set by `accelerate launch`: 'no' if nothing names a precision


class Precision(NamedTuple):
    """The precision of autocast, one of `PRECISIONS`, and what has named it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"mixed precision {self.name} ({self.reason})"


def choose_precision(requested: str, device: str, by_zero: bool, timeout: float) -> Precision:
    """Return the precision of all processes, which the main process chooses: what a flag requests, else what the launch
    file or the command line of `accelerate launch` names, else what the device is fast at.

    requested: by a flag, or ''. device: its kind: cpu, cuda or mps. by_zero: DeepSpeed's autocast has no loss scaling,
    so fp16 is never the default. timeout: seconds. Raises `UserError` for a precision that is not supported.
    """
    return Precision(*decide_on_main(lambda: list(_choose(requested, device, by_zero)), "precision", timeout))


def _choose(requested: str, device: str, by_zero: bool) -> Precision:
    chosen = Precision(requested, "by a flag") if requested else _of_launcher() or _of_device(device, by_zero)
    if chosen.name not in PRECISIONS:
        raise UserError(f"{chosen} is not supported; use one of {', '.join(PRECISIONS)}")
    if by_zero and chosen.name == "fp16":
        raise UserError(f"{chosen} is not supported with DeepSpeed; use bf16 or no")
    if device == "cpu" and chosen.name == "fp16":  # Accelerate would silently compute in float32
        raise UserError(f"{chosen} is not supported on the CPU; use bf16 or no")
    return chosen


def _of_launcher() -> Precision | None:
    """Return the precision that the launcher's file or command line names.

    'no' in the environment alone names none: `accelerate launch` sets it if its user has named nothing.
    """
    name, command = os.environ.get(LAUNCHER_PRECISION, "").lower(), launch_command()
    if not name:
        return None
    if command and command.flags.mixed_precision:
        return Precision(name, "--mixed_precision of accelerate launch")
    if command and (command.config.get("mixed_precision") or command.config.get("fp16")):
        return Precision(name, f"named by {command.file}")
    return Precision(name, LAUNCHER_PRECISION) if name != "no" else None


def _of_device(device: str, by_zero: bool) -> Precision:
    if device != "cuda":
        return Precision("no", f"the default on {'the CPU' if device == 'cpu' else 'an Apple GPU'}")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision("bf16", "the default on this GPU")
    return Precision("no" if by_zero else "fp16", "the default on this GPU, which has no fast bf16")
