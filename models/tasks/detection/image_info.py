"""The type of `Batch.infos` in this package: a detection data set's description of an image.

Used by postprocess.py and records.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Placement(Protocol):
    """The map from a file's pixels to the batch's: batch = file x scale + offset, by (x, y)."""

    scale: tuple[float, float]
    offset: tuple[int, int]


class ImageInfo(Protocol):
    """An image of a batch: its file, its placement and its labels."""

    image: int  # index in the split
    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    placement: Placement
    rows: np.ndarray  # the labels, float32 (m, 5): class, normalised xywh
