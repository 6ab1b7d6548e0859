"""The path of an image's label file, by YOLO's convention. Called by the modules of data/ that read labels."""

from __future__ import annotations

import os
from functools import lru_cache


def label_name(image: str) -> str:
    """Return the path of an image's label file: the last folder `images` becomes `labels`, and the suffix .txt.

    Paths are text, because `Path` is slow for many images.
    """
    name = image.rfind(os.sep) + 1
    suffix = image.rfind(".", name + 1)  # a leading dot starts no suffix
    return f"{_label_folder(image[:name])}{image[name : suffix if suffix > 0 else None]}.txt"


@lru_cache(4096)
def _label_folder(folder: str) -> str:
    """Return the label folder of an image folder. Both end with a separator, or are empty."""
    before, images, after = f"{os.sep}{folder}".rpartition(f"{os.sep}images{os.sep}")
    return f"{before}{os.sep}labels{os.sep}{after}"[len(os.sep) :] if images else folder
