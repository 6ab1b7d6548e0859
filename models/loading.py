"""The model that training starts from: its YAML and weights, transfer, frozen layers, and image size.

Called by train.py; models/ensemble.py shares the transfer and the image size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.layers import without_batchnorm
from models.tasks import TASKS, TaskEntry, add_tasks, task_name
from models.tasks.contract import Model, Task
from models.weights import (
    LICENCES,
    TORCHVISION_DEFAULT,
    YOURS,
    Origin,
    Weights,
    find_weights,
    read_weights,
    refuse_unread_family,
    same_names,
)
from models.yolo import MODEL_FOLDERS, YoloModel, add_layers, whole_strides
from utils.batch import PixelFormat
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import Recipe
from utils.console import log
from utils.errors import UserError, first_line, nearest, plural, quoted
from utils.files import find_file, read_yaml

# The image size


def image_sides(imgsz: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sides that --imgsz gives: one, height and width, or none for 0. Raises `UserError` for more."""
    sides = tuple(filter(None, (imgsz,) if isinstance(imgsz, int) else imgsz))
    if len(sides) > 2:
        raise UserError(f"--imgsz {' '.join(map(str, sides))}: give one number of pixels, or height and width")
    return sides


def format_sides(sides: Sequence[int]) -> str:
    """Format one side, or height and width, as --imgsz takes them."""
    return " ".join(map(str, sides if len(set(sides)) > 1 else sides[:1]))


def log_rounding(asked: Sequence[int], sides: Sequence[int], stride: int) -> None:
    """Log that --imgsz was rounded to `sides`, if it was. Each is one side, or height and width, in pixels."""
    if (asked[0], asked[-1]) != (sides[0], sides[-1]):
        log(f"--imgsz {format_sides(asked)} is rounded up to {format_sides(sides)}, whole strides of {stride} pixels")


class ImageSize(NamedTuple):
    """The size that images are fitted into: height and width in pixels, and whether a file requires just this size."""

    sides: tuple[int, int]
    is_fixed: bool = False

    def rounded(self, stride: int) -> ImageSize:
        """Return the size in whole strides. A fixed size is not rounded."""
        height, width = self.sides
        return self if self.is_fixed else ImageSize((whole_strides(height, stride), whole_strides(width, stride)))


def count_gflops(model: nn.Module, imgsz: int, source: str = "the model") -> float:
    """Return the billions of floating-point operations for one square image; a multiply-add counts as two.

    The model is traced on the "meta" device. If a layer cannot be traced, the model runs on a black image and the
    result is 0. Raises `UserError`, which names `source`, if it does not take such an image.
    """
    dtype = next(model.parameters(), torch.zeros(0)).dtype
    shape = 1, PixelFormat.of_model(getattr(model, "yaml", {})).channels, imgsz, imgsz
    with suppress(Exception), torch.no_grad():  # a user's layer can fail anywhere
        replaced = {id(tensor): tensor.to("meta") for tensor in (*model.parameters(), *model.buffers())}
        traced = without_batchnorm(copy.deepcopy(model, replaced).eval())  # no weight is copied
        with FlopCounterMode(display=False) as counter:
            traced(torch.empty(shape, dtype=dtype, device="meta"))
        return counter.get_total_flops() / 1e9
    try:
        with torch.no_grad():
            copy.deepcopy(model).eval()(torch.zeros(shape, dtype=dtype))
    except Exception as error:
        if "cuda" not in str(error).lower():  # of a layer that runs on a GPU only
            reason = first_line(error)
            raise UserError(f"{source} does not take images of {imgsz} pixels ({reason}); change --imgsz") from error
    return 0.0


# Layers and parameters by name, for --freeze and `lr_factor`


def layer_names(model: nn.Module) -> list[str]:
    """Return the names of the numbered layers of a model, such as `model.0`."""
    parent = "model" if "model" in dict(model.named_children()) else ""
    return [f"{parent}.{name}".strip(".") for name, _ in model.get_submodule(parent).named_children()]


def head_prefix(model: nn.Module) -> str:
    """Return the name of the head among a model's modules; if none is known, of the last layer."""
    head = getattr(model, "head", None)
    return next((name for name, module in model.named_modules() if module is head), layer_names(model)[-1])


