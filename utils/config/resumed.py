"""The options of a resumed run: its saved settings, the given flags, and the flags that must not change.

`settings` is the content of a run's settings.yaml: the options by name, `hyperparameters` and `model`. Called by
utils/checkpoint/resume.py and settings.py.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from utils.config.hyperparameters import (
    AUTO,
    DERIVED,
    OVERRIDE_PREFIX,
    Recipe,
    from_mapping,
    parse_overrides,
    read_hyperparameters,
)
from utils.config.options import flags_of
from utils.config.values import accepts
from utils.errors import UserError, nearest, plural, shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
# Maps a run's settings and the given flags to the class of its hyperparameters.
RecipeOf = Callable[[Mapping[str, Any], Mapping[str, Any]], type[Recipe]]

# The training curve depends on these flags: a run cannot be resumed with another value. For the image size, which the
# settings hold rounded, see `Identity.check`.
CURVE_FLAGS = (
    *("weights", "cfg", "batch_size", "rect", "multi_scale", "image_weights", "repeat_factor", "close_mosaic"),
    *("partners", "mask_ratio", "no_overlap", "noautoanchor", "scale_lr", "single_cls", "optimizer", "cos_lr"),
    *("label_smoothing", "class_weights", "freeze", "seed", "logical_processes", "image_padding"),
    "augmentations",
    "lr_factor",
    "fitness",  # --patience stops by it, and best.pt must be chosen by one fitness throughout
)
LAUNCHER_FLAGS = ("device", "processes")  # not taken from the settings under a launcher, which decides them
# Never taken from the settings: a run that reached its time limit must continue, and a profile belongs to one start.
SINGLE_START_FLAGS = ("time_limit", "profile")
SETTINGS_PARTS = ("hyperparameters", "model")  # keys of the settings beside the flags
RUN_FOLDER_FLAGS = ("resume", "project", "name", "exist_ok")


def resumed_options(
    kind: type[T],
    given: Mapping[str, Any],
    run: Path,
    settings: Mapping[str, Any],
    recipe_of: RecipeOf,
    launched: bool,
) -> T:
    """Return the options that a run continues with: its settings, overridden by the `given` flags.

    Settings that are no longer flags are ignored, and new flags have their defaults. Raises `UserError` if a flag that
    the curve depends on differs from the settings.

    Args:
        launched: whether a launcher started the processes
    """
    known = {field.name for field in dataclasses.fields(kind)}
    # Under a launcher the processes connect, with --dist-timeout, before the main one reads the settings.
    dropped = (*SINGLE_START_FLAGS, *((*LAUNCHER_FLAGS, "dist_timeout") if launched else ()))
    saved = {name: value for name, value in settings.items() if name in known and name not in dropped}
    given = {name: value for name, value in given.items() if name != "resume" and (name, value) != ("hyp", AUTO)}
    _refuse_changes(run, settings, given)
    if "hyp" in given or "overrides" in given:
        _refuse_hyperparameters(run, settings, given, recipe_of(settings, given))
    if "overrides" in given:
        given["overrides"] = {**saved.get("overrides", {}), **given["overrides"]}
    given["batch_size"] = settings["batch_size"]  # the size that --batch-size -1 has measured
    folder = {"project": str(run.parent), "name": run.name, "exist_ok": True, "resume": str(run)}
    return from_plain(kind, {**saved, **given, **folder})


def check_settings(
    kind: type[DataclassInstance], settings: Mapping[str, Any], recorded: Mapping[str, Any], source: Path
) -> None:
    """Check a settings.yaml, which may have been edited. `Settings.resolve` checks its hyperparameters further.

    Raises `UserError` for a wrong value, for an unknown key that is not recorded, and for a change that the curve
    depends on.

    Args:
        recorded: the settings that a state of the run contains; {} if an older version wrote the state
        source: path of the settings.yaml
    """
    hints, fields = typing.get_type_hints(kind), {field.name: field for field in flags_of(kind)}
    for key, value in settings.items():
        if key in fields:
            field = fields[key]
            if _plain(field.default) != value and not accepts(hints[key], field.metadata, value):
                raise UserError(f"{source}: `{key}` is {shortened(repr(value))}, which {_flag(key)} refuses; fix it")
        elif key in (*SETTINGS_PARTS, "overrides"):
            if not isinstance(value, dict):
                raise UserError(f"{source}: `{key}` is {shortened(repr(value))}; it must be `key: value` lines")
        elif recorded and key not in recorded:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), fields)}; correct or remove it")
    now, then = _curve_settings(settings), _curve_settings(yaml.safe_load(yaml.safe_dump(recorded)))  # without tuples
    for key, value in then.items():
        if now.get(key) != value:
            raise UserError(
                f"{source}: `{key}` is {shortened(repr(now.get(key)))}, and the run was started with "
                f"{shortened(repr(value))}, which its curve depends on; restore it, or start a new run from "
                f"{source.parent / 'weights' / 'last.pt'}"
            )


def from_plain(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return options from the plain values of a YAML or JSON file: lists become tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def changes(settings: Mapping[str, Any], options: DataclassInstance) -> list[str]:
    """Return a message for each flag that differs from the settings of the run."""
    skipped = ("imgsz", *CURVE_FLAGS, *RUN_FOLDER_FLAGS, *LAUNCHER_FLAGS, *SINGLE_START_FLAGS)
    names = [field.name for field in flags_of(type(options)) if field.name in settings and field.name not in skipped]
    changed = {name: value for name in names if _plain(value := getattr(options, name)) != settings[name]}
    messages = [f"{_flag(name)} is {value!r} and was {settings[name]!r}" for name, value in changed.items()]
    if "epochs" in changed:
        messages.append(f"from here on the learning rate follows the schedule for {plural(changed['epochs'], 'epoch')}")
    return messages


def _curve_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the curve depends on; hyperparameters and model settings as `hyperparameters: lr0`."""
    flags = {name: settings[name] for name in CURVE_FLAGS if name in settings}
    parts = {f"{part}: {key}": value for part in SETTINGS_PARTS for key, value in settings.get(part, {}).items()}
    return {**flags, **parts}


