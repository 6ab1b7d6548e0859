"""The models that look at images together: read from their weight files, compared, built for one size of image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.tasks import task_of
from models.weights.reader import Weights
from models.weights.releases import find_weights
from models.weights.transfer import transfer
from utils.errors import UserError


def weight_files(names: Sequence[str]) -> dict[str, Path]:
    """The weight files by what the command line calls them."""
    if not all(names) or not names:
        raise UserError("--weights names no file; give one to validate, or several as an ensemble")
    return {name: find_weights(name) for name in names}


def refuse_flags(options: Any, refused: Mapping[str, str]) -> None:
    """Raises `UserError` for a flag that means nothing to the task, which says why."""
    for flag, reason in refused.items():
        if getattr(options, flag, False):
            raise UserError(f"--{flag.replace('_', '-')} {reason}")


def common_task(weights: Mapping[str, Weights]) -> str:
    """The task of all weight files. Raises `UserError` where one has no model, or two do not go together."""
    for name, content in weights.items():
        if content.model is None:
            raise UserError(f"{name} holds bare tensors without a model; give weights that train.py or YOLOv5 wrote")
    first, *others = ((name, content, task_of({"task": content.task}, name)) for name, content in weights.items())
    for other in others:
        _compare(first, other)
    return first[2]


def _compare(one: tuple[str, Weights, str], other: tuple[str, Weights, str]) -> None:
    """Raises `UserError` where two weight files, each with its name and task, cannot be one ensemble."""
    together = f"{one[0]} and {other[0]} cannot be one ensemble"
    if one[2] != other[2]:
        raise UserError(f"{together}: their tasks are '{one[2]}' and '{other[2]}'")
    for number in sorted({*one[1].names, *other[1].names}):
        pair = [f"'{known[number]}'" if number in known else "absent" for known in (one[1].names, other[1].names)]
        if pair[0] != pair[1]:
            raise UserError(f"{together}: class {number} is {pair[0]} in the first and {pair[1]} in the second")


def check_programs(weights: Mapping[str, Weights], augment: bool) -> None:
    """Raises `UserError` where exported files are to do what they cannot. `augment`: to look in several sizes."""
    for name, content in weights.items():
        if content.program and augment:
            raise UserError(f"--augment needs maps of all sizes, which the exported {name} does not give; take its .pt")
        if content.program and content.program.metadata.suppression and len(weights) > 1:
            raise UserError(f"{name} was exported with --nms and cannot be in an ensemble; export it without")


def fixed_size(weights: Mapping[str, Weights]) -> tuple[int, int] | None:
    """Height and width that images must have, where an exported file is for one size; None where any will do.

    Raises `UserError` where two files differ.
    """
    told = {name: content.program.metadata for name, content in weights.items() if content.program}
    sizes = {name: metadata.imgsz for name, metadata in told.items() if not metadata.dynamic}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} {height}x{width}" for name, (height, width) in sizes.items())
        raise UserError(f"these files take images of different sizes ({each}); export them with --dynamic")
    return next(iter(sizes.values()), None)


def load_models(tasks: Sequence[Any], weights: Mapping[str, Weights], imgsz: int, data: str) -> list[tuple[Any, Any]]:
    """The model inside each weight file, with its task, all for images of one size: whole strides of each of them.

    data: what errors call the data set whose classes the tasks have.
    """

    def load(size: int) -> list[tuple[Any, Any]]:
        each = zip(tasks, weights.items(), strict=True)
        return [(task, load_model(task, content, size, name, data)) for task, (name, content) in each]

    members = load(imgsz)
    stride = math.lcm(*(task.stride for task in tasks))
    common = math.ceil(max(task.imgsz for task in tasks) / stride) * stride
    return members if all(task.imgsz == common for task in tasks) else load(common)


def load_model(task: Any, weights: Weights, imgsz: int, name: str, data: str) -> Any:
    """The model inside a weight file. Raises `UserError` where it was made for other classes than the data set's."""
    assert weights.model is not None
    if weights.program and len(weights.names) == len(task.names):
        task.adopt(weights.program.metadata.stride, imgsz)
        return weights.program
    model = task.build_model(weights.model, imgsz, name)
    found = transfer(model, weights.state)
    if found.loaded < found.total:
        raise UserError(
            f"{name} knows {weights.model.get('nc')} classes and {data} has {len(task.names)}; "
            "give the data set that the weights were trained for"
        )
    return model


def halve(model: Any) -> Any:
    """The model with weights in half precision. What belongs to no weights stays as it is: it says where things are."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.half()
    return model
