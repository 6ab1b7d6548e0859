"""The faults that a round may draw."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil

from benchmarks.chaos.cluster import ADDRESSES, HOSTS, Attempt, Cluster, Start
from tests import wandb_server
from tests.machines import ip
from tests.web import running, sending

MEMORY_GROUP = Path("/sys/fs/cgroup/memory") / HOSTS[1]
BACK_SECONDS = 60.0  # in which a machine must be back, or the training is finished
SHORT_SECONDS = 3.0  # of a fault that passes: less than --dist-timeout
OTHER_ADDRESS = "10.77.0.77"  # of the main machine
LOSSY = "rate 40mbit burst 4kb limit 6kb"  # a queue of a few packets, which drops the others


class NotHere(Exception):
    """The kernel or an absent program does not allow the fault on this machine."""


class Fault(NamedTuple):
    """Something that goes wrong.

    ends: whether the training must end by itself; else it must go on. during: is entered while the training pauses at
    the drawn moment, and left after `seconds`, None for the end of the attempt. before: is entered before the attempt
    starts and left after its end; gives how it is started. disk: whether nothing can be saved meanwhile.
    """

    name: str
    ends: bool
    during: Callable[[Attempt], AbstractContextManager[object]] = lambda _: nullcontext()
    seconds: float | None = None
    before: Callable[[Cluster, str, Random], AbstractContextManager[Start]] = lambda *_: nullcontext(Start())
    disk: bool = False


def command(*words: str) -> None:
    """Run a command. Raises NotHere if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"{' '.join(words[:6])}: {done.stderr.strip()}")


# Processes


@contextmanager
def signalled(kind: str, number: signal.Signals, attempt: Attempt) -> Iterator[None]:
    """Send a signal to the processes of a kind; those that it stops are continued at the end."""
    training = attempt.training()[attempt.rank]
    machine = attempt.start.machines[attempt.rank]
    if kind == "a training process":
        processes = [training]
    elif kind == "a loader process":  # a fork, with the command of its parent
        processes = [child for child in training.children() if child.cmdline() == training.cmdline()][:1]
    elif kind == "a launcher":
        processes = [attempt.launcher(machine)]
    else:
        processes = attempt.processes(machine)
    for process in processes:
        process.send_signal(number)
    try:
        yield
    finally:
        for process in processes if number == signal.SIGSTOP else ():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


@contextmanager
def machine_gone(attempt: Attempt) -> Iterator[None]:
    """The second machine is killed, and comes back at the end."""
    for process in attempt.processes(1):
        process.kill()
    yield
    attempt.launchers[1].wait()
    attempt.launch(1)
    attempt.until(lambda: len(attempt.training()) == sum(attempt.start.elastic), BACK_SECONDS)


