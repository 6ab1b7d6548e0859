"""Which classes of the data the weights know. Called by starting_point.py; a recipe may depend on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from models.tasks.contract import Model
from models.weights.content import Weights


def same_names(names: Mapping[int, str], new: Mapping[int, str]) -> dict[int, int]:
    """Return the number of a class in `names` by its number in `new`, for equal names, whatever their case."""
    numbers = {key: number for number, key in reversed(list(zip(names, _keys(names.values()), strict=True)))}
    found = {number: numbers.get(key) for number, key in zip(new, _keys(new.values()), strict=True)}
    return {number: old for number, old in found.items() if old is not None}


def known_share(model: Model, weights: Weights, names: Mapping[int, str]) -> float | None:
    """Return the share of the classes that a weight file has, by name; None if it is another model's.

    It is another model's if at most half of the tensors of `model` are in it.
    """
    state = model.state_dict()
    fitting = sum(name in weights.state and weights.state[name].shape == tensor.shape for name, tensor in state.items())
    return len(same_names(weights.names, names)) / len(names) if fitting > len(state) / 2 else None


def _keys(names: Iterable[str]) -> list[str]:
    return [name.strip().casefold() for name in names]