def find_parameters(model: nn.Module, word: str, flag: str) -> set[str]:
    """Return the names of the parameters that a word of a flag selects. Raises `UserError` if it names no layer.

    A word is `backbone` (the rows of that list in the model YAML; without one the modules of that name, or as -1),
    `head` (the rest), -1 (all but the head), the number of a layer, or a pattern such as `model.2`, `*.bn` or `*.bias`
    for parameters, and for modules with all their parameters.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # names of shared ones too
    layers, rows = layer_names(model), getattr(model, "yaml", {}).get("backbone")
    if word == "head":
        return parameters - find_parameters(model, "backbone", flag)
    is_number = word.isdecimal() and int(word) < len(layers)
    if is_number:
        patterns = [layers[int(word)]]
    elif word == "backbone" and isinstance(rows, list):
        patterns = layers[: len(rows)]
    else:
        patterns = ["*backbone" if word == "backbone" else word]
    patterns += [f"{pattern}.*" for pattern in patterns]  # parameters of modules
    selected = {name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not selected and word in ("backbone", "-1"):
        return {name for name in parameters if not name.startswith(f"{head_prefix(model)}.")}
    if not selected and not is_number:
        raise UserError(
            f"{flag} {quoted(word)} matches no layer or parameter{nearest(word, [*parameters, *layers])}; "
            f"give backbone, head, a number from -1 to {len(layers) - 1}, or a pattern such as {layers[0]} or *.bias"
        )
    return selected


def rate_factors(model: nn.Module, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factors of parameters by name, from factors by words as for `find_parameters`.

    The last word that selects a parameter decides. Raises `UserError` if a word selects none.
    """
    return {name: factor for word, factor in factors.items() for name in find_parameters(model, word, "lr_factor:")}


def freeze(model: nn.Module, words: Sequence[int | str]) -> None:
    """Freeze the parameters of layers, and log how many. Raises `UserError` for an unknown layer, or if all are frozen.

    A single number N stands for the first N layers, -N for all but the last N; else see `find_parameters`.
    """
    parameters, layers = dict(model.named_parameters(remove_duplicate=False)), len(layer_names(model))
    flag, count = f"--freeze {' '.join(map(str, words))}", words[0] if len(words) == 1 else None
    if isinstance(count, int) and -layers < count <= layers and count != -1:  # -1 is a word: all but the head
        words = range(count if count >= 0 else layers + count)
    frozen = {name for word in words for name in find_parameters(model, str(word), "--freeze")}
    if frozen == {*parameters}:
        raise UserError(f"{flag} freezes all parameters; freeze fewer")
    for name in frozen:
        parameters[name].requires_grad_(False)
    log(f"{flag}: {len(frozen)} of {len(parameters)} parameters are frozen" if frozen else "")


# Transfer


def transfer(model: nn.Module, state: Mapping[str, Tensor], exclude: Sequence[str] = ()) -> tuple[int, int, list[str]]:
    """Load the tensors whose names and shapes fit the model, except for names that contain a part in `exclude`.

    Returns the number of loaded tensors, of the model's tensors, and the names of those that have another shape.
    """
    tensors = model.state_dict()
    named = [name for name in tensors if name in state and not any(part in name for part in exclude)]
    fitting = {name: state[name] for name in named if state[name].shape == tensors[name].shape}
    model.load_state_dict(fitting, strict=False)
    return len(fitting), len(tensors), [name for name in named if name not in fitting]


def head_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors of a model's head by their names in the model; {} if it has none, as in torchvision."""
    head = getattr(model, "head", None)
    return head.state_dict(prefix=f"{head_prefix(model)}.") if isinstance(head, nn.Module) else {}


# The start of training


@dataclass(frozen=True)
class StartingPoint:
    """The model that a run trains, and its initial weights."""

    entry: TaskEntry
    yaml: dict[str, Any]
    source: str  # value of the flag that named the model, for messages
    from_yaml: bool  # whether --cfg named the model; otherwise a weight file contains it
    weights: Weights | None = None
    weights_name: str = ""
    weights_file: Path | None = None

    def with_weights(self, name: str) -> StartingPoint:
        """Load --weights if the model comes from --cfg; an empty name loads nothing. Raises `UserError`."""
        if not self.from_yaml or not name:
            return self
        file = find_weights(name, self.yaml, self.source)
        licence = LICENCES["torchvision"] if name == TORCHVISION_DEFAULT else ""
        return self.with_content(read_weights(file, licence), name, file)

    def with_content(self, weights: Weights, name: str, file: Path) -> StartingPoint:
        """Start from the content of a weight file, whose tensors get the names that the task's models have."""
        weights = replace(weights, state=dict(self.entry.load().renamed(weights.state)))
        return replace(self, weights=weights, weights_name=name, weights_file=file)

    @property
    def origin(self) -> Origin:
        """The licence of the initial weights, and the files that they began from."""
        return self.weights.origin if self.weights else Origin(YOURS)

    def default_weights(self, from_main: Callable[[bool], bool]) -> str:
        """Return DEFAULT if the main process can get the weights that torchvision recommends for the model, else ''.

        `from_main` returns the main process's value on every process.
        """
        if "architecture" not in self.yaml:
            log("training from scratch: no --weights are given")
            return ""
        found = False
        with suppress(UserError):
            found = bool(find_weights(TORCHVISION_DEFAULT, self.yaml, self.source))
        if not from_main(found):
            log("training from scratch: torchvision's weights cannot be downloaded")
            return ""
        log("starting from torchvision's weights; --weights '' trains from scratch")
        return TORCHVISION_DEFAULT

    def pretrained_share(self, model: Model, task: Task) -> float | None:
        """Return the share of the task's classes that the weights know by name; None if at most half the tensors fit.

        The share is halved if they lack part of the model's head, as a detector's file lacks the masks.
        """
        if not (file := self.weights):
            return None
        tensors = model.state_dict()
        fitting = sum(name in file.state and file.state[name].shape == x.shape for name, x in tensors.items())
        if fitting <= len(tensors) / 2:
            return None
        known = len(same_names(file.names, task.names)) / len(task.names)
        return known if all(name in file.state for name in head_tensors(model)) else known / 2


