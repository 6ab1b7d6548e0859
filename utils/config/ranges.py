"""Ranges of numbers, for flags, hyperparameters and the keys of YAML files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


def is_number(value: Any) -> bool:
    """Is this a finite number, such as a float can hold? True and False are none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have. `above`, `below`: the ends themselves are no such numbers."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        low = self.least < value if self.above else self.least <= value
        high = value < self.most if self.below else value <= self.most
        return low and high and is_number(value)

    def __str__(self) -> str:
        least, most = f"{self.least:.10g}", f"{self.most:.10g}"
        low = f"more than {least}" if self.above else f"{least} or more"
        if self.most == math.inf:
            return low
        return f"{low} and less than {most}" if self.below else f"{least} to {most}"


FINITE, NOT_NEGATIVE, POSITIVE = Range(), Range(0), Range(0, above=True)
IMGSZ = Range(1, 2**14)
SHARE, BELOW_ONE = Range(0, 1), Range(0, 1, below=True)
