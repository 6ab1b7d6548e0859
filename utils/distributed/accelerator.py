"""The Accelerator: device, precision, seed, and the start of the processes. Called by the scripts.

No other module makes an Accelerator.
"""

from __future__ import annotations

import io
import math
import os
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DynamoBackend, set_seed

from utils.distributed import deepspeed
from utils.distributed.comm_hooks import bucket_size
from utils.distributed.devices import choose_devices, describe_device
from utils.distributed.exit import sign_in
from utils.distributed.ranks import world_size
from utils.distributed.rendezvous import (
    RESTART_METHOD,
    prepare_for_gloo,
    refuse_uneven_launch,
    release_store,
    rendezvous_errors,
    wait_for_main_address,
)
from utils.distributed.store import attempt
from utils.errors import UserError

LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"  # what `accelerate launch` leaves for the processes that it starts
# After the time-out, until torch ends a wait: the watchdog, which knows which process holds the others up, comes first.
COLLECTIVE_MARGIN_SECONDS = 10.0


def start(device: str, mixed_precision: str, timeout: float, comm_hook: str = "") -> Accelerator:
    """Make an Accelerator on `device` ('' is the best there is), for global batches.

    Under a launcher all its processes meet here. timeout: seconds that they wait for each other, now and later.
    comm_hook: how the gradients will travel.
    Raises `UserError` if a device is missing or the processes do not meet.
    """
    deepspeed.refuse_comm_hook(comm_hook)
    processes = world_size()
    on_cpu = choose_devices(device)
    if processes > 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # Accelerate asks for it; some clusters set the other three only
        refuse_uneven_launch()
        if on_cpu:
            prepare_for_gloo()
        wait_for_main_address(timeout)
    precision, by_zero = _precision(on_cpu or device == "mps", mixed_precision), deepspeed.is_requested()
    engine_precision = deepspeed.prepare_environment(on_cpu, precision) if by_zero else ""
    # On the CPU DeepSpeed prints a line per process about an operation that it has built.
    with rendezvous_errors(timeout), redirect_stdout(io.StringIO()) if by_zero else nullcontext():
        accelerator = Accelerator(
            cpu=on_cpu and not by_zero,  # Accelerate's word for the CPU would switch DeepSpeed off silently
            mixed_precision="no" if by_zero else precision,
            dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                InitProcessGroupKwargs(
                    timeout=timedelta(seconds=timeout + COLLECTIVE_MARGIN_SECONDS),
                    backend="gloo" if by_zero and on_cpu else None,
                    init_method=RESTART_METHOD if attempt() else None,
                ),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=bucket_size(comm_hook)),
            ],
        )
    release_store()
    sign_in()
    if accelerator.num_processes != processes:
        raise UserError(
            f"the launcher started {processes} processes and {accelerator.num_processes} of them found each other; "
            "start them with accelerate launch, torch.distributed.run, or --processes"
        )
    if by_zero:
        deepspeed.configure_autocast(accelerator.state.deepspeed_plugin, engine_precision)
    return accelerator


def _precision(slow: bool, requested: str) -> str | None:
    """Return the flag's precision, else the launcher's (None), else what the device is fast at.

    That is bf16 or fp16 on CUDA, no mixed precision elsewhere (`slow`).
    """
    if requested:
        return requested
    if os.environ.get(LAUNCHER_PRECISION):
        return None
    if slow or not torch.cuda.is_available():
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def forget() -> None:
    """Reset Accelerate's state, which it keeps from its first use, so that this process can begin another run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def seed_everything(seed: int) -> None:
    """Seed what is drawn outside the data path (the model's first weights) and ask for repeatable kernels."""
    set_seed(seed)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def plan(accelerator: Accelerator, batch_size: int, batches: int, epochs: int) -> list[str]:
    """Describe how the images of an epoch, in `batches` of `batch_size`, become optimizer steps."""
    processes, accumulated = accelerator.num_processes, accelerator.gradient_accumulation_steps
    split = f"{processes} processes x {batch_size // processes}" if processes > 1 else "1 process"
    steps = math.ceil(batches / accumulated)
    return [
        f"batches of {batch_size} images ({split}) x {accumulated} accumulated: an optimizer step for every "
        f"{batch_size * accumulated} images",
        f"{batches} batches and {steps} steps an epoch, {epochs} epochs",
    ]


def describe(accelerator: Accelerator) -> str:
    """Describe what the run runs on, for people."""
    device = accelerator.device
    processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
    precision = accelerator.mixed_precision
    if plugin := accelerator.state.deepspeed_plugin:
        stage, precision = deepspeed.stage_and_precision(plugin)
        processes += f" under DeepSpeed ZeRO-{stage}"
    compiler = accelerator.state.dynamo_plugin.backend
    compiled = "" if compiler == DynamoBackend.NO else f", compiled by {compiler.value.lower()}"
    hardware = f"{device} ({describe_device(device)})"
    return f"torch {torch.__version__}, {hardware}, {processes}, mixed precision {precision}{compiled}"
