"""The faults that a round may draw."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

from benchmarks.chaos.cluster import ADDRESSES, HOSTS, Attempt, Cluster, Start, set_cable
from benchmarks.chaos.namespaces import inside
from tests import wandb_server
from tests.machines import ip
from tests.web import running

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
BACK_SECONDS = 60.0  # in which a machine must be back, or the training is finished
SHORT_SECONDS = 3.0  # of a fault that passes: less than --dist-timeout
OTHER_ADDRESS = "10.77.0.77"  # of the main machine
IGNORED = {("loader process", "SIGTERM"), ("loader process", "SIGUSR1")}  # a job's signals are for training processes
WANDB_KEY = "0" * 40


class NotHere(Exception):
    """The kernel or an absent program does not allow the fault on this machine."""


class Fault(NamedTuple):
    """Something that goes wrong.

    ends: whether the training must end by itself; else it must go on. during: is entered while the training pauses at
    the drawn moment, and left after `seconds`, None for the end of the attempt. before: is entered before the attempt
    starts and left after its end; gives how it is started. disk: whether W&B's own file, on the same disk, may lack
    what was logged meanwhile.
    """

    name: str
    ends: bool
    during: Callable[[Attempt], AbstractContextManager[object]] = lambda _: nullcontext()
    seconds: float | None = None
    before: Callable[[Cluster, str, Random], AbstractContextManager[Start]] = lambda *_: nullcontext(Start())
    disk: bool = False


# Processes


@contextmanager
def signalled(find: Callable[[Attempt], list], number: signal.Signals, attempt: Attempt) -> Iterator[None]:
    """Send a signal to the processes that `find` returns; those that it stops are continued at the end."""
    processes = find(attempt)
    for process in processes:
        process.send_signal(number)
    try:
        yield
    finally:
        for process in processes if number == signal.SIGSTOP else ():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def one_training(attempt: Attempt) -> list:
    return [attempt.training()[attempt.rank]]


def one_loader(attempt: Attempt) -> list:
    return attempt.loaders(attempt.rank)[:1]


def one_launcher(attempt: Attempt) -> list:
    return [attempt.launcher(attempt.machine_of(attempt.rank))]


def one_machine(attempt: Attempt) -> list:
    return attempt.processes(attempt.machine_of(attempt.rank))


# The network


@contextmanager
def cut_cable(_: Attempt) -> Iterator[None]:
    set_cable(up=False)
    try:
        yield
    finally:
        set_cable(up=True)


@contextmanager
def shaped_cable(words: tuple[str, ...], _: Attempt) -> Iterator[None]:
    """Let traffic control limit both ends of the cable."""
    for host in HOSTS:
        shaped = subprocess.run(
            ["ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", "cable", "root", *words],
            capture_output=True,
            text=True,
        )
        if shaped.returncode:
            raise NotHere(f"tc {words[0]}: {shaped.stderr.strip().splitlines()[0]}")
    try:
        yield
    finally:
        for host in HOSTS:
            ip("netns", "exec", host, "tc", "qdisc", "del", "dev", "cable", "root")


@contextmanager
def another_address(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The main machine has come back with another address."""
    ip("-n", HOSTS[0], "addr", "add", f"{OTHER_ADDRESS}/24", "dev", "cable")
    try:
        yield Start(address=OTHER_ADDRESS)
    finally:
        ip("-n", HOSTS[0], "addr", "del", f"{OTHER_ADDRESS}/24", "dev", "cable")


