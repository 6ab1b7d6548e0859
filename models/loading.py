"""Load"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.layers import skip_norms
from models.tasks import TASKS, TaskEntry, add_tasks, task_of
from models.tasks.contract import Model, Task
from models.weights import (
    TORCHVISION_DEFAULT,
    YOURS,
    Origin,
    Weights,
    find_weights,
    read_weights,
    same_names,
    torchvision_weights,
)
from models.yolo import add_layers, whole_strides
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import Recipe
from utils.config.values import IMGSZ
from utils.console import log
from utils.errors import UserError, nearest, plural, shown
from utils.files import find_file, read_yaml


def rounding(requested: Sequence[int], taken: Sequence[int], stride: int) -> list[str]:
    """Return a message if --imgsz was rounded.

    Args:
        requested: one side, or height and width, in pixels, as given
        taken: one side, or height and width, in pixels, after rounding
    """
    if (requested[0], requested[-1]) == (taken[0], taken[-1]):
        return []
    return [f"--imgsz {in_words(requested)} is rounded up to {in_words(taken)}, whole strides of {stride} pixels"]


def sides_of(imgsz: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sides that --imgsz gives: one side, height and width, or none for 0 or empty, the default.

    Raises `UserError` for any other value.
    """
    sides = (imgsz,) if isinstance(imgsz, int) else tuple(imgsz)
    if sides == (0,):
        return ()
    if len(sides) > 2 or not all(side in IMGSZ for side in sides):
        raise UserError(f"--imgsz {' '.join(map(str, sides))}: give one number of pixels, or height and width")
    return sides


def in_words(sides: Sequence[int]) -> str:
    """Format one side, or height and width, as --imgsz takes them."""
    return " ".join(map(str, sides if len(set(sides)) > 1 else sides[:1]))


@dataclass(frozen=True)
class ImageSize:
    """The size that images are fitted into.

    Attributes:
        sides: height and width in pixels
        is_fixed: whether an exported file requires exactly this size
        messages: lines for the console that say how the size was chosen
    """

    sides: tuple[int, int]
    is_fixed: bool = False
    messages: tuple[str, ...] = ()

    def rounded(self, stride: int) -> ImageSize:
        """Return the size in whole strides, with a message if it differs. A fixed size is not rounded."""
        if self.is_fixed:
            return self
        sides = whole_strides(self.sides[0], stride), whole_strides(self.sides[1], stride)
        return replace(self, sides=sides, messages=(*self.messages, *rounding(self.sides, sides, stride)))

    def square(self) -> int:
        """Return the side of the square for both sides. Raises `UserError` if they are fixed and differ."""
        height, width = self.sides
        if self.is_fixed and height != width:
            raise UserError(
                f"--weights takes only images of {height}x{width}, and val.py makes square ones; "
                "export it with --dynamic, or with one number for --imgsz"
            )
        return max(self.sides)


class Layers(NamedTuple):
    """The numbered layers of a model: the children of `model.model`, or of a model without that attribute."""

    parent: nn.Module
    names: list[str]  # prefixes of the parameters' names, such as `model.0`
    modules: list[nn.Module]
    main: int  # number of layers up to and with the head; an auxiliary branch follows it


def layers_of(model: nn.Module) -> Layers:
    """Return the numbered layers of a model."""
    children = dict(model.named_children())
    parent, prefix = (children["model"], "model.") if "model" in children else (model, "")
    names, modules = [prefix + name for name, _ in parent.named_children()], list(parent.children())
    head = getattr(model, "head", None)
    main = next((number for number, layer in enumerate(modules, 1) if layer is head), len(modules))
    return Layers(parent, names, modules, main)


