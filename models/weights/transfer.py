"""`transfer`: tensors of a weight file into a model. Called by models/starting_point.py and models/ensemble.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

# Names in torchvision's older DenseNet and ViT files, and what replaces them.
TORCHVISION_RENAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


class Transfer(NamedTuple):
    """The outcome of `transfer`."""

    loaded: int  # tensors
    total: int  # tensors of the model
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, shape in the file, shape in the model


def transfer(model: nn.Module, state: Mapping[str, Tensor], exclude: tuple[str, ...] = ()) -> Transfer:
    """Load every tensor whose name and shape the model has and whose name contains none of `exclude`."""
    model_state = model.state_dict()
    state = {name if name in model_state else _current_name(name): tensor for name, tensor in state.items()}
    shared = [name for name in state if name in model_state and not any(part in name for part in exclude)]
    fitting = type(model_state)((name, state[name]) for name in shared if model_state[name].shape == state[name].shape)
    fitting._metadata = model_state._metadata  # type: ignore[attr-defined]  # versions of layers, which some ask for
    misfits = [
        (name, tuple(state[name].shape), tuple(model_state[name].shape)) for name in shared if name not in fitting
    ]
    model.load_state_dict(fitting, strict=False)
    return Transfer(len(fitting), len(model_state), misfits)


def _current_name(name: str) -> str:
    """Return the name that torchvision gives to a tensor today."""
    for old, new in TORCHVISION_RENAMES:
        name = old.sub(new, name)
    return name
