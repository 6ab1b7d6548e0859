"""Load tensors of a weight file into a model. Called by models/starting_point.py and models/ensemble.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

# Parts of names in torchvision's older DenseNet and ViT files, and their replacements.
TORCHVISION_RENAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


class Transfer(NamedTuple):
    """The result of `transfer`."""

    loaded: int  # tensors
    total: int  # tensors in the model
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, shape in the file, shape in the model


def transfer(model: nn.Module, state: Mapping[str, Tensor], exclude: tuple[str, ...] = ()) -> Transfer:
    """Load the tensors whose names and shapes fit the model, except for names that contain a part in `exclude`."""
    model_state = model.state_dict()
    state = {name if name in model_state else _current_name(name): tensor for name, tensor in state.items()}
    shared = [name for name in state if name in model_state and not any(part in name for part in exclude)]
    fitting = type(model_state)((name, state[name]) for name in shared if model_state[name].shape == state[name].shape)
    fitting._metadata = model_state._metadata  # type: ignore[attr-defined]  # versions of layers, which some layers read
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
