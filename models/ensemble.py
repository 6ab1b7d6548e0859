"""Read the weight files of val.py, detect.py and export.py, compare them, and build their models for one image size.

Several weight files form an ensemble, whose predictions are joined.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.export import Exported, ExportMetadata, read_model
from models.layers import Conv, RepConv
from models.loading import ImageSize, in_words, sides_of, transfer
from models.tasks import TASKS, TaskEntry, add_tasks, model_words, task_of
from models.tasks.contract import Model, Postprocess, Task, View
from models.weights import Weights, find_weights
from models.yolo import add_layers, whole_strides
from utils.batch import Batch, layout
from utils.config.parser import refuse_flags
from utils.errors import UserError, plural
from utils.summary import INFERENCE, PREPARING, StageTimer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def fuse(model: M) -> M:
    """Return a copy of the model in evaluation mode, with the BatchNorms of `Conv`s and of nn.Sequential chains folded,
    and each `RepConv` merged into one convolution.

    BatchNorm(w x) = (g w / d) x + (b - g mean / d), with d = sqrt(variance + eps), is one convolution. Outputs are
    equal up to rounding; state-dict keys differ.
    """
    fused = copy.deepcopy(model).eval()
    for module in list(fused.modules()):
        if isinstance(module, Conv):
            _fold(module, "conv", "bn")
        elif isinstance(module, nn.Sequential):
            for first, second in pairwise(list(module._modules)):
                _fold(module, first, second)
    for module in fused.modules():
        if isinstance(module, RepConv):
            _join(module)
    return fused


def _join(layer: RepConv) -> None:
    """Merge the two convolutions of a `RepConv` with folded BatchNorms into one, computed in float64.

    The 1x1 kernel is added to the middle of the larger kernel.
    """
    assert isinstance(layer.conv1, Conv)
    assert isinstance(layer.conv2, Conv)
    large, small = layer.conv1.conv, layer.conv2.conv
    if large.bias is None or small.bias is None:  # a BatchNorm without running statistics
        return
    border = large.kernel_size[0] // 2
    added = functional.pad(small.weight.double(), (border,) * 4)
    large.weight.copy_(large.weight.double() + added)
    large.bias.copy_(large.bias.double() + small.bias.double())
    layer.conv1, layer.conv2 = large, None


def _fold(parent: nn.Module, first: str, second: str) -> None:
    """Fold child `second` into `first` if they are a convolution and a BatchNorm with running statistics.

    The weights are computed in float64; they keep their dtype and memory format.
    """
    convolution, norm = getattr(parent, first), getattr(parent, second)
    if type(convolution) is not nn.Conv2d or not isinstance(norm, nn.BatchNorm2d) or norm.running_var is None:
        return
    dtype, contiguous = convolution.weight.dtype, convolution.weight.is_contiguous()
    folded = fuse_conv_bn_eval(convolution.double(), norm.double()).to(dtype)
    setattr(parent, first, folded.to(memory_format=torch.contiguous_format if contiguous else torch.channels_last))
    setattr(parent, second, nn.Identity())


DEFAULT_SIDE_PIXELS = 640  # image side for a task whose `defaults` lack imgsz


def weight_files(names: Sequence[str]) -> dict[str, Path]:
    """Return the weight files, by name on the command line, downloaded if necessary. Raises `UserError`."""
    if not all(names) or not names:
        raise UserError("--weights is empty; give one file, or several as an ensemble")
    return {name: find_weights(name, training=False) for name in names}


def export_base(name: str, file: Path) -> Path:
    """Return the path that exports of a weight file are named after: the file's own path, or for a file that was
    downloaded into a cache a path in the working folder.

    Args:
        name: the file's name on the command line
    """
    return file if os.path.exists(name) else Path(file.name)


def _text(value: float | Sequence[int]) -> str:
    """Format the value of a flag."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, (int, float)) else in_words(value)


def common_task(weights: Mapping[str, Weights]) -> str:
    """Return the name of the task that all weight files share. A task that is not registered is loaded from the Python
    file that the weights were trained with, if this user has run that file before.

    Raises `UserError` if a file has no model, or if two files have different tasks or classes.
    """
    for name, content in weights.items():
        if content.model is None:
            raise UserError(f"{name} holds bare tensors without a model; give weights that train.py or YOLOv5 wrote")
        if content.task not in TASKS and (task_file := content.settings.get("task_file")):
            add_tasks(str(task_file), is_named=False, named_by=name)
    tasks = {name: task_of({"task": content.task}, name) for name, content in weights.items()}
    first, *others = weights
    for other in others:
        refusal = f"{first} and {other} cannot be one ensemble"
        if tasks[first] != tasks[other]:
            raise UserError(f"{refusal}: their tasks are '{tasks[first]}' and '{tasks[other]}'")
        names = [weights[name].names for name in (first, other)]
        for number in sorted({*names[0], *names[1]}):
            one, two = (f"'{classes[number]}'" if number in classes else "absent" for classes in names)
            if one != two:
                raise UserError(f"{refusal}: class {number} is {one} in the first and {two} in the second")
    return tasks[first]


