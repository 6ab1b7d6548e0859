"""Freeze layers of a model, for --freeze. Called by models/starting_point.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from utils.errors import UserError


def freeze(model: nn.Module, layers: Sequence[int]) -> list[int]:
    """Freeze layers and return their numbers: (N,) is the first N, (-N,) all but the last N, several are these layers.

    The layers are the children of `model.model`, or of a model without that attribute. Raises `UserError` for a number
    that is no layer.
    """
    layered = dict(model.named_children()).get("model", model)
    rows = list(layered.children())
    count = len(rows)
    if len(layers) > 1:
        chosen = list(layers)
    elif layers[0] >= 0:
        chosen = list(range(layers[0]))
    else:
        chosen = list(range(count + layers[0])) if -layers[0] <= count else list(layers)
        for parameter in layered.parameters(recurse=False):  # in no layer, such as a transformer's class token
            parameter.requires_grad_(False)
    for number in chosen:
        if not 0 <= number < count:
            raise UserError(
                f"--freeze {' '.join(map(str, layers))}: the model has layers 0 to {count - 1}, no {number}"
            )
        rows[number].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--freeze {' '.join(map(str, layers))} freezes all layers, 0 to {count - 1}; freeze fewer")
    return chosen
