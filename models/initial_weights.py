"""Read the model YAML and the weights that training starts from. Called by train.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.image_size import rounding
from models.layer_registry import add_layers
from models.layers import skip_norms
from models.parts import layers_of, parameters_of
from models.tasks import TASKS, TaskEntry, add_tasks, task_of
from models.tasks.contract import Model, Task
from models.weights.content import Weights
from models.weights.licence import YOURS, Origin
from models.weights.reader import read_weights
from models.weights.releases import TORCHVISION_DEFAULT, find_weights, torchvision_weights
from models.weights.transfer import known_share, transfer
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import Recipe
from utils.console import log
from utils.errors import UserError, plural
from utils.files import find_file, read_yaml


@dataclass(frozen=True)
class StartingPoint:
    """The model that a run trains, and its initial weights."""

    entry: TaskEntry
    yaml: dict[str, Any]
    source: str  # value of the flag that named the model, for messages
    from_yaml: bool  # whether --cfg named the model; otherwise a weight file contains it
    weights: Weights | None = None
    weights_name: str = ""
    message: str = ""  # says why these weights are used although no flag names them
    weights_file: Path | None = None

    def with_weights(self, name: str) -> StartingPoint:
        """Load --weights if the model comes from --cfg; an empty name loads nothing. Raises `UserError`."""
        if not self.from_yaml or not name:
            return self
        file = find_weights(name, self.yaml, self.source)
        return replace(self, weights=read_weights(file), weights_name=name, weights_file=file)

    @property
    def origin(self) -> Origin:
        """The licence of the initial weights, and the files that they began from."""
        return self.weights.origin if self.weights else Origin(YOURS)

    def with_default_weights(self, agreed: Callable[[bool], bool]) -> StartingPoint:
        """Load the weights that torchvision recommends for the model, if the main process can get them.

        Raises `UserError` if only this machine cannot.

        Args:
            agreed: returns the main process's value on every process
        """
        if "architecture" not in self.yaml:
            return self.from_scratch("no --weights are given")
        file, weights, problem = None, None, None
        try:
            file = torchvision_weights(self.yaml, self.source)
            weights = read_weights(file)
        except UserError as error:
            problem = error
        if not agreed(problem is None):
            return self.from_scratch("torchvision's weights cannot be downloaded")
        if problem:
            raise problem
        message = "starting from torchvision's weights; --weights '' trains from scratch"
        return replace(self, weights=weights, weights_name=TORCHVISION_DEFAULT, weights_file=file, message=message)

    def from_scratch(self, reason: str) -> StartingPoint:
        """Return the starting point without weights, with a message that says why."""
        return replace(
            self, weights=None, weights_name="", weights_file=None, message=f"training from scratch: {reason}"
        )

    def known_share(self, model: Model, task: Task) -> float | None:
        """Return the share of the task's classes that the weights know; None if the weights do not fit this model."""
        return known_share(model, self.weights, task.names) if self.weights else None


def starting_point(
    options: TrainOptions, saved_yaml: Mapping[str, Any] | None, given: Collection[str]
) -> StartingPoint:
    """Read the model that --cfg names, else the one in --weights.

    If --cfg is given, `with_weights` reads the weights later. Raises `UserError`.

    Args:
        saved_yaml: model YAML of the run that is resumed; None for a new run
        given: names of the flags on the command line; other values may come from the resumed run's settings
    """
    if options.layers:
        add_layers(options.layers, "layers" in given)
    if options.task_file:
        add_tasks(options.task_file, "task_file" in given)
    source, content, file = options.cfg or options.weights, None, None
    if saved_yaml is not None:
        yaml = dict(saved_yaml)
    elif options.cfg:
        yaml = read_yaml(find_file(options.cfg, "model", ["models", "models/hub"]))
    else:
        file = find_weights(options.weights) if options.weights else None
        content = read_weights(file) if file else None
        if content is None or content.model is None:
            raise UserError("no model is given; name one with --cfg, such as --cfg yolov5n.yaml")
        yaml = content.task_yaml
    entry = TASKS[task_of(yaml, source)]
    name = options.weights if content else ""
    return StartingPoint(entry, yaml, source, bool(options.cfg), content, name, weights_file=file)


