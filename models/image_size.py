"""The size of a model's images: the values of --imgsz, and whole strides. Called by models/ and the scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from utils.config.values import IMGSZ
from utils.errors import UserError


def whole_strides(side: int, stride: int) -> int:
    """Return `side` in pixels, rounded up to whole strides: at least two strides if the stride is above 1."""
    return max(math.ceil(side / stride), 2 if stride > 1 else 1) * stride


def rounding(requested: Sequence[int], taken: Sequence[int], stride: int) -> list[str]:
    """Return a message if --imgsz was rounded.

    Args:
        requested: one side, or height and width, in pixels, as given
        taken: one side, or height and width, in pixels, after rounding
    """
    if (requested[0], requested[-1]) == (taken[0], taken[-1]):
        return []
    return [f"--imgsz {in_words(requested)} is rounded up to {in_words(taken)}, whole strides of {stride} pixels"]


def sides_of(imgsz: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sides that --imgsz gives: one side, height and width, or none for 0 or empty, the default.

    Raises `UserError` for any other value.
    """
    sides = (imgsz,) if isinstance(imgsz, int) else tuple(imgsz)
    if sides == (0,):
        return ()
    if len(sides) > 2 or not all(side in IMGSZ for side in sides):
        raise UserError(f"--imgsz {' '.join(map(str, sides))}: give one number of pixels, or height and width")
    return sides


def in_words(sides: Sequence[int]) -> str:
    """Format one side, or height and width, as --imgsz takes them."""
    return " ".join(map(str, sides if len(set(sides)) > 1 else sides[:1]))


@dataclass(frozen=True)
class ImageSize:
    """The size that images are fitted into.

    Attributes:
        sides: height and width in pixels
        is_fixed: whether an exported file requires exactly this size
        messages: lines for the console that say how the size was chosen
    """

    sides: tuple[int, int]
    is_fixed: bool = False
    messages: tuple[str, ...] = ()

    def rounded(self, stride: int) -> ImageSize:
        """Return the size in whole strides, with a message if it differs. A fixed size is not rounded."""
        if self.is_fixed:
            return self
        sides = whole_strides(self.sides[0], stride), whole_strides(self.sides[1], stride)
        return replace(self, sides=sides, messages=(*self.messages, *rounding(self.sides, sides, stride)))

    def square(self) -> int:
        """Return the side of the square for both sides. Raises `UserError` if they are fixed and differ."""
        height, width = self.sides
        if self.is_fixed and height != width:
            raise UserError(
                f"--weights takes only images of {height}x{width}, and val.py makes square ones; "
                "export it with --dynamic, or with one number for --imgsz"
            )
        return max(self.sides)
