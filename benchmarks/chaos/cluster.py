"""Two machines, simulated by network namespaces, with a disk that both see; attempts of one training on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from data.builtin import shapes
from tests.faults.fault_points import planted
from tests.machines import ACCELERATE, CONFIGS, TORCHRUN, left_behind, living, machines
from tests.making import write_yaml
from utils.checkpoint import StateFiles
from utils.files import ROOT

HOSTS = ("lockstepchaos0", "lockstepchaos1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # as tests.machines gives them
PORT = "29500"
MARK, MACHINE = "LOCKSTEP_CHAOS", "LOCKSTEP_MACHINE"  # variables of the processes of an attempt, and of a machine
DISK = "800m"  # room for four states, the weights and the logs
DIST_TIMEOUT_SECONDS = 10
MEETING_SECONDS = 60  # in which both launchers must be there
POLL_SECONDS = 0.05
# Four optimizer steps in an epoch of seven batches.
RECIPE = {"nbs": 8, "lr0": 0.0002, "warmup_bias_lr": 0.0002, "warmup_epochs": 1.0}


@dataclass(frozen=True)
class Start:
    """How the training is started. machines: the numbers of those that take part, the main one first.

    address: of the main machine. wrap: by machine, a command that runs the launch command. variables: of the
    environment. elastic: the number of processes of each machine, started by torch's launcher with the machines
    that are there; if empty, Accelerate's launcher starts one on each.
    """

    machines: tuple[int, ...] = (0, 1)
    address: str = ADDRESSES[0]
    wrap: Mapping[int, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    elastic: tuple[int, ...] = ()


class Cluster:
    """Two machines, their disk in `folder`/disk, and the command of a training with a process on each of them.

    Other folders: data, home, cache and tmp of the training, logs of the attempts.
    """

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder, self.disk, self.attempts = folder, folder / "disk", 0
        for name in ("disk", "home", "cache", "tmp", "logs"):
            (folder / name).mkdir(parents=True)
        images = shapes.draw_dataset(folder / "data" / "images", train=28, val=8)
        content = {"path": str(images), "train": "images/train", "val": "images/val"}
        data = write_yaml(folder / "data" / "data.yaml", {**content, "names": dict(enumerate(shapes.names))})
        recipe = write_yaml(folder / "data" / "hyp.yaml", RECIPE)
        what = ("--data", str(data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(recipe), "--imgsz", "64")
        how = ("--epochs", str(epochs), "--batch-size", "4", "--workers", "1", "--device", "cpu", "--noplots")
        rest = ("--logical-processes", "4", "--save-steps", "1", "--dist-timeout", str(DIST_TIMEOUT_SECONDS))
        self.flags = (*what, *how, *rest, "--exist-ok", "--resume", "auto")

    def environment(self) -> dict[str, str]:
        """Return the environment of each attempt: one thread per process, nothing written outside of `folder`."""
        places = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
        paths = {name: str(self.folder / path) for name, path in places.items()}
        return {**os.environ, **paths, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}

    def command(self, number: int, start: Start, run: str) -> list[str]:
        """Return the launch command of a machine."""
        script = (str(ROOT / "train.py"), *self.flags, "--project", str(self.disk), "--name", run)
        if start.elastic:
            size = (
                "--nnodes",
                "1:2",
                "--nproc_per_node",
                str(start.elastic[number]),
                "--max-restarts",
                "3",
                "--rdzv_backend",
                "c10d",
            )
            rendezvous = ("--rdzv_id", run, "--rdzv_endpoint", f"{start.address}:{PORT}")
            main = number == start.machines[0]
            here = ("--local-addr", ADDRESSES[number], "--rdzv_conf", f"last_call_timeout=3,is_host={main:d}")
            return ["ip", "netns", "exec", HOSTS[number], *TORCHRUN, *size, *rendezvous, *here, *script]
        count, rank = str(len(start.machines)), str(start.machines.index(number))
        size = ("--config_file", str(CONFIGS / "2node.yaml"), "--num_machines", count, "--num_processes", count)
        rendezvous = ("--main_process_ip", start.address, "--main_process_port", PORT, "--machine_rank", rank)
        launch = (*ACCELERATE, *size, *rendezvous, "--rdzv_conf", f"timeout={MEETING_SECONDS}")
        # The wrapper is outside: inside, /sys is another one, without control groups.
        return [*start.wrap.get(number, ()), "ip", "netns", "exec", HOSTS[number], *launch, *script]

    def states(self, run: str) -> StateFiles:
        """Return the states of a run."""
        return StateFiles(self.disk / run / "checkpoint")

    def progress(self, run: str) -> dict[str, Any]:
        """Return the progress of a run by its newest state that is whole."""
        state = self.states(run).read(lambda warning: None)
        return state["progress"] if state else {"step": 0, "finished": False}

    def step(self, run: str) -> int:
        """Return the optimizer step of the newest state, 0 if there is none."""
        return int(self.progress(run)["step"])

    def finished(self, run: str) -> bool:
        """Return whether the run has nothing left to do."""
        return bool(self.progress(run)["finished"])


class Attempt:
    """The training, started on the machines; it ends when all its launchers have ended.

    fault: if given, point, number and rank of the moment at which the training pauses until `go`.
    """

    def __init__(self, cluster: Cluster, run: str, start: Start, fault: tuple[str, int, int] | None = None) -> None:
        self.cluster, self.run, self.start, self.number = cluster, run, start, str(uuid4())
        cluster.attempts += 1
        self.folder = cluster.folder / "logs" / f"{cluster.attempts:03d}"
        self.folder.mkdir()
        self.rank = fault[2] if fault else 0  # of the process that pauses
        plan = planted(f"pause {self.folder}", *fault) if fault else {}
        self.environment = {**cluster.environment(), **plan, **start.variables, MARK: self.number}
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        for number in start.machines:
            self.launch(number)

    def launch(self, number: int) -> None:
        """Start the launcher of a machine."""
        with (self.folder / f"machine{number}.log").open("wb") as log:
            self.launchers[number] = subprocess.Popen(
                self.cluster.command(number, self.start, self.run),
                env={**self.environment, MACHINE: str(number)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> dict[str, str]:
        """Return what each machine has printed."""
        return {log.stem: log.read_text(errors="replace") for log in sorted(self.folder.glob("*.log"))}

    def until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait until a condition is true or the attempt has ended; return whether it is true."""
        end = time.monotonic() + seconds
        while not condition():
            if self.ended() or time.monotonic() > end:
                return bool(condition())
            time.sleep(POLL_SECONDS)
        return True

    def paused(self) -> bool:
        """Return whether the moment of the fault has come."""
        return (self.folder / "reached").exists()

    def go(self) -> None:
        """Let the paused process go on."""
        (self.folder / "go").touch()

    def ended(self) -> bool:
        """Return whether all launchers have ended."""
        return all(launcher.poll() is not None for launcher in self.launchers.values())

    def ask_to_end(self) -> None:
        """Send SIGTERM to all launchers, as a scheduler does."""
        for machine, launcher in self.launchers.items():
            if launcher.poll() is None:
                self.launcher(machine).send_signal(signal.SIGTERM)

    def processes(self, machine: int | None = None) -> list[psutil.Process]:
        """Return the living processes of the attempt, those of other programs that it has started too."""
        return list(living(f"{MARK}={self.number}", *([] if machine is None else [f"{MACHINE}={machine}"])))

    def training(self) -> dict[int, psutil.Process]:
        """Return the training processes by rank: those with a rank whose parent has none."""
        ranks: dict[int, psutil.Process] = {}
        for process in self.processes():
            with suppress(psutil.Error):
                rank, parent = process.environ().get("RANK"), process.parent()
                if rank is not None and parent and "RANK" not in parent.environ():
                    ranks[int(rank)] = process
        return ranks

    def launcher(self, machine: int) -> psutil.Process:
        """Return the launcher of a machine: the first of its processes that runs a launcher's command."""
        command = (TORCHRUN if self.start.elastic else ACCELERATE)[-1]
        return next(p for p in self.processes(machine) if command in p.cmdline() and p.name() != "ip")

    def left_behind(self, seconds: float) -> list[str]:
        """Return the commands of processes that outlive `seconds`."""
        lines = []
        for process in left_behind(f"{MARK}={self.number}", seconds):
            with suppress(psutil.Error):
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return lines

    def kill(self) -> None:
        """Kill all processes that are left, and let stopped ones die."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for launcher in self.launchers.values():
            launcher.kill()
            launcher.wait()


@contextmanager
def two_machines(cluster: Cluster) -> Iterator[None]:
    """Make the namespaces and mount the disk, and remove both afterwards."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(cluster.disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        sys.exit(f"error: a disk of {DISK} cannot be mounted ({mounted.stderr.strip()}); root is needed")
    try:
        with machines(HOSTS):
            yield
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: network namespaces: {error} {error.stderr}")
    finally:
        subprocess.run(["umount", "-l", str(cluster.disk)], check=True)
