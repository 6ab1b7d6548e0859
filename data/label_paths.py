"""The path of an image's label file, by YOLO's convention. Called by the modules of data/ that read labels."""

from __future__ import annotations

import os
from functools import lru_cache


def label_name(image: str) -> str:
    """Return the label file of an image: the last folder `images` of its path becomes `labels`, the suffix .txt.

    Text, because Paths are slow for many images.
    """
    name = image.rfind(os.sep) + 1
    suffix = image.rfind(".", name + 1)  # a leading dot starts no suffix
    return f"{_label_folder(image[:name])}{image[name : suffix if suffix > 0 else None]}.txt"


@lru_cache(4096)
def _label_folder(folder: str) -> str:
    """Return the folder of the labels for a folder of images. Both end with a separator, or are empty."""
    before, images, after = f"{os.sep}{folder}".rpartition(f"{os.sep}images{os.sep}")
    return f"{before}{os.sep}labels{os.sep}{after}"[len(os.sep) :] if images else folder
