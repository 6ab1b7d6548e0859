"""The run that --resume continues: found in its project, its settings.yaml checked, and overridden by flags."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from utils.checkpoint import STATES, Identity, Progress, StateFiles, explain_misfit
from utils.config.flags import AUTO, NEWEST, DetectOptions, TrainOptions, as_flag, flags_of, typed_values
from utils.config.hyperparameters import OVERRIDE_PREFIX, Recipe, from_mapping, parse_overrides, read_hyperparameters
from utils.console import log
from utils.distributed.launch import cores_per_process
from utils.distributed.ranks import world_size
from utils.errors import Stopped, UserError, plural, quoted
from utils.files import SETTINGS_FILE, read_yaml
from utils.user_code import package_version

if TYPE_CHECKING:
    from utils.config.settings import Settings
    from utils.run import Run

PROGRESS = "progress"  # folder in an unfinished run of detect.py: its flags, and a journal of each process
# Maps a run's settings and the flags to the class of its hyperparameters.
RecipeOf = Callable[[Mapping[str, Any], Mapping[str, Any]], type[Recipe]]

LAUNCHER_FLAGS = ("device", "processes")  # not taken from a run's settings under a launcher, which decides them
# Not taken from a run's settings either: a time limit and a profile are for one start only.
SINGLE_START_FLAGS = ("time_limit", "profile")
SETTINGS_PARTS = ("hyperparameters", "model")  # keys of settings.yaml beside the flags
CURVE_FLAGS = [option.name for option in flags_of(TrainOptions) if option.metadata["curve"]]
WRITTEN = (SETTINGS_FILE, "results.csv", f"{STATES}/*.pt")  # files that tell when a run was alive


def continued_run(options: TrainOptions, flags: Mapping[str, Any], recipe_of: RecipeOf) -> dict[str, Any]:
    """Return the attributes of `Settings` that the run which --resume names changes; {} if `auto` finds none.

    `options` are the `flags` over their defaults. Raises `Stopped` with exit code 0 if the run is finished, and
    `UserError` if there is nothing to resume or a flag must not change.
    """
    run = find_run(options.resume, Path(options.project), options.name, options.exist_ok)
    if run is None:
        return {}
    saved = read_yaml(run / SETTINGS_FILE)
    if not {"epochs", "batch_size", "hyperparameters", "model"} <= saved.keys():
        raise UserError(f"{run} is not the folder of a training run, so it cannot be resumed; name one that is")
    states = StateFiles(run / STATES)
    state = states.read(warns=False)  # `read_saved_state` reads it again
    check_settings(saved, state.get("settings", {}) if state else {}, run / SETTINGS_FILE)
    resumed = resumed_options(flags, run, saved, recipe_of, world_size() > 1)
    if state is None:
        has_results = any(run.glob("weights/*.pt")) or (not resumed.nosave and (run / "results.csv").exists())
        if options.resume == AUTO and not has_results:
            return {"options": resumed, "is_fixed": True}
        raise UserError(
            f"no state is in {states.folder}, so {run} cannot be resumed; restore the states, start a new run from its "
            "weights, or, if it has no results, start it again with --resume auto"
        )
    with explain_misfit(state):
        progress = Progress.from_state(state["progress"])
    if progress.finished and resumed.epochs > saved["epochs"]:
        raise UserError(
            f"{run} is finished and has not kept the optimizer's state, so --epochs {resumed.epochs} cannot continue "
            f"it; start a new run from {run / 'weights' / 'last.pt'}"
        )
    if progress.finished or progress.epoch >= resumed.epochs:
        print(f"{run} is finished: it has trained {plural(progress.epoch, 'epoch')}", flush=True)
        if progress.summary:
            progress.summary.write_result(run)
        raise Stopped(0)
    return {"options": resumed, "saved": saved, "is_fixed": True}


def find_run(resume: str, project: Path, name: str, exist_ok: bool) -> Path | None:
    """Return the run folder that --resume names; None if it is `auto` and there is no run. Raises `UserError`."""
    if resume in (NEWEST, AUTO):
        pattern = ".*" if resume == NEWEST else re.escape(name) if exist_ok else rf"{re.escape(name)}\d*"
        runs = [file.parent for file in project.glob(f"*/{SETTINGS_FILE}") if re.fullmatch(pattern, file.parent.name)]
        written = {run: max(file.stat().st_mtime for part in WRITTEN for file in run.glob(part)) for run in runs}
        for run in sorted(runs, key=written.__getitem__, reverse=True):
            settings = read_yaml(run / SETTINGS_FILE)  # without hyperparameters: of a validation
            # The second run `fold1` is in fold12, as is the first run `fold12`.
            if "hyperparameters" in settings and (resume == NEWEST or exist_ok or settings.get("name") == name):
                return run
        if resume == AUTO:
            return None
        raise UserError(f"there is no run to resume in {project}; name a run folder, or start one without --resume")
    path = Path(os.path.abspath(resume))
    for folder in (path, *path.parents[:2]):  # the run folder, or checkpoint/ or weights/last.pt in it
        if os.path.isfile(folder / SETTINGS_FILE):  # Path.is_file raises an error for a folder that may not be entered
            return folder
    raise UserError(
        f"--resume {path}: neither it nor its parent folders are a run folder of train.py (no {SETTINGS_FILE}); name "
        "one, or start a new run with --weights, as from a run of YOLOv5"
    )


def resumed_options(
    flags: Mapping[str, Any], run: Path, settings: Mapping[str, Any], recipe_of: RecipeOf, launched: bool
) -> TrainOptions:
    """Return the options that a run continues with: `flags` over its settings. Raises `UserError`."""
    # Under a launcher the processes connect, with --dist-timeout, before the main one reads the settings.
    dropped = (*SINGLE_START_FLAGS, *((*LAUNCHER_FLAGS, "dist_timeout") if launched else ()))
    names = {field.name for field in dataclasses.fields(TrainOptions)}.difference(dropped)
    saved = {name: value for name, value in settings.items() if name in names}
    measured = (("hyp", AUTO), ("batch_size", -1))  # the settings hold the results
    flags = {name: value for name, value in flags.items() if name != "resume" and (name, value) not in measured}
    for name in CURVE_FLAGS:
        if name in flags and name in settings:
            _check_unchanged(run, as_flag(name), _plain(flags[name]), settings[name])
    if "hyp" in flags or "overrides" in flags:
        recipe, overrides = recipe_of(settings, flags), flags.get("overrides", {})
        before = vars(from_mapping(recipe, settings["hyperparameters"], run / SETTINGS_FILE))
        now = parse_overrides(recipe, overrides)
        if "hyp" in flags:
            now = vars(read_hyperparameters(flags["hyp"], recipe, {**settings.get("overrides", {}), **overrides}))
        for name, value in now.items():
            _check_unchanged(run, OVERRIDE_PREFIX + name, value, before[name])
        flags["overrides"] = {**saved.get("overrides", {}), **overrides}
    folder = {"project": str(run.parent), "name": saved.get("name", run.name), "exist_ok": True, "resume": str(run)}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return TrainOptions(**{**plain, **flags, **folder})


def check_settings(settings: Mapping[str, Any], saved: Mapping[str, Any], source: Path) -> None:
    """Check a settings.yaml, which may have been edited, by the settings `saved` in a state of the run, if any.

    Raises `UserError` for a wrong value, an unknown key, and a change that the curve depends on. `Settings.resolve`
    checks the hyperparameters further.
    """
    fields = {option.name: option for option in flags_of(TrainOptions)}
    values = {}
    for key, value in settings.items():
        if key in (*SETTINGS_PARTS, "overrides"):
            if not isinstance(value, dict):
                raise UserError(f"{source}: `{key}` is {quoted(value)}; it must be `key: value` lines")
            continue
        is_unknown = saved and key not in saved  # another version may have saved it
        if value != _plain(fields[key].default) if key in fields else is_unknown:
            values[key] = value
    typed_values(TrainOptions, values, f"{source}: `{{}}`".format)
    if version := settings.get("optimizer_version"):
        name = f"the version of --optimizer {settings['optimizer']}"
        _check_unchanged(source.parent, name, package_version(str(settings["optimizer"])), version)
    now, before = curve_settings(settings), curve_settings(yaml.safe_load(yaml.safe_dump(saved)))  # without tuples
    for key, value in before.items():
        _check_unchanged(source.parent, f"`{key}` of {source}", now.get(key), value)


def curve_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the curve depends on; hyperparameters and model settings as `hyperparameters: lr0`."""
    values = {name: settings[name] for name in CURVE_FLAGS if name in settings}
    for part in SETTINGS_PARTS:
        content = settings.get(part, {})
        values |= {f"{part}: {key}": content[key] for key in content} if isinstance(content, dict) else {part: content}
    return values


