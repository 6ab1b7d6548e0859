"""The preflight (`--doctor`): checks every process of a launch before a job starts. Called by train.py.

The processes exchange their facts through the store, which needs the main port only; the other ports are tested after
the table is printed.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed

from utils.distributed.deepspeed import is_requested, missing_packages, refuse_comm_hook
from utils.distributed.devices import device_kind, loader_workers
from utils.distributed.exit import give_up
from utils.distributed.launcher import refuse_unsupported_launch
from utils.distributed.preflight_network import BACKENDS, Measured, judge_measurement, measure
from utils.distributed.preflight_report import (
    Finding,
    ProcessFacts,
    compare,
    rank_list,
    short_hash,
    short_value,
    table,
    verdict,
)
from utils.distributed.ranks import ranks, world_size
from utils.distributed.rendezvous import RENDEZVOUS_MARGIN_SECONDS, connect, main_address
from utils.distributed.store import RunStore
from utils.errors import UserError, plural
from utils.files import ROOT

NOTICE_SECONDS = 15.0  # until the main process prints which processes it waits for
MEASUREMENT_SECONDS = 30.0  # of the network, at most
RESULTS_SECONDS = 10.0  # that the main process waits for the other processes' measurements after its own
CONNECT_SECONDS = 5.0  # time-out of a connection to the main address
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
Inputs = tuple[Mapping[str, Any], Mapping[str, Sequence[Path]]]  # settings by name, and the job's files by purpose


def examine(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> None:
    """Check all processes of this launch; the main one prints a table, errors and warnings.

    flags: the command line by name, `comm_hook`, `device`, `dist_timeout`, `project` and `workers` among them. read:
    returns the inputs of the job; raises `UserError`. If the job would fail all processes end here with exit code 1.
    """
    main, errors, kind, timeout = ranks().rank == 0, [], "", flags["dist_timeout"]
    try:
        refuse_comm_hook(flags["comm_hook"])
        refuse_unsupported_launch(flags["device"])
        kind = device_kind(flags["device"])
    except UserError as error:
        errors.append(str(error))
    store = connect(timeout, "doctor")
    store.write("facts", dataclasses.asdict(_examine_process(flags, read, kind, errors)))
    facts, serious = _report_facts(store, timeout) if main else ([], 0)
    if store.wait_for_main("measure", timeout + RENDEZVOUS_MARGIN_SECONDS):
        limit = min(timeout, MEASUREMENT_SECONDS)
        store.write("measured", measure(kind, limit))
        serious += _report_measurement(store, facts, limit) if main else 0
    if main:
        print(verdict(serious), flush=True)
        store.write("serious", serious)
    failed = store.wait_for_main("serious", MEASUREMENT_SECONDS + RENDEZVOUS_MARGIN_SECONDS)
    store.leave("facts")
    if failed:
        give_up("")  # a measurement that hangs would block a regular exit


def _report_facts(store: RunStore, timeout: float) -> tuple[list[ProcessFacts], int]:
    """Print the table and all findings; write whether to measure. Returns the facts and the number of errors."""
    facts = collect_facts(store, timeout)
    findings = [*check_ranks(store, facts, timeout), *compare(facts)]
    print(*table(facts), *findings, sep="\n", flush=True)
    backends = {process.backend for process in facts}
    store.write("measure", 1 < len(facts) == world_size() and len(backends) == 1 and "" not in backends)
    return facts, sum(finding.serious for finding in findings)


def _report_measurement(store: RunStore, facts: Sequence[ProcessFacts], limit: float) -> int:
    """Print the result of the measurement. Returns the number of errors."""
    measured = {rank: Measured(*values) for rank, values in store.wait_for_values("measured", RESULTS_SECONDS).items()}
    lines, findings = judge_measurement(facts, measured, limit)
    print(*lines, *findings, sep="\n", flush=True)
    return len(findings)


def collect_facts(store: RunStore, timeout: float) -> list[ProcessFacts]:
    """Return the facts of all processes that write them within `timeout` seconds, in the order of the ranks."""
    known = {field.name for field in dataclasses.fields(ProcessFacts)}
    written = store.wait_for_values("facts", min(NOTICE_SECONDS, timeout))
    if len(written) < world_size() and timeout > NOTICE_SECONDS:
        print(f"waiting for {rank_list(_missing_ranks(written))}, at most {timeout:g} s (--dist-timeout)", flush=True)
        written = store.wait_for_values("facts", timeout - NOTICE_SECONDS)
    return [
        ProcessFacts(**{name: value for name, value in written[rank].items() if name in known})
        for rank in sorted(written)
    ]


def _missing_ranks(present: Iterable[int]) -> list[int]:
    return sorted(set(range(world_size())) - set(present))


def check_ranks(store: RunStore, facts: Sequence[ProcessFacts], timeout: float) -> list[Finding]:
    """Return an error for ranks that have written no facts, and for each rank that several processes have."""
    address, port = main_address()
    errors = []
    if missing := _missing_ranks(process.rank for process in facts):
        errors.append(
            f"no answer from {rank_list(missing)} within {timeout:g} s: start the same command there, check its "
            f"output, and open {address} port {port} to it"
        )
    for rank in range(world_size()):
        if (times := store.times_written("facts", rank)) > 1:
            errors.append(
                f"{times} processes have rank {rank}; give each machine its own --machine_rank, or each process its "
                "own RANK"
            )
    return [Finding(True, text) for text in errors]


def _examine_process(
    flags: Mapping[str, Any], read: Callable[[], Inputs], kind: str, errors: list[str]
) -> ProcessFacts:
    """Return the facts of this process. errors: those of its device."""
    inputs: Mapping[str, Any] = {}
    files: Mapping[str, Sequence[Path]] = {}
    try:
        inputs, files = read()
    except UserError as error:
        errors.append(str(error))
    if is_requested() and (missing := missing_packages()):
        errors.append(f"DeepSpeed is requested, but {' and '.join(missing)} cannot be imported; install them here too")
    project = Path(flags["project"]).absolute()
    folder = next(path for path in (project, *project.parents) if path.exists())  # where the run folder will be
    if ranks().rank == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
        errors.append(f"{folder} is not writable; choose another --project")
    compared = {f"--{name}".replace("_", "-"): value for name, value in flags.items() if name not in MACHINE_FLAGS}
    device, memory = _device(kind)
    return ProcessFacts(
        host=socket.gethostname(),
        rank=ranks().rank,
        device=device,
        backend=BACKENDS.get(kind, ""),
        memory=memory,
        reached=_reach() if world_size() > 1 else -1.0,
        versions=_versions(),
        deepspeed=is_requested(),
        code=hash_files(ROOT, CODE_FILES, MACHINE_FILES),
        own_files=hash_files(ROOT, MACHINE_FILES),
        data={name: fingerprint(paths) for name, paths in files.items()},
        settings={
            name: short_value(value) for name, value in {"WORLD_SIZE": world_size(), **compared, **inputs}.items()
        },
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else -1,
        disk=shutil.disk_usage(folder).free,
        workers=loader_workers(flags["workers"]),
        errors=tuple(errors),
    )


def _device(kind: str) -> tuple[str, tuple[int, int]]:
    """Return the name of this process's device, and its free and total memory in bytes."""
    if kind == "cuda":
        number = ranks().local_rank
        return f"cuda:{number} {torch.cuda.get_device_name(number)}", torch.cuda.mem_get_info(number)
    memory = psutil.virtual_memory()
    return kind or "-", (memory.available, memory.total)


def _reach() -> float:
    """Return the milliseconds of a connection to the main address; -1 if it fails."""
    begun = time.perf_counter()
    try:
        socket.create_connection(main_address(), timeout=CONNECT_SECONDS).close()
    except OSError:
        return -1.0
    return (time.perf_counter() - begun) * 1000


def _versions() -> dict[str, str]:
    nccl = torch.cuda.is_available() and distributed.is_nccl_available()
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "accelerate": _version("accelerate"),
        "deepspeed": _version("deepspeed"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "-",
    }


def _version(package: str) -> str:
    """Return a package's version, or '-', without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def hash_files(root: Path, patterns: Sequence[str], excluded: Sequence[str] = ()) -> dict[str, str]:
    """Return a hash of the content of each file below `root` that matches a pattern, and none of `excluded`."""
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
