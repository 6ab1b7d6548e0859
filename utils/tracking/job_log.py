"""What val.py, detect.py and export.py log: a run of their own, joined to the training run of the weights.

utils/run.py calls the functions for val.py; detect.py and export.py use `job_log`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utils.distributed.failure import on_failure
from utils.tracking.requested import TrackerOptions, make_trackers
from utils.tracking.run_log import git_commit, wandb_run_id
from utils.tracking.tracker import EPOCH, Print, Tracker

LOGGED_PICTURES = 16
# Of the training run that other jobs join: the flag, and W&B's variable for it.
TRAINING_PLACE = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_group": "WANDB_RUN_GROUP"}


class JobLog:
    """The trackers of a job without epochs; without trackers its methods do nothing."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self.trackers = trackers

    def log(self, values: Mapping[str, Any], documents: Mapping[str, str] | None = None) -> None:
        """Log values by key, and text files by name."""
        for tracker in self.trackers:
            log(tracker, values, documents or {})

    def log_pictures(self, folder: Path) -> None:
        """Log the first pictures of a folder."""
        files = sorted(file for file in folder.iterdir() if file.suffix in (".jpg", ".png"))[:LOGGED_PICTURES]
        for tracker in self.trackers:
            tracker.log_pictures({f"pictures/{file.stem}": file for file in files}, 0)


@contextmanager
def job_log(
    job: str, flags: Mapping[str, Any], training: Mapping[str, Any], folder: Path, print_line: Print
) -> Iterator[JobLog]:
    """Start the trackers that the flags name; finish them at the end of the `with` block. See `start`."""
    trackers = start(job, flags, training, folder, print_line)
    for tracker in trackers:
        tracker.store_init_configuration(configuration(flags, training))
    yield JobLog(trackers)
    for tracker in trackers:
        tracker.finish()


def start(
    job: str, flags: Mapping[str, Any], training: Mapping[str, Any], folder: Path, print_line: Print
) -> list[Tracker]:
    """Return the trackers of a job: val, detect or export, and print warnings.

    flags: of the script, by name. training: settings of the weights' training; W&B's project, entity and group are
    those of that run. folder: gets what trackers store.
    """
    if flags["log_with"] == "none":
        return []
    folder.mkdir(parents=True, exist_ok=True)
    # A variable of the environment counts more than where the training run is.
    same = {
        name: training[name]
        for name, variable in TRAINING_PLACE.items()
        if training.get(name) and not os.environ.get(variable)
    }
    model = [f"run_{training['wandb_id']}_model:best"] if training.get("wandb_id") else []
    options = TrackerOptions(
        project=str(training.get("project") or "train"),
        log_with=flags["log_with"],
        wandb_id=wandb_run_id("", None),
        **same,
    )
    trackers, warnings = make_trackers(options, folder, print_line, job, inputs=model)
    for warning in warnings:
        print_line(warning)

    def fail(reason: str) -> None:
        for tracker in trackers:
            tracker.fail(reason)

    on_failure(fail)
    return trackers


def configuration(flags: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a job's run: its flags, its command, and the id of the training run."""
    config = {**flags, "git_commit": git_commit(), "command": shlex.join(sys.argv)}
    return {**config, "training_run": training.get("wandb_id", "")}


def log(tracker: Tracker, values: Mapping[str, Any], documents: Mapping[str, str]) -> None:
    """Log the values of a job by key, and its text files by name."""
    tracker.log({**values, EPOCH: 0}, step=0)
    tracker.log_documents(documents, 0, 0)
