"""Launch runs, find their processes, and simulate machines by network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from utils.files import ROOT

ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
CONFIGS = ROOT / "accelerate_configs"


@contextmanager
def machines(names: Sequence[str]) -> Iterator[None]:
    """Make network namespaces, 10.77.0.1, 10.77.0.2 ..., and remove them afterwards.

    The device `cable` of each leads to the others; that of the first is a bridge.
    """
    try:
        for number, name in enumerate(names):
            ip("netns", "add", name)
            if number == 0:
                ip("-n", name, "link", "add", "cable", "type", "bridge")
            else:
                port = f"port{number}"
                ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", port, "netns", names[0])
                ip("-n", names[0], "link", "set", port, "master", "cable", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*words: str) -> None:
    """Run the command `ip`. Raises `CalledProcessError` with its `stderr`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def by_hand(rank: int, port: str, address: str = "127.0.0.1", count: int = 2) -> dict[str, str]:
    """Return a launcher's environment variables for one of `count` machines with one process each."""
    here = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1"}
    return {**here, "MASTER_ADDR": address, "MASTER_PORT": port}


def on_machine(host: str, rank: int) -> tuple[str, ...]:
    """Return the launch command for `host`, one of two machines with one process each, up to the script."""
    rendezvous = ("--main_process_ip", "10.77.0.1", "--machine_rank", str(rank))
    return ("ip", "netns", "exec", host, *ACCELERATE, "--config_file", str(CONFIGS / "2node.yaml"), *rendezvous)


def living(mark: str, *more: str, session: int = 0) -> Iterator[psutil.Process]:
    """Yield the living processes that have variables, each `NAME=value`, in their environment, or are of a session."""
    wanted = dict(variable.split("=", 1) for variable in (mark, *more))
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_wanted = 0 < session == os.getsid(process.pid) or wanted.items() <= process.environ().items()
            if is_wanted and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def left_behind(mark: str, patience: float = 10.0, session: int = 0) -> list[psutil.Process]:
    """Return the processes of `living` that outlive `patience` seconds; loaders need up to 5."""
    end = time.monotonic() + patience
    while (alive := list(living(mark, session=session))) and time.monotonic() < end:
        time.sleep(0.1)
    return alive
