"""Devices: the ones that `--device` names, the number of processes for them, and their description.

Called by the scripts, accelerator, spawn, utils/doctor/, utils/run.py and utils/training/memory.py.
"""

from __future__ import annotations

import os
import socket

import torch

from utils.distributed.ranks import local_world_size, world_size
from utils.distributed.rendezvous import prepare_for_gloo
from utils.errors import UserError, plural

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
MOST_PROCESSES_PER_CORE = 4  # limit for --processes
# Variables by which `accelerate launch` selects features that are not supported.
OTHER_LAUNCHES = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}
_chosen: list[str] = []  # --device of an earlier run in this process, and the value of the variable that it set


def device_numbers(device: str) -> list[int]:
    """Return torch's numbers of the CUDA devices that `--device` names; [] for '', cpu and mps."""
    if device in ("", "cpu", "mps"):
        return []
    words = device.replace("cuda:", "").replace(" ", "").split(",")
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(numbers) < len(words) or len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: give cpu, mps, or the numbers of CUDA devices such as 0 or 0,1")
    return numbers


def one_device(device: str) -> torch.device:
    """Return the device that `--device` names, for a single-process program; '' selects the best one."""
    numbers = device_numbers(device)
    if len(numbers) > 1:
        raise UserError(f"--device {device}: one device is enough here; name one of them")
    _check_mps_exists(device)
    if numbers:
        _check_devices_exist(device, numbers, torch.cuda.device_count())
        return torch.device("cuda", numbers[0])
    if device:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def processes_to_start(device: str, processes: int) -> int:
    """Return the number of processes to start without a launcher: one for each named device, or `processes`.

    Raises `UserError` if the two contradict each other or the launcher.
    """
    named = len(device_numbers(device))
    if processes and named > 1 and processes != named:
        raise UserError(f"--processes {processes} --device {device}: one process runs per device; remove --processes")
    if processes > 1 and named == 1:
        raise UserError(f"--processes {processes} --device {device}: name a device for each process, such as 0,1")
    if processes > 1 and device == "mps":
        raise UserError(f"--processes {processes} --device mps: an Apple GPU supports one process only")
    most = MOST_PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if processes > most:
        raise UserError(
            f"--processes {processes} is more than {MOST_PROCESSES_PER_CORE} for each of the {os.cpu_count()} cores; "
            f"give at most {most}, or start them with accelerate launch"
        )
    launched = world_size()
    if processes and launched > 1 and processes != launched:
        raise UserError(
            f"--processes {processes}: the launcher has started {launched} processes; "
            "remove --processes and pass the number to the launcher"
        )
    return processes or max(named, 1)


def choose_devices(device: str) -> bool:
    """Make only the named CUDA devices visible, so that local rank k gets the k-th; return whether to use the CPU.

    CUDA must not be initialised before the environment is set. Raises `UserError` if there are fewer devices than
    named, or than processes.
    """
    _check_mps_exists(device)
    if device in ("cpu", "mps"):
        return device == "cpu"
    if not device and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":  # set by accelerate launch --cpu
        return True
    numbers, processes = device_numbers(device), local_world_size()
    if numbers and _chosen == [device, os.environ.get(VISIBLE_DEVICES)]:
        return False
    if numbers:
        available = torch.cuda.device_count()
        _check_devices_exist(device, numbers, available)
        if len(numbers) < processes:
            raise UserError(
                f"--device {device} names {plural(len(numbers), 'device')} for the {processes} processes of this "
                "machine; name one for each"
            )
        visible = (os.environ.get(VISIBLE_DEVICES) or ",".join(map(str, range(available)))).split(",")
        os.environ[VISIBLE_DEVICES] = ",".join(visible[number] for number in numbers)
        _chosen[:] = device, os.environ[VISIBLE_DEVICES]
    elif torch.cuda.is_available():
        if processes > torch.cuda.device_count():
            raise UserError(
                f"the launcher started {processes} processes on this machine, but torch sees "
                f"{plural(torch.cuda.device_count(), 'CUDA device')}; start as many processes, or use --device cpu"
            )
    else:
        return world_size() > 1 or not torch.backends.mps.is_available()
    return False


def refuse_unsupported_launch(device: str) -> None:
    """Raise `UserError` if the launcher requests, or this machine has, something that would silently not be used.

    That is FSDP, Megatron-LM, or an accelerator that is not supported.

    Args:
        device: value of --device; if it is given, the accelerator is not looked for
    """
    for variable, name in OTHER_LAUNCHES.items():
        if os.environ.get(variable, "").lower() in ("true", "1"):
            raise UserError(
                f"accelerate launch requests {name}, which is not supported; use a file of accelerate_configs with "
                "distributed_type MULTI_GPU or DEEPSPEED"
            )
    if device or torch.cuda.is_available():
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "TPU" if os.environ.get("PJRT_DEVICE") == "TPU" else accelerator.type if accelerator else "cpu"
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"this machine has an accelerator that is not supported: {kind}; add --device cpu")


def device_kind(device: str) -> str:
    """Prepare the devices as for a run; return the kind that `--device` selects: cpu, cuda or mps."""
    on_cpu = choose_devices(device)
    if on_cpu and world_size() > 1:
        prepare_for_gloo()
    return "cpu" if on_cpu else "mps" if device == "mps" or not torch.cuda.is_available() else "cuda"


def _check_mps_exists(device: str) -> None:
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine has no Apple GPU that torch can use; try --device cpu")


def _check_devices_exist(device: str, numbers: list[int], available: int) -> None:
    if max(numbers) >= available:
        count = f"torch sees {plural(available, 'CUDA device')} here" if available else "torch sees no CUDA device here"
        raise UserError(f"--device {device}: {count}; try --device {available - 1 if available else 'cpu'}")


def loader_workers(requested: int) -> int:
    """Return the loader processes per training process: `requested`, at most one per core of the machine in total."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(requested, cores // local_world_size()))


def describe_device(device: torch.device) -> str:
    """Return the threads of a CPU, or the name and memory of a GPU."""
    if device.type != "cuda":
        return plural(torch.get_num_threads(), "thread")
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"


def device_name(device: torch.device) -> str:
    """Return this process's host and device, with its description."""
    return f"{socket.gethostname()} {device} ({describe_device(device)})"