def check_programs(weights: Mapping[str, Weights], augment: bool) -> None:
    """Raise `UserError` if an exported file does not support `augment`, or this ensemble."""
    for name, content in weights.items():
        if content.metadata and augment:
            raise UserError(f"--augment needs maps of all sizes, which the exported {name} does not give; use its .pt")
        if content.metadata and content.metadata.suppression and len(weights) > 1:
            raise UserError(f"{name} was exported with --nms and cannot be in an ensemble; export it without")


def choose_size(
    weights: Mapping[str, Weights], task: type[Task], requested: int | Sequence[int], suggested: int = 0
) -> ImageSize:
    """Return the image size of a model or an ensemble, not rounded.

    The first of these decides: the size that an exported file requires; `requested`; the size in the weights, see
    `Weights.image_sides`; `suggested`; the task's `defaults`. Raises `UserError` for a wrong --imgsz, and if the files
    of an ensemble disagree.

    Args:
        weights: contents of the weight files, by name on the command line
        requested: value of --imgsz; 0 or empty if it is not given
        suggested: image size in the data set YAML; 0 if it names none
    """
    sides = sides_of(requested)
    if fixed := fixed_size(weights):
        return ImageSize(fixed, True, (f"exported for images of {fixed[0]}x{fixed[1]} only",))
    if sides:
        return ImageSize((sides[0], sides[-1]))
    sizes = {name: own for name, content in weights.items() if (own := content.image_sides)}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} at {in_words(own)} px" for name, own in sizes.items())
        raise UserError(f"these models were trained at different image sizes ({each}); give one with --imgsz")
    for own in sizes.values():
        return ImageSize(own, messages=(f"images of {in_words(own)} px, the size in the weights",))
    default = suggested or int(task.defaults.get("imgsz", DEFAULT_SIDE_PIXELS))
    return ImageSize((default, default))


def fixed_size(weights: Mapping[str, Weights]) -> tuple[int, int] | None:
    """Return the image height and width in pixels that exported files require; None if they take any size.

    Raises `UserError` if two files require different sizes.
    """
    programs = {name: content.metadata for name, content in weights.items() if content.metadata}
    sizes = {name: metadata.imgsz for name, metadata in programs.items() if not metadata.dynamic}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} {height}x{width}" for name, (height, width) in sizes.items())
        raise UserError(f"these files take images of different sizes ({each}); export them with --dynamic")
    return next(iter(sizes.values()), None)


def load_model(task: Task, weights: Weights, imgsz: int, name: str, data: str) -> Model:
    """Return the model of a weight file. Raises `UserError` if the data set has another number of classes.

    Args:
        imgsz: image size in pixels, rounded up to whole strides
        name: name of the file in errors
        data: name of the data set in errors
    """
    assert weights.model is not None
    program = weights.program
    if isinstance(program, Exported) and len(weights.names) == len(task.names):
        program.resize(imgsz)
        program.names = dict(task.names)
        return program
    used = {key: rows for key, rows in weights.model.items() if key != "auxiliary"}  # a branch for training only
    model = task.build_model(used, imgsz, name)
    transferred = transfer(model, weights.state)
    if transferred.loaded < transferred.total:
        raise UserError(
            f"{name} has {plural(weights.model.get('nc', 0), 'class')} and {data} has {len(task.names)}; "
            "give the data set that the weights were trained on"
        )
    return model


