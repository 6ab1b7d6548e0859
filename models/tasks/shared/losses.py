"""Helpers for the losses of several tasks: constants on a device, class weights, and the loss of an exported file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from models.tasks.contract import Criterion, LossTerms
from utils.batch import Batch
from utils.errors import UserError, nearest


@cache
def device_constant(values: Any, device: torch.device) -> Tensor:
    """Return a float32 tensor of plain values, copied to the device only once, as every copy waits for the device."""
    with torch.inference_mode(False):  # a tensor that a validation makes must be usable in training too
        return torch.tensor(values, dtype=torch.float32, device=device)


def at_least_float32(values: Tensor) -> Tensor:
    """Return half-precision values as float32, other values unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def weights_by_class(names: Mapping[int, str], weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weight of each class, by number; () if all are 1. Raises `UserError` for an unknown name.

    Args:
        names: class names, by number
        weights: weights by class name; other classes have weight 1
    """
    known = set(names.values())
    for name in weights:
        if name not in known:
            raise UserError(
                f"class_weights: the data set has no class '{name}'{nearest(name, known)}; correct the name"
            )
    by_number = tuple(float(weights.get(names[k], 1.0)) for k in sorted(names))
    return by_number if set(by_number) - {1.0} else ()


class UnavailableCriterion(Criterion):
    """The criterion of an exported file, which does not return raw outputs: every term is NaN.

    Args:
        terms: number of loss terms
    """

    def __init__(self, terms: int) -> None:
        self.count = terms

    def __call__(self, outputs: None, batch: Batch) -> LossTerms:
        """Return terms of NaN."""
        ones = torch.ones(self.count, 1)
        return LossTerms(ones * torch.nan, ones, ones)

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return NaN."""
        return means.sum()

    def weight(self, batch: Batch) -> float:
        """Return 1."""
        return 1.0