def load_and_freeze(model: Model, start: StartingPoint, task: Task, options: TrainOptions) -> None:
    """Load the tensors that fit `model` and freeze layers; log the model, the tensors and the layers.

    Raises `UserError` if no tensor fits, or if a layer's number is out of range.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = sum(not any(module.children()) for module in model.modules())
    work = gflops(model, model.imgsz)
    size = f", {work:.3g} GFLOPs at {model.imgsz} px" if work else ""
    log(f"{start.source}: {layers} layers, {parameters:,} parameters{size}")
    log(*rounding([options.imgsz], [model.imgsz], model.stride), start.message)
    if start.weights:
        _load(model, start, start.weights, task)
        log(f"licence of these weights: {start.origin}")
    numbers = [word for word in options.freeze if isinstance(word, int)]
    if len(numbers) < len(options.freeze):
        log(freeze_parts(model, [str(word) for word in options.freeze]))
    elif layers_frozen := freeze(model, numbers):
        log(f"layers {', '.join(map(str, layers_frozen))} are frozen")


def _load(model: Model, start: StartingPoint, weights: Weights, task: Task) -> None:
    name = start.weights_name
    loaded, total, misfits = transfer(model, weights.state, task.fresh_tensors(start.from_yaml))
    if not loaded:
        raise UserError(
            f"no tensor of {name} fits the model; leave out --cfg to train the model in that file, or give "
            "--weights '' to start from scratch"
        )
    head = task.keep_head(model, weights.state, weights.names)
    if weights.task and TASKS.get(weights.task) is not start.entry:
        log(f"warning: {name} is a model for another task, '{weights.task}'")
    warning = "" if loaded > total / 2 else "warning: these are weights of another model: only "
    if misfits and not head:
        tensor, of_file, of_model = misfits[0]
        classes = len(weights.names) or (of_file[0] if of_model[:1] == (len(task.names),) else len(task.names))
        if classes != len(task.names) and not warning:
            head = f"not its head: it is for {plural(classes, 'class')}"
        else:
            shapes = ("x".join(map(str, shape)) for shape in (of_file, of_model))
            head = f"not {len(misfits)} with other shapes, such as {tensor} ({', here '.join(shapes)})"
    log(f"{warning}{loaded} of {total} tensors taken from {name}{', ' * bool(head)}{head}")
    log(*weights.class_warnings(task.names, name))


def gflops(model: nn.Module, imgsz: int) -> float:
    """Return the billions of floating-point operations for one image (3, imgsz, imgsz); a multiply-add counts as two.

    The model is traced on the "meta" device: nothing is computed. Returns 0 if a layer cannot be traced.
    """
    try:
        replaced = {id(tensor): tensor.to("meta") for tensor in (*model.parameters(), *model.buffers())}
        traced = copy.deepcopy(model, replaced).eval()  # no weight is copied
        skip_norms(traced)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            traced(torch.empty(1, 3, imgsz, imgsz, device="meta"))
    except Exception:  # a user's layer can fail anywhere
        return 0.0
    return counter.get_total_flops() / 1e9


def freeze(model: nn.Module, layers: Sequence[int]) -> list[int]:
    """Freeze layers and return their numbers: (N,) means the first N, (-N,) all but the last N, several these layers.

    Layers are numbered as in `layers_of`; the layers of an auxiliary branch, after the head, are not among the last N.
    Raises `UserError` if a number is out of range.
    """
    layered, _, rows, main = layers_of(model)
    count = len(rows)
    if len(layers) > 1:
        chosen = list(layers)
    elif layers[0] >= 0:
        chosen = list(range(min(layers[0], count + 1)))
    else:
        chosen = [*range(main + layers[0]), *range(main, count)] if -layers[0] <= main else list(layers)
        for parameter in layered.parameters(recurse=False):  # outside of layers, such as a transformer's class token
            parameter.requires_grad_(False)
    for number in chosen:
        if not 0 <= number < count:
            raise UserError(
                f"--freeze {' '.join(map(str, layers))}: the model has layers 0 to {count - 1}, but no layer {number}"
            )
        rows[number].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--freeze {' '.join(map(str, layers))} freezes all layers, 0 to {count - 1}; freeze fewer")
    return chosen


def freeze_parts(model: nn.Module, words: Sequence[str]) -> str:
    """Freeze the parameters that the words name, see `parameters_of`; return a message that counts them.

    Raises `UserError` if a word names no parameter, or if all parameters are frozen.
    """
    frozen = {name for word in words for name in parameters_of(model, word, "--freeze")}
    parameters = dict(model.named_parameters())
    if len(frozen) == len(parameters):
        raise UserError(f"--freeze {' '.join(words)} freezes all parameters; freeze fewer")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return f"{len(frozen)} of {len(parameters)} parameters are frozen: {', '.join(words)}"


def recipe_of(settings: Mapping[str, Any], given: Mapping[str, Any]) -> type[Recipe]:
    """Return the class of a run's hyperparameters.

    Raises `UserError` if the task does not exist, or if its file may not be run.

    Args:
        settings: content of the run's settings.yaml
        given: values of flags, by name, that replace settings
    """
    if task_file := {**settings, **given}.get("task_file"):
        add_tasks(task_file, "task_file" in given)
    return TASKS[task_of(settings["model"], "the model")].load().recipe
