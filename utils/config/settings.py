"""The settings of a training run: flags over defaults, and the hyperparameters of its task.

Made by utils/checkpoint/resume.py, completed by train.py when the task is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from utils.config.hyperparameters import AUTO, OVERRIDE_PREFIX, Choice, Recipe, from_mapping, read_hyperparameters
from utils.config.options import TrainOptions
from utils.config.parser import defaults_of_hyp, refuse_flags, with_defaults
from utils.config.resumed import changes
from utils.config.select import select
from utils.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class Settings:
    """The flags of train.py over their defaults, and the hyperparameters of the task.

    Attributes:
        given: flags of the command line, or arguments of a call from Python, by name
        saved: content of the resumed run's settings.yaml, None for a new run
        is_fixed: whether the options come from a resumed run and already include the defaults of task and data set
        hyp: hyperparameters of the task
        origin: licence and origin of the weights, which are stored in every file made from them
        choice: line for the console about the file that --hyp auto chose and the reason; '' if the file was named
    """

    options: TrainOptions
    given: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] | None = None
    is_fixed: bool = False
    hyp: Recipe = field(default_factory=Recipe)
    origin: Mapping[str, Any] = field(default_factory=dict)
    choice: str = ""

    @property
    def accumulation(self) -> int:
        """Number of batches per optimizer step."""
        return self.hyp.accumulation(max(self.options.batch_size, 1))

    @property
    def changes(self) -> list[str]:
        """A message for each flag that differs from the settings of the resumed run."""
        return changes(self.saved, self.options) if self.saved else []

    def refuse(self, concerns: Collection[str], model: str) -> None:
        """Raise `UserError` for a flag of a new run that does not apply to its model, as `refuse_flags` does."""
        if not self.saved:
            refuse_flags(type(self.options), self.given, concerns, model)

    def refuse_unread(self, unread: Collection[str], model: str) -> None:
        """Raise `UserError` for a hyperparameter on the command line that a new run does not read.

        Args:
            unread: hyperparameters that are not read, see `Task.unread`
            model: description of the model that does not read them
        """
        overrides = {} if self.saved else self.given.get("overrides", {})
        for key in overrides:
            if key in unread:
                flag = f"{OVERRIDE_PREFIX}{key}"
                raise UserError(f"{flag} has no effect on {model}, which does not read it; leave it out")

    def resolve(
        self, recipe: type[Recipe], *defaults: Mapping[str, Any], choose: Callable[[], Choice] | None = None
    ) -> Settings:
        """Return the settings with the hyperparameters of a task, and with every flag that is not given resolved.

        Such a flag is what the hyperparameters ask for, else a default of their file, else the last of `defaults` that
        has it, else its own default. Raises `UserError` for a wrong hyperparameter file or flag.

        Args:
            choose: chooses the file for --hyp auto
        """
        if self.saved:
            hyp = from_mapping(recipe, self.saved["hyperparameters"], f"settings.yaml of {self.options.resume}")
            return dataclasses.replace(self, hyp=hyp)
        if self.is_fixed:
            hyp = read_hyperparameters(self.options.hyp, recipe, self.options.overrides)
            return dataclasses.replace(self, hyp=hyp)
        layers = {key: value for mapping in defaults for key, value in mapping.items()}
        name, choice = {"hyp": self.options.hyp, **layers, **self.given}["hyp"], None
        if name == AUTO and choose:
            choice = choose()
            name = choice.name
        hyp, wishes = read_hyperparameters(name, recipe, self.options.overrides), defaults_of_hyp(name)
        layers |= wishes
        layers |= hyp.flags({"epochs": self.options.epochs, **layers, **self.given}["epochs"])
        options = dataclasses.replace(with_defaults(self.options, self.given, layers), hyp=name)
        line = choice_message(choice, wishes, self.given) if choice else ""
        return dataclasses.replace(self, hyp=hyp, options=options, choice=line)

    def value(self, flag: str, *defaults: Mapping[str, Any]) -> Any:
        """Return the value that `resolve` gives a flag that no hyperparameter file sets."""
        for mapping in () if self.is_fixed or flag in self.given else reversed(defaults):
            if flag in mapping:
                return mapping[flag]
        return getattr(self.options, flag)

    def names(self, flag: str, defaults: Mapping[str, Any]) -> bool:
        """Return whether the command line, `defaults` or the settings of a resumed run give a flag's value."""
        return self.is_fixed or flag in self.given or flag in defaults

    def for_weights(self, known: float | None) -> tuple[Settings, list[str]]:
        """Return the settings after `Recipe.for_weights`, and its messages; a resumed run's are unchanged."""
        hyp, messages = (self.hyp, []) if self.saved else self.hyp.for_weights(known)
        return dataclasses.replace(self, hyp=hyp), messages

    def with_options(self, **values: Any) -> Settings:
        """Return the settings with other values of some flags."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **values))

    def select(self, kind: type[T], **values: Any) -> T:
        """Return the options of a component: the flags with the names of its fields, overridden by `values`."""
        return select(kind, self.options, **values)

    def flags(self) -> dict[str, Any]:
        """Return all flags by name."""
        return dict(vars(self.options))

    def content(self, model_yaml: Mapping[str, Any], imgsz: int) -> dict[str, Any]:
        """Return the content of settings.yaml.

        Args:
            imgsz: the model's image size in pixels, a multiple of its stride
        """
        parts = {"hyperparameters": vars(self.hyp), "model": model_yaml, **self.origin}
        return {**self.flags(), "imgsz": imgsz, **parts}


def choice_message(choice: Choice, wishes: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the line about the file that --hyp auto chose.

    Args:
        wishes: defaults of flags in the file; the line names the `given` flags that replace one
    """
    line = f"hyperparameters: --hyp {choice.name}, because {choice.reason}"
    for flag, value in wishes.items():
        if flag in given and given[flag] != value:
            line += f"; your --{flag.replace('_', '-')} {given[flag]} replaces its {value}"
    return line + (f"; --hyp {choice.yolov5} has YOLOv5's values" if choice.yolov5 not in ("", choice.name) else "")
