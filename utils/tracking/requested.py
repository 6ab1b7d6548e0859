"""The trackers that flags and environment request. Used by run_log.py.

A new kind of tracker is a subclass of `Tracker` and a line in `make_trackers`; a tracker that Accelerate knows needs
only its name in `TRACKERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from utils.tracking.tracker import FINISH_SECONDS, TENSORBOARD, WANDB, Print, Tracker, requested_trackers

DEFAULT_PROJECT = "train"  # the last folder of the default --project; W&B's project is then "lockstep"


def make_trackers(
    project: str,
    log_with: str,
    run_id: str,
    folder: Path,
    print_line: Print,
    job: str,
    *,
    no_wandb: bool = False,
    uploads: bool = False,
    inputs: Sequence[str] = (),
) -> tuple[list[Tracker], list[str]]:
    """Return the trackers of a run, not yet started, and warnings about packages that are not installed.

    Args:
        project: value of --project, whose last folder is W&B's project
        log_with: value of --log-with
        run_id: the run's id
        folder: the run folder
        job: W&B's job type, train or val
        uploads: whether files are uploaded, which takes longer at the end
        inputs: names of W&B artifacts that the run uses, if they exist
    """
    # Only here, because most starts need none, or one.
    from utils.tracking.accelerate_tracker import AccelerateTracker
    from utils.tracking.tensorboard import TensorBoardTracker
    from utils.tracking.wandb import UPLOAD_SECONDS, WandbTracker

    names, warnings = requested_trackers(log_with, no_wandb)
    run = wandb_arguments(project, run_id, folder, job)
    timeout = UPLOAD_SECONDS if uploads else FINISH_SECONDS
    own: dict[str, Callable[[], Tracker]] = {
        WANDB: lambda: WandbTracker(folder, run, print_line, timeout, inputs),
        TENSORBOARD: lambda: TensorBoardTracker(folder, run_id, print_line),
    }
    named = {key: run[key] for key in ("project", "name", "id")}
    return [
        own[name]() if name in own else AccelerateTracker(name, folder, named, print_line) for name in names
    ], warnings


def wandb_arguments(project: str, run_id: str, folder: Path, job: str) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that name the run in `folder`, from W&B's variables or defaults."""
    project = Path(project).name
    name = folder.name if job == "train" or job in folder.name else f"{job}-{folder.name}"
    arguments = {
        "project": os.environ.get("WANDB_PROJECT") or ("lockstep" if project == DEFAULT_PROJECT else project),
        "entity": os.environ.get("WANDB_ENTITY") or None,
        "group": os.environ.get("WANDB_RUN_GROUP") or None,
        "tags": list(filter(None, os.environ.get("WANDB_TAGS", "").split(","))) or None,
        "name": os.environ.get("WANDB_NAME") or name,
        "notes": os.environ.get("WANDB_NOTES") or None,
        "job_type": os.environ.get("WANDB_JOB_TYPE") or job,
        "id": run_id,
    }
    return {**arguments, **({"dir": os.environ["WANDB_DIR"]} if os.environ.get("WANDB_DIR") else {})}
