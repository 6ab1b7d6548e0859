"""The preflight: what every process of a launch has, where they differ, and how fast they talk to each other.

The processes tell each other at the store where a run meets, for that needs no other port than the main one. Whether
the others are open is tried when the table has been printed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed

from utils.config.options import TrainOptions
from utils.distributed.accelerator import GRACE, attend, device_kind, loader_workers, main_address, meet
from utils.distributed.deepspeed import absent_packages, wanted
from utils.distributed.exit import give_up
from utils.distributed.ranks import key, place
from utils.distributed.store import SLACK, Board
from utils.errors import UserError
from utils.files import ROOT

GIB, MIB = 2**30, 2**20
NOTICE = 15.0  # seconds until the main process says for whom it waits
MEASURE = 30.0  # seconds that the other ports have, at most
MESSAGE = 16 * MIB  # bytes of an all-reduce
LEAST = GIB  # of /dev/shm and of the disk, bytes
NAMED = 3  # files that a sentence names, at most
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# Flags that a machine may have of its own. Files that they name are compared by what is in them.
OWN_FLAGS = (
    *("weights", "cfg", "data", "hyp", "device", "processes", "dist_timeout", "workers", "cache", "project", "name"),
    *("exist_ok", "nosave", "noplots", "show_processes", "local_rank", "doctor"),
)
CODE = (
    "train.py",
    "val.py",
    *(f"{part}/**/*.{kind}" for part in ("models", "data", "utils") for kind in ("py", "yaml")),
)
OWN_FILES = ("accelerate_configs/*.yaml", "data/*.yaml")  # they may hold a machine's own rank, or its path to the data
# What read() gives: settings, by name, and the files that the job reads, by what they are for.
Inputs = tuple[Mapping[str, Any], Mapping[str, Sequence[Path]]]


@dataclass(frozen=True)
class Facts:
    """What one process knows of itself. Plain values, for they travel as JSON; sizes in bytes, -1 where unknown.

    With values for all, since a process with another state of the code may tell less.
    """

    host: str = "?"
    rank: int = -1
    device: str = "-"
    backend: str = ""  # of the communication; '' where there is no device
    memory: tuple[int, int] = (-1, -1)  # free and total
    reached: float = -1.0  # milliseconds to the main address
    versions: dict[str, str] = field(default_factory=dict)
    deepspeed: bool = False  # is it used?
    code: dict[str, str] = field(default_factory=dict)  # file to hash
    own_files: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)  # kind of file to number and hash
    settings: dict[str, str] = field(default_factory=dict)
    shm: int = -1
    disk: int = -1  # free where the run folder would be
    workers: int = 0
    errors: tuple[str, ...] = ()


class Finding(NamedTuple):
    """A sentence that says what is wrong and what to do, and whether the job would fail of it."""

    serious: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.serious else 'warning'}: {self.text}"


def examine(options: TrainOptions, read: Callable[[], Inputs]) -> None:
    """Look at all processes of this launch; the main one prints a table and what is wrong.

    read: reads what the job would, and raises `UserError` where it could not. Where the job would fail all processes
    end here, with 1.
    """
    main, errors, kind = place().rank == 0, [], ""
    try:
        kind = device_kind(options.device)
    except UserError as error:
        errors.append(str(error))
    board = Board(meet(options.dist_timeout) if place().processes > 1 else distributed.HashStore(), "doctor")
    board.put("facts", dataclasses.asdict(_look(options, read, kind, errors)))
    facts, serious = _report_facts(board, options.dist_timeout) if main else ([], 0)
    if board.of_main("measure", options.dist_timeout + GRACE):
        limit = min(options.dist_timeout, MEASURE)
        board.put("measured", measure(kind, limit))
        serious += _report_measurement(board, facts, limit) if main else 0
    if main:
        print(_verdict(serious), flush=True)
        board.put("serious", serious)
    failed = board.of_main("serious", MEASURE + GRACE)
    board.leave("facts")
    if failed:
        give_up("", 1)  # hard, for a measurement that hangs would keep the process


def _report_facts(board: Board, timeout: float) -> tuple[list[Facts], int]:
    """Print the table and what is wrong. Returns the facts and the number of errors; says whether to measure."""
    facts = _all_facts(board, timeout)
    findings = [*_absent(board, facts, timeout), *compare(facts)]
    print(*table(facts), *findings, sep="\n", flush=True)
    backends = {one.backend for one in facts}
    board.put("measure", 1 < len(facts) == place().processes and len(backends) == 1 and "" not in backends)
    return facts, sum(finding.serious for finding in findings)


def _report_measurement(board: Board, facts: Sequence[Facts], limit: float) -> int:
    """Print what the measurement says. Returns the number of errors."""
    found = {rank: Measured(*values) for rank, values in board.read("measured", 2 * SLACK).items()}
    lines, findings = judge_measurement(facts, found, limit)
    print(*lines, *findings, sep="\n", flush=True)
    return len(findings)


def _verdict(serious: int) -> str:
    if not serious:
        return "the job can start"
    return f"the job would fail: {serious} error{'s' if serious > 1 else ''} to mend first"


def _all_facts(board: Board, timeout: float) -> list[Facts]:
    """What all processes know of themselves, by rank, of those that tell within the time-out."""
    known = {one.name for one in dataclasses.fields(Facts)}
    found = board.read("facts", min(NOTICE, timeout))
    if len(found) < place().processes and timeout > NOTICE:
        print(f"waiting for {_ranks(_missing(found))}, for at most {timeout:g} s (--dist-timeout)", flush=True)
        found = board.read("facts", timeout - NOTICE)
    return [Facts(**{key: value for key, value in found[rank].items() if key in known}) for rank in sorted(found)]


def _missing(found: Iterable[int]) -> list[int]:
    return sorted(set(range(place().processes)) - set(found))


def _absent(board: Board, facts: Sequence[Facts], timeout: float) -> list[Finding]:
    """Ranks that have said nothing, and ranks that several processes have."""
    address, port = main_address()
    found = []
    if missing := _missing(one.rank for one in facts):
        found.append(
            f"no word from {_ranks(missing)} within {timeout:g} s: start the same command there, read what it "
            f"printed, and open {address} port {port} to it"
        )
    for rank in range(place().processes):
        if (times := board.times("facts", rank)) > 1:
            found.append(
                f"{times} processes say that they are rank {rank}; give each machine its own --machine_rank, or each "
                "process its own RANK"
            )
    return [Finding(True, text) for text in found]


# What a process knows of itself


def _look(options: TrainOptions, read: Callable[[], Inputs], kind: str, errors: Sequence[str]) -> Facts:
    settings: Mapping[str, Any] = {}
    files: Mapping[str, Sequence[Path]] = {}
    errors = list(errors)
    try:
        settings, files = read()
    except UserError as error:
        errors.append(str(error))
    if wanted() and (absent := absent_packages()):
        errors.append(f"DeepSpeed is asked for, and {' and '.join(absent)} cannot be found; install them here too")
    folder = _existing(Path(options.project).absolute())
    if place().rank == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
        errors.append(f"nothing can be written to {folder}; choose another --project")
    flags = {f"--{name}".replace("_", "-"): value for name, value in vars(options).items() if name not in OWN_FLAGS}
    device, memory = _device(kind)
    return Facts(
        host=socket.gethostname(),
        rank=place().rank,
        device=device,
        backend=BACKENDS.get(kind, ""),
        memory=memory,
        reached=_reach() if place().processes > 1 else -1.0,
        versions=_versions(),
        deepspeed=wanted(),
        code=hash_files(ROOT, CODE, OWN_FILES),
        own_files=hash_files(ROOT, OWN_FILES),
        data={name: fingerprint(found) for name, found in files.items()},
        settings={
            name: _short(value) for name, value in {"WORLD_SIZE": place().processes, **flags, **settings}.items()
        },
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else -1,
        disk=shutil.disk_usage(folder).free,
        workers=loader_workers(options.workers),
        errors=tuple(errors),
    )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


def _device(kind: str) -> tuple[str, tuple[int, int]]:
    """This process's device, and its memory, free and total."""
    if kind == "cuda":
        number = place().local_rank
        return f"cuda:{number} {torch.cuda.get_device_name(number)}", torch.cuda.mem_get_info(number)
    memory = psutil.virtual_memory()
    return kind or "-", (memory.available, memory.total)