@contextmanager
def elastic(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The machines have one or two processes each: together two, three or four of four logical processes."""
    counts = random.randint(1, 2), random.randint(1, 2)
    yield Start(elastic=counts, variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@contextmanager
def one_machine_only(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """One of the machines has not come back: the job goes on with --num_machines 1."""
    yield Start(machines=(random.randrange(2),))


# The network


@contextmanager
def cut_cable(_: Attempt) -> Iterator[None]:
    ip("-n", HOSTS[0], "link", "set", "cable", "down")
    try:
        yield
    finally:
        ip("-n", HOSTS[0], "link", "set", "cable", "up")


@contextmanager
def shaped_cable(limits: str, _: Attempt) -> Iterator[None]:
    """Let traffic control limit both ends of the cable."""
    for host in HOSTS:
        command(*f"ip netns exec {host} tc qdisc replace dev cable root tbf {limits}".split())
    try:
        yield
    finally:
        for host in HOSTS:
            ip(*f"netns exec {host} tc qdisc del dev cable root".split())


@contextmanager
def another_address(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The main machine has come back with another address."""
    ip("-n", HOSTS[0], "addr", "add", f"{OTHER_ADDRESS}/24", "dev", "cable")
    try:
        yield Start(address=OTHER_ADDRESS)
    finally:
        ip("-n", HOSTS[0], "addr", "del", f"{OTHER_ADDRESS}/24", "dev", "cable")


# The disk, and the states on it


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
    try:
        command("chattr", "+i", *folders)
        yield
    finally:
        subprocess.run(["chattr", "-i", *folders], capture_output=True)


@contextmanager
def damaged_state(cut: bool, cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """Cut the newest state short, or flip a byte of it, before the training starts, if there are two."""
    for file in cluster.states(run).files()[:-1]:
        content = bytearray(file.read_bytes())
        place = random.randrange(len(content))
        content[place] ^= 0xFF
        file.write_bytes(content[:place] if cut else content)
    yield Start()


# Weights & Biases


class Lying(BaseHTTPRequestHandler):
    """Answers every request with success and a page that is not what was asked for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        sending(b"<html>Welcome to the hotel's network</html>")(self)

    do_GET = do_PUT = do_POST


@contextmanager
def on_main_machine(server: AbstractContextManager[Any]) -> Iterator[Any]:
    """Run a server in a thread inside the main machine's namespace: the sockets that it opens belong there."""

    def enter() -> None:
        with Path("/run/netns", HOSTS[0]).open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with ThreadPoolExecutor(1, initializer=enter) as thread:
        running_server = thread.submit(server.__enter__).result()
        try:
            yield running_server
        finally:
            thread.submit(server.__exit__, None, None, None).result()


@contextmanager
def wandb_online(kind: str, cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """Log to a W&B server that is dead, takes a second for each answer, never answers, or lies."""

    def start(address: str) -> Start:
        return Start(variables={"WANDB_MODE": "online", "WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40})

    if kind == "is dead":
        yield start("http://127.0.0.1:9")
    elif kind == "lies":
        with on_main_machine(running(Lying)) as address:
            yield start(address)
    else:
        with on_main_machine(wandb_server.serve()) as server:
            if kind == "is silent":
                server.silent.set()
            server.delay = 1.0
            yield start(server.address)


# Clock and memory


@contextmanager
def wrong_clock(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """The clock of one machine is an hour ahead or behind."""
    if not shutil.which("faketime"):
        raise NotHere("no program faketime (package faketime)")
    # The monotonic clock is off too: without that, time.sleep fails.
    yield Start(wrap={random.randrange(2): ("faketime", "-m", "-f", random.choice(("+1h", "-1h")))})


@contextmanager
def memory_group(cluster: Cluster, run: str, random: Random) -> Iterator[Start]:
    """Start the second machine in a separate control group."""
    try:
        MEMORY_GROUP.mkdir(exist_ok=True)
    except OSError as error:
        raise NotHere(f"a memory control group ({error.strerror})") from None
    try:
        yield Start(wrap={1: ("sh", "-c", f'echo 0 > {MEMORY_GROUP}/cgroup.procs && exec "$@"', "sh")})
    finally:
        time.sleep(0.5)  # its processes have just been killed
        with suppress(OSError):
            MEMORY_GROUP.rmdir()


BALLOON = """
import pathlib, sys
pathlib.Path("/proc/self/oom_score_adj").write_text("-1000")
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
content = []
while len(content) < 64:
    content.append(b"0" * 2**24)
"""


@contextmanager
def short_memory(attempt: Attempt) -> Iterator[None]:
    """Another program takes the memory of the second machine: the kernel kills until there is enough."""
    used = int((MEMORY_GROUP / "memory.usage_in_bytes").read_text())
    (MEMORY_GROUP / "memory.limit_in_bytes").write_text(str(used + 2**26))
    balloon = subprocess.Popen([sys.executable, "-c", BALLOON, str(MEMORY_GROUP)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        balloon.kill()
        balloon.wait()


def catalogue() -> list[Fault]:
    """Return all faults. A job's signals are for training processes: loaders ignore them."""
    faults = []
    for kind in ("a training process", "a loader process", "a launcher"):
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1):
            ends = kind != "a loader process" or number == signal.SIGKILL
            faults.append(Fault(f"{number.name} to {kind}", ends, partial(signalled, kind, number), 0.0))
    for kind in ("a training process", "a loader process"):
        stopped = partial(signalled, kind, signal.SIGSTOP)
        faults.append(Fault(f"{kind} is stopped for 3 s", False, stopped, SHORT_SECONDS))
        faults.append(Fault(f"{kind} is stopped", True, stopped))
    for kind in ("is dead", "is slow", "is silent", "lies"):
        faults.append(Fault(f"W&B's server {kind}", False, before=partial(wandb_online, kind)))
    return [
        *faults,
        Fault("SIGKILL to a whole machine", True, partial(signalled, "a machine", signal.SIGKILL)),
        Fault("SIGTERM to a whole machine", True, partial(signalled, "a machine", signal.SIGTERM)),
        Fault("the cable is cut for 3 s", False, cut_cable, SHORT_SECONDS),
        Fault("the cable is cut", True, cut_cable),
        Fault("the cable is slow for 10 s", False, partial(shaped_cable, "rate 4mbit burst 16kb latency 200ms"), 10.0),
        Fault("the cable loses packets for 10 s", False, partial(shaped_cable, LOSSY), 10.0),
        Fault("the main machine has another address", False, before=another_address),
        Fault("another machine is the main one", False, before=lambda *_: nullcontext(Start((1, 0), ADDRESSES[1]))),
        Fault("a machine does not come back", False, before=one_machine_only),
        Fault("a machine leaves and comes back", False, machine_gone, before=elastic),
        Fault("the disk is full for 3 s", False, full_disk, SHORT_SECONDS, disk=True),
        Fault("the disk is full", False, full_disk, disk=True),
        Fault("the disk is read-only for 3 s", False, read_only_disk, SHORT_SECONDS, disk=True),
        Fault("the disk is read-only", False, read_only_disk, disk=True),
        Fault("the newest state is cut short", False, before=partial(damaged_state, True)),
        Fault("a byte of the newest state is flipped", False, before=partial(damaged_state, False)),
        Fault("the clock of a machine is off by an hour", False, before=wrong_clock),
        Fault("memory is short", True, short_memory, before=memory_group),
    ]
