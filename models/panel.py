"""The models that look at images together: read from their weight files, compared, built for one size of image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.hub import find_weights
from models.tasks import task_of
from models.weights import Weights, transfer
from utils.errors import UserError


def weight_files(names: Sequence[str]) -> dict[str, Path]:
    """The weight files by what the command line calls them."""
    if not all(names) or not names:
        raise UserError("--weights names no file; give one to validate, or several as an ensemble")
    return {name: find_weights(name) for name in names}


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
