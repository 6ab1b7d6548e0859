"""Read the weight files of val.py, detect.py and export.py, compare them, and build their models for one image size.

Several weight files form an ensemble, whose predictions are joined. `fuse` folds BatchNorm for inference.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.layers import Conv, RepConv
from models.loading import ImageSize, add_user_code, format_sides, image_sides, transfer
from models.tasks import TASKS, TaskEntry, add_tasks, describe_model, task_name
from models.tasks.contract import Model, Postprocess, Prediction, Task, Thresholds, View
from models.weights import Weights, find_weights
from models.yolo import whole_strides
from utils.batch import Batch, PixelFormat, layout, use_onednn
from utils.config.settings import refuse_flags
from utils.console import log
from utils.errors import UserError, plural
from utils.summary import INFERENCE, PREPARING, StageTimer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from models.export import ExportMetadata

DEFAULT_SIDE_PIXELS = 640  # image side for a task whose `defaults` lack imgsz
M = TypeVar("M", bound=nn.Module)


def weight_files(names: Sequence[str]) -> dict[str, Path]:
    """Return the weight files, by name on the command line, downloaded if necessary. Raises `UserError`."""
    if not all(names) or not names:
        raise UserError("--weights is empty; give one file, or several as an ensemble")
    return {name: find_weights(name, training=False) for name in names}


def export_base(name: str, file: Path) -> Path:
    """Return the path that exports of the weight file `name` are named after: the file's own path, or for a file that
    was downloaded into a cache a path in the working folder."""
    return file if os.path.exists(name) else Path(file.name)


def common_task(weights: Mapping[str, Weights]) -> str:
    """Return the name of the task that all weight files share; a user's is loaded from its file. Raises `UserError`."""
    for name, content in weights.items():
        if content.model is None:
            raise UserError(f"{name} holds bare tensors without a model; give weights that train.py or YOLOv5 wrote")
        if content.task not in TASKS and (task_file := content.settings.get("task_file")):
            add_tasks(str(task_file), named_by_user=False, named_by=name)
    kinds = {
        name: (task_name({"task": content.task}, name), content.names, str(PixelFormat.of_model(content.model or {})))
        for name, content in weights.items()
    }
    first = next(iter(weights))
    for other, kind in kinds.items():
        if kind != kinds[first]:
            raise UserError(f"{first} and {other} cannot be one ensemble: their tasks, class names or channels differ")
    return kinds[first][0]


def load_model(task: Task, weights: Weights, imgsz: int, name: str, data: str) -> Model:
    """Return the model of the file `name` for about `imgsz` pixels and the data set `data`. Raises `UserError`."""
    from models.export import Exported  # only here, because training does not need it

    assert weights.model is not None
    program = weights.program
    if isinstance(program, Exported) and len(weights.names) == len(task.names):
        program.resize(imgsz)
        program.names = dict(task.names)
        return program
    used = {key: rows for key, rows in weights.model.items() if key != "auxiliary"}  # a branch for training only
    model = task.build_model(used, imgsz, name)
    state = task.renamed(weights.state)
    loaded, total, _ = transfer(model, state)
    if loaded < total and weights.model.get("nc") == len(task.names):
        raise UserError(f"{name}: only {loaded} of {total} tensors fit its layers; give the --layers of its training")
    if loaded < total:
        raise UserError(
            f"{name} has {plural(weights.model.get('nc', 0), 'class')} and {data} has {len(task.names)}; give the data "
            "set that the weights were trained on, with --single-cls if they were trained with it"
        )
    if "auxiliary" not in weights.model and (unused := sorted(state.keys() - model.state_dict().keys())):
        log(f"warning: {name} has {plural(len(unused), 'tensor')} that no layer here takes, such as {unused[0]}")
    return model


def halve(model: M) -> M:
    """Convert the weights to half precision, in place. Modules without weights of their own keep their buffers:
    a head's anchors are coordinates, which need float32."""
    for module in model.modules():
        if [*module.parameters(recurse=False)]:
            module.half()
    return model


