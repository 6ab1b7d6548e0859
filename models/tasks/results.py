"""What Python users get from predictor.py: `Result`, the base class of every `Prediction`, and `Results`, a list."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch

from utils.errors import UserError
from utils.files import numbered_folder, unique_stems
from utils.plots.drawing import Style, write_picture

if TYPE_CHECKING:
    from models.tasks.contract import Image

ROWS = ("xyxy", "xywh", "xyxyn", "xywhn")  # YOLOv5's attributes of `Results`
YOLOV5_NAMES = {"pred": "xyxy", "files": "path"}  # further attributes there, and what they are here
SAVE_PROJECT = Path("runs/detect")  # folder that `save` writes into by default


class Result:
    """The result for one image: an iterable over its objects, each a dict of `columns`."""

    if TYPE_CHECKING:  # the task's `Prediction` defines them
        path: str
        names: Mapping[int, str]
        pixels: Callable[[], Image] | None

        @property
        def scores(self) -> np.ndarray: ...
        @property
        def classes(self) -> np.ndarray: ...
        def describe(self) -> str: ...
        def draw(self, image: Image, style: Style) -> Image: ...

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

    def __getitem__(self, index: int) -> Result:
        """Return the result itself for 0, as if it were a list of one, which ultralytics returns for an image."""
        return (self,)[index]

    def to_df(self) -> Any:
        """Return a pandas.DataFrame of `columns`. Raises `UserError` if pandas is not installed."""
        return data_frame(self.columns())

    def to_json(self) -> str:
        """Return the objects as JSON: a list of dicts of `columns`."""
        return json.dumps(list(self))

    def plot(
        self,
        line_thickness: int = Style().thickness,
        hide_labels: bool = False,
        hide_conf: bool = False,
        bgr: bool = False,
        labels: bool = True,  # False is YOLOv5's name for `hide_labels`
    ) -> Image:
        """Return the image with the result drawn on it, uint8 (h, w, 3) in RGB or BGR; see detect.py's flags."""
        if self.pixels is None:
            raise UserError(f"{self.path}: there is no image to draw on; use draw(image, style)")
        picture = self.draw(self.pixels(), Style(line_thickness, labels and not hide_labels, not hide_conf))
        return picture if bgr else np.ascontiguousarray(picture[..., ::-1])

    def show(self, **style: Any) -> None:
        """Show the picture of `plot`, whose arguments `style` are, in the notebook or a viewer. Raises `UserError`."""
        from PIL import Image, ImageShow  # imported here because it imports IPython if that is installed

        picture, notebook = Image.fromarray(self.plot(**{**style, "bgr": False})), sys.modules.get("IPython")
        if notebook and hasattr(notebook.get_ipython(), "kernel"):
            notebook.display.display(picture)
        elif not ImageShow.show(picture):
            raise UserError("show(): this machine has no program that shows pictures; write a file with save(path)")

    def save(self, path: str | Path = "", exist_ok: bool = False, **style: Any) -> Path:
        """Write the picture of `plot`, whose arguments `style` are, to a file and return its path.

        `path` is a file, whose suffix names the format, or a folder; by default the next free runs/detect/exp, exp2 ...
        """
        picture = self.plot(**{**style, "bgr": True})  # before a folder is made
        file = Path(path) if path else _save_folder(exist_ok)
        if file.is_dir() or not file.suffix:
            file /= f"{unique_stems([self.path])[0]}.jpg"
        if file.resolve() == Path(self.path).resolve():
            raise UserError(f"{file} is the image itself; name another file or folder")
        write_picture(file, picture)
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
    """A list of the results for several images, in order. An attribute such as `boxes` is the list of its members'; the
    arrays of ROWS are tensors, as in YOLOv5."""

    def show(self, **style: Any) -> None:
        """Show each image, see `Prediction.show`."""
        for result in self:
            result.show(**style)

    def render(self, **style: Any) -> list[Image]:
        """Return each image drawn, see `Prediction.plot`."""
        return [result.plot(**style) for result in self]

    plot, n = render, property(len)

    def save(self, save_dir: str | Path = "", exist_ok: bool = False, **style: Any) -> Path:
        """Write each image into a folder, see `Prediction.save`; return the folder."""
        Results(self[:1]).render(**style)  # raises for a wrong argument before a folder is made
        folder = Path(save_dir) if save_dir else _save_folder(exist_ok)
        for result, stem in zip(self, unique_stems(result.path for result in self), strict=True):
            result.save(folder / f"{stem}.jpg", **style)
        return folder

    def to_df(self) -> Any:
        """Return a pandas.DataFrame of the objects of all images, with a column `image` first. Raises `UserError`."""
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

    @property
    def names(self) -> dict[int, str]:
        """The class names by number, as in YOLOv5; {} without images."""
        return dict(self[0].names) if self else {}

    def __getattr__(self, name: str) -> list[Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("crop", "ims", "imgs", "s", "t", "tolist"):
            raise AttributeError(f"results have no {name}: each result of the list has crops(image), plot() and xyxy")
        name = YOLOV5_NAMES.get(name, name)
        values = [getattr(result, name) for result in self]
        return [torch.from_numpy(value) for value in values] if name in ROWS else values

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def data_frame(data: Any, **options: Any) -> Any:
    """Return pandas.DataFrame(data, **options). Raises `UserError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise UserError("to_df() and pandas() need pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(data, **options)


def _save_folder(exist_ok: bool) -> Path:
    return SAVE_PROJECT / "exp" if exist_ok else numbered_folder(SAVE_PROJECT, "exp", exist_ok=False)
