"""--resume: find the run folder, the options of the resumed run, and the state that it continues from.

train.py calls `resolve_settings` before anything else is read, and `read_saved_state` once the data set is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint.state_files import StateFiles
from utils.checkpoint.training_state import Identity, Progress
from utils.config.flags import AUTO, BUILT_IN_JOB, NEWEST, TrainOptions
from utils.config.parser import over_defaults
from utils.config.settings import RecipeOf, Settings, check_settings, resumed_options
from utils.console import log
from utils.distributed.launch import connect
from utils.distributed.ranks import broadcast_from_main, launched
from utils.errors import Stopped, UserError, plural
from utils.files import read_yaml

if TYPE_CHECKING:
    from utils.run import Run

SETTINGS, STATES = "settings.yaml", "checkpoint"  # file and folder in a run folder


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
    return broadcast_from_main(lambda: _settings_of_run(settings, recipe_of))


def read_saved_state(run: Run, settings: Settings, identity: Identity) -> dict[str, Any] | None:
    """Return the saved state of a run, None for a new run; restore the run folder to that state.

    Raises `UserError` if classes, image size, images or labels differ from the saved state's, before anything in the
    folder changes.
    """
    saved = run.collectives.broadcast(run.files.read_state()) if settings.saved else None
    if saved:
        identity.check(saved)
        settings.log_changes()
        log(f"resuming {run.path} {Progress.from_state(saved['progress'])}")
    elif settings.is_fixed:
        log(f"{run.path} ended before it saved anything: it starts anew, with its settings")
    run.files.restore_to_state(saved)
    return saved


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
    state = states.read(warns=False)  # `read_saved_state` reads it again
    check_settings(saved, state.get("settings", {}) if state else {}, run / SETTINGS)
    options = resumed_options(settings.given, run, saved, recipe_of, launched())
    if state is None:
        has_results = any(run.glob("weights/*.pt")) or (not options.nosave and (run / "results.csv").exists())
        if given.resume == AUTO and not has_results:
            return Settings(options, settings.given, is_fixed=True)
        raise UserError(
            f"no state is in {states.folder}, so {run} cannot be resumed; restore the states, start a new run from its "
            "weights, or, if it has no results, start it again with --resume auto"
        )
    progress = Progress.from_state(state["progress"])
    if progress.finished and options.epochs > saved["epochs"]:
        raise UserError(
            f"{run} is finished and has not kept the optimizer's state, so --epochs {options.epochs} cannot continue "
            f"it; start a new run from {run / 'weights' / 'last.pt'}"
        )
    if progress.finished or progress.epoch >= options.epochs:
        trained = f"has trained {plural(progress.epoch, 'epoch')}; --epochs {options.epochs} leaves nothing to do"
        print(f"{run} {'is finished: nothing to resume' if progress.finished else trained}", flush=True)
        raise Stopped(0)
    return Settings(options, settings.given, saved, is_fixed=True)


def find_run(resume: str, project: Path, name: str, exist_ok: bool) -> Path | None:
    """Return the run folder that --resume names; None if it is `auto` and there is no run.

    Raises `UserError` if a path is not in a run folder, or the project has no run folder.
    """
    if resume in (NEWEST, AUTO):
        pattern = ".*" if resume == NEWEST else re.escape(name) if exist_ok else rf"{re.escape(name)}\d*"
        runs = [file.parent for file in project.glob(f"*/{SETTINGS}") if re.fullmatch(pattern, file.parent.name)]
        if resume == NEWEST and not runs:
            raise UserError(f"there is no run to resume in {project}; name a run folder, or start one without --resume")
        return max(runs, key=_last_written, default=None)
    path = Path(resume)
    for folder in (path, *path.absolute().parents[:2]):  # the run folder, or checkpoint/ or weights/last.pt in it
        if (folder / SETTINGS).is_file():
            return folder
    raise UserError(
        f"--resume {path}: neither it nor its parent folders are a run folder of train.py (no {SETTINGS}); name one, "
        "or start a new run with --weights, as from a run of YOLOv5"
    )


def _last_written(run: Path) -> float:
    files = [run / SETTINGS, run / "results.csv", *(run / STATES).glob("*.pt")]
    return max(file.stat().st_mtime for file in files if file.exists())
