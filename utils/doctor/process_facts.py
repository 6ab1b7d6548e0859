"""Facts about one process for the doctor: machine, versions, and hashes of code and data."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed

from utils.distributed.deepspeed import is_requested, missing_packages, refuse_comm_hook
from utils.distributed.devices import device_kind, loader_workers, refuse_unsupported_launch
from utils.distributed.ranks import ranks, world_size
from utils.errors import UserError, plural
from utils.files import ROOT

MAX_VALUE_LENGTH = 40  # characters of a setting; a longer one is hashed
# Flags that may differ between machines. The files that they name are compared by content.
MACHINE_FLAGS = (
    *("weights", "cfg", "data", "hyp", "device", "processes", "dist_timeout", "workers", "cache", "project", "name"),
    *("exist_ok", "nosave", "noplots", "doctor"),
)
CODE_FILES = (
    "train.py",
    "val.py",
    *(f"{part}/**/*.{kind}" for part in ("models", "data", "utils") for kind in ("py", "yaml")),
)
MACHINE_FILES = ("accelerate_configs/*.yaml", "data/*.yaml")  # may hold a machine's own rank, or its path to the data
# Settings by name, the job's files by purpose, and lines about its data.
Inputs = tuple[Mapping[str, Any], Mapping[str, Sequence[Path]], Sequence[str]]


@dataclass(frozen=True)
class ProcessFacts:
    """Facts about one process, as plain JSON values; sizes in bytes, -1 if unknown.

    Every field has a default: a process with another version of the code may send fewer.
    """

    host: str = "?"
    rank: int = -1
    device: str = "-"
    memory: tuple[int, int] = (-1, -1)  # free and total memory of the device
    shm: int = -1
    disk: int = -1  # free space for the run folder
    workers: int = 0
    # Values that must be the same everywhere, by group (`comparison.REMEDIES`) and name; empty groups after an error.
    compared: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()  # lines about the data, as at the start of a run


def examine_process(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> ProcessFacts:
    """Return the facts about this process; the arguments are as in `run_doctor`."""
    errors: list[str] = []

    def attempt(work: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return work()
        except UserError as error:
            errors.append(str(error))
            return otherwise

    attempt(lambda: refuse_comm_hook(flags["comm_hook"]), None)
    attempt(lambda: refuse_unsupported_launch(flags["device"]), None)
    kind = attempt(lambda: device_kind(flags["device"]), "")
    inputs, files, messages = attempt(read, ({}, {}, ()))
    if is_requested() and (missing := missing_packages()):
        errors.append(f"DeepSpeed is requested, but {' and '.join(missing)} cannot be imported; install them here too")
    project = Path(flags["project"]).absolute()
    folder = next(path for path in (project, *project.parents) if path.exists())  # the run folder will be in it
    if ranks().rank == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
        errors.append(f"{folder} is not writable; choose another --project")
    device, memory = _device(kind)
    given = {f"--{name}".replace("_", "-"): value for name, value in flags.items() if name not in MACHINE_FLAGS}
    return ProcessFacts(
        host=socket.gethostname(),
        rank=ranks().rank,
        device=device,
        memory=memory,
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else -1,
        disk=shutil.disk_usage(folder).free,
        workers=loader_workers(flags["workers"]),
        compared={
            "code": hash_files(ROOT, CODE_FILES, MACHINE_FILES),
            "machine files": hash_files(ROOT, MACHINE_FILES),
            "data": {f"the data ({name})": fingerprint(paths) for name, paths in files.items()},
            "settings": {name: short_value(value) for name, value in {"WORLD_SIZE": world_size(), **given}.items()},
            "inputs": {name: short_value(value) for name, value in inputs.items()},
            "versions": _versions(),
            "devices": {"the kind of device": kind} if kind else {},
            "device types": {"the type of device": _device_type(kind)} if kind else {},
        },
        errors=tuple(errors),
        messages=tuple(messages),
    )


def _device(kind: str) -> tuple[str, tuple[int, int]]:
    """Return the name of this process's device, and its free and total memory in bytes."""
    if kind == "cuda":
        number = ranks().local_rank
        return f"cuda:{number} {torch.cuda.get_device_name(number)}", torch.cuda.mem_get_info(number)
    memory = psutil.virtual_memory()
    return kind or "-", (memory.available, memory.total)


def _device_type(kind: str) -> str:
    """Return the device type that decides which kernels run: the GPU, or the instruction set of the CPU."""
    return torch.cuda.get_device_name(ranks().local_rank) if kind == "cuda" else torch.backends.cpu.get_cpu_capability()


def _versions() -> dict[str, str]:
    """Return the versions of packages, '-' for one that is not installed, without importing it."""
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("accelerate", "deepspeed"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "-"
    if torch.cuda.is_available() and distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def short_hash(content: bytes) -> str:
    """Return the first eight hexadecimal digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:8]


def short_value(value: object) -> str:
    """Return a value as text, or its hash if the text is long."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else short_hash(text.encode())


def hash_files(root: Path, patterns: Sequence[str], excluded: Sequence[str] = ()) -> dict[str, str]:
    """Return a hash of the content of each file below `root` that matches one of `patterns` and none of `excluded`."""
    files = {file for pattern in patterns for file in root.glob(pattern)}
    files -= {file for pattern in excluded for file in root.glob(pattern)}
    return {
        file.relative_to(root).as_posix(): short_hash(file.read_bytes()) for file in sorted(files) if file.is_file()
    }


def fingerprint(files: Sequence[Path]) -> str:
    """Return the number of files and a hash of their sizes and relative names: `28 files 3f2a91bc`."""
    top = os.path.commonpath([file.parent for file in files])
    lines = sorted(f"{os.path.relpath(file, top)} {file.stat().st_size if file.exists() else ''}" for file in files)
    return f"{plural(len(files), 'file')} {short_hash(os.fsencode(chr(10).join(lines)))}"