def _reach() -> float:
    """Milliseconds that a connection to the main address takes; -1 where none is made."""
    begun = time.perf_counter()
    try:
        socket.create_connection(main_address(), timeout=SLACK).close()
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
    """Asked of its files: importing it may take long, and print."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def hash_files(root: Path, patterns: Sequence[str], but: Sequence[str] = ()) -> dict[str, str]:
    """The files below `root` that match a pattern, and none of `but`, with a hash of what is in each."""
    found = {file for pattern in patterns for file in root.glob(pattern)}
    found -= {file for pattern in but for file in root.glob(pattern)}
    return {file.relative_to(root).as_posix(): _hash(file.read_bytes()) for file in sorted(found) if file.is_file()}


def fingerprint(files: Sequence[Path]) -> str:
    """`28 files 3f2a91bc`: how many, and a hash of their sizes and their names below the folder that all are in.

    A file that does not exist is one without a size.
    """
    top = os.path.commonpath([file.parent for file in files])
    lines = sorted(f"{os.path.relpath(file, top)} {file.stat().st_size if file.exists() else ''}" for file in files)
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return f"{count} {_hash(os.fsencode(chr(10).join(lines)))}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _short(value: Any) -> str:
    """A value as people read it, or its hash where that is long."""
    text = str(value)
    return text if len(text) <= 40 else _hash(text.encode())


def _hash_all(hashes: Mapping[str, str]) -> str:
    return _hash(json.dumps(hashes, sort_keys=True).encode()) if hashes else "-"


# What is wrong


def compare(facts: Sequence[Facts]) -> list[Finding]:
    """What the processes' facts say of the job, for one process or many."""
    return [*_own_errors(facts), *_differences(facts), *_shortages(facts)]


