"""The preflight's report: what each process found, how the processes differ, and the table of them.

Called by preflight and preflight_network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from utils.distributed.ranks import world_size

GIB, MIB = 2**30, 2**20
LEAST_FREE_BYTES = GIB  # of /dev/shm and of the disk
MAX_FILES_NAMED = 3  # in a sentence
MAX_VALUE_LENGTH = 40  # characters of a setting that is compared as it is; longer ones are hashed


@dataclass(frozen=True)
class ProcessFacts:
    """What one process found. Plain values, for they travel as JSON; sizes in bytes, -1 if unknown.

    Every field has a default, since a process with another version of the code may send fewer.
    """

    host: str = "?"
    rank: int = -1
    device: str = "-"
    backend: str = ""  # of the communication; '' if there is no device
    memory: tuple[int, int] = (-1, -1)  # free and total
    reached: float = -1.0  # milliseconds to the main address
    versions: dict[str, str] = field(default_factory=dict)
    deepspeed: bool = False  # is it used?
    code: dict[str, str] = field(default_factory=dict)  # file to hash
    own_files: dict[str, str] = field(default_factory=dict)  # those that may differ, file to hash
    data: dict[str, str] = field(default_factory=dict)  # kind of file to number and hash
    settings: dict[str, str] = field(default_factory=dict)
    shm: int = -1
    disk: int = -1  # free where the run folder would be
    workers: int = 0
    errors: tuple[str, ...] = ()


class Finding(NamedTuple):
    """A sentence that says what is wrong and what to do, and whether the job would fail because of it."""

    serious: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.serious else 'warning'}: {self.text}"


def short_hash(content: bytes) -> str:
    """Return eight hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:8]


def short_value(value: object) -> str:
    """Return a value as people read it, or its hash if that is long."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else short_hash(text.encode())


def _hash_all(hashes: Mapping[str, str]) -> str:
    return short_hash(json.dumps(hashes, sort_keys=True).encode()) if hashes else "-"


# What is wrong


def compare(facts: Sequence[ProcessFacts]) -> list[Finding]:
    """Return what is wrong with the processes of a job, one or many."""
    return [*_errors(facts), *_differences(facts), *_shortages(facts)]


def _errors(facts: Sequence[ProcessFacts]) -> list[Finding]:
    holders: dict[str, list[ProcessFacts]] = {}
    for process in facts:
        for error in process.errors:
            holders.setdefault(error, []).append(process)
    return [Finding(True, f"on {places(having)}: {error}") for error, having in holders.items()]


def _differences(facts: Sequence[ProcessFacts]) -> list[Finding]:
    findings = _difference(
        f"the code{_in_files(facts)}",
        [(process, _hash_all(process.code)) for process in facts],
        "check out the same commit on all machines",
    )
    for name in _names(process.own_files for process in facts):
        values = [(process, process.own_files.get(name, "none")) for process in facts]
        remedy = "see that nothing but a machine's own rank or paths does"
        findings += _difference(name, values, remedy, serious=False)
    for name in _names(process.data for process in facts):  # a process without any has reported an error
        values = [(process, process.data.get(name, "none")) for process in facts if process.data]
        findings += _difference(f"the data ({name})", values, "copy the same files to all machines")
    for name in _names(process.settings for process in facts):
        values = [(process, process.settings[name]) for process in facts if name in process.settings]
        findings += _difference(name, values, "give the same on all machines")
    for name in _names(process.versions for process in facts):
        values = [(process, process.versions.get(name, "-")) for process in facts]
        serious = name != "Python" and (name != "deepspeed" or any(process.deepspeed for process in facts))
        findings += _difference(name, values, "install the same version on all machines", serious)
    kinds = [(process, process.device.partition(":")[0]) for process in facts if process.backend]
    return findings + _difference("the kind of device", kinds, "give --device cpu, or a GPU to every process")


def _names(mappings: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _in_files(facts: Sequence[ProcessFacts]) -> str:
    """Return the files that differ, or some of them: ` in utils/training/ema.py`."""
    names = sorted({name for process in facts for name in process.code})
    wrong = [name for name in names if len({process.code.get(name) for process in facts}) > 1]
    more = f" and {len(wrong) - MAX_FILES_NAMED} more" if len(wrong) > MAX_FILES_NAMED else ""
    return f" in {', '.join(wrong[:MAX_FILES_NAMED])}{more}" if wrong else ""


def _difference(
    name: str, values: Sequence[tuple[ProcessFacts, str]], remedy: str, serious: bool = True
) -> list[Finding]:
    """Return a sentence that names which processes have what, if not all have the same."""
    holders: dict[str, list[ProcessFacts]] = {}
    for process, value in values:
        holders.setdefault(value, []).append(process)
    if len(holders) < 2:
        return []
    listed = ", ".join(
        f"{places(having)} {'has' if len(having) == 1 else 'have'} {value}" for value, having in holders.items()
    )
    return [Finding(serious, f"{name} differs: {listed}; {remedy}")]


def _shortages(facts: Sequence[ProcessFacts]) -> list[Finding]:
    warnings = []
    for process in {process.host: process for process in facts}.values():
        if process.workers and 0 <= process.shm < LEAST_FREE_BYTES:
            warnings.append(
                f"on host {process.host} /dev/shm has {process.shm / MIB:.0f} MiB, and loader processes hand their "
                "batches over there; enlarge it (docker run --shm-size 8g), or give --workers 0"
            )
    for process in facts:
        if process.rank == 0 and 0 <= process.disk < LEAST_FREE_BYTES:
            warnings.append(
                f"on host {process.host}, which writes the results, the disk has {process.disk / MIB:.0f} MiB left; "
                "make room, or choose another --project"
            )
        free, total = process.memory
        if process.device.startswith("cuda") and free < total / 2:
            warnings.append(
                f"on {places([process])} only {free / GIB:.1f} of {total / GIB:.1f} GiB of {process.device} are free; "
                "nvidia-smi shows which program has the rest"
            )
    return [Finding(False, text) for text in warnings]


def places(facts: Sequence[ProcessFacts]) -> str:
    """Return where processes are: `host a rank 0, host b ranks 1 and 2`."""
    return ", ".join(f"host {host} {rank_list(ranks)}" for host, ranks in _by_host(facts).items())


def _by_host(facts: Sequence[ProcessFacts]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for process in facts:
        ranks.setdefault(process.host, []).append(process.rank)
    return ranks


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 0`, `ranks 1 and 3`, `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


# What is printed


def table(facts: Sequence[ProcessFacts]) -> list[str]:
    """Return a line with the hosts and their ranks, and a table with a line for each process."""
    hosts = ", ".join(f"{host} {rank_list(ranks)}" for host, ranks in _by_host(facts).items())
    rows = [_row(process) for process in facts]
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    count = world_size()
    return [f"{count} process{'es' if count > 1 else ''}: {hosts}", *lines]


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
    """Return the last line: can the job start?"""
    if not errors:
        return "the job can start"
    return f"the job would fail: {errors} error{'s' if errors > 1 else ''} to fix first"
