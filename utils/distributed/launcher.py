"""The `accelerate launch` command that started this process, and launches that are refused.

Called by accelerator, precision, preflight and rendezvous.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from utils.errors import UserError
from utils.files import read_yaml

SUPPORTED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")  # `distributed_type` of a launch file
# Flags of accelerate launch that select another type, and the variables by which it passes two of them on.
OTHER_TYPES = {"use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "tpu": "TPU"}
OTHER_TYPE_VARIABLES = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM"}
# Modules of torch, and what they drive; other packages add some of them to torch.
OTHER_ACCELERATORS = {"xpu": "Intel GPU", "npu": "Ascend NPU", "hpu": "Gaudi", "mlu": "MLU", "musa": "MUSA GPU"}


class LaunchCommand(NamedTuple):
    """The flags of `accelerate launch`, and its launch file: name, '' if there is none, and content."""

    flags: Namespace
    file: str
    config: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """Return the value of a flag, else that of the launch file; None if neither names it."""
        given = getattr(self.flags, name, None)
        return self.config.get(name) if given is None else given


def launch_command() -> LaunchCommand | None:
    """Return the `accelerate launch` command that started this process; None if there is none or it is unreadable."""
    try:
        commands = [parent.cmdline() for parent in psutil.Process().parents()]
        words = next((words for command in commands if (words := _after_launch(command)) is not None), None)
        if words is None:
            return None
        # Imported here because other launches do not need it.
        from accelerate.commands.config.config_args import default_config_file
        from accelerate.commands.launch import launch_command_parser

        flags = launch_command_parser().parse_args(words)
        file = flags.config_file or (default_config_file if os.path.isfile(default_config_file) else "")
        file = "" if flags.cpu and not flags.config_file else file
        return LaunchCommand(flags, file, read_yaml(Path(file)) if file else {})
    except (psutil.Error, SystemExit, UserError):
        return None


def _after_launch(command: list[str]) -> list[str] | None:
    """Return the words after `accelerate launch`, `accelerate-launch` or `-m accelerate.commands.launch`, if any."""
    names = [os.path.basename(word) for word in command]
    for start, (before, name) in enumerate(zip(["", *names], names, strict=False), 1):
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return command[start:]
        if name == "launch" and before.startswith("accelerate"):
            return command[start:]
    return None


def refuse_unsupported_launch(device: str) -> None:
    """Raise `UserError` for what would silently train on the CPU: other accelerators, and what launch files request.

    device: --device; if it is given, only a launch for FSDP or Megatron-LM is refused.
    """
    command = launch_command()
    types = [name for variable, name in OTHER_TYPE_VARIABLES.items() if _is_true(os.environ.get(variable))]
    if command and not device:
        types += [name for flag, name in OTHER_TYPES.items() if getattr(command.flags, flag, False)]
        types += [str(command.config.get("distributed_type", "NO"))]
    if other := next((name for name in types if name not in SUPPORTED_TYPES), None):
        raise UserError(
            f"accelerate launch requests {other}, which is not supported; use a file of accelerate_configs with "
            "distributed_type MULTI_GPU or DEEPSPEED, or for the CPU --device cpu after the script"
        )
    if device or torch.cuda.is_available():
        return
    for name, text in OTHER_ACCELERATORS.items():
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            raise UserError(f"this machine has an accelerator that is not supported: {text}; add --device cpu")
    if os.environ.get("PJRT_DEVICE") == "TPU":
        raise UserError("this machine has an accelerator that is not supported: TPU; add --device cpu")


def refuse_uneven_launch() -> None:
    """Raise `UserError` if `accelerate launch` cannot divide its processes evenly among the machines.

    It starts num_processes // num_machines processes on each machine and silently drops the rest.
    """
    command = launch_command()
    if command is None:
        return
    processes, machines = command.value("num_processes") or 1, command.value("num_machines") or 1
    if processes % machines:
        raise UserError(
            "accelerate launch starts the same number of processes on every machine; "
            f"{processes} cannot be divided among {machines} machines: use a multiple of {machines}, or "
            "torch.distributed.run on each machine"
        )


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("true", "1")
