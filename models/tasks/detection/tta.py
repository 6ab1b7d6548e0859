"""Test-time augmentation (--augment): scaled and mirrored copies of a batch.

Called by `DetectionPostprocess`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

PADDING_GREY = 0.447  # value, in 0 to 1, around a scaled image: near the mean of ImageNet's channels


class Augmentation(NamedTuple):
    """A scaled and possibly mirrored copy of a batch of images."""

    scale: float
    mirrored: bool

    def apply(self, images: Tensor, stride: int) -> tuple[Tensor, tuple[float, float]]:
        """Return the augmented images and the exact scale of width and height, after rounding to whole pixels.

        The images, (b, c, h, w) in 0 to 1, are padded on the right and below to whole strides.
        """
        if self.mirrored:
            images = images.flip(3)
        if self.scale == 1:
            return images, (1.0, 1.0)
        sides = images.shape[2:]
        height, width = (int(side * self.scale) for side in sides)
        below, right = (math.ceil(side / stride) * stride - side for side in (height, width))
        small = functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
        padded = functional.pad(small, (0, right, 0, below), value=PADDING_GREY)
        return padded, (width / sides[1], height / sides[0])


AUGMENTATIONS = (Augmentation(1.0, False), Augmentation(0.83, True), Augmentation(0.67, False))  # as in YOLOv5
