"""The type of `Batch.infos` in this package: what a detection data set returns for each image beside its pixels.

Used by postprocess.py and records.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Placement(Protocol):
    """How an image's file lies in the batch: pixels of the batch = pixels of the file x scale + offset, by (x, y)."""

    @property
    def scale(self) -> tuple[float, float]: ...
    @property
    def offset(self) -> tuple[int, int]: ...


class ImageInfo(Protocol):
    """An image of a batch: its file, how it lies in the batch, and its labels."""

    @property
    def image(self) -> int:
        """The index in the split."""
        ...

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the file's image, pixels."""
        ...

    @property
    def placement(self) -> Placement: ...

    @property
    def rows(self) -> np.ndarray:
        """The labels, float32 (m, 5): class, normalised xywh."""
        ...
