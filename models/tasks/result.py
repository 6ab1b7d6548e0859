"""`Result`: the result for one image as Python users see it, in a line, a picture or a table. Base of `Prediction`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.plots.drawing import Style, write_picture


@dataclass(frozen=True, eq=False, repr=False)
class Result(ABC):
    """The result for one image, in pixels of its file.

    image: the index in the split. path: of the file, or another name of the image. names: of the classes, by number.
    pixels: returns the image, uint8 (h, w, 3) BGR, for `plot`; None in val.py.
    """

    image: int
    path: str
    names: Mapping[int, str]
    pixels: Callable[[], np.ndarray] | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def scores(self) -> np.ndarray:
        """Return the confidence of each object, or of the most probable classes, float32 (k,), the highest first."""

    @property
    @abstractmethod
    def classes(self) -> np.ndarray:
        """Return the class number of each of `scores`, int64 (k,)."""

    @abstractmethod
    def describe(self) -> str:
        """Format the result for the console: `2 persons, 1 dog`."""

    @abstractmethod
    def draw(self, image: np.ndarray, style: Style) -> np.ndarray:
        """Return a copy of `image` with the result drawn on it."""

    @property
    def items(self) -> list[tuple[str, float]]:
        """Return class name and confidence of each of `scores`."""
        return [(self.names[k], score) for k, score in zip(self.classes.tolist(), self.scores.tolist(), strict=True)]

    def columns(self) -> dict[str, Any]:
        """Return the columns of `to_df` by name, of a value for each of `scores`."""
        return {"confidence": self.scores, "class": self.classes, "name": [name for name, _ in self.items]}

    def to_df(self) -> Any:
        """Return a pandas.DataFrame of `columns`. Raises `UserError` if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_df() needs pandas, which is not installed; pip install pandas") from None
        return pandas.DataFrame(self.columns())

    def plot(
        self,
        *,
        line_thickness: int = Style().thickness,
        hide_labels: bool = False,
        hide_conf: bool = False,
        bgr: bool = False,
    ) -> np.ndarray:
        """Return the image with the result drawn on it, uint8 (h, w, 3) in RGB or BGR; see detect.py's flags."""
        if self.pixels is None:
            raise UserError(f"{self.path}: there is no image to draw on; use draw(image, style)")
        picture = self.draw(self.pixels(), Style(line_thickness, not hide_labels, not hide_conf))
        return picture if bgr else np.ascontiguousarray(picture[..., ::-1])

    def save(self, path: str | Path, **style: Any) -> None:
        """Write `plot` into a file, whose suffix is the format, such as .jpg. style: as in `plot`."""
        write_picture(Path(path), self.plot(**{**style, "bgr": True}))

    def __str__(self) -> str:
        return f"{self.path}: {self.describe()}"

    __repr__ = __str__
