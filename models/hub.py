"""Where weights that a flag names are to be found."""

from __future__ import annotations

import os
import re
from pathlib import Path

from utils.errors import UserError
from utils.files import ROOT

OFFICIAL = re.compile(r"yolov5[nsmlx]6?\.pt")
RELEASE = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"


def find_weights(name: str) -> Path:
    """The weight file of that name, as given or in the repository's folder.

    Raises `UserError`; for an official YOLOv5 name it tells the address.
    """
    for candidate in (Path(name), ROOT / name):
        if os.path.isfile(candidate):
            return candidate
    if OFFICIAL.fullmatch(Path(name).name):
        raise UserError(
            f"weights {name} are not here; download {RELEASE}{Path(name).name} and put it at {Path(name).absolute()}, "
            "or start from scratch with --weights '' --cfg and a model YAML"
        )
    raise UserError(f"weights {name} are not a file; check the path, or start from scratch with --weights ''")
