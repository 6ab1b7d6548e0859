"""Pods on this machine: a container's processes in namespaces of their own (network, processes, mounts, host name)."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# Gives a pod its host name, names and /dev/shm, and becomes its first process.
ENTER = """
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
shift 2
exec "$@"
"""
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")


class Pod:
    """A running pod in the network namespace `network`; its output is appended to `log`.

    names: the addresses of the names that it can resolve. folder: its working folder.
    """

    def __init__(
        self,
        network: str,
        host: str,
        names: Mapping[str, str],
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
    ) -> None:
        hosts = log.with_suffix(".hosts")
        hosts.write_text(
            "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items())
        )
        self.log = log
        outside = ("env", "--default-signal=HUP,INT", "ip", "netns", "exec", network, *NAMESPACES)
        with log.open("ab") as output:
            self._started = subprocess.Popen(
                [*outside, "bash", "-c", ENTER, "-", host, str(hosts), *command],
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._started.poll()

    def wait(self, seconds: float) -> int:
        """Return the exit code. Raises `TimeoutExpired` after `seconds`."""
        return self._started.wait(seconds)

    def evict(self, grace: float) -> None:
        """Send SIGTERM to the first process, and SIGKILL to all after `grace` seconds, as a kubelet does."""
        for first in psutil.Process(self._started.pid).children():
            first.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.wait(grace)
        self.kill()

    def kill(self) -> None:
        """Kill all processes: those of a namespace end with its first one, and that one with unshare."""
        self._started.kill()
        self._started.wait()
