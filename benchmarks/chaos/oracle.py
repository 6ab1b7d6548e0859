"""The checks after each round: they compare files, processes and messages, and do not trust the program's own word."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.cluster import DIST_TIMEOUT_SECONDS, Attempt, Cluster
from tests import wandb_files
from tests.curves import identical
from utils.errors import UserError
from utils.files import ROOT

LEFT_BEHIND_SECONDS = 10.0  # in which the last processes must have ended
WANDB_SECONDS = 75.0  # after which W&B's process must have given up sending

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
    r"error: the processes cannot connect: \S+ port \d+ cannot be reached within .*",
    r"error: .* cannot be written: .*; fix that, and (continue with --resume \S+|start the run again)",
    rf"error: {WHO} did not read the data within {DIST_TIMEOUT_SECONDS} s of the others, .*",
    r"warning: .* cannot be written now: .*",
    r"warning: \S+ is damaged \(its checksum does not match\); trying the one before",
    r"warning: W&B.*",
]
LAST_WORDS = ("error: ", "stopped by ", "results in ")  # the last after a fault in the last epoch


class Oracle:
    """Compares the training with an undisturbed one: its run folder, and what is around it."""

    def __init__(self, cluster: Cluster, reference: Path) -> None:
        self.cluster, self.reference = cluster, reference
        self.surroundings = dict(self._surroundings())

    def check(self, attempt: Attempt, must_end: bool) -> list[str]:
        """Return what is wrong after an attempt. must_end: whether a fault must have ended it."""
        run, outputs = self.cluster.disk / attempt.run, attempt.output()
        problems = [f"left behind: {line}" for line in attempt.left_behind(LEFT_BEHIND_SECONDS) if "wandb" not in line]
        problems += [f"left behind: {line}" for line in attempt.left_behind(WANDB_SECONDS)]
        problems += [f"{machine}: {line}" for machine, text in outputs.items() for line in wrong_messages(text)]
        if must_end and not any(words in text for words in LAST_WORDS for text in outputs.values()):
            problems.append("it ended without a message")
        try:
            self.cluster.states(attempt.run).read(problems.append)
        except UserError as error:
            problems.append(str(error))
        curve = run / "results.csv"
        if curve.is_file() and not (self.reference / "results.csv").read_text().startswith(curve.read_text()):
            problems.append("results.csv is not the beginning of the undisturbed run's")
        for steps_and_epochs in logged(run):
            for numbers in steps_and_epochs:
                if twice := sorted(number for number, count in Counter(numbers).items() if count > 1):
                    problems.append(f"W&B has twice: {twice}")
        before, self.surroundings = self.surroundings, dict(self._surroundings())
        for name, content in self.surroundings.items():
            if changed := sorted(content ^ before[name]):
                problems.append(f"changed in {name}: {changed[:5]}")
        return problems

    def compare_end(self, run: str) -> list[str]:
        """Return how a finished run differs from the reference."""
        try:
            identical(self.cluster.disk / run, self.reference)
        except AssertionError as error:
            return [f"the end differs from that of the undisturbed run: {error}"]
        return []

    def _surroundings(self) -> Iterator[tuple[str, set[str]]]:
        for name in ("data", "home"):
            files = [path for path in (self.cluster.folder / name).rglob("*") if "wandb" not in path.parts]
            yield name, {f"{path}, {path.stat().st_mtime_ns}" for path in files if path.is_file()}
        runs = {path.name for path in self.cluster.disk.iterdir()}
        yield "the folder of runs", {name for name in runs if not name.startswith("training")}
        yield "/dev/shm", {path.name for path in Path("/dev/shm").iterdir() if "faketime" not in path.name}
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


def logged(run: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Iterate over the parts of a W&B run: the steps and the epochs of each, in order."""
    for file in wandb_files.runs(run):
        rows = wandb_files.read(file).rows
        epochs = [row["epoch"] for row in rows if "train/box_loss" in row]
        yield [row["step"] for row in rows if "step" in row], epochs
