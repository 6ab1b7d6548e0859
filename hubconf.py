"""Models for `torch.hub.load(FOLDER, "custom", path="best.pt", source="local")`, as YOLOv5's hub names them.

Each is a `Predictor` that always returns a list; its arguments (predictor.py) may follow. The names are `custom` and
the names of YOLOv5's release files: yolov5n to yolov5x, yolov5n6 to yolov5x6, yolov5n-seg to yolov5x-seg, yolov5n-cls
to yolov5x-cls; and yolov9t, yolov9s, yolov9m, yolov9c.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predictor import Predictor

dependencies = ["torch", "torchvision", "cv2", "numpy", "PIL", "yaml", "filelock", "tqdm"]


def custom(path: Any = "yolov5s.pt", *, pretrained: bool = True, _verbose: bool = True, **arguments: Any) -> Predictor:
    """Return a `Predictor` of a weight file, which returns `Results` for one image too.

    Args:
        path: one name or several, for an ensemble
        pretrained: accepted as in YOLOv5; False raises `UserError`
        _verbose: whether to print more than warnings, as in YOLOv5
        arguments: arguments of `Predictor`
    """
    from predictor import Predictor
    from utils.errors import UserError

    if not pretrained:
        raise UserError("pretrained=False: a model without training detects nothing; train one with train.py")
    predictor = Predictor(path, **{"quiet": not _verbose, **arguments})
    predictor.as_list = True
    return predictor


for _suffix in ("", "6", "-seg", "-cls"):
    for _size in "nsmlx":
        globals()[f"yolov5{_size}{_suffix}"] = functools.partial(custom, f"yolov5{_size}{_suffix}.pt")
for _size in "tsmc":
    globals()[f"yolov9{_size}"] = functools.partial(custom, f"v9-{_size}.pt")
