"""What a training starts from: the YAML of a model, and the weights that are loaded into it. Called by train.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.flops import gflops
from models.layer_registry import add_layers
from models.tasks import TASKS, TaskEntry, task_of
from models.tasks.contract import Model, Task
from models.weights.reader import Weights, read_weights
from models.weights.releases import find_weights
from models.weights.transfer import transfer
from utils.config.hyperparameters import Recipe
from utils.errors import UserError
from utils.files import find_file, read_yaml
from utils.training.optimizer import freeze

MAX_NAMED_TENSORS = 5  # in a message


@dataclass(frozen=True)
class ModelOptions:
    """The flags that say which model is trained, and from which weights."""

    cfg: str
    weights: str
    layers: str
    freeze: tuple[int, ...]


@dataclass(frozen=True)
class StartingPoint:
    """The model that a run trains, and the weights that it starts from."""

    entry: TaskEntry
    yaml: dict[str, Any]
    source: str  # the flag's value that named the model, for messages
    from_yaml: bool  # given by --cfg, not found in a weight file
    weights: Weights | None = None
    weights_name: str = ""

    def with_weights(self, name: str) -> StartingPoint:
        """Read the weight file that --weights names beside --cfg; '' is none. Raises `UserError`."""
        if not self.from_yaml or not name:
            return self
        return replace(self, weights=read_weights(self.find(name)), weights_name=name)

    def find(self, weights: str) -> Path:
        """Return the weight file that --weights names for this model, downloaded if it has to be."""
        return find_weights(weights, self.yaml, self.source if self.from_yaml else "the model YAML")


def starting_point(options: ModelOptions, saved_yaml: Mapping[str, Any] | None = None) -> StartingPoint:
    """Read the model that --cfg names, else the one inside --weights; `saved_yaml` is that of a run that is resumed.

    A file that --weights names beside --cfg is not read here: `with_weights` does it. Raises `UserError`.
    """
    if options.layers:
        add_layers(options.layers)
    source, content = options.cfg or options.weights, None
    if saved_yaml is not None:
        yaml = dict(saved_yaml)
    elif options.cfg:
        yaml = read_yaml(find_file(options.cfg, "model", ["models", "models/hub"]))
    else:
        content = read_weights(find_weights(options.weights)) if options.weights else None
        if content is None or content.model is None:
            raise UserError("no model is given; name one with --cfg, such as --cfg yolov5n.yaml")
        yaml = {"task": content.task, **content.model}
    entry = TASKS[task_of(yaml, source)]
    return StartingPoint(entry, yaml, source, bool(options.cfg), content, options.weights if content else "")


def load_and_freeze(model: Model, start: StartingPoint, task: Task, options: ModelOptions) -> list[str]:
    """Load the tensors of the weights that fit `model` and freeze layers; return messages about the model and both.

    Raises `UserError` if no tensor fits, or for a layer that the model does not have.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = sum(not any(module.children()) for module in model.modules())
    work = gflops(model, model.imgsz)
    size = f", {work:.3g} GFLOPs at {model.imgsz} px" if work else ""
    messages = [f"{start.source}: {layers} layers, {parameters:,} parameters{size}"]
    if start.weights:
        messages += _load(model, start, start.weights, task)
    if numbers := freeze(model, options.freeze):
        messages.append(f"layers {', '.join(map(str, numbers))} are frozen")
    return messages


def _load(model: Model, start: StartingPoint, weights: Weights, task: Task) -> list[str]:
    name = start.weights_name
    loaded, total, misfits = transfer(model, weights.state, task.fresh_tensors(start.from_yaml))
    if not loaded:
        raise UserError(
            f"no tensor of {name} fits the model; leave --cfg out to train the model that is in the "
            "file, or give --weights '' to start from scratch"
        )
    messages = []
    if weights.task and TASKS.get(weights.task) is not start.entry:
        messages.append(f"warning: {name} is a model for another task, '{weights.task}'")
    warning = "" if loaded > total / 2 else "warning: these are weights of another model: only "
    messages.append(f"{warning}{loaded} of {total} tensors taken from {name}")
    if misfits:
        dropped = [f"{tensor} ({_shape(of_file)}, here {_shape(of_model)})" for tensor, of_file, of_model in misfits]
        more = f" and {len(dropped) - MAX_NAMED_TENSORS} more" if len(dropped) > MAX_NAMED_TENSORS else ""
        messages.append(f"dropped, for they are of another shape: {', '.join(dropped[:MAX_NAMED_TENSORS])}{more}")
    return messages


def _shape(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def recipe_of(yaml: Mapping[str, Any]) -> type[Recipe]:
    """Return the kind of hyperparameters that goes with a model's YAML."""
    return TASKS[task_of(yaml, "the model")].load().recipe
