"""The settings of a training run: flags over defaults, and the hyperparameters of its task; or those of a resumed run.

Made by utils/checkpoint.py, completed once by job.py's `resolve`, when the task is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from utils.config.flags import AUTO, TrainOptions, flags_of
from utils.config.hyperparameters import OVERRIDE_PREFIX, Recipe, from_mapping, parse_overrides, read_hyperparameters
from utils.config.parser import as_flag, checked, defaults_of_hyp, refuse_flags
from utils.console import log
from utils.errors import UserError, plural, quoted

# Maps a run's settings and the given flags to the class of its hyperparameters.
RecipeOf = Callable[[Mapping[str, Any], Mapping[str, Any]], type[Recipe]]

LAUNCHER_FLAGS = ("device", "processes")  # not taken from a run's settings under a launcher, which decides them
# Never taken from a run's settings: one that reached its time limit must continue, and a profile belongs to one start.
SINGLE_START_FLAGS = ("time_limit", "profile")
SETTINGS_PARTS = ("hyperparameters", "model")  # keys of settings.yaml beside the flags
CURVE_FLAGS = [option.name for option in flags_of(TrainOptions) if option.metadata["curve"]]
RUN_FOLDER_FLAGS = ("resume", "project", "name", "exist_ok")


@dataclass(frozen=True)
class Settings:
    """The flags of train.py over their defaults, and the hyperparameters of the task.

    Attributes:
        given: flags of the command line, or arguments of a call from Python, by name
        saved: content of the resumed run's settings.yaml, None for a new run
        is_fixed: whether the options come from a resumed run and already include the defaults of task and data set
        hyp: hyperparameters of the task
        origin: licence and origin of the weights, which are stored in every file made from them
    """

    options: TrainOptions
    given: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] | None = None
    is_fixed: bool = False
    hyp: Recipe = field(default_factory=Recipe)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def refuse(self, features: Collection[str], unread: Collection[str], model: str) -> None:
        """Raise `UserError` for a flag or a hyperparameter on a new run's command line that its model does not use."""
        if self.saved:
            return
        refuse_flags(type(self.options), self.given, features, model)
        for key in self.given.get("overrides", {}):
            if key in unread:
                raise UserError(f"{OVERRIDE_PREFIX}{key} has no effect on {model}; leave it out")

    def resolve(
        self,
        recipe: type[Recipe],
        *defaults: Mapping[str, Any],
        choose: Callable[[], tuple[str, str, str]] | None = None,
        **values: Any,
    ) -> Settings:
        """Return the settings with the hyperparameters of a task, and with every flag that is not given resolved.

        Such a flag is what the hyperparameters ask for, else a default of their file, else the last of `defaults` that
        has it, else its own default. Raises `UserError` for a wrong hyperparameter file or flag.
        """
        if self.saved:
            hyp = from_mapping(recipe, self.saved["hyperparameters"], f"settings.yaml of {self.options.resume}")
        elif self.is_fixed:
            hyp = read_hyperparameters(self.options.hyp, recipe, self.options.overrides)
        if self.saved or self.is_fixed:
            return dataclasses.replace(self, hyp=hyp, **values)
        layers = {key: value for mapping in defaults for key, value in mapping.items()}
        name = {"hyp": self.options.hyp, **layers, **self.given}["hyp"]
        if name == AUTO and choose:
            name, reason, yolov5 = choose()
            other = f"; --hyp {yolov5} has YOLOv5's values" if yolov5 not in ("", name) else ""
            log(f"hyperparameters: --hyp {name}, because {reason}{other}")
        hyp = read_hyperparameters(name, recipe, self.options.overrides)
        layers |= defaults_of_hyp(name)
        layers |= hyp.flags({"epochs": self.options.epochs, **layers, **self.given}["epochs"])
        layers = {key: value for key, value in layers.items() if key not in self.given}
        options = dataclasses.replace(self.options, **{**layers, "hyp": name})
        return dataclasses.replace(self, hyp=hyp, options=options, **values)

    def value(self, flag: str, *defaults: Mapping[str, Any]) -> Any:
        """Return the value that `resolve` gives a flag that no hyperparameter file sets."""
        for mapping in () if self.is_fixed or flag in self.given else reversed(defaults):
            if flag in mapping:
                return mapping[flag]
        return getattr(self.options, flag)

    def names(self, flag: str, defaults: Mapping[str, Any]) -> bool:
        """Return whether the command line, `defaults` or the settings of a resumed run give a flag's value."""
        return self.is_fixed or flag in self.given or flag in defaults

    def content(
        self, model_yaml: Mapping[str, Any], imgsz: int, batch_size: int, run_id: str, threads: int
    ) -> dict[str, Any]:
        """Return the content of settings.yaml, with the model's image size and what --batch-size -1 has measured."""
        sizes = {"imgsz": imgsz} if self.options.batch_size > 0 else {"imgsz": imgsz, "batch_size": batch_size}
        parts = {"hyperparameters": vars(self.hyp), "model": model_yaml, **self.origin}
        return {**vars(self.options), **sizes, "threads": threads, "wandb_id": run_id, **parts}

    def log_changes(self, threads: int) -> None:
        """Log each flag that differs from the settings of the resumed run, and the CPU threads; 0 for a GPU."""
        saved = self.saved or {}
        if threads and (before := saved.get("threads", threads)) != threads:
            log(f"warning: CPU threads: {threads}, was {before}; the same bytes need OMP_NUM_THREADS={before}")
        skipped = ("imgsz", "overrides", *CURVE_FLAGS, *RUN_FOLDER_FLAGS, *LAUNCHER_FLAGS, *SINGLE_START_FLAGS)
        for name, value in vars(self.options).items():
            now = _plain(value)
            if name not in skipped and saved.get(name, now) != now:
                log(f"{as_flag(name)} is {now!r} and was {saved[name]!r}")
                if name == "epochs":
                    log(f"from here on the learning rate follows the schedule for {plural(value, 'epoch')}")


