"""Starting: the device, the precision, the seed. The only place that makes an Accelerator."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

from utils.errors import UserError

LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"  # what `accelerate launch` leaves for the processes that it starts


def start(device: str, mixed_precision: str, accumulation: int = 1) -> Accelerator:
    """An Accelerator on `device` ('' is the best there is), for global batches, so many per optimizer step."""
    _choose_device(device)
    return Accelerator(
        cpu=device == "cpu",
        mixed_precision=_precision(device, mixed_precision),
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False),
        step_scheduler_with_optimizer=False,
    )


def _choose_device(device: str) -> None:
    """Make the one device visible that the user names. Raises `UserError` where it is not there."""
    if device in ("", "cpu"):
        return
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("--device mps: this machine has no Apple GPU that torch can use; try --device cpu")
    elif device.isdecimal():
        if int(device) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            there = f"{count} CUDA device{'s' if count > 1 else ''}" if count else "no CUDA device"
            raise UserError(f"--device {device}: torch sees {there} here; try --device {count - 1 if count else 'cpu'}")
        torch.cuda.set_device(int(device))
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{device}"
    else:
        raise UserError(f"--device {device}: give cpu, mps or the number of one CUDA device, such as 0")


def _precision(device: str, asked: str) -> str | None:
    """The flag's, else the launcher's (None), else what the device is fast at: bf16 or fp16 on CUDA, none elsewhere."""
    if asked:
        return asked
    if os.environ.get(LAUNCHER_PRECISION):
        return None
    if device in ("cpu", "mps") or not torch.cuda.is_available():
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def seed_everything(seed: int) -> None:
    """Seed what is drawn outside the data path (the model's first weights) and ask for repeatable kernels."""
    set_seed(seed)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def loader_workers(asked: int, processes: int) -> int:
    """Loader processes for each training process: as asked, at most this machine's cores shared among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(asked, cores // processes))


def describe(accelerator: Accelerator) -> str:
    """What the run runs on, for people."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
    return f"torch {torch.__version__}, {device} ({name}), {processes}, mixed precision {accelerator.mixed_precision}"
