"""The doctor (`train.py --doctor`): compares all processes of a launch before a job starts."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from utils.console import log, table
from utils.distributed import deepspeed, launch
from utils.distributed.ranks import ranks
from utils.errors import Stopped, UserError, plural
from utils.files import ROOT

MAX_VALUE_LENGTH = 40  # characters of a setting; a longer one is hashed
# Flags that may differ between machines. The files that they name are compared by content, weights by size.
MACHINE_FLAGS = (
    *("weights", "cfg", "data", "hyp", "device", "processes", "dist_timeout", "workers", "cache", "project", "name"),
    *("exist_ok", "nosave", "noplots", "doctor", "layers", "task_file", "augmentations", "hooks"),
)
CODE_FILES = ("train.py", "job.py", "val.py", "models/**/*.py", "models/**/*.yaml", "data/**/*.py", "utils/**/*.py")
Facts = dict[str, Any]  # of a process: its `row` of the table, what is `compared` by name, and `errors`
Inputs = tuple[Mapping[str, Any], Mapping[str, Sequence[Path]]]  # settings of a job by name, its files by purpose


def run_doctor(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> None:
    """Check all processes of a launch with these flags, by name; the main one prints a table and errors.

    `read` reads the job's inputs, logs lines about them, and raises `UserError`. If the job would fail, all processes
    end here with exit code 1.
    """
    launch.connect("cpu", flags["dist_timeout"])  # `process_facts` looks at the devices
    facts = gather_object([process_facts(flags, read)])
    errors = findings(facts)
    if ranks().rank == 0:
        rows = [list(facts[0]["row"]), *(list(process["row"].values()) for process in facts)]
        verdict = f"the job would fail: {plural(len(errors), 'error')} to fix first" if errors else "the job can start"
        log(*table(rows), *errors, verdict)
    PartialState().wait_for_everyone()  # a launcher ends all processes once one has failed
    if errors:
        raise Stopped(1)


def process_facts(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> Facts:
    """Return the facts about this process; the arguments are those of `run_doctor`."""
    device_type, errors = "", []
    inputs: Inputs = ({}, {})
    try:
        device_type = launch.select_device_type(flags["device"])
        inputs = read()
    except UserError as error:
        errors.append(str(error))
    gpu = torch.device("cuda", ranks().local_rank)
    hardware = launch.describe_device(gpu) if device_type == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = {"torch": torch.__version__, "accelerate": metadata.version("accelerate")}
    if deepspeed.is_requested():
        versions["deepspeed"] = metadata.version("deepspeed")
    code, files = code_hash(ROOT), {f"the data ({name})": fingerprint(paths) for name, paths in inputs[1].items()}
    settings = {f"--{name}".replace("_", "-"): value for name, value in flags.items() if name not in MACHINE_FLAGS}
    compared = {"the code": code, **files, **versions, **({"the kind of device": device_type} if device_type else {})}
    for name, value in {**settings, **inputs[0]}.items():
        compared[name] = text if len(text := str(value)) <= MAX_VALUE_LENGTH else _hash(text)
    names = {"host": socket.gethostname(), "rank": str(ranks().rank), "device": f"{device_type or '-'} {hardware}"}
    row = {**names, **versions, "code": code, "data": _hash(str(files))}
    return {"row": row, "compared": compared, "errors": errors}


def findings(facts: Sequence[Facts]) -> list[str]:
    """Return a line for each error of a process and each difference."""
    by_name = {f"host {process['row']['host']} rank {process['row']['rank']}": process for process in facts}
    lines = [f"error: on {name}: {error}" for name, process in by_name.items() for error in process["errors"]]
    whole = {name: process["compared"] for name, process in by_name.items() if not process["errors"]}
    for key in dict.fromkeys(key for compared in whole.values() for key in compared):
        values = {name: compared.get(key, "none") for name, compared in whole.items()}
        if len({*values.values()}) > 1:
            listed = ", ".join(f"{name} has {value}" for name, value in values.items())
            lines.append(f"error: {key} differs: {listed}; use the same on all machines")
    return lines


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:8]


def code_hash(root: Path) -> str:
    """Return a hash of the code in a checkout: of the names and the contents of `CODE_FILES`."""
    files = sorted(file for pattern in CODE_FILES for file in root.glob(pattern))
    return _hash(str([(file.relative_to(root).as_posix(), file.read_bytes()) for file in files]))


def fingerprint(files: Sequence[Path]) -> str:
    """Return the number of files and a hash of their sizes and relative names: `28 files 3f2a91bc`."""
    top = os.path.commonpath([file.parent for file in files])
    lines = sorted(f"{os.path.relpath(file, top)} {file.stat().st_size if file.exists() else ''}" for file in files)
    return f"{plural(len(files), 'file')} {_hash(chr(10).join(lines))}"
