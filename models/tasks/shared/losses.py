"""What the losses of several tasks use: constants on a device, precision, and the loss of an exported file."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from models.tasks.contract import Criterion, LossTerms
from utils.batch import Batch


@cache
def device_constant(values: Any, device: torch.device) -> Tensor:
    """Return a float32 tensor of plain values, copied to a device once: every copy waits for the device."""
    with torch.inference_mode(False):  # a tensor made during a validation must serve in training too
        return torch.tensor(values, dtype=torch.float32, device=device)


def at_least_float32(values: Tensor) -> Tensor:
    """Return half-precision values as float32, others unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class UnavailableCriterion(Criterion):
    """The criterion of an exported file, which returns no raw outputs: every term is NaN. terms: their number."""

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