def _refuse_changes(run: Path, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `UserError` if a flag that the curve depends on has changed."""
    for name in CURVE_FLAGS:
        if name not in given or name not in settings or (name == "batch_size" and given[name] == -1):
            continue  # -1 is measured, and the settings hold the result
        if _plain(given[name]) != settings[name]:
            raise _changed(run, _flag(name), given[name], settings[name])


def _refuse_hyperparameters(
    run: Path, settings: Mapping[str, Any], given: Mapping[str, Any], kind: type[Recipe]
) -> None:
    saved, overrides = settings["hyperparameters"], given.get("overrides", {})
    derived = (*DERIVED, *["class_weights"] * (settings.get("class_weights") == "auto"))  # the flag sets it
    for name, value in parse_overrides(kind, overrides).items():
        if value != saved.get(name) and name not in derived:
            raise _changed(run, OVERRIDE_PREFIX + name, value, saved.get(name))
    if "hyp" in given:
        saved = vars(from_mapping(kind, saved, run / "settings.yaml"))  # adds keys that are newer than the run
        now = vars(read_hyperparameters(given["hyp"], kind, {**settings.get("overrides", {}), **overrides}))
        changed = [
            f"{name} is {now[name]} and was {saved.get(name)}"
            for name in now
            if name not in derived and now[name] != saved[name]
        ]
        if changed:
            raise UserError(
                f"--hyp {given['hyp']} has changed since {run} was started: {', '.join(changed)}; {_advice(run)}"
            )


def _changed(run: Path, flag: str, now: object, saved: object) -> UserError:
    return UserError(
        f"{flag} is {now!r} now, and {run} was started with {saved!r}, which its curve depends on; {_advice(run)}"
    )


def _advice(run: Path) -> str:
    return f"leave it out, or start a new run from {run / 'weights' / 'last.pt'}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plain(value: object) -> object:
    """Return the value of a flag as a YAML file holds it."""
    return list(value) if isinstance(value, tuple) else value
