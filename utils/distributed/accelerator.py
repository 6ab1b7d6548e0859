"""The Accelerator: device, precision, seed, and connecting the processes. Called by the scripts.

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
from accelerate.utils import DDPCommunicationHookType, DynamoBackend, set_seed

from utils.distributed import deepspeed
from utils.distributed.allocator import keep_freed_memory
from utils.distributed.devices import describe_device, device_kind
from utils.distributed.exit import sign_in
from utils.distributed.launcher import refuse_unsupported_launch
from utils.distributed.precision import Precision, choose_precision
from utils.distributed.ranks import world_size
from utils.distributed.rendezvous import RESTART_METHOD, release_store, rendezvous_errors
from utils.distributed.store import attempt
from utils.errors import UserError, plural

# Added to torch's own time-out, so that the watchdog, which knows which process is late, ends the run first.
COLLECTIVE_MARGIN_SECONDS = 10.0


def start(device: str, mixed_precision: str, timeout: float, comm_hook: str = "") -> tuple[Accelerator, Precision]:
    """Make an Accelerator on `device` ('' selects the best one), for global batches; connect all processes.

    mixed_precision: requested by a flag, or ''. timeout: seconds that the processes wait for each other, now and later.
    comm_hook: fp16 or bf16, to which DDP compresses the gradients, or ''. Raises `UserError` if a device is missing or
    not supported, or if the processes cannot connect.
    """
    deepspeed.refuse_comm_hook(comm_hook)
    refuse_unsupported_launch(device)
    processes, kind, by_zero = world_size(), device_kind(device), deepspeed.is_requested()
    if processes > 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # needed by Accelerate, and not set on some clusters
    if by_zero:
        deepspeed.prepare_environment(kind == "cpu")
    precision = choose_precision(mixed_precision, kind, by_zero, timeout)
    on_cpu = kind == "cpu"
    if on_cpu:
        keep_freed_memory()  # activations are allocated anew in each step
    # On the CPU DeepSpeed prints a line per process about an operation that it has compiled.
    with rendezvous_errors(timeout), redirect_stdout(io.StringIO()) if by_zero else nullcontext():
        accelerator = Accelerator(
            cpu=on_cpu and not by_zero,  # with cpu=True Accelerate would silently not use DeepSpeed
            mixed_precision="no" if by_zero else precision.name,
            dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                InitProcessGroupKwargs(
                    timeout=timedelta(seconds=timeout + COLLECTIVE_MARGIN_SECONDS),
                    backend="gloo" if by_zero and on_cpu else None,
                    init_method=RESTART_METHOD if attempt() else None,
                ),
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType(comm_hook or "no")
                ),
            ],
        )
    release_store()
    sign_in()
    if accelerator.num_processes != processes:
        raise UserError(
            f"the launcher started {processes} processes, but {accelerator.num_processes} are connected; start them "
            "with accelerate launch, torch.distributed.run, or --processes"
        )
    if by_zero:
        deepspeed.configure_autocast(accelerator.state.deepspeed_plugin, precision.name)
    return accelerator, precision


def forget() -> None:
    """Reset Accelerate's global state, so that this process can start another run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def seed_everything(seed: int) -> None:
    """Seed the random numbers outside of the data path (initial weights) and select deterministic kernels."""
    set_seed(seed)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with a fixed workspace
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def plan(accelerator: Accelerator, batch_size: int, batches: int, epochs: int) -> list[str]:
    """Describe the batch size and the optimizer steps of an epoch of `batches`."""
    processes, accumulated = accelerator.num_processes, accelerator.gradient_accumulation_steps
    split = f"{processes} processes x {batch_size // processes}" if processes > 1 else "1 process"
    return [
        f"batch size {batch_size} ({split}), {plural(accumulated, 'batch')} per optimizer step "
        f"({plural(batch_size * accumulated, 'image')})",
        f"{plural(batches, 'batch')}, {plural(math.ceil(batches / accumulated), 'optimizer step')} per epoch; "
        f"{plural(epochs, 'epoch')}",
    ]


def describe(accelerator: Accelerator, precision: Precision) -> str:
    """Describe torch's version, the device, the processes, precision and compiler of a run."""
    device = accelerator.device
    processes = plural(accelerator.num_processes, "process")
    if plugin := accelerator.state.deepspeed_plugin:
        processes += f" under DeepSpeed ZeRO-{deepspeed.stage(plugin)}"
    compiler = accelerator.state.dynamo_plugin.backend
    compiled = "" if compiler == DynamoBackend.NO else f", compiled by {compiler.value.lower()}"
    hardware = f"{device} ({describe_device(device)})"
    return f"torch {torch.__version__}, {hardware}, {processes}, {precision}{compiled}"
