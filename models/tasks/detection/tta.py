"""In what sizes a detector is shown the images of a batch, where it is shown them more than once."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

GREY = 0.447  # between the means of ImageNet's channels, of values in 0 to 1: what is around an image that was shrunk


class View(NamedTuple):
    """Images as a share of their size, with left and right swapped or not."""

    scale: float
    mirrored: bool

    def of(self, images: Tensor, stride: int) -> tuple[Tensor, tuple[float, float]]:
        """The images (b, c, h, w), in 0 to 1, seen so, filled up to whole strides on the right and below; and what
        their width and height are really multiplied by, for pixels are whole."""
        if self.mirrored:
            images = images.flip(3)
        if self.scale == 1:
            return images, (1.0, 1.0)
        sides = images.shape[2:]
        height, width = (int(side * self.scale) for side in sides)
        below, right = (math.ceil(side / stride) * stride - side for side in (height, width))
        small = functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
        return functional.pad(small, (0, right, 0, below), value=GREY), (width / sides[1], height / sides[0])


VIEWS = (View(1.0, False), View(0.83, True), View(0.67, False))  # YOLOv5's
