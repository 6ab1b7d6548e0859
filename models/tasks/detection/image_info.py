"""The type of `Batch.infos` in this package: what a detection data set returns for each image beside its pixels.

Used by postprocess.py and records.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Placement(Protocol):
    """How an image's file lies in the batch: pixels of the batch = pixels of the file x scale + offset, by (x, y)."""

    scale: tuple[float, float]
    offset: tuple[int, int]


class ImageInfo(Protocol):
    """An image of a batch: its file, how it lies in the batch, and its labels."""

    image: int  # index in the split
    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    placement: Placement
    rows: np.ndarray  # the labels, float32 (m, 5): class, normalised xywh
