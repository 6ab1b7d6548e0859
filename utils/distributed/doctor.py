"""The doctor (`train.py --doctor`): compares all processes of a launch before a job starts.

They exchange facts through the run's store, which needs only the main process's port. Called by train.py.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from utils.distributed import deepspeed, launch
from utils.distributed.failure import hard_exit
from utils.distributed.ranks import RunStore, ranks, run_store, world_size
from utils.errors import UserError, plural
from utils.files import ROOT

MARGIN_SECONDS = 30.0  # after its time-out, in which the main process must answer
LEAVE_SECONDS = 5.0  # time that the main process, which may host the store, waits for the others to leave it
MAX_VALUE_LENGTH = 40  # characters of a setting; a longer one is hashed
# Flags that may differ between machines. The files that they name are compared by content.
MACHINE_FLAGS = (
    *("weights", "cfg", "data", "hyp", "device", "processes", "dist_timeout", "workers", "cache", "project", "name"),
    *("exist_ok", "nosave", "noplots", "doctor"),
)
CODE_FILES = ("train.py", "job.py", "val.py", "models/**/*.py", "models/**/*.yaml", "data/**/*.py", "utils/**/*.py")
Facts = dict[str, Any]  # of a process, as JSON: its `row` of the table, what is `compared` by name, and `errors`
Inputs = tuple[Mapping[str, Any], Mapping[str, Sequence[Path]]]  # settings of a job by name, its files by purpose


def run_doctor(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> None:
    """Check all processes of this launch; the main one prints a table and errors.

    If the job would fail, all processes end here with exit code 1.

    Args:
        flags: flags of the command line by name, including `device` and `dist_timeout`
        read: reads the inputs of the job, and logs lines about them; raises `UserError`
    """
    timeout = flags["dist_timeout"]
    with launch.rendezvous_errors(timeout):
        store = run_store() or RunStore(launch.open_store(timeout))  # with --resume there is one
    store.write("doctor/facts", process_facts(flags, read))
    if ranks().rank == 0:
        _wait(lambda: len(store.values("doctor/facts")) == world_size(), timeout)
        facts = list(store.values("doctor/facts").values())
        lines = findings(facts, timeout)
        verdict = f"the job would fail: {plural(len(lines), 'error')} to fix first" if lines else "the job can start"
        print(*table(facts), *lines, verdict, sep="\n", flush=True)
        store.write_once("doctor/errors", len(lines))
        _wait(lambda: store.count("doctor/left", 0) >= len(facts) - 1, LEAVE_SECONDS)
    elif not _wait(lambda: store.value("doctor/errors") is not None, timeout + MARGIN_SECONDS):
        raise UserError(f"the main process has not answered for {timeout:g} s: check its output, and the network")
    errors = store.value("doctor/errors")
    store.count("doctor/left")
    if errors:
        hard_exit("")


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until `ready` returns True, for at most `seconds`; return whether it did."""
    end = time.monotonic() + seconds
    while not (done := ready()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def process_facts(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> Facts:
    """Return the facts about this process; the arguments are those of `run_doctor`."""
    kind, errors = "", []
    inputs: Inputs = ({}, {})
    try:
        kind = launch.device_kind(flags["device"])
        inputs = read()
    except UserError as error:
        errors.append(str(error))
    gpu = torch.device("cuda", ranks().local_rank)
    hardware = launch.describe_device(gpu) if kind == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = {"torch": torch.__version__, "accelerate": metadata.version("accelerate")}
    if deepspeed.is_requested() and find_spec("deepspeed"):
        versions["deepspeed"] = metadata.version("deepspeed")
    code, files = code_hash(ROOT), {f"the data ({name})": fingerprint(paths) for name, paths in inputs[1].items()}
    settings = {f"--{name}".replace("_", "-"): value for name, value in flags.items() if name not in MACHINE_FLAGS}
    compared = {"the code": code, **files, **versions, **({"the kind of device": kind} if kind else {})}
    for name, value in {**settings, **inputs[0]}.items():
        compared[name] = text if len(text := str(value)) <= MAX_VALUE_LENGTH else _hash(text)
    names = {"host": socket.gethostname(), "rank": str(ranks().rank), "device": f"{kind or '-'} {hardware}"}
    return {
        "row": {**names, **versions, "code": code, "data": _hash(str(files))},
        "compared": compared,
        "errors": errors,
    }


def findings(facts: Sequence[Facts], timeout: float) -> list[str]:
    """Return a line for each error of a process, each missing process, and each difference."""
    by_name = {f"host {process['row']['host']} rank {process['row']['rank']}": process for process in facts}
    lines = [f"error: on {name}: {error}" for name, process in by_name.items() for error in process["errors"]]
    if missing := sorted(set(range(world_size())) - {int(process["row"]["rank"]) for process in facts}):
        address, port = launch.main_address()
        lines.append(
            f"error: no answer from rank {', '.join(map(str, missing))} within {timeout:g} s: start the same command "
            f"there, check its output, and open {address} port {port} to it"
        )
    whole = {name: process["compared"] for name, process in by_name.items() if not process["errors"]}
    for key in dict.fromkeys(key for compared in whole.values() for key in compared):
        values = {name: compared.get(key, "none") for name, compared in whole.items()}
        if len({*values.values()}) > 1:
            listed = ", ".join(f"{name} has {value}" for name, value in values.items())
            lines.append(f"error: {key} differs: {listed}; use the same on all machines")
    return lines


def table(facts: Sequence[Facts]) -> list[str]:
    """Return the lines of a table with a row for each process."""
    cells = [list(facts[0]["row"]), *(list(process["row"].values()) for process in facts)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


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