def _check_unchanged(run: Path, setting: str, now: object, saved: object) -> None:
    if now != saved:
        raise UserError(
            f"{setting} is {quoted(now)}, and {run} was started with {quoted(saved)}, which its "
            f"curve depends on; restore it, or start a new run from {run / 'weights' / 'last.pt'}"
        )


def _plain(value: object) -> object:
    """Return the value of a flag as a YAML file holds it."""
    return list(value) if isinstance(value, tuple) else value


def read_saved_state(run: Run, settings: Settings, identity: Identity) -> dict[str, Any] | None:
    """Return the saved state of a run, None for a new run; restore the run folder to that state.

    Raises `UserError` if classes, image size, images or labels differ from the saved state's, before anything in the
    folder changes.
    """
    saved = run.collectives.broadcast(run.files.read_state()) if settings.saved else None
    if saved and settings.saved:
        identity.check(saved)
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(min(settings.saved.get("threads", torch.get_num_threads()), cores_per_process()))
        threads = torch.get_num_threads() if run.accelerator.device.type == "cpu" else 0
        log_changes(settings.options, settings.saved, threads)
        log(f"resuming {run.path} {Progress.from_state(saved['progress'])}")
    elif settings.is_fixed:
        log(f"{run.path} has no saved state: it starts anew, with its settings")
    run.files.restore_to_state(saved)
    return saved


