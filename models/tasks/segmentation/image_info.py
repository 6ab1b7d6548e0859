"""The types of this package's batches and of `Batch.infos`: a segmentation data set's description of an image.

Used by the criterion, the postprocess and the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from models.tasks.detection.image_info import ImageInfo

MASK_STRIDE = 4  # pixels of the network's image per pixel of a mask map, in x and in y


class SegmentationInfo(ImageInfo, Protocol):
    """An image of a batch: its file, its placement, its labels and, in an evaluation, their outlines."""

    outlines: tuple[np.ndarray, ...]  # of each row, float32 (p, 2): x, y as shares of the file's width and height


class SegmentationBatch(Protocol):
    """A batch with the masks of its targets, on maps of 1/`MASK_STRIDE` of the images' height and width.

    images, targets: as a detector's. mask_pixels: uint8 (s,), 0 or 1, the pixels of all windows, target after target,
    row by row. windows: int32 (m, 4), left, top, right, bottom (exclusive) of each target's window on the map; outside
    of it a mask is 0. host_targets: float32 (m, 6), equal to `targets`. The last two are on the host, so that shapes
    that follow from them are known without waiting for the device.
    """

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def infos(self) -> Sequence[SegmentationInfo]: ...
    @property
    def mask_pixels(self) -> Tensor: ...
    @property
    def windows(self) -> np.ndarray: ...
    @property
    def host_targets(self) -> np.ndarray: ...
