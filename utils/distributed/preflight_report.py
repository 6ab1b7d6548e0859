"""The preflight's report: facts of each process, findings, and a table. Called by preflight and preflight_network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from utils.distributed.ranks import world_size
from utils.errors import plural

GIB, MIB = 2**30, 2**20
LEAST_FREE_BYTES = GIB  # of /dev/shm and of the disk
MAX_FILES_NAMED = 3  # in a message
MAX_VALUE_LENGTH = 40  # characters of a setting; longer ones are hashed


@dataclass(frozen=True)
class ProcessFacts:
    """Facts of one process, as plain JSON values; sizes in bytes, -1 if unknown.

    Every field has a default: a process with another version of the code may send fewer.
    """

    host: str = "?"
    rank: int = -1
    device: str = "-"
    backend: str = ""  # of torch.distributed; '' without a device
    memory: tuple[int, int] = (-1, -1)  # free and total
    reached: float = -1.0  # milliseconds to the main address
    versions: dict[str, str] = field(default_factory=dict)
    deepspeed: bool = False  # is it used?
    code: dict[str, str] = field(default_factory=dict)  # hashes by file
    own_files: dict[str, str] = field(default_factory=dict)  # hashes of files that may differ
    data: dict[str, str] = field(default_factory=dict)  # number and hash of files by purpose
    settings: dict[str, str] = field(default_factory=dict)
    shm: int = -1
    disk: int = -1  # free space for the run folder
    workers: int = 0
    errors: tuple[str, ...] = ()


class Finding(NamedTuple):
    """An error (`serious`), with which the job would fail, or a warning."""

    serious: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.serious else 'warning'}: {self.text}"


def short_hash(content: bytes) -> str:
    """Return the first eight hexadecimal digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:8]