def parameters_of(model: nn.Module, word: str, flag: str) -> set[str]:
    """Return the names of the parameters that a word of a flag selects. Raises `UserError` if it selects none.

    Args:
        word: `backbone` (the rows of that list in the model YAML; without one the module of that name, or all but the
            last layer), `head` (the rest), the number of a layer, or a pattern such as `model.2`, `*.bn` or `*.bias`,
            which selects the parameters whose names it matches and all parameters of the modules whose names it matches
        flag: name of the flag in errors
    """
    parameters = {name for name, _ in model.named_parameters()}
    layers = layers_of(model)
    if word in ("backbone", "head"):
        backbone = _backbone(model, parameters, layers)
        chosen = backbone if word == "backbone" else parameters - backbone
    else:
        pattern = layers.names[int(word)] if word.isdecimal() and int(word) < len(layers.names) else word
        modules = tuple(f"{name}." for name, _ in model.named_modules() if name and fnmatchcase(name, pattern))
        chosen = {name for name in parameters if fnmatchcase(name, pattern) or name.startswith(modules)}
    if not chosen:
        known = sorted({name.rpartition(".")[0] for name in parameters} | parameters)
        some = [name for name, _ in model.named_parameters()][:1]
        raise UserError(
            f"{flag} {shown(word)} matches no layer or parameter of the model{nearest(word, known)}; give "
            f"backbone, head, the number of a layer, or a name or pattern such as {', '.join([*some, '*.bias'])}"
        )
    return chosen


def _backbone(model: nn.Module, parameters: set[str], layers: Layers) -> set[str]:
    rows = getattr(model, "yaml", {}).get("backbone")
    named = sorted((name for name, _ in model.named_modules() if name.split(".")[-1] == "backbone"), key=len)
    if isinstance(rows, list):
        prefixes = layers.names[: len(rows)]
    elif named:
        prefixes = named[:1]
    else:
        head = f"{layers.names[layers.main - 1]}."
        return {name for name in parameters if not name.startswith(head)}
    return {name for name in parameters if name.startswith(tuple(f"{prefix}." for prefix in prefixes))}


def rate_factors(model: nn.Module, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factors of parameters by name, from the factors of parts.

    A parameter in several parts has the last part's factor; a parameter in none is not in the result. Raises
    `UserError` if a part matches no parameter.
    """
    return {name: factor for word, factor in parts.items() for name in parameters_of(model, word, "lr_factor:")}


# Patterns in tensor names of torchvision's older DenseNet and ViT files, and their replacements.
TORCHVISION_RENAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


class Transfer(NamedTuple):
    """The result of `transfer`."""

    loaded: int  # number of loaded tensors
    total: int  # number of tensors in the model
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, shape in the file, shape in the model


def transfer(model: nn.Module, state: Mapping[str, Tensor], exclude: tuple[str, ...] = ()) -> Transfer:
    """Load the tensors whose names and shapes fit the model, except for names that contain a part in `exclude`."""
    model_state = model.state_dict()
    state = {name if name in model_state else _current_name(name): tensor for name, tensor in state.items()}
    shared = [name for name in state if name in model_state and not any(part in name for part in exclude)]
    fitting = type(model_state)((name, state[name]) for name in shared if model_state[name].shape == state[name].shape)
    fitting._metadata = model_state._metadata  # type: ignore[attr-defined]  # the versions of layers, which some layers check
    misfits = [
        (name, tuple(state[name].shape), tuple(model_state[name].shape)) for name in shared if name not in fitting
    ]
    model.load_state_dict(fitting, strict=False)
    return Transfer(len(fitting), len(model_state), misfits)


def _current_name(name: str) -> str:
    """Return the current name of a tensor in an older torchvision file."""
    for old, new in TORCHVISION_RENAMES:
        name = old.sub(new, name)
    return name


def known_share(model: Model, weights: Weights, names: Mapping[int, str]) -> float | None:
    """Return the share of the classes that a weight file knows by name; None if the file is of another model.

    A file is of another model if it has at most half of the tensors of `model`. The share is halved if the file lacks
    part of the model's head, as a detector's file lacks the masks.
    """
    state = model.state_dict()
    fitting = sum(name in weights.state and weights.state[name].shape == tensor.shape for name, tensor in state.items())
    if fitting <= len(state) / 2:
        return None
    share = len(same_names(weights.names, names)) / len(names)
    return share if all(name in weights.state for name in head_tensors(model)) else share / 2


def head_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors of a model's head by their names in the model; {} if it has none, as in torchvision."""
    head = getattr(model, "head", None)
    return head.state_dict(prefix=f"{head_prefix(model)}.") if isinstance(head, nn.Module) else {}


def head_prefix(model: Model) -> str:
    """Return the name of the head among a model's modules; the model must have one."""
    return next(name for name, module in model.named_modules() if module is model.head)


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
