"""Models for `torch.hub.load(FOLDER, "custom", path="best.pt", source="local")`, as YOLOv5's hub names them.

The names are `custom` and those of the release files: yolov5n to yolov5x, also with 6, -seg and -cls; yolov9t to c.
"""

from __future__ import annotations

import functools
from typing import Any

from predictor import Predictor
from utils.errors import UserError


def custom(path: Any = "yolov5s.pt", *, _verbose: bool = True, **arguments: Any) -> Predictor:
    """Return a `Predictor` of one weight file or several, which returns `Results` for one image too.

    Without YOLOv5's `_verbose` only warnings are printed; its `pretrained`, `autoshape` and `channels` are fixed.
    """
    for name, value in (("pretrained", True), ("autoshape", True), ("channels", 3)):
        if arguments.pop(name, value) != value:
            raise UserError(f"{name}= can only be {value}: the models are trained, on colour images")
    if isinstance(arguments.get("classes"), int):  # in YOLOv5 the number of classes of a new head
        raise UserError("classes=N: train.py gives a model the classes of your data; to find some classes give a list")
    predictor = Predictor(path, **{"quiet": not _verbose, **arguments})
    predictor.as_list = True
    return predictor


for _suffix in ("", "6", "-seg", "-cls"):
    for _size in "nsmlx":
        globals()[f"yolov5{_size}{_suffix}"] = functools.partial(custom, path=f"yolov5{_size}{_suffix}.pt")
for _size in "tsmc":
    globals()[f"yolov9{_size}"] = functools.partial(custom, path=f"v9-{_size}.pt")