def add_user_code(layers: str, task_file: str, flags: Collection[str] = ("layers", "task_file")) -> None:
    """Add the layers and tasks of --layers and --task-file; not in `flags`, the settings of a resumed run name them."""
    if layers:
        add_layers(layers, "layers" in flags)
    if task_file:
        add_tasks(task_file, "task_file" in flags)


def starting_point(cfg: str, weights: str, saved_yaml: Mapping[str, Any] | None) -> StartingPoint:
    """Read the model that --cfg names, else the one in the file `weights`.

    If --cfg is given, `with_weights` reads the weights later. A resumed run has its model in `saved_yaml`. Raises
    `UserError`.
    """
    source = cfg or weights
    if saved_yaml is None:
        refuse_unread_family(f"--cfg {cfg}", cfg, "yolov9t.yaml")
    if saved_yaml is not None or cfg:
        yaml = saved_yaml or read_yaml(find_file(cfg, "model", MODEL_FOLDERS))
        return StartingPoint(TASKS[task_name(yaml, source)], dict(yaml), source, bool(cfg))
    file = find_weights(weights) if weights else None
    content = read_weights(file) if file else None
    if file is None or content is None or content.model is None:
        what = f"{weights} holds no model" if file else "no model is given"
        raise UserError(f"{what}; name one with --cfg, such as --cfg yolov5n.yaml")
    yaml = {"task": content.task, **content.model}
    start = StartingPoint(TASKS[task_name(yaml, source)], yaml, source, from_yaml=False)
    return start.with_content(content, weights, file)


def load_and_freeze(model: Model, start: StartingPoint, task: Task, options: TrainOptions) -> None:
    """Load the tensors that fit `model` and freeze layers; log the model, tensors and layers. Raises `UserError`."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = sum(not any(module.children()) for module in model.modules())
    model.gflops = count_gflops(model, model.imgsz, start.source)
    size = f", {model.gflops:.3g} GFLOPs at {model.imgsz} px" if model.gflops else ""
    log(f"{start.source}: {layers} layers, {parameters:,} parameters{size}")
    log_rounding([options.imgsz], [model.imgsz], model.stride)
    if start.weights:
        _load(model, start, start.weights, task)
        log(f"licence of these weights: {start.origin}")
    if options.freeze:
        freeze(model, options.freeze)
    if isinstance(model, YoloModel):
        model.check_rows(start.source)


def _load(model: Model, start: StartingPoint, weights: Weights, task: Task) -> None:
    name = start.weights_name
    fresh = task.fresh_tensors(start.from_yaml)
    tensors, state, mean = model.state_dict(), dict(weights.state), ""
    for key, x in weights.state.items():
        if x.ndim == 4 and x.shape[1] == 3 and key in tensors and (channels := tensors[key].shape[1]) != 3:
            state[key] = x.mean(1, keepdim=True).repeat(1, channels, 1, 1) * (3 / channels)  # of the same sum
            mean = f" ({key}: the mean of 3 channels for each of {channels})"
    loaded, total, misfits = transfer(model, state, fresh)
    if not loaded:
        raise UserError(
            f"no tensor of {name} fits the model; leave out --cfg to train the model in that file, or give "
            "--weights '' to start from scratch"
        )
    head = task.keep_head(model, weights.state, weights.names)
    if not head and len(task.names) > 1:  # one class may learn another; a head keeps classes by their names
        weights.compare_names(task.names, name)
    if misfits and not head:
        shapes = ["x".join(map(str, state[misfits[0]].shape)) for state in (state, tensors)]
        head = f"not {len(misfits)} with other shapes, such as {misfits[0]} ({', here '.join(shapes)})"
    warning = "warning: these are weights of another model: only " if loaded <= total / 2 else ""
    log(f"{warning}{loaded} of {total} tensors taken from {name}{mean}{', ' if head else ''}{head}")
    found = {**weights.state, **head_tensors(model)}  # another head is no surprise
    unneeded = (*fresh, "num_batches_tracked")  # which files of an old torch lack
    expected = [tensor for tensor in model.state_dict() if not any(part in tensor for part in unneeded)]
    if missing := [tensor for tensor in expected if tensor not in found]:
        log(f"warning: {name} lacks {plural(len(missing), 'tensor')} of the model, such as {missing[0]}")


def recipe_of(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> type[Recipe]:
    """Return the class of a run's hyperparameters, by settings that `flags` may replace. Raises `UserError`."""
    if task_file := {**settings, **flags}.get("task_file"):
        add_tasks(task_file, "task_file" in flags)
    return TASKS[task_name(settings["model"], "the model")].load().recipe
