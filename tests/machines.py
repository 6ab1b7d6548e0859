"""How runs are launched, and two machines that this one plays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from utils.files import ROOT

ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
CONFIGS = ROOT / "accelerate_configs"


@contextmanager
def machines(names: Sequence[str]) -> Iterator[None]:
    """Two network namespaces of these names, joined by a `cable` from 10.77.0.1 to 10.77.0.2; gone afterwards."""
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*words: str) -> None:
    """Raises `CalledProcessError`, whose `stderr` says why."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def by_hand(rank: int, port: str, address: str = "127.0.0.1") -> dict[str, str]:
    """What a launcher would set for one of two machines with a process each."""
    here = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    return {**here, "MASTER_ADDR": address, "MASTER_PORT": port}


def on_machine(host: str, rank: int) -> tuple[str, ...]:
    """The launcher of a process on each of two machines, of which this is `host`, in front of a script."""
    meeting = ("--main_process_ip", "10.77.0.1", "--machine_rank", str(rank))
    return ("ip", "netns", "exec", host, *ACCELERATE, "--config_file", str(CONFIGS / "2node.yaml"), *meeting)
