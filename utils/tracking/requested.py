"""The trackers that flags and environment request. Used by run_log.py.

A new kind of tracker is a subclass of `Tracker` and a line in `make_trackers`; a tracker that Accelerate knows needs
only its name in `TRACKERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from utils.errors import public
from utils.tracking.accelerate_tracker import AccelerateTracker
from utils.tracking.log_position import earlier_epochs
from utils.tracking.tensorboard import TensorBoardTracker
from utils.tracking.tracker import EPOCH, FINISH_SECONDS, TENSORBOARD, WANDB, Print, Tracker, requested_trackers
from utils.tracking.wandb import UPLOAD_SECONDS, WandbTracker

DEFAULT_PROJECT = "train"  # the last folder of the default --project; W&B's project is then "lockstep"

# Flags of the training run that a validation joins, and W&B's variable for each.
TRAINING_LOCATION = {
    "wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_group": "WANDB_RUN_GROUP",
}  # fmt: skip


@dataclass(frozen=True)
class TrackerOptions:
    """The settings that name a run in its trackers, named like their flags."""

    project: str
    log_with: str = ""
    no_wandb: bool = False
    wandb_project: str = ""
    wandb_entity: str = ""
    wandb_group: str = ""
    wandb_tags: tuple[str, ...] = ()
    wandb_name: str = ""
    wandb_notes: str = ""
    wandb_job_type: str = ""
    wandb_id: str = ""
    wandb_alerts: bool = False


def make_trackers(
    options: TrackerOptions,
    folder: Path,
    print_line: Print,
    job: str,
    *,
    uploads: bool = False,
    inputs: Sequence[str] = (),
) -> tuple[list[Tracker], list[str]]:
    """Return the trackers of a run, not yet started, and warnings about packages that are not installed.

    Args:
        folder: the run folder
        job: W&B's job type, train or val
        uploads: whether files are uploaded, which takes longer at the end
        inputs: names of W&B artifacts that the run uses, if they exist
    """
    names, warnings = requested_trackers(options.log_with, options.no_wandb)
    run = wandb_arguments(options, folder, job)
    timeout = UPLOAD_SECONDS if uploads else FINISH_SECONDS
    own: dict[str, Callable[[], Tracker]] = {
        WANDB: lambda: WandbTracker(folder, run, print_line, timeout, options.wandb_alerts, inputs),
        TENSORBOARD: lambda: TensorBoardTracker(folder, options.wandb_id, print_line),
    }
    named = {key: run[key] for key in ("project", "name", "id")}
    return [
        own[name]() if name in own else AccelerateTracker(name, folder, named, print_line) for name in names
    ], warnings


def log_lost_epochs(folder: Path, settings: Mapping[str, Any]) -> None:
    """Log the last epochs of a finished run to the trackers that lack them: one failed, or its process was killed.

    Args:
        folder: the run folder
        settings: settings of the run
    """
    epochs = earlier_epochs(folder)
    names = {each.name for each in fields(TrackerOptions)}
    options = TrackerOptions(**{name: value for name, value in settings.items() if name in names})
    trackers, _ = make_trackers(options, folder, print, "train")
    for tracker in trackers:
        if epochs and tracker.lacks_epoch(int(epochs[-1][EPOCH])):
            print(f"{tracker.name} lacks epochs that {folder / 'results.csv'} has: they are logged now", flush=True)
            tracker.store_init_configuration({name: public(value) for name, value in settings.items()})
            tracker.finish()


def joined_options(log_with: str, training: Mapping[str, Any], run_id: str) -> TrackerOptions:
    """Return the options of a run that joins the W&B project, entity and group of a training run.

    Variables of the environment take precedence.

    Args:
        training: settings of the training run
    """
    same = {
        name: training[name]
        for name, variable in TRAINING_LOCATION.items()
        if training.get(name) and not os.environ.get(variable)
    }
    return TrackerOptions(str(training.get("project") or DEFAULT_PROJECT), log_with, wandb_id=run_id, **same)


def wandb_arguments(options: TrackerOptions, folder: Path, job: str) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that name the run in `folder`, from flags, W&B's variables or defaults."""
    project = Path(options.project).name
    tags = options.wandb_tags or tuple(filter(None, os.environ.get("WANDB_TAGS", "").split(",")))
    arguments = {
        "project": _first(
            options.wandb_project, "WANDB_PROJECT", "lockstep" if project == DEFAULT_PROJECT else project
        ),
        "entity": _first(options.wandb_entity, "WANDB_ENTITY"),
        "group": _first(options.wandb_group, "WANDB_RUN_GROUP"),
        "tags": list(tags) or None,
        "name": _first(
            options.wandb_name,
            "WANDB_NAME",
            folder.name if job == "train" or job in folder.name else f"{job}-{folder.name}",
        ),
        "notes": _first(options.wandb_notes, "WANDB_NOTES"),
        "job_type": _first(options.wandb_job_type, "WANDB_JOB_TYPE", job),
        "id": options.wandb_id,
    }
    return {**arguments, **({"dir": os.environ["WANDB_DIR"]} if os.environ.get("WANDB_DIR") else {})}


def _first(flag: str, variable: str, default: str = "") -> str | None:
    """Return the value of a flag, else of an environment variable, else the default; None if all are empty."""
    return flag or os.environ.get(variable) or default or None