def log_changes(options: TrainOptions, saved: Mapping[str, Any], threads: int) -> None:
    """Log each flag that differs from the `saved` settings of the resumed run, and the CPU threads; 0 for a GPU."""
    if threads and (before := saved.get("threads", threads)) != threads:
        log(f"warning: CPU threads: {threads}, was {before}; the same bytes need OMP_NUM_THREADS={before}")
    skipped = {"imgsz", "overrides", "resume", "project", "name", "exist_ok"}
    skipped |= {*CURVE_FLAGS, *LAUNCHER_FLAGS, *SINGLE_START_FLAGS}
    for name, value in vars(options).items():
        now = _plain(value)
        if name not in skipped and saved.get(name, now) != now:
            log(f"{as_flag(name)} is {now!r} and was {saved[name]!r}")
            if name == "epochs":
                log(f"from here on the learning rate follows the schedule for {plural(value, 'epoch')}")


def resumed_detection(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the flags of the run of detect.py that --resume names; without it, `flags`. Raises `UserError`."""
    if not (resume := flags.get("resume")):
        return flags
    pattern, base = f"{PROGRESS}/{SETTINGS_FILE}", Path(flags.get("project", DetectOptions.project))
    files = base.glob(f"*/{pattern}") if resume == NEWEST else Path(os.path.abspath(resume)).glob(pattern)
    if (file := max(files, key=os.path.getmtime, default=None)) is None:
        raise UserError(f"{base if resume == NEWEST else resume} has no unfinished run of detect.py; start a new one")
    if taken := flags.keys() - {"resume", "project", *LAUNCHER_FLAGS}:
        raise UserError(f"--resume takes {as_flag(min(taken))} from {file}; leave it out")
    saved = {name: value for name, value in read_yaml(file).items() if name not in ("items", *LAUNCHER_FLAGS)}
    start = {name: value for name, value in flags.items() if name in LAUNCHER_FLAGS}
    return {**typed_values(DetectOptions, saved, f"{file}: `{{}}`".format), **start, "resume": str(file.parents[1])}
