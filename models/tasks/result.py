"""Results for Python users, as a line, a picture or a table: `Result`, the base of `Prediction`, for one image, and
`Results`, a list, for several images."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np

from utils.errors import UserError
from utils.files import numbered_folder, unique_stems
from utils.plots.drawing import Style, write_picture

SAVE_PROJECT = Path("runs/detect")  # folder that `save` writes into by default


@dataclass(frozen=True, eq=False, repr=False)
class Result(ABC):
    """The result for one image, in pixels of its file: an iterable over its objects, each a dict of `columns`.

    Attributes:
        image: index of the image in its split
        path: path of the file, or another name of the image
        names: class names, by number
        pixels: function that returns the image, uint8 (h, w, 3) BGR, for `plot`; None in val.py
    """

    image: int
    path: str
    names: Mapping[int, str]
    pixels: Callable[[], np.ndarray] | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def scores(self) -> np.ndarray:
        """Return the confidence of each object, or of the most probable classes, float32 (k,), highest first."""

    @property
    @abstractmethod
    def classes(self) -> np.ndarray:
        """Return the class number that belongs to each of `scores`, int64 (k,)."""

    @abstractmethod
    def describe(self) -> str:
        """Format the result for the console: `2 persons, 1 dog`."""

    @abstractmethod
    def draw(self, image: np.ndarray, style: Style) -> np.ndarray:
        """Return a copy of `image` with the result drawn on it."""

    @property
    def items(self) -> list[tuple[str, float]]:
        """Return the class name and confidence of each of `scores`."""
        return [(self.names[k], score) for k, score in zip(self.classes.tolist(), self.scores.tolist(), strict=True)]

    def columns(self) -> dict[str, Any]:
        """Return the columns of `to_df` by name, with one value for each of `scores`."""
        return {"confidence": self.scores, "class": self.classes, "name": [name for name, _ in self.items]}

    def __len__(self) -> int:
        """Return the number of objects, or of the most probable classes."""
        return len(self.scores)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the objects, each a dict of numbers and text, see `columns`."""
        columns = {name: np.asarray(values).tolist() for name, values in self.columns().items()}
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def to_df(self) -> Any:
        """Return a pandas.DataFrame of `columns`. Raises `UserError` if pandas is not installed."""
        return data_frame(self.columns())

    def to_json(self) -> str:
        """Return the objects as JSON: a list of dicts of `columns`."""
        return json.dumps(list(self))

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

    def show(self, **style: Any) -> None:
        """Show the picture of `plot`, whose arguments `style` are, in the notebook or the system's picture viewer.

        Raises `UserError` if there is neither.
        """
        from PIL import Image, ImageShow  # imported here because it imports IPython if that is installed

        picture, notebook = Image.fromarray(self.plot(**{**style, "bgr": False})), sys.modules.get("IPython")
        if notebook and hasattr(notebook.get_ipython(), "kernel"):
            notebook.display.display(picture)
        elif not ImageShow.show(picture):
            raise UserError("show(): this machine has no program that shows pictures; write a file with save(path)")

    def save(self, path: str | Path = "", **style: Any) -> Path:
        """Write the picture of `plot`, whose arguments `style` are, to a file and return its path.

        Args:
            path: file, whose suffix, such as .jpg, names the format, or folder; by default the next free folder
                runs/detect/exp, exp2 ...
        """
        file = Path(path) if path else numbered_folder(SAVE_PROJECT, "exp", exist_ok=False)
        if file.is_dir() or not file.suffix:
            file /= f"{unique_stems([self.path])[0]}.jpg"
        write_picture(file, self.plot(**{**style, "bgr": True}))
        return file

    def _repr_png_(self) -> bytes | None:
        """Return the picture of `plot` as PNG, for notebooks; None if the image cannot be read."""
        try:
            return cv2.imencode(".png", self.plot(bgr=True))[1].tobytes()
        except UserError:
            return None

    def __str__(self) -> str:
        return f"{self.path}: {self.describe()}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self}>"


class Results(list[Any]):
    """A list of the results for several images, in order. An attribute such as `boxes` is the list of its members'."""

    def show(self, **style: Any) -> None:
        """Show each image, see `Result.show`."""
        for result in self:
            result.show(**style)

    def save(self, folder: str | Path = "", **style: Any) -> Path:
        """Write each image into a folder, by default the next free runs/detect/exp, exp2 ...; return the folder."""
        folder = Path(folder) if folder else numbered_folder(SAVE_PROJECT, "exp", exist_ok=False)
        for result, stem in zip(self, unique_stems(result.path for result in self), strict=True):
            result.save(folder / f"{stem}.jpg", **style)
        return folder

    def to_df(self) -> Any:
        """Return a pandas.DataFrame of the objects of all images, with a column `image` before the results' columns.

        Raises `UserError` if pandas is not installed.
        """
        names = ["image", *(self[0].columns() if self else ())]
        return data_frame([(result.path, *row.values()) for result in self for row in result], columns=names)

    def pandas(self) -> SimpleNamespace:
        """Return the tables of the images as in YOLOv5: `pandas().xyxy[0]` is `to_df` of the first."""
        return SimpleNamespace(xyxy=[result.to_df() for result in self])

    def print(self) -> None:
        """Print a line for each image."""
        print(self)

    def to_json(self) -> str:
        """Return JSON: a list with the `image` and `objects` of each image."""
        return json.dumps([{"image": result.path, "objects": list(result)} for result in self])

    def __getattr__(self, name: str) -> list[Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return [getattr(result, name) for result in self]

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def data_frame(data: Any, **options: Any) -> Any:
    """Return pandas.DataFrame(data, **options). Raises `UserError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise UserError("to_df() needs pandas, which is not installed; pip install pandas") from None
    return pandas.DataFrame(data, **options)
