"""The size of a model's images: the one that is taken without --imgsz, and whole strides.

Called by models/ and export.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from utils.config.ranges import IMGSZ
from utils.errors import UserError

if TYPE_CHECKING:
    from models.tasks.contract import Task
    from models.weights.reader import Weights

DEFAULT_SIDE_PIXELS = 640  # of a task whose `defaults` have no imgsz


def whole_strides(side: int, stride: int) -> int:
    """Return `side` in pixels, rounded up to whole strides: at least two if the stride is above 1."""
    return max(math.ceil(side / stride), 2 if stride > 1 else 1) * stride


def rounding(requested: Sequence[int], taken: Sequence[int], stride: int) -> list[str]:
    """Return a message if --imgsz was rounded. requested, taken: one side, or height and width, in pixels."""
    if (requested[0], requested[-1]) == (taken[0], taken[-1]):
        return []
    return [f"--imgsz {in_words(requested)} is rounded up to {in_words(taken)}, whole strides of {stride} pixels"]


def sides_of(imgsz: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sides in a value of --imgsz: one, height and width, or none for the default, 0 or empty.

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

    sides: height and width in pixels. is_fixed: whether an exported file requires exactly this size. messages: how it
    was chosen, for the console.
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


def choose_size(
    weights: Mapping[str, Weights], task: type[Task], requested: int | Sequence[int], suggested: int = 0
) -> ImageSize:
    """Return the image size of a model or an ensemble, not rounded.

    The first of these decides: the size that an exported file requires; `requested`; the size of the training, if that
    is the task's default (`Task.default_is_training_size`); `suggested`; the task's `defaults`.

    weights: by the names on the command line. requested: --imgsz, 0 or empty if it is not given. suggested: by the data
    set YAML, 0 for none. Raises `UserError` for a wrong --imgsz, and if the files of an ensemble disagree.
    """
    sides = sides_of(requested)
    if fixed := fixed_size(weights):
        return ImageSize(fixed, True, (f"exported for images of {fixed[0]}x{fixed[1]} alone",))
    if sides:
        return ImageSize((sides[0], sides[-1]))
    trained = {name: size for name, content in weights.items() if (size := content.training_size)}
    default = suggested or int(task.defaults.get("imgsz", DEFAULT_SIDE_PIXELS))
    if trained and task.default_is_training_size:
        if len(set(trained.values())) > 1:
            each = ", ".join(f"{name} at {size} px" for name, size in trained.items())
            raise UserError(f"these models were trained at different image sizes ({each}); give one with --imgsz")
        default = next(iter(trained.values()))
    messages = (
        f"{name} was trained at {size} px; the default size is {default}, and --imgsz {size} gives that of the training"
        for name, size in trained.items()
        if size != default
    )
    return ImageSize((default, default), messages=tuple(messages))


def fixed_size(weights: Mapping[str, Weights]) -> tuple[int, int] | None:
    """Return the image height and width in pixels that exported files require; None if they take any size.

    Raises `UserError` if two files require different sizes.
    """
    programs = {name: content.program.metadata for name, content in weights.items() if content.program}
    sizes = {name: metadata.imgsz for name, metadata in programs.items() if not metadata.dynamic}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} {height}x{width}" for name, (height, width) in sizes.items())
        raise UserError(f"these files take images of different sizes ({each}); export them with --dynamic")
    return next(iter(sizes.values()), None)
