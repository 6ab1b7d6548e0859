"""Augmentations of your own: `python train.py --data my.yaml --augmentations examples/own_augmentations.py`.

A function names what it takes, of image, boxes and classes, and returns the same in the same order; rng is the
generator of the item. image: uint8 (h, w, 3) RGB, of a size that stays. boxes: float32 (k, 4), x1 y1 x2 y2 in pixels.
classes: int64 (k,). Objects with outlines (segmentation) must stay where they are.
"""

from __future__ import annotations

import numpy as np


def fog(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blend the image with white, for one image in three, more at the top than at the bottom."""
    if rng.random() > 1 / 3:
        return image
    share = np.linspace(rng.uniform(0.3, 0.7), 0, len(image))[:, None, None]
    return (image * (1 - share) + 255 * share).astype(np.uint8)


class Cutout:
    """Paint a grey square over each image, of a share of its shorter side, and drop the objects that it hides."""

    def __init__(self, share: float = 0.3, hidden: float = 0.8) -> None:
        self.share, self.hidden = share, hidden

    def __call__(
        self, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        side = round(self.share * min(image.shape[:2]))
        left, top = rng.integers(0, image.shape[1] - side + 1), rng.integers(0, image.shape[0] - side + 1)
        image[top : top + side, left : left + side] = 114
        square = np.array([left, top, left + side, top + side])
        overlap = np.minimum(boxes[:, 2:], square[2:]) - np.maximum(boxes[:, :2], square[:2])
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        seen = overlap.clip(0).prod(1) <= self.hidden * area
        return image, boxes[seen], classes[seen]


AUGMENTATIONS = [fog, Cutout()]
