"""Compare the processes of a launch: errors, differences and shortages, and a table of all processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from utils.distributed.deepspeed import is_requested
from utils.doctor.process_facts import ProcessFacts, short_hash
from utils.errors import plural

GIB = 2**30
MAX_FILES_NAMED = 3  # files that a message names
# By group of `ProcessFacts.compared`: the advice about a difference.
REMEDIES = {
    "code": "check out the same commit on all machines",
    "machine files": "only the machine's own rank or paths should",
    "data": "copy the same files to all machines",
    "settings": "use the same value on all machines",
    "inputs": "use the same value on all machines",
    "versions": "install the same version on all machines",
    "devices": "use --device cpu, or a GPU for every process",
    "device types": "--logical-processes gives the same bytes on devices of one type only",
}


class Finding(NamedTuple):
    """An error (`serious`) that would make the job fail, or a warning."""

    serious: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.serious else 'warning'}: {self.text}"


def compare(facts: Sequence[ProcessFacts]) -> list[Finding]:
    """Return the errors of each process, the differences between processes, and shortages of memory and disk."""
    errors = group_by((error, process) for process in facts for error in process.errors)
    failures = [Finding(True, f"on {format_hosts(processes)}: {error}") for error, processes in errors.items()]
    differences = [finding for group in REMEDIES for finding in _differences(group, facts)]
    return [*failures, *differences, *_shortages(facts)]


def group_by(pairs: Iterable[tuple[str, ProcessFacts]]) -> dict[str, list[ProcessFacts]]:
    """Group processes by a value, in the order of the first process of each."""
    groups: dict[str, list[ProcessFacts]] = {}
    for value, process in pairs:
        groups.setdefault(value, []).append(process)
    return groups


def _differences(group: str, facts: Sequence[ProcessFacts]) -> list[Finding]:
    """Return a finding for each name of a group that has several values, but only one for all files of the code."""
    having = [(process.compared[group], process) for process in facts if process.compared.get(group)]
    names = list(dict.fromkeys(name for values, _ in having for name in values))
    different = [name for name in names if len({values.get(name) for values, _ in having}) > 1]
    if group == "code" and different:
        more = f" and {len(different) - MAX_FILES_NAMED} more" if len(different) > MAX_FILES_NAMED else ""
        name = f"the code in {', '.join(sorted(different)[:MAX_FILES_NAMED])}{more}"
        having = [({name: hash_all(values)}, process) for values, process in having]
        different = [name]
    findings = []
    for name in different:
        holders = group_by((values.get(name, "none"), process) for values, process in having)
        listed = ", ".join(
            f"{format_hosts(processes)} {'has' if len(processes) == 1 else 'have'} {value}"
            for value, processes in holders.items()
        )
        harmless = (
            group in ("machine files", "device types")
            or name == "Python"
            or (name == "deepspeed" and not is_requested())
        )
        findings.append(Finding(not harmless, f"{name} differs: {listed}; {REMEDIES[group]}"))
    return findings


def _shortages(facts: Sequence[ProcessFacts]) -> list[Finding]:
    """Return a warning for each host with less than 1 GiB of /dev/shm, or of the main process's disk."""
    warnings = []
    for process in {process.host: process for process in facts}.values():
        if process.workers and 0 <= process.shm < GIB:
            warnings.append(
                f"/dev/shm of host {process.host} is small; enlarge it (docker --shm-size), or use --workers 0"
            )
    for process in facts:
        if process.rank == 0 and 0 <= process.disk < GIB:
            warnings.append(
                f"the disk of host {process.host} is nearly full; delete files, or choose another --project"
            )
    return [Finding(False, text) for text in warnings]


def hash_all(hashes: Mapping[str, str]) -> str:
    """Return one hash of all hashes; '-' if there are none."""
    return short_hash(json.dumps(hashes, sort_keys=True).encode()) if hashes else "-"


def format_hosts(facts: Sequence[ProcessFacts]) -> str:
    """Return hosts and ranks in words: `host a rank 0, host b ranks 1 and 2`."""
    hosts = group_by((process.host, process) for process in facts)
    return ", ".join(f"host {host} {format_ranks([process.rank for process in here])}" for host, here in hosts.items())


def format_ranks(ranks: Sequence[int]) -> str:
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
    return [f"{plural(len(facts), 'process')}: {format_hosts(facts)}", *lines]


def _row(process: ProcessFacts) -> dict[str, str]:
    free, total = process.memory
    return {
        "host": process.host,
        "rank": str(process.rank),
        "device": process.device,
        "memory free": f"{free / GIB:.1f} of {total / GIB:.1f} GiB" if total > 0 else "-",
        "/dev/shm": f"{process.shm / GIB:.1f} GiB" if process.shm >= 0 else "-",
        "disk free": f"{process.disk / GIB:.0f} GiB" if process.disk >= 0 else "-",
        **{name: process.compared.get("versions", {}).get(name, "-") for name in ("torch", "accelerate", "deepspeed")},
        **{group: hash_all(process.compared.get(group, {})) for group in ("code", "data")},
    }