# A resumed run


def resumed_options(
    given: Mapping[str, Any], run: Path, settings: Mapping[str, Any], recipe_of: RecipeOf, launched: bool
) -> TrainOptions:
    """Return the options that a run continues with: its settings, or what is `given`. Raises `UserError`."""
    known = {field.name for field in dataclasses.fields(TrainOptions)}
    # Under a launcher the processes connect, with --dist-timeout, before the main one reads the settings.
    dropped = (*SINGLE_START_FLAGS, *((*LAUNCHER_FLAGS, "dist_timeout") if launched else ()))
    saved = {name: value for name, value in settings.items() if name in known and name not in dropped}
    asked = (("hyp", AUTO), ("batch_size", -1))  # the settings hold what was chosen and measured
    given = {name: value for name, value in given.items() if name != "resume" and (name, value) not in asked}
    for name in CURVE_FLAGS:
        if name in given and name in settings:
            _refuse_change(run, as_flag(name), _plain(given[name]), settings[name])
    if "hyp" in given or "overrides" in given:
        kind, overrides = recipe_of(settings, given), given.get("overrides", {})
        before = vars(from_mapping(kind, settings["hyperparameters"], run / "settings.yaml"))
        now = parse_overrides(kind, overrides)
        if "hyp" in given:
            now = vars(read_hyperparameters(given["hyp"], kind, {**settings.get("overrides", {}), **overrides}))
        for name, value in now.items():
            _refuse_change(run, OVERRIDE_PREFIX + name, value, before[name])
        given["overrides"] = {**saved.get("overrides", {}), **overrides}
    folder = {"project": str(run.parent), "name": saved.get("name", run.name), "exist_ok": True, "resume": str(run)}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return TrainOptions(**{**plain, **given, **folder})


def check_settings(settings: Mapping[str, Any], recorded: Mapping[str, Any], source: Path) -> None:
    """Check a settings.yaml, which may have been edited, by the settings `recorded` in a state of the run, if any.

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
        is_unknown = recorded and key not in recorded  # another version may have recorded it
        if value != _plain(fields[key].default) if key in fields else is_unknown:
            values[key] = value
    checked(TrainOptions, values, f"{source}: `{{}}`".format)
    now, then = curve_settings(settings), curve_settings(yaml.safe_load(yaml.safe_dump(recorded)))  # without tuples
    for key, value in then.items():
        _refuse_change(source.parent, f"`{key}` of {source}", now.get(key), value)


def curve_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the curve depends on; hyperparameters and model settings as `hyperparameters: lr0`."""
    values = {name: settings[name] for name in CURVE_FLAGS if name in settings}
    for part in SETTINGS_PARTS:
        value = settings.get(part, {})
        values |= {f"{part}: {key}": each for key, each in value.items()} if isinstance(value, dict) else {part: value}
    return values


def _refuse_change(run: Path, setting: str, now: object, saved: object) -> None:
    if now != saved:
        raise UserError(
            f"{setting} is {quoted(now)}, and {run} was started with {quoted(saved)}, which its "
            f"curve depends on; restore it, or start a new run from {run / 'weights' / 'last.pt'}"
        )


def _plain(value: object) -> object:
    """Return the value of a flag as a YAML file holds it."""
    return list(value) if isinstance(value, tuple) else value