def _own_errors(facts: Sequence[Facts]) -> list[Finding]:
    said: dict[str, list[Facts]] = {}
    for one in facts:
        for error in one.errors:
            said.setdefault(error, []).append(one)
    return [Finding(True, f"on {places(holders)}: {error}") for error, holders in said.items()]


def _differences(facts: Sequence[Facts]) -> list[Finding]:
    found = _difference(
        f"the code{_in_files(facts)}",
        [(one, _hash_all(one.code)) for one in facts],
        "check out the same commit on all machines",
    )
    for name in _names(one.own_files for one in facts):
        values = [(one, one.own_files.get(name, "none")) for one in facts]
        found += _difference(name, values, "see that nothing but a machine's own rank or paths does", serious=False)
    for name in _names(one.data for one in facts):  # those who have none have said why
        values = [(one, one.data.get(name, "none")) for one in facts if one.data]
        found += _difference(f"the data ({name})", values, "copy the same files to all machines")
    for name in _names(one.settings for one in facts):
        values = [(one, one.settings[name]) for one in facts if name in one.settings]
        found += _difference(name, values, "give the same on all machines")
    for name in _names(one.versions for one in facts):
        values = [(one, one.versions.get(name, "-")) for one in facts]
        serious = name != "Python" and (name != "deepspeed" or any(one.deepspeed for one in facts))
        found += _difference(name, values, "install the same version on all machines", serious)
    kinds = [(one, one.device.partition(":")[0]) for one in facts if one.backend]
    return found + _difference("the kind of device", kinds, "give --device cpu, or a GPU to every process")


