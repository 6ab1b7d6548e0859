"""Load the tensors of a weight file into a model, and find the classes that both have.

Called by models/initial_weights.py, models/ensemble.py and the detection task; a recipe may depend on `known_share`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from models.tasks.contract import Model
from models.weights.content import Weights

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


def same_names(names: Mapping[int, str], new: Mapping[int, str]) -> dict[int, int]:
    """Map the numbers of classes in `new` to the numbers of equally named classes in `names`, ignoring case."""
    numbers = {key: number for number, key in reversed(list(zip(names, _keys(names.values()), strict=True)))}
    found = {number: numbers.get(key) for number, key in zip(new, _keys(new.values()), strict=True)}
    return {number: old for number, old in found.items() if old is not None}


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


def _keys(names: Iterable[str]) -> list[str]:
    return [name.strip().casefold() for name in names]
