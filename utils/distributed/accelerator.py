"""The Accelerator: connecting the processes, device, precision and seed.

Called by the scripts. utils/checkpoint/resume.py connects the processes earlier, to decide which run is resumed.
No other module makes an Accelerator.
"""

from __future__ import annotations

import math
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DynamoBackend, set_seed

from utils.config.options import PRECISIONS
from utils.console import joined
from utils.distributed import deepspeed
from utils.distributed.allocator import keep_freed_memory
from utils.distributed.collectives import broadcast_from_main
from utils.distributed.devices import describe_device, device_kind, refuse_unsupported_launch
from utils.distributed.failure import start_failure_monitor
from utils.distributed.ranks import world_size
from utils.distributed.rendezvous import RUN_RENDEZVOUS, rendezvous_errors, wait_for_main_address
from utils.errors import UserError, first_line, plural

# Seconds added to torch's own time-out, so that the watchdog, which knows the lagging process, ends the run first.
COLLECTIVE_MARGIN_SECONDS = 10.0
# Set by `accelerate launch`, from its file or command line. It is also 'no' if neither names a precision, so 'no' does
# not count as a choice; --mixed-precision no trains in float32.
LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"


class Precision(NamedTuple):
    """The precision of autocast, one of `PRECISIONS`, and the reason for it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"mixed precision {self.name} ({self.reason})"


def connect(device: str, timeout: float) -> str:
    """Connect all processes, unless they are connected, and return the device's kind (cpu, cuda or mps).

    Raises `UserError` if a device is missing or not supported, or if the processes cannot connect.

    Args:
        device: value of --device; '' selects the best device
        timeout: seconds that the processes wait for each other, now and later
    """
    if PartialState._shared_state:
        return PartialState().device.type
    refuse_unsupported_launch(device)
    kind, by_zero = device_kind(device), deepspeed.is_requested()
    on_cpu, hosted = kind == "cpu", None
    if world_size() > 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # needed by Accelerate, and not set on some clusters
        hosted = wait_for_main_address(timeout)
    if by_zero:
        deepspeed.prepare_environment(on_cpu)
    with rendezvous_errors(timeout), environment_errors():
        state = PartialState(
            cpu=on_cpu and not by_zero,  # with cpu=True Accelerate would silently not use DeepSpeed
            timeout=timedelta(seconds=timeout + COLLECTIVE_MARGIN_SECONDS),
            backend="gloo" if by_zero and on_cpu else None,
            init_method=RUN_RENDEZVOUS,
        )
    del hosted  # shared by torch
    start_failure_monitor()
    if state.num_processes != world_size():
        raise UserError(
            f"the launcher started {world_size()} processes, but {state.num_processes} are connected; start them "
            "with accelerate launch, torch.distributed.run, or --processes"
        )
    return kind


@contextmanager
def environment_errors() -> Iterator[None]:
    """Turn Accelerate's error about a value of its environment variables into a `UserError`."""
    try:
        yield
    except ValueError as error:
        values = {name: value for name, value in sorted(os.environ.items()) if name.startswith("ACCELERATE_")}
        quoted = [
            name for name, value in values.items() if re.search(rf"\b{re.escape(value)}\b", str(error), re.I) and value
        ]
        if not quoted or not any("accelerate" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise UserError(
            f"Accelerate cannot use {' or '.join(f'{name}={os.environ[name]}' for name in quoted)} of the environment "
            f"({first_line(error)}); correct or unset it"
        ) from error


def start(device: str, mixed_precision: str, timeout: float, comm_hook: str = "") -> tuple[Accelerator, Precision]:
    """Connect all processes as `connect` does, and make an Accelerator for global batches.

    Raises `UserError` for anything that is not supported.

    Args:
        mixed_precision: precision that a flag requests, or ''
        comm_hook: type to which DDP compresses the gradients, fp16 or bf16, or ''
    """
    deepspeed.refuse_comm_hook(comm_hook)
    kind, by_zero = connect(device, timeout), deepspeed.is_requested()
    precision = broadcast_from_main(lambda: choose_precision(mixed_precision, kind, by_zero))
    if kind == "cpu":
        keep_freed_memory()  # activations are allocated anew in each step
    with environment_errors():
        accelerator = Accelerator(
            cpu=kind == "cpu" and not by_zero,
            mixed_precision="no" if by_zero else precision.name,
            dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType(comm_hook or "no")
                ),
            ],
        )
    if by_zero:
        deepspeed.configure_autocast(accelerator.state.deepspeed_plugin, precision.name)
    return accelerator, precision


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
        chosen = _device_precision(device, by_zero)
    if chosen.name not in PRECISIONS:
        raise UserError(f"{chosen} is not supported; use one of {', '.join(PRECISIONS)}")
    if by_zero and chosen.name == "fp16":
        raise UserError(f"{chosen} is not supported with DeepSpeed; use bf16 or no")
    if device == "cpu" and chosen.name == "fp16":  # Accelerate would silently compute in float32
        raise UserError(f"{chosen} is not supported on the CPU; use bf16 or no")
    return chosen


def _device_precision(device: str, by_zero: bool) -> Precision:
    if device != "cuda":
        return Precision("no", f"the default on {'the CPU' if device == 'cpu' else 'an Apple GPU'}")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision("bf16", "the default on this GPU")
    return Precision("no" if by_zero else "fp16", "the default on this GPU, which has no fast bf16")


def reset_accelerate() -> None:
    """Reset Accelerate's global state, so that this process can start another run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def seed_everything(seed: int, deterministic: bool = True) -> list[str]:
    """Seed the random numbers outside the data path (initial weights) and select deterministic kernels.

    Returns a message if `deterministic` is False: CUDA's kernels may then add in a different order each time.
    """
    set_seed(seed)
    if not deterministic:
        torch.use_deterministic_algorithms(False)  # an earlier run in this Python process may have set it
        effect = "equal runs differ by rounding" if torch.cuda.is_available() else "no effect without CUDA"
        return [f"--no-deterministic: {effect}"]
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with a fixed workspace
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return []


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


def describe(accelerator: Accelerator, precision: Precision) -> list[str]:
    """Describe torch's version and a run's device, processes, precision and compiler, in lines that fit."""
    device = accelerator.device
    processes = plural(accelerator.num_processes, "process")
    if plugin := accelerator.state.deepspeed_plugin:
        processes += f" under DeepSpeed ZeRO-{deepspeed.stage(plugin)}"
    compiler = accelerator.state.dynamo_plugin.backend
    compiled = [] if compiler == DynamoBackend.NO else [f"compiled by {compiler.value.lower()}"]
    hardware = f"{device} ({describe_device(device)})"
    return joined([f"torch {torch.__version__}", hardware, processes, str(precision), *compiled])