@contextmanager
def other_main_machine(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The scheduler has made the second machine the main one."""
    yield Start(machines=(1, 0), address=ADDRESSES[1])


@contextmanager
def one_machine_only(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """One of the machines has not come back: the job goes on with --num_machines 1."""
    yield Start(machines=(random.randrange(2),))


@contextmanager
def elastic(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """torch's launcher goes on with the machines that are there."""
    if not cluster.same_bytes:
        raise NotHere("Accelerate starts DeepSpeed")
    yield Start(elastic=True, variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@contextmanager
def gone(attempt: Attempt) -> Iterator[None]:
    """The second machine is killed, and comes back at the end."""
    for process in attempt.processes(1):
        process.kill()
    try:
        yield
    finally:
        attempt.launchers[1].wait()
        attempt.launch(1)
        attempt.until(lambda: len(attempt.training()) == len(HOSTS) * attempt.cluster.per_machine, BACK_SECONDS)


# The disk


@contextmanager
def full_disk(attempt: Attempt) -> Iterator[None]:
    filler = attempt.cluster.disk / "filler"
    with filler.open("wb", 0) as file:
        for size in (2**20, 2**12):
            with suppress(OSError):
                while file.write(b"0" * size) == size:
                    pass
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only_disk(attempt: Attempt) -> Iterator[None]:
    """Forbid changes in the run folder and its folders; a mount with open files cannot be made read-only."""
    run = attempt.cluster.disk / attempt.run
    folders = [str(path) for path in (run, *run.rglob("*")) if path.is_dir() and not path.is_symlink()]
    made = subprocess.run(["chattr", "+i", *folders], capture_output=True, text=True)
    try:
        if made.returncode:
            raise NotHere(f"chattr +i: {made.stderr.strip()}")
        yield
    finally:
        subprocess.run(["chattr", "-i", *folders], capture_output=True)


@contextmanager
def damaged_state(
    damage: Callable[[bytes, Random], bytes], cluster: Cluster, run: str, random: Random
) -> Iterator[Start]:
    """Damage the newest state before the training starts, if there are two; its name stays."""
    for file in cluster.states(run).files()[:-1]:
        file.write_bytes(damage(file.read_bytes(), random))
    yield Start()


def cut_short(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def byte_flipped(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


# Weights & Biases


class Lying(BaseHTTPRequestHandler):
    """Answers every request with success and a page that is not what was asked for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        page = b"<html>Welcome to the hotel's network</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_GET = do_PUT = do_POST


def online(address: str) -> Start:
    """Return a start that logs to a W&B server at an address."""
    return Start(variables={"WANDB_MODE": "online", "WANDB_BASE_URL": address, "WANDB_API_KEY": WANDB_KEY})


@contextmanager
def wandb_dead(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    yield online("http://127.0.0.1:9")


@contextmanager
def wandb_slow(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """Each answer takes a second."""
    with inside(HOSTS[0], wandb_server.serve()) as server:
        server.delay = 1.0
        yield online(server.address)


@contextmanager
def wandb_silent(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The server accepts connections and never answers."""
    with inside(HOSTS[0], wandb_server.serve()) as server:
        server.silent.set()
        yield online(server.address)


@contextmanager
def wandb_lying(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    with inside(HOSTS[0], running(Lying)) as address:
        yield online(address)


# Clock and memory


@contextmanager
def wrong_clock(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The clock of one machine is an hour ahead or behind."""
    program = shutil.which("faketime")
    if not program:
        raise NotHere("no program faketime (package faketime)")
    shift = random.choice(("+1h", "-1h"))
    # The monotonic clock is off too: without that, time.sleep fails.
    yield Start(wrap={random.randrange(2): (program, "-m", "-f", shift)})


BALLOON = """
import pathlib, sys
pathlib.Path("/proc/self/oom_score_adj").write_text("-1000")
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
content = []
while len(content) < 64:
    content.append(b"0" * 2**24)
"""


@contextmanager
def memory_group(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """Start the second machine in a separate control group."""
    group = MEMORY_GROUPS / HOSTS[1]
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise NotHere(f"a memory control group ({error.strerror})") from None
    try:
        yield Start(wrap={1: ("sh", "-c", f'echo 0 > {group}/cgroup.procs && exec "$@"', "sh")})
    finally:
        for _ in range(50):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def short_memory(attempt: Attempt) -> Iterator[None]:
    """Another program takes the memory of the second machine: the kernel kills until there is enough."""
    group = MEMORY_GROUPS / HOSTS[1]
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + 2**26))
    balloon = subprocess.Popen([sys.executable, "-c", BALLOON, str(group)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        balloon.kill()
        balloon.wait()


def catalogue() -> list[Fault]:
    """Return all faults."""
    signals = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1
    kinds = {"training process": one_training, "loader process": one_loader, "launcher": one_launcher}
    sent = [
        Fault(f"{number.name} to a {kind}", (kind, number.name) not in IGNORED, partial(signalled, find, number), 0.0)
        for kind, find in kinds.items()
        for number in signals
    ]
    stopped_training, stopped_loader = (partial(signalled, find, signal.SIGSTOP) for find in (one_training, one_loader))
    slow = ("tbf", "rate", "4mbit", "burst", "16kb", "latency", "200ms")
    # Without netem: a queue of a few packets, which drops the others.
    lossy = ("tbf", "rate", "40mbit", "burst", "4kb", "limit", "6kb")
    return [
        *sent,
        Fault("SIGKILL to a whole machine", True, partial(signalled, one_machine, signal.SIGKILL)),
        Fault("SIGTERM to a whole machine", True, partial(signalled, one_machine, signal.SIGTERM)),
        Fault("a training process is stopped for 3 s", False, stopped_training, SHORT_SECONDS),
        Fault("a training process is stopped", True, stopped_training),
        Fault("a loader process is stopped for 3 s", False, stopped_loader, SHORT_SECONDS),
        Fault("a loader process is stopped", True, stopped_loader),
        Fault("the cable is cut for 3 s", False, cut_cable, SHORT_SECONDS),
        Fault("the cable is cut", True, cut_cable),
        Fault("the cable is slow for 10 s", False, partial(shaped_cable, slow), 10.0),
        Fault("the cable loses packets for 10 s", False, partial(shaped_cable, lossy), 10.0),
        Fault("the main machine has another address", False, before=another_address),
        Fault("another machine is the main one", False, before=other_main_machine),
        Fault("a machine does not come back", False, before=one_machine_only),
        Fault("a machine leaves and comes back", False, gone, before=elastic),
        Fault("the disk is full for 3 s", False, full_disk, SHORT_SECONDS, disk=True),
        Fault("the disk is full", False, full_disk, disk=True),
        Fault("the disk is read-only for 3 s", False, read_only_disk, SHORT_SECONDS, disk=True),
        Fault("the disk is read-only", False, read_only_disk, disk=True),
        Fault("the newest state is cut short", False, before=partial(damaged_state, cut_short)),
        Fault("a byte of the newest state is flipped", False, before=partial(damaged_state, byte_flipped)),
        Fault("the clock of a machine is off by an hour", False, before=wrong_clock),
        Fault("W&B's server is dead", False, before=wandb_dead),
        Fault("W&B's server is slow", False, before=wandb_slow),
        Fault("W&B's server is silent", False, before=wandb_silent),
        Fault("W&B's server lies", False, before=wandb_lying),
        Fault("memory is short", True, short_memory, before=memory_group),
    ]