def _names(mappings: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _in_files(facts: Sequence[Facts]) -> str:
    """` in utils/training/ema.py`: the files that differ, or some of them."""
    names = sorted({name for one in facts for name in one.code})
    wrong = [name for name in names if len({one.code.get(name) for one in facts}) > 1]
    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return f" in {', '.join(wrong[:NAMED])}{more}" if wrong else ""


def _difference(what: str, values: Sequence[tuple[Facts, str]], remedy: str, serious: bool = True) -> list[Finding]:
    """A sentence that names who has what, where not all have the same."""
    holders: dict[str, list[Facts]] = {}
    for one, value in values:
        holders.setdefault(value, []).append(one)
    if len(holders) < 2:
        return []
    who = ", ".join(
        f"{places(having)} {'has' if len(having) == 1 else 'have'} {has}" for has, having in holders.items()
    )
    return [Finding(serious, f"{what} differs: {who}; {remedy}")]


def _shortages(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    for one in {one.host: one for one in facts}.values():
        if one.workers and 0 <= one.shm < LEAST:
            found.append(
                f"on host {one.host} /dev/shm has {one.shm / MIB:.0f} MiB, and loader processes hand their batches "
                "over there; enlarge it (docker run --shm-size 8g), or give --workers 0"
            )
    for one in facts:
        if one.rank == 0 and 0 <= one.disk < LEAST:
            found.append(
                f"on host {one.host}, which writes the results, the disk has {one.disk / MIB:.0f} MiB left; make room, "
                "or choose another --project"
            )
        free, total = one.memory
        if one.device.startswith("cuda") and free < total / 2:
            found.append(
                f"on {places([one])} only {free / GIB:.1f} of {total / GIB:.1f} GiB of {one.device} are free; "
                "look with nvidia-smi who has the rest"
            )
    return [Finding(False, text) for text in found]


def places(facts: Sequence[Facts]) -> str:
    """`host a rank 0, host b ranks 1 and 2`."""
    ranks: dict[str, list[int]] = {}
    for one in facts:
        ranks.setdefault(one.host, []).append(one.rank)
    return ", ".join(f"host {host} {_ranks(found)}" for host, found in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


# What is printed


def table(facts: Sequence[Facts]) -> list[str]:
    """Who is there, and a line for each process."""
    hosts: dict[str, list[Facts]] = {}
    for one in facts:
        hosts.setdefault(one.host, []).append(one)
    here = ", ".join(f"{host} {_ranks([one.rank for one in found])}" for host, found in hosts.items())
    rows = [_row(one) for one in facts]
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    count = place().processes
    return [f"{count} process{'es' if count > 1 else ''}: {here}", *lines]


def _row(one: Facts) -> dict[str, str]:
    free, total = one.memory
    return {
        "host": one.host,
        "rank": str(one.rank),
        "device": one.device,
        "memory free": f"{free / GIB:.1f} of {total / GIB:.1f} GiB" if total > 0 else "-",
        "main reached": f"{one.reached:.1f} ms" if one.reached >= 0 else "-",
        "/dev/shm": f"{one.shm / GIB:.1f} GiB" if one.shm >= 0 else "-",
        "disk free": f"{one.disk / GIB:.0f} GiB" if one.disk >= 0 else "-",
        **{name: one.versions.get(name, "-") for name in ("Python", "torch", "accelerate", "deepspeed", "NCCL")},
        "code": _hash_all(one.code),
        "data": _hash_all(one.data),
    }


# The other ports


class Measured(NamedTuple):
    """Seconds of an all-reduce; where there was none, why, and whether the processes had met at all."""

    seconds: float
    met: bool
    error: str


def measure(kind: str, limit: float) -> Measured:
    """All-reduce a message among all processes, in a thread of its own: what hangs is left behind."""
    done: list[float] = []
    errors: list[str] = []
    met = threading.Event()

    def work() -> None:
        try:
            done.append(_all_reduce(kind, limit, met))
        except (RuntimeError, UserError) as error:
            errors.append((str(error).splitlines() or ["no reason"])[0])

    # NCCL's guard would abort the process at the time-out; here there is a guard.
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    return Measured(done[0] if done else 0.0, met.is_set(), "" if done else errors[0] if errors else "no answer")


def _all_reduce(kind: str, limit: float, met: threading.Event) -> float:
    """Seconds that all processes take for one message. Sets `met` as soon as anything came through."""
    here = place()
    store = distributed.PrefixStore(key("doctor"), attend(limit))
    device = torch.device(kind, here.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        BACKENDS[kind], store=store, rank=here.rank, world_size=here.processes, timeout=timedelta(seconds=limit)
    )
    _slowest(0.0, device)
    met.set()
    message = torch.zeros(MESSAGE // 4, device=device)
    times: list[float] = []
    while len(times) < 5:
        begun = time.perf_counter()
        distributed.all_reduce(message)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        times.append(_slowest(time.perf_counter() - begun, device))
        if times[0] > 1:  # the same on all processes: a slow network is measured once
            break
    return min(times)


def _slowest(seconds: float, device: torch.device) -> float:
    """The most that any process has."""
    shared = torch.tensor(seconds, device=device)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX)
    return shared.item()


def judge_measurement(
    facts: Sequence[Facts], found: Mapping[int, Measured], limit: float
) -> tuple[list[str], list[Finding]]:
    """What the measurement says: lines for people, and what is wrong."""
    results = [(one, found.get(one.rank, Measured(0.0, False, "no answer"))) for one in facts]
    failed = [(one, result) for one, result in results if result.error]
    size, backend = f"{MESSAGE // MIB} MiB", facts[0].backend
    if not failed:
        seconds = max(result.seconds for _, result in results)
        rate = MESSAGE / seconds / 1e6
        speed = f"{seconds * 1000:.1f} ms, {rate:.0f} MB/s"
        return [f"all-reduce of {size} among {len(facts)} processes over {backend}: {speed}"], []
    if all(result.met for _, result in failed):
        text = (
            f"the processes reach each other, but an all-reduce of {size} did not end within {limit:g} s: the network "
            "is slow or drops large packets; compare the MTU (ip link) on all machines"
        )
    else:
        said: dict[str, list[Facts]] = {}
        for one, result in failed:
            said.setdefault(result.error, []).append(one)
        reasons = "; ".join(f"{places(having)}: {reason}" for reason, having in said.items())
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        address, port = main_address()
        text = (
            f"the processes meet at {address} port {port} but do not reach each other at other ports within "
            f"{limit:g} s ({reasons}); open all ports between the machines in their firewalls, or name the network "
            f"interface that leads to the others in {variable}"
        )
    return [], [Finding(True, text)]
