"""The doctor (`train.py --doctor`): compares all processes of a launch before a job starts.

They exchange facts through the run's store, which needs only the main process's port. Called by train.py.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, TCPStore

from utils.distributed import deepspeed, launch
from utils.distributed.failure import hard_exit
from utils.distributed.ranks import RunStore, ranks, run_store, world_size
from utils.errors import UserError, plural
from utils.files import ROOT

MARGIN_SECONDS = 30.0  # time that the other processes wait for the main one's answer after its time-out
LEAVE_SECONDS = 5.0  # time that the main process, which may host the store, waits for the others to leave it
MAX_VALUE_LENGTH = 40  # characters of a setting; a longer one is hashed
# Flags that may differ between machines. The files that they name are compared by content.
MACHINE_FLAGS = (
    *("weights", "cfg", "data", "hyp", "device", "processes", "dist_timeout", "workers", "cache", "project", "name"),
    *("exist_ok", "nosave", "noplots", "doctor"),
)
CODE_FILES = ("train.py", "job.py", "val.py", "models/**/*.py", "models/**/*.yaml", "data/**/*.py", "utils/**/*.py")
# What is compared, and what to do about a difference.
REMEDIES = {
    "code": "check out the same commit on all machines",
    "data": "copy the same files to all machines",
    "settings": "use the same value on all machines",
    "versions": "install the same version on all machines",
    "devices": "use --device cpu, or a GPU for every process",
}
# Of a process, as JSON: its `row` of the table, what is `compared` by group and name, `errors`, and `messages`.
Facts = dict[str, Any]
# Settings of a job by name, its files by purpose, and lines about its data.
Inputs = tuple[Mapping[str, Any], Mapping[str, Sequence[Path]], Sequence[str]]


def run_doctor(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> None:
    """Check all processes of this launch; the main one prints lines about the data, a table and errors.

    If the job would fail, all processes end here with exit code 1.

    Args:
        flags: flags of the command line by name, including `device` and `dist_timeout`
        read: returns the inputs of the job; raises `UserError`
    """
    timeout = flags["dist_timeout"]
    store = _open_store(timeout)
    store.write("doctor/facts", process_facts(flags, read))
    if ranks().rank == 0:
        _wait(lambda: len(store.values("doctor/facts")) == world_size(), timeout)
        facts = list(store.values("doctor/facts").values())
        lines = findings(facts, timeout)
        errors = sum(line.startswith("error: ") for line in lines)
        verdict = f"the job would fail: {plural(errors, 'error')} to fix first" if errors else "the job can start"
        print(*facts[0]["messages"], *table(facts), *lines, verdict, sep="\n", flush=True)
        store.write_once("doctor/errors", errors)
        _wait(lambda: store.count("doctor/left", 0) >= len(facts) - 1, LEAVE_SECONDS)
    elif _wait(lambda: store.value("doctor/errors") is not None, timeout + MARGIN_SECONDS):
        errors = store.value("doctor/errors")
        store.count("doctor/left")
    else:
        raise UserError(f"the main process has not answered for {timeout:g} s: check its output, and the network")
    if errors:
        hard_exit("")


def _open_store(timeout: float) -> RunStore:
    """Connect to the store that the launcher or the main process hosts. Does not wait for other processes."""
    if world_size() == 1:
        return RunStore(HashStore())
    hosted = launch.wait_for_main_process(timeout)
    if connected := run_store():  # with --resume
        return connected
    with launch.rendezvous_errors(timeout):
        limit = timedelta(seconds=timeout)
        return RunStore(hosted or TCPStore(*launch.main_address(), timeout=limit, wait_for_workers=False))


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until `ready` returns True, for at most `seconds`; return whether it did."""
    end = time.monotonic() + seconds
    while not (done := ready()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def process_facts(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> Facts:
    """Return the facts about this process; the arguments are those of `run_doctor`."""
    errors, kind = [], ""
    job: Inputs = ({}, {}, ())
    try:
        kind = launch.device_kind(flags["device"])
        job = read()
    except UserError as error:
        errors.append(str(error))
    gpu = torch.device("cuda", ranks().local_rank)
    hardware = launch.describe_device(gpu) if kind == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()} | {"torch": torch.__version__}
    packages = ("torch", "accelerate", "deepspeed")[: 3 if deepspeed.is_requested() else 2]
    settings = {f"--{name}".replace("_", "-"): value for name, value in flags.items() if name not in MACHINE_FLAGS}
    texts = {name: str(value) for name, value in {**settings, **job[0]}.items()}
    compared = {
        "code": {"the code": code_hash(ROOT)},
        "data": {f"the data ({name})": fingerprint(paths) for name, paths in job[1].items()},
        "settings": {name: text if len(text) <= MAX_VALUE_LENGTH else _hash(text) for name, text in texts.items()},
        "versions": {name: versions.get(name, "none") for name in packages},
        "devices": {"the kind of device": kind} if kind else {},
    }
    row = {
        **{"host": socket.gethostname(), "rank": str(ranks().rank), "device": f"{kind or '-'} {hardware}"},
        **{**compared["versions"], "code": code_hash(ROOT), "data": _hash(str(compared["data"]))},
    }
    return {"row": row, "compared": compared, "errors": errors, "messages": [*job[2]]}


def findings(facts: Sequence[Facts], timeout: float) -> list[str]:
    """Return a line for each error of a process, each missing process, and each difference."""
    found = [f"error: on {who}: {error}" for error, who in _holders((e, f) for f in facts for e in f["errors"])]
    if missing := sorted(set(map(str, range(world_size()))) - {each["row"]["rank"] for each in facts}, key=int):
        address, port = launch.main_address()
        found.append(
            f"error: no answer from rank {', '.join(missing)} within {timeout:g} s: start the same command there, "
            f"check its output, and open {address} port {port} to it"
        )
    for group, remedy in REMEDIES.items():
        having = [(each["compared"][group], each) for each in facts if each["compared"].get(group)]
        for name in dict.fromkeys(name for values, _ in having for name in values):
            holders = _holders((values.get(name, "none"), each) for values, each in having)
            if len(holders) > 1:
                listed = ", ".join(f"{who} has {value}" for value, who in holders)
                found.append(f"error: {name} differs: {listed}; {remedy}")
    return found


def _holders(pairs: Iterable[tuple[str, Facts]]) -> list[tuple[str, str]]:
    """Return each value with the hosts and ranks that have it: `host a rank 0, 1, host b rank 2`."""
    holders: dict[str, dict[str, list[str]]] = {}
    for value, each in pairs:
        holders.setdefault(value, {}).setdefault(each["row"]["host"], []).append(each["row"]["rank"])
    return [
        (value, ", ".join(f"host {host} rank {', '.join(ranks)}" for host, ranks in hosts.items()))
        for value, hosts in holders.items()
    ]


def table(facts: Sequence[Facts]) -> list[str]:
    """Return the lines of a table with a row for each process."""
    cells = [list(facts[0]["row"]), *(list(each["row"].values()) for each in facts)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


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