def short_value(value: object) -> str:
    """Return a value as text, or its hash if the text is long."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else short_hash(text.encode())


def _hash_all(hashes: Mapping[str, str]) -> str:
    return short_hash(json.dumps(hashes, sort_keys=True).encode()) if hashes else "-"


def by_value(values: Iterable[tuple[ProcessFacts, str]]) -> dict[str, list[ProcessFacts]]:
    """Group processes by their value, in the order of the first process of each."""
    groups: dict[str, list[ProcessFacts]] = {}
    for process, value in values:
        groups.setdefault(value, []).append(process)
    return groups


# Findings


def compare(facts: Sequence[ProcessFacts]) -> list[Finding]:
    """Return the errors of each process, the differences between processes, and shortages of memory and disk."""
    errors = by_value((process, error) for process in facts for error in process.errors)
    failures = [Finding(True, f"on {places(processes)}: {error}") for error, processes in errors.items()]
    return [*failures, *_differences(facts), *_shortages(facts)]


def _differences(facts: Sequence[ProcessFacts]) -> list[Finding]:
    findings = _difference(
        f"the code{_in_files(facts)}",
        [(process, _hash_all(process.code)) for process in facts],
        "check out the same commit on all machines",
    )
    for name in _names(process.own_files for process in facts):
        values = [(process, process.own_files.get(name, "none")) for process in facts]
        remedy = "only the machine's own rank or paths should"
        findings += _difference(name, values, remedy, serious=False)
    for name in _names(process.data for process in facts):  # a process without any has reported an error
        values = [(process, process.data.get(name, "none")) for process in facts if process.data]
        findings += _difference(f"the data ({name})", values, "copy the same files to all machines")
    for name in _names(process.settings for process in facts):
        values = [(process, process.settings[name]) for process in facts if name in process.settings]
        findings += _difference(name, values, "use the same value on all machines")
    for name in _names(process.versions for process in facts):
        values = [(process, process.versions.get(name, "-")) for process in facts]
        serious = name != "Python" and (name != "deepspeed" or any(process.deepspeed for process in facts))
        findings += _difference(name, values, "install the same version on all machines", serious)
    kinds = [(process, process.device.partition(":")[0]) for process in facts if process.backend]
    return findings + _difference("the kind of device", kinds, "use --device cpu, or a GPU for every process")


def _names(mappings: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _in_files(facts: Sequence[ProcessFacts]) -> str:
    """Return the first files that differ: ` in utils/training/ema.py`."""
    names = sorted({name for process in facts for name in process.code})
    files = [name for name in names if len({process.code.get(name) for process in facts}) > 1]
    more = f" and {len(files) - MAX_FILES_NAMED} more" if len(files) > MAX_FILES_NAMED else ""
    return f" in {', '.join(files[:MAX_FILES_NAMED])}{more}" if files else ""


def _difference(
    name: str, values: Sequence[tuple[ProcessFacts, str]], remedy: str, serious: bool = True
) -> list[Finding]:
    """Return a finding that lists the processes of each value, if not all values are equal."""
    groups = by_value(values)
    if len(groups) < 2:
        return []
    listed = ", ".join(
        f"{places(processes)} {'has' if len(processes) == 1 else 'have'} {value}" for value, processes in groups.items()
    )
    return [Finding(serious, f"{name} differs: {listed}; {remedy}")]


def _shortages(facts: Sequence[ProcessFacts]) -> list[Finding]:
    warnings = []
    for process in {process.host: process for process in facts}.values():
        if process.workers and 0 <= process.shm < LEAST_FREE_BYTES:
            warnings.append(
                f"on host {process.host} /dev/shm, through which loader processes pass their batches, has "
                f"{process.shm / MIB:.0f} MiB; enlarge it (docker run --shm-size 8g), or use --workers 0"
            )
    for process in facts:
        if process.rank == 0 and 0 <= process.disk < LEAST_FREE_BYTES:
            warnings.append(
                f"on host {process.host}, which writes the results, the disk has {process.disk / MIB:.0f} MiB free; "
                "delete files, or choose another --project"
            )
        free, total = process.memory
        if process.device.startswith("cuda") and free < total / 2:
            warnings.append(
                f"on {places([process])} only {free / GIB:.1f} of {total / GIB:.1f} GiB of {process.device} are free; "
                "nvidia-smi shows which program uses the rest"
            )
    return [Finding(False, text) for text in warnings]


def places(facts: Sequence[ProcessFacts]) -> str:
    """Return hosts and ranks in words: `host a rank 0, host b ranks 1 and 2`."""
    hosts = by_value((process, process.host) for process in facts)
    return ", ".join(f"host {host} {rank_list([process.rank for process in here])}" for host, here in hosts.items())


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 0`, `ranks 1 and 3`, `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def table(facts: Sequence[ProcessFacts]) -> list[str]:
    """Return a line with all hosts and ranks, and a table with a line for each process."""
    rows = [_row(process) for process in facts]
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return [f"{plural(world_size(), 'process')}: {places(facts)}", *lines]


def _row(process: ProcessFacts) -> dict[str, str]:
    free, total = process.memory
    return {
        "host": process.host,
        "rank": str(process.rank),
        "device": process.device,
        "memory free": f"{free / GIB:.1f} of {total / GIB:.1f} GiB" if total > 0 else "-",
        "main reached": f"{process.reached:.1f} ms" if process.reached >= 0 else "-",
        "/dev/shm": f"{process.shm / GIB:.1f} GiB" if process.shm >= 0 else "-",
        "disk free": f"{process.disk / GIB:.0f} GiB" if process.disk >= 0 else "-",
        **{name: process.versions.get(name, "-") for name in ("Python", "torch", "accelerate", "deepspeed", "NCCL")},
        "code": _hash_all(process.code),
        "data": _hash_all(process.data),
    }


def verdict(errors: int) -> str:
    """Return the last line, for a number of errors."""
    return f"the job would fail: {plural(errors, 'error')} to fix first" if errors else "the job can start"
