"""The checks after each round: they compare files, processes and messages, and do not trust the program's own word."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.chaos.cluster import DIST_TIMEOUT_SECONDS, Attempt, Cluster
from tests import wandb_files
from tests.curves import identical, same_curve
from utils.errors import UserError
from utils.files import ROOT

SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND_SECONDS = 10.0  # in which the last processes must have ended
WANDB_SECONDS = 75.0  # after which W&B's process must have given up sending
ROUNDING = 1e-3  # relative, of losses and weights, between different numbers of processes
SCORE_ROUNDING = 0.01  # absolute

# All errors and warnings that a user may see; docs/reliability.md explains them.
WHO = r"process \d+( on \S+)?( and process \d+( on \S+)?)*"
MESSAGES = [
    rf"error: {WHO} ended without an error message, or cannot be reached",
    rf"error: {WHO} was killed by SIG\w+.*",
    rf"error: the launcher of {WHO} has ended, so the run ends too; continue with --resume",
    rf"error: {WHO} made no progress, or cannot be reached, for {DIST_TIMEOUT_SECONDS} s \(--dist-timeout\); "
    r"the stack of each process is in \S+",
    rf"error: no process made progress for {DIST_TIMEOUT_SECONDS} s .*",
    r"error: a loader process was killed, possibly by the system because memory or /dev/shm ran out; .*",
    r"error: the connection to the other processes broke \(.*\); see their output",
    r"error: the processes cannot connect at \S+ within .*",
    r"error: the main process at \S+ port \d+ cannot be reached within .*",
    r"error: .* cannot be written: .*; fix that, and (continue with --resume \S+|start the run again)",
    rf"error: {WHO} did not read the data within {DIST_TIMEOUT_SECONDS} s of the others, .*",
    r"warning: .* cannot be written now: .*",
    r"warning: \S+ is damaged \(its checksum does not match\); trying the one before",
    r"warning: W&B.*",
]


class Oracle:
    """Compares the training with an undisturbed one: its run folder, and what is around it."""

    def __init__(self, cluster: Cluster, reference: Path) -> None:
        self.cluster, self.reference = cluster, reference
        self.surroundings = dict(self._surroundings())

    def check(self, attempt: Attempt, exact: bool, ends: bool) -> list[str]:
        """Return what is wrong after an attempt. exact: whether all processes so far were as many as the reference's.

        ends: whether a fault must have ended it.
        """
        run = self.cluster.disk / attempt.run
        problems = [f"left behind: {line}" for line in attempt.left_behind(LEFT_BEHIND_SECONDS) if "wandb" not in line]
        problems += [f"left behind: {line}" for line in attempt.left_behind(WANDB_SECONDS)]
        outputs = attempt.output()
        problems += [f"machine {number}: {line}" for number in outputs for line in wrong_messages(outputs[number])]
        messages = ("error: ", "stopped by ", "results in ")  # the last after a fault in the last epoch
        if ends and not any(message in text for message in messages for text in outputs.values()):
            problems.append("it ended without a message")
        problems += self._state(attempt)
        actual, expected = (read_text(folder / "results.csv") for folder in (run, self.reference))
        problems += wrong_rows(actual, expected, exact)
        for steps, epochs in logged(run):
            problems += [f"W&B has twice: {twice}" for twice in (repeated(steps), repeated(epochs)) if twice]
        problems += self._temporary_files(ends or attempt.start.elastic)
        now = dict(self._surroundings())
        for name, before in self.surroundings.items():
            if changed := sorted(now[name] ^ before):
                problems.append(f"changed in {name}: {changed[:5]}")
        self.surroundings = now
        return problems

    def compare_end(self, run: str, exact: bool, log_gaps: bool) -> list[str]:
        """Return how a finished run differs from the reference. log_gaps: whether W&B may lack epochs."""
        folder = self.cluster.disk / run
        try:
            if exact:
                identical(folder, self.reference)
            else:
                same_curve(folder, self.reference, ROUNDING, SCORE_ROUNDING, ROUNDING)
        except AssertionError as error:
            return [f"the end differs from that of the undisturbed run: {error}"]
        have, need = ({epoch for _, epochs in logged(run) for epoch in epochs} for run in (folder, self.reference))
        return [] if log_gaps or have == need else [f"W&B has epochs {sorted(have)} instead of {sorted(need)}"]

    def _state(self, attempt: Attempt) -> list[str]:
        problems: list[str] = []
        try:
            self.cluster.states(attempt.run).read(problems.append)
        except UserError as error:
            problems.append(str(error))
        return problems

    def _temporary_files(self, killed: bool) -> Iterator[str]:
        """Report what stays in TMPDIR, unless processes were killed. Torch's and W&B's folders are theirs."""
        for path in (self.cluster.folder / "tmp").iterdir():
            if not re.search("torchelastic_|torchinductor_|wandb", path.name) and not killed:
                files = sorted(file.name for file in path.rglob("*")) if path.is_dir() else ""
                yield f"left in TMPDIR: {path.name} {files}"
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _surroundings(self) -> Iterator[tuple[str, set[str]]]:
        folder = self.cluster.folder
        for name in ("data", "home"):
            files = [path for path in (folder / name).rglob("*") if path.is_file() and "wandb" not in path.parts]
            yield name, {f"{path}, {path.stat().st_size} bytes, {path.stat().st_mtime_ns}" for path in files}
        runs = {path.name for path in self.cluster.disk.iterdir()}
        yield "the folder of runs", {name for name in runs if not name.startswith("training")}
        yield "/dev/shm", {path.name for path in SHARED_MEMORY.iterdir() if "faketime" not in path.name}
        status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
        yield "the repository", set(status.stdout.splitlines())


def wrong_messages(text: str) -> list[str]:
    """Return what is wrong with the output of a machine: unknown messages, more than one error, a traceback of ours."""
    lines = [line for line in text.splitlines() if line.startswith(("error: ", "warning: "))]
    wrong = [f"unknown message: {line}" for line in lines if not any(re.fullmatch(known, line) for known in MESSAGES)]
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) > 1:
        wrong.append(f"several errors: {errors}")
    files = re.findall(r'File "([^"]+)"', text)
    if any(file.startswith(f"{ROOT}/") and "/site-packages/" not in file for file in files):
        wrong.append("a traceback of ours")
    return wrong


def wrong_rows(actual: str, expected: str, exact: bool) -> list[str]:
    """Return how results.csv differs from the beginning of the undisturbed run's, to the byte or up to rounding."""
    if exact:
        return [] if expected.startswith(actual) else ["results.csv is not the beginning of the undisturbed run's"]
    wrong = []
    for row, other in zip(csv.DictReader(io.StringIO(actual)), csv.DictReader(io.StringIO(expected)), strict=False):
        if list(row) != list(other):
            return ["results.csv has other columns"]
        for name, value in other.items():
            tolerance = pytest.approx(float(value), rel=ROUNDING, abs=0 if "loss" in name else SCORE_ROUNDING)
            if not name.startswith(("metrics/precision", "metrics/recall")) and float(row[name]) != tolerance:
                wrong.append(f"results.csv, epoch {row['epoch']}: {name} is {row[name]}, not {value}")
    return wrong


def repeated(numbers: Sequence[int]) -> list[int]:
    """Return the numbers that a log has twice."""
    return sorted(number for number, count in Counter(numbers).items() if count > 1)


def read_text(file: Path) -> str:
    """Return the content of a file, '' if there is none."""
    return file.read_text() if file.is_file() else ""


def logged(run: Path) -> list[tuple[list[int], list[int]]]:
    """Return the steps and the epochs in each part of a W&B run, in order."""
    parts = [wandb_files.read(file).rows for file in wandb_files.runs(run)]
    return [
        (
            [row["step"] for row in rows if "step" in row],
            [row["epoch"] for row in rows if "train/box_loss" in row or "train/loss" in row],
        )
        for rows in parts
    ]
