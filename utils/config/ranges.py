"""Ranges of numbers, for flags, hyperparameters and keys of YAML files. Imports nothing of the repository."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float that fits into a float; bools are not numbers."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True)
class Range:
    """The finite numbers from `minimum` to `maximum`, without exclusive bounds."""

    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.minimum < value if self.exclusive_minimum else self.minimum <= value
        below = value < self.maximum if self.exclusive_maximum else value <= self.maximum
        return above and below and is_number(value)

    def __str__(self) -> str:
        minimum, maximum = f"{self.minimum:.10g}", f"{self.maximum:.10g}"
        low = f"more than {minimum}" if self.exclusive_minimum else f"{minimum} or more"
        if self.maximum == math.inf:
            return low
        return f"{low} and less than {maximum}" if self.exclusive_maximum else f"{minimum} to {maximum}"


FINITE, NOT_NEGATIVE, POSITIVE = Range(), Range(0), Range(0, exclusive_minimum=True)
SHARE, BELOW_ONE = Range(0, 1), Range(0, 1, exclusive_maximum=True)
IMGSZ = Range(1, 2**14)  # the side of an image, in pixels
OPSETS = Range(12, 21)  # of ONNX: those that torch's exporters write and ONNX Runtime 1.20 runs