@dataclass(frozen=True)
class Members:
    """The weight files of an ensemble, or a single one: their paths and contents, by name on the command line."""

    files: dict[str, Path]
    weights: dict[str, Weights]
    entry: TaskEntry

    @property
    def first(self) -> Weights:
        """The content of the first file."""
        return next(iter(self.weights.values()))

    def refuse_flags(self, options: DataclassInstance, flags: Mapping[str, Any]) -> None:
        """Raise `UserError` for a flag, among `options` of a script, that the models cannot have: see `refusals`."""
        task, weights = self.entry.load(), self.weights.values()
        yamls = [{"task": content.task, **(content.model or {})} for content in weights]
        features = frozenset().union(*map(task.features_of, yamls))  # that one of the models has
        left_out = task.prediction.refused() if task.prediction else {}
        refuse_flags(options, flags, features, describe_model(yamls[0]), left_out=left_out.items())

    def image_size(self, imgsz: int | Sequence[int], suggested: int = 0) -> ImageSize:
        """Return the image size, not rounded, and log a size that the weights decide.

        The first of these decides: the size that an exported file requires; `imgsz`, the value of --imgsz; the size in
        the weights, see `Weights.image_sides`; `suggested`, by the data set YAML; the task's `defaults`. 0 is none.
        Raises `UserError` for a wrong --imgsz, and if the files disagree.
        """
        fixed = {name: file.imgsz for name, file in self.exported.items() if not file.dynamic}
        if not fixed and (sides := image_sides(imgsz)):
            return ImageSize((sides[0], sides[-1]))
        sizes = fixed or {name: size for name, content in self.weights.items() if (size := content.image_sides)}
        if len(set(sizes.values())) > 1:
            words = ", ".join(f"{name} at {format_sides(size)}" for name, size in sizes.items())
            raise UserError(
                f"these models are for different image sizes ({words} px); give one with --imgsz, and export with "
                "--dynamic"
            )
        if not sizes:
            default = suggested or int(self.entry.load().defaults.get("imgsz", DEFAULT_SIDE_PIXELS))
            return ImageSize((default, default))
        size = next(iter(sizes.values()))
        reason = "fixed by the exported file" if fixed else "stored in the checkpoint"
        log(f"image size {format_sides(size)} ({reason})")
        return ImageSize(size, is_fixed=bool(fixed))

    def pixel_format(self, data: PixelFormat | None = None, source: str = "") -> PixelFormat:
        """Return how images are read. Raises `UserError` if the `data` set of the YAML `source` differs in it."""
        form = PixelFormat.of_model(self.first.model or {})
        if data and str(data) != str(form):
            raise UserError(f"{next(iter(self.files))} takes images of {form}, but {source} has {data}; use others")
        return form

    @property
    def exported(self) -> dict[str, ExportMetadata]:
        """The metadata of the exported files, by name on the command line."""
        return {name: content.metadata for name, content in self.weights.items() if content.metadata}

    def log_notes(self, wants_half: bool, half: bool) -> None:
        """Log what the results depend on: the precision (--half works on CUDA only), and an exported file's limits."""
        if wants_half:
            log("weights and images in half precision" if half else "warning: --half is for CUDA; using full precision")
        for name, file in self.exported.items():
            if file.suppression:
                limits = ", ".join(f"{key} {value}" for key, value in file.suppression.items())
                log(f"warning: {name} suppresses boxes itself ({limits}); flags can only be stricter")

    def build(self, task: Task, imgsz: int, data: str) -> list[Model]:
        """Return the models, on the CPU, for about `imgsz` pixels: a multiple of every stride; see `load_model`."""

        def load(size: int) -> list[Model]:
            return [load_model(task, content, size, name, data) for name, content in self.weights.items()]

        models = load(imgsz)
        stride = math.lcm(*(model.stride for model in models))
        common = whole_strides(max(model.imgsz for model in models), stride)
        return models if all(model.imgsz == common for model in models) else load(common)


def read_members(names: Sequence[str], layers: str, task_file: str, augment: bool) -> Members:
    """Read the weight files that --weights names, downloaded if necessary, by values of flags. Raises `UserError`."""
    from models.export import read_model

    add_user_code(layers, task_file)
    files = weight_files(names)
    weights = {name: read_model(file) for name, file in files.items()}
    members = Members(files, weights, TASKS[common_task(weights)])
    for name, file in members.exported.items():
        if augment:
            raise UserError(f"--augment needs maps of all sizes, which the exported {name} does not give; use its .pt")
        if file.suppression and len(weights) > 1:
            raise UserError(f"{name} was exported with --nms and cannot be in an ensemble; export it without")
    return members


def for_inference(model: Model, device: torch.device, half: bool, fold: bool = False) -> Model:
    """Return the model on `device`, in evaluation mode; an exported file as it is.

    `fold` folds BatchNorm into convolutions, which changes results by rounding; `RepConv`s are always folded.
    """
    from models.export import Exported

    fold = fold or any(isinstance(module, RepConv) for module in model.modules())
    if fold and not isinstance(model, Exported):
        model = fuse(model)
    model = halve(model) if half else model
    use_onednn(model, device)
    return model.to(device, memory_format=layout(device)).eval()  # type: ignore[call-overload]


@dataclass(frozen=True)
class Inference:
    """Runs the models of an ensemble."""

    task: Task
    postprocess: Postprocess
    device: torch.device
    augment: bool = False  # whether the models also run on scaled and mirrored images
    half: bool = False  # whether the models' weights, and hence their inputs, are in half precision

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


def join_windows(predictions: Sequence[Prediction], batch: Batch, limits: Thresholds) -> tuple[list[Prediction], Batch]:
    """Join the predictions for the windows of an image; return one for each image, and the batch with one info each."""
    if not any(getattr(info, "window", None) for info in batch.infos):
        return [*predictions], batch
    joined, infos = [], []
    for _, group in groupby(zip(predictions, batch.infos, strict=True), key=lambda pair: pair[1].image):
        (first, *others), windows = zip(*group, strict=True)
        joined.append(first.joined(others, windows, limits) if others else first)
        infos.append(windows[0])
    return joined, replace(batch, infos=tuple(infos))


# Folding


@torch.no_grad()
def fuse(model: M) -> M:
    """Return a copy of the model in evaluation mode, with the BatchNorms of `Conv`s folded into their convolutions, and
    each `RepConv` merged into one convolution. Outputs are equal up to rounding; state-dict keys differ."""
    fused = copy.deepcopy(model).eval()
    for layer in fused.modules():
        if isinstance(layer, Conv) and isinstance(layer.bn, nn.BatchNorm2d):  # computed in float64
            dtype = layer.conv.weight.dtype
            layer.conv = fuse_conv_bn_eval(layer.conv.double(), layer.bn.double()).to(dtype)
            layer.bn = nn.Identity()
    merged: list[Any] = [layer for layer in fused.modules() if isinstance(layer, RepConv)]
    for layer in merged:  # the 1x1 kernel is added to the middle of the larger kernel, in float64
        large, small = layer.conv1.conv, layer.conv2.conv
        border = large.kernel_size[0] // 2
        large.weight.copy_(large.weight.double() + functional.pad(small.weight.double(), (border,) * 4))
        large.bias.copy_(large.bias.double() + small.bias.double())
        layer.conv1, layer.conv2 = large, None
    return fused
