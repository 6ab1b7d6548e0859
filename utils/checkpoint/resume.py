"""--resume: find the run folder, the options of the resumed run, and the state that it continues from.

train.py calls `resolve_settings` before anything else is read, and `read_saved_state` once the data set is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint.progress import Progress
from utils.checkpoint.state_files import StateFiles
from utils.checkpoint.training_state import Identity, can_continue
from utils.config.options import AUTO, BUILT_IN_JOB, NEWEST, TrainOptions
from utils.config.parser import over_defaults
from utils.config.resumed import RecipeOf, check_settings, resumed_options
from utils.config.settings import Settings
from utils.distributed.accelerator import connect
from utils.distributed.collectives import broadcast_from_main
from utils.distributed.failure import Stopped
from utils.distributed.ranks import launched
from utils.errors import UserError
from utils.files import read_yaml
from utils.tracking.requested import log_lost_epochs

if TYPE_CHECKING:
    from utils.run import Run

SETTINGS, STATES = "settings.yaml", "checkpoint"  # file and folder in a run folder
YOLOV5_SETTINGS = "opt.yaml"  # file in a run folder of YOLOv5


def resolve_settings(given: Mapping[str, Any], recipe_of: RecipeOf) -> Settings:
    """Return the settings that a run starts or continues with; the main process decides for all.

    Raises `Stopped` with exit code 0 if the run is finished, and `UserError` if there is nothing to resume or a flag
    must not change.

    Args:
        given: flags by name; if they name no data, model, weights or hyperparameters, the built-in job gives the rest
        recipe_of: returns a run's class of hyperparameters
    """
    settings = Settings(over_defaults(TrainOptions, given, BUILT_IN_JOB), given)
    options = settings.options
    if not options.resume:
        return settings
    if not launched():  # the processes that `spawn` starts get the settings from their parent
        return _settings_of_run(settings, recipe_of)
    if options.doctor and options.resume == AUTO:  # the flags are complete; the doctor names who cannot be reached
        return settings
    connect(options.device, options.dist_timeout)
    return broadcast_from_main(partial(_settings_of_run, settings, recipe_of))


def read_saved_state(
    run: Run, settings: Settings, names: Mapping[int, str], imgsz: int, splits: Mapping[str, Mapping[str, str]]
) -> tuple[Identity, dict[str, Any] | None]:
    """Return the identity of a run and its saved state, None for a new run; restore the run folder to that state.

    Raises `UserError` if classes, image size, images or labels differ from the saved state's, before anything in the
    folder changes.

    Args:
        names: class names, by class number
        imgsz: image size in pixels
        splits: `Split.identity` of `train` and `val`
    """
    identity = Identity(names, imgsz, splits)
    saved = run.files.read_state() if settings.saved else None
    if saved:
        identity.check(saved)
        run.print(*settings.changes)
        run.print(f"resuming {run.path} {Progress.from_state(saved['progress'])}")
    elif settings.is_fixed:
        run.print(f"{run.path} ended before it saved anything: it starts anew, with its settings")
    run.files.restore_to_state(saved)
    return identity, saved


def _settings_of_run(settings: Settings, recipe_of: RecipeOf) -> Settings:
    """Return the settings of the run that --resume names, overridden by the given flags."""
    given = settings.options
    run = find_run(given.resume, Path(given.project), given.name, given.exist_ok)
    if run is None:
        return settings
    saved = read_yaml(run / SETTINGS)
    if not {"epochs", "batch_size", "hyperparameters", "model"} <= saved.keys():
        raise UserError(f"{run} is not the folder of a training run, so it cannot be resumed; name one that is")
    states = StateFiles(run / STATES)
    state = states.peek() or states.read(lambda warning: None)  # `read` raises an error if all states are damaged
    check_settings(type(given), saved, state.get("settings", {}) if state else {}, run / SETTINGS)
    options = resumed_options(type(given), settings.given, run, saved, recipe_of, launched())
    if state is None:
        states.refuse_new_start(given.resume == AUTO, options.nosave)
        return Settings(options, settings.given, is_fixed=True)
    progress, has_tensors = Progress.from_state(state["progress"]), can_continue(state)
    if reason := progress.nothing_to_do(saved["epochs"], options.epochs, has_tensors):
        print(f"{run} {reason}", flush=True)
        log_lost_epochs(run, saved)
        raise Stopped(0)
    if not has_tensors:
        raise UserError(
            f"{run} is finished and has not kept the optimizer's state (--keep-state keeps it), so --epochs "
            f"{options.epochs} cannot continue it; start a new run from {run / 'weights' / 'last.pt'}"
        )
    return Settings(options, settings.given, saved, is_fixed=True)


def find_run(resume: str, project: Path, name: str, exist_ok: bool) -> Path | None:
    """Return the run folder that --resume names; None if it is `auto` and there is no run.

    Raises `UserError` if a path is not in a run folder, or the project has no run folder.
    """
    if resume == NEWEST:
        run = newest(project, ".*")
        if run is None:
            raise UserError(f"there is no run to resume in {project}; name a run folder, or start one without --resume")
        return run
    if resume == AUTO:
        return newest(project, re.escape(name) if exist_ok else rf"{re.escape(name)}\d*")
    path = Path(resume)
    if not os.path.exists(path):
        raise UserError(f"--resume {path}: there is no such file or folder; name a run folder, or a weight file in one")
    folders = (path, *path.absolute().parents[:2])  # the run folder, or checkpoint/ or weights/last.pt in it
    for folder in folders:
        if (folder / SETTINGS).is_file():
            return folder
    for folder in folders:
        if (folder / YOLOV5_SETTINGS).is_file():
            raise UserError(
                f"--resume {path}: {folder} is a run of YOLOv5, which only YOLOv5 can resume; start a new run with "
                f"--weights {folder / 'weights' / 'last.pt'} --hyp {folder / 'hyp.yaml'} and the remaining epochs"
            )
    raise UserError(f"--resume {path}: neither it nor its parent folders are a run folder of train.py (no {SETTINGS})")


def newest(project: Path, pattern: str) -> Path | None:
    """Return the most recently written run folder whose name matches `pattern`; None if there is none."""
    runs = [file.parent for file in project.glob(f"*/{SETTINGS}") if re.fullmatch(pattern, file.parent.name)]
    return max(runs, key=_last_written, default=None)


def _last_written(run: Path) -> float:
    files = [run / SETTINGS, run / "results.csv", *(run / STATES).glob("*.pt")]
    return max(file.stat().st_mtime for file in files if file.exists())