def halve(model: M) -> M:
    """Convert the weights to half precision, in place. Modules without weights of their own keep their buffers:
    a head's anchors are coordinates, which need float32."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.half()
    return model


@dataclass(frozen=True)
class Members:
    """The weight files of an ensemble, or a single one.

    Attributes:
        files: paths of the files, by name on the command line
        weights: contents of the files, by the same names
    """

    files: dict[str, Path]
    weights: dict[str, Weights]
    entry: TaskEntry

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the first file was trained with; {} if it contains none."""
        return dict(next(iter(self.weights.values())).settings)

    @property
    def class_names(self) -> dict[int, str]:
        """The class names, which all files share."""
        return next(iter(self.weights.values())).class_names

    def class_warnings(self, names: Mapping[int, str]) -> list[str]:
        """Return a warning if a data set's class names differ from the files'."""
        name, content = next(iter(self.weights.items()))
        return content.class_warnings(names, name)

    @property
    def features(self) -> frozenset[str]:
        """The features that flags may need: all that one of the models has."""
        kind = self.entry.load()
        return frozenset().union(*(kind.features_of(content.task_yaml) for content in self.weights.values()))

    def refuse(self, kind: type[DataclassInstance], given: Mapping[str, Any]) -> None:
        """Raise `UserError` for a flag that does not apply to the models or to their predictions.

        Args:
            kind: class of the options
            given: values of the given flags, by name
        """
        first, task = next(iter(self.weights.values())), self.entry.load()
        refuse_flags(kind, given, self.features, model_words(first.task_yaml))
        for name, reason in (task.prediction.refused() if task.prediction else {}).items():
            if given.get(name):
                raise UserError(f"--{name.replace('_', '-')} {reason}")

    def image_size(self, requested: int | Sequence[int], suggested: int = 0) -> ImageSize:
        """Return the image size, not rounded: see `choose_size`. Raises `UserError` if the files disagree."""
        return choose_size(self.weights, self.entry.load(), requested, suggested)

    @property
    def exported(self) -> dict[str, ExportMetadata]:
        """The metadata of the exported files."""
        return {name: content.metadata for name, content in self.weights.items() if content.metadata}

    @property
    def suppression(self) -> str:
        """The file that was exported with --nms, and its flags, in words; '' if there is none."""
        files = [(name, file) for name, file in self.exported.items() if file.suppression]
        return next((f"{name} was exported with {file.suppression_flags}" for name, file in files), "")

    def messages(self, half: bool, half_asked: bool, augment: bool) -> list[str]:
        """Return lines about precision, square images, an ensemble, and --augment.

        Args:
            half: whether weights and images are in half precision; `half_asked`: whether --half is given
        """
        lines = ["weights and images in half precision"] if half and len(self.exported) < len(self.files) else []
        if half_asked and not half:
            lines.append("warning: --half is for CUDA; using full precision")
        if "padding" in self.features and fixed_size(self.weights):
            lines.append("images are square: the metrics are comparable with a .pt file's under --square")
        first, *others = self.files
        if others:
            lines.append(f"an ensemble of {len(self.files)} models; the losses come from {first}")
        return lines + ["--augment: the model runs on scaled and mirrored copies of each image too"] * augment

    def suppression_warnings(self) -> list[str]:
        """Return a warning if an exported file suppresses boxes itself: the metrics are not comparable."""
        words = "the metrics are comparable only among files that were exported alike"
        return [f"warning: {self.suppression}; {words}"] if self.suppression else []

    def overridden(self, flags: Mapping[str, Any]) -> list[str]:
        """Return a warning for each exported file that overrides flags, with the values that apply.

        Args:
            flags: values given on the command line, by field name
        """
        lines = []
        for name, file in self.exported.items():
            values = file.overrides(flags)
            each = [
                f"--{flag.replace('_', '-')} {_text(value)} (not {_text(flags[flag])})"
                for flag, value in values.items()
            ]
            if each:
                lines.append(f"warning: {name} was exported with its own values: {', '.join(each)}")
        return lines

    def build(self, task: Task, imgsz: int, data: str) -> list[Model]:
        """Return the model of each file, on the CPU, all for one image size: a multiple of every model's stride.

        Args:
            imgsz: image size in pixels, rounded up to the models' `imgsz`
            data: name of the data set in errors
        """

        def load(size: int) -> list[Model]:
            return [load_model(task, content, size, name, data) for name, content in self.weights.items()]

        models = load(imgsz)
        stride = math.lcm(*(model.stride for model in models))
        common = whole_strides(max(model.imgsz for model in models), stride)
        return models if all(model.imgsz == common for model in models) else load(common)


def read_members(names: Sequence[str], layers: str, task_file: str, augment: bool) -> Members:
    """Read the weight files that --weights names, downloaded if necessary.

    Raises `UserError` if a file cannot be used, or not together with the others.

    Args:
        layers: Python file with the user's layers; '' for none
        task_file: Python file or package with the user's task; '' for none
        augment: whether --augment is given
    """
    if layers:
        add_layers(layers)
    if task_file:
        add_tasks(task_file)
    files = weight_files(names)
    weights = {name: read_model(file) for name, file in files.items()}
    entry = TASKS[common_task(weights)]
    check_programs(weights, augment)
    return Members(files, weights, entry)


def for_inference(model: Model, device: torch.device, half: bool, fold: bool = False) -> Model:
    """Return the model on `device`, in evaluation mode.

    Args:
        half: whether to convert the weights to half precision; ignored for an exported file
        fold: whether to fold BatchNorm into convolutions, which changes results by rounding; always done for a model
            with `RepConv`s, never for an exported file
    """
    fold = fold or any(isinstance(module, RepConv) for module in model.modules())
    if fold and not isinstance(model, Exported):
        model = fuse(model)
    if half:
        halve(model)
    return model.to(device, memory_format=layout(device)).eval()  # type: ignore[call-overload]


@dataclass(frozen=True)
class Inference:
    """Runs the models of an ensemble.

    Attributes:
        augment: whether the models also run on scaled and mirrored images
        half: whether the models' weights, and hence their inputs, are in half precision
    """

    task: Task
    postprocess: Postprocess
    device: torch.device
    augment: bool = False
    half: bool = False

    def views(self, models: Sequence[Model], batch: Batch, timer: StageTimer) -> tuple[Batch, list[View]]:
        """Return the batch on the device and the models' outputs for it; `timer` measures both stages."""
        timer.start_batch(len(batch.infos))
        batch = batch.to(self.device)
        inputs = self.task.inputs(batch)
        inputs = inputs.half() if self.half else inputs
        timer.end_stage(PREPARING)
        views = [view for model in models for view in self.postprocess.views(model, inputs, self.augment)]
        timer.end_stage(INFERENCE)
        return batch, views
