"""What trackers and pictures cost a training: CPU-seconds of each process, and the rate.

    python -m benchmarks.trackers [--rounds 3] [--epochs 8] [--processes 2] [--jobs nothing everything]

Trains the built-in job in turn with each of `JOBS`: without trackers and pictures, with everything (W&B offline with
uploads, alerts and boxes after every epoch, TensorBoard, MLflow, pictures), or with a part of that. What is counted
lies between the console's lines of the first and of the last epoch, so that starts and ends do not count. On busy cores
the CPU-seconds are steady while rates are not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from utils.files import ROOT

SAMPLE_SECONDS = 0.5  # between two readings of the processes' times
IMAGES = 640  # of the built-in job, in an epoch
UPLOADS = ("--upload-model", "--upload-dataset", "--save-period", "1", "--bbox-interval", "1")
JOBS = {
    "nothing": ("--log-with", "none", "--noplots"),
    "pictures": ("--log-with", "none"),
    "wandb": ("--log-with", "wandb", "--noplots", *UPLOADS),
    "tensorboard": ("--log-with", "tensorboard", "--noplots"),
    "mlflow": ("--log-with", "mlflow", "--noplots"),
    "everything": ("--log-with", "wandb,tensorboard,mlflow", *UPLOADS),
}
# Parts of a run, by words of their command lines.
PARTS = {
    "wandb-core": "W&B: its service",
    "utils.plots": "charts",
}


class Usage(NamedTuple):
    """What a run has used between its first and its last epoch, per epoch in between."""

    seconds: float
    cpu_seconds: dict[str, float]  # by part


def main() -> None:
    """Train in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["nothing", "everything"])
    options = parser.parse_args()
    runs: dict[str, list[Usage]] = {job: [] for job in options.jobs}
    for number in range(options.rounds):
        for job in options.jobs[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                runs[job].append(train(folder, JOBS[job], options.epochs, options.processes))
            print(job, runs[job][-1], file=sys.stderr, flush=True)
    print_table(runs)


def print_table(runs: dict[str, list[Usage]]) -> None:
    """Print a column for each job: medians of CPU-seconds by part, and the images/s of whole epochs."""
    parts = sorted({part for usages in runs.values() for usage in usages for part in usage.cpu_seconds})

    def row(value: Callable[[Usage], float]) -> list[float]:
        return [float(np.median([value(usage) for usage in usages])) for usages in runs.values()]

    rows = {part: row(lambda usage, part=part: usage.cpu_seconds.get(part, 0)) for part in parts}  # type: ignore[misc]
    rows["all, CPU-seconds"] = row(lambda usage: sum(usage.cpu_seconds.values()))
    rows["wall, s"] = row(lambda usage: usage.seconds)
    rows["images/s"] = row(lambda usage: IMAGES / usage.seconds)
    print("| per epoch |", " | ".join(runs), "|")
    print("|---|" + "---|" * len(runs))
    for name, values in rows.items():
        print(f"| {name} |", " | ".join(f"{value:.2f}" for value in values), "|")


def train(folder: str, flags: Sequence[str], epochs: int, processes: int) -> Usage:
    """Train the built-in job and return what it has used."""
    command = [sys.executable, "train.py", "--epochs", str(epochs), "--processes", str(processes), "--project", folder]
    quiet = {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--workers", "1", *flags],
        cwd=ROOT,
        env={**os.environ, **quiet},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    meter = Meter(process.pid)
    readings: list[tuple[float, Counter[str]]] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch ") and "img/s" in line:
            readings.append((time.monotonic(), meter.read()))
    meter.stop.set()
    if process.wait() or len(readings) != epochs:
        raise SystemExit(f"error: {' '.join(command)} has ended with exit code {process.returncode}")
    (began, before), (ended, after) = readings[0], readings[-1]
    between = epochs - 1
    return Usage((ended - began) / between, {part: (after[part] - before[part]) / between for part in after})


class Meter:
    """Reads the CPU-seconds of a process and its descendants; those that have ended count as last read."""

    def __init__(self, pid: int) -> None:
        self.root, self.stop, self._lock = psutil.Process(pid), threading.Event(), threading.Lock()
        self._parts: dict[tuple[int, float], str] = {}
        self._seconds: dict[tuple[int, float], float] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.stop.wait(SAMPLE_SECONDS):
            self.read()

    def read(self) -> Counter[str]:
        """Return the seconds so far by part."""
        with self._lock:
            with suppress(psutil.Error):
                for process in (self.root, *self.root.children(recursive=True)):
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        key = process.pid, process.create_time()
                        if process.status() != psutil.STATUS_ZOMBIE:  # which has no command line
                            self._parts[key] = part_of(process, self.root)
                        self._seconds[key] = times.user + times.system
            total: Counter[str] = Counter()
            for key, seconds in self._seconds.items():
                total[self._parts.get(key, "others")] += seconds  # type: ignore[assignment]
            return total


def part_of(process: psutil.Process, root: psutil.Process) -> str:
    """Return the part of a run that a process is."""
    words, parent = " ".join(process.cmdline()), process.parent()
    known = next((part for word, part in PARTS.items() if word in words), "")
    if known or process == root or parent is None:
        return known or "launcher"
    if parent == root:
        ranks = sorted(child.pid for child in root.children() if "spawn_main" in " ".join(child.cmdline()))
        return f"training, process {ranks.index(process.pid)}" if process.pid in ranks else "launcher"
    return "loaders" if process.cmdline() == parent.cmdline() else f"others: {Path(process.name()).name}"


if __name__ == "__main__":
    main()
