"""A drawn data set of oriented boxes: plates, frames and ladders, rectangles at any angle that do not overlap.

Backgrounds, colours and the camera are those of `data.builtin`.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import torch

from data.builtin import SIDE_PIXELS, Drawing, DrawnSet, background, fill_colour, photograph

from .geometry import corners

NAMES = ("plate", "frame", "ladder")

_FEWEST, _MOST, _TRIES = 3, 7, 12  # rectangles of an image, and positions that are tried for each
_LONGEST, _SHORTEST, _LEAST_ASPECT, _MOST_ASPECT = 72.0, 24.0, 1.4, 4.0  # of the longer side, pixels
_FRACTION_BITS = 4  # of the coordinates that OpenCV fills polygons by


def _filled(box: np.ndarray) -> np.ndarray:
    """Return the share of each pixel that a box (5,) covers, float32."""
    mask = np.zeros((SIDE_PIXELS, SIDE_PIXELS), np.uint8)
    points = (corners(torch.from_numpy(box)).numpy() - 0.5) * 2**_FRACTION_BITS
    cv2.fillConvexPoly(mask, np.round(points).astype(np.int32), 255, cv2.LINE_AA, _FRACTION_BITS)
    return mask.astype(np.float32) / 255


def _parts(box: np.ndarray, label: int) -> np.ndarray:
    """Return the share of each pixel that the object inside of a box covers: all, its edges, or those and rungs."""
    whole, line = _filled(box), 0.22 * box[3]
    if NAMES[label] == "plate":
        return whole
    holes = 1 if NAMES[label] == "frame" else 3
    along = np.array((math.cos(box[4]), math.sin(box[4])))
    length = (box[2] - line) / holes
    for number in range(holes):
        centre = box[:2] + along * length * (number - (holes - 1) / 2)
        whole = whole - _filled(np.array((*centre, length - line, box[3] - 2 * line, box[4])))
    return whole.clip(0, 1)


def _draw(rng: np.random.Generator, index: int) -> Drawing:
    """Draw an image and the corners of its objects, as shares of its side."""
    image, taken, rows = background(rng), np.zeros((SIDE_PIXELS, SIDE_PIXELS), bool), []
    for _ in range(int(rng.integers(_FEWEST, _MOST + 1))):
        label, width = int(rng.integers(len(NAMES))), rng.uniform(_SHORTEST, _LONGEST)
        height = width / rng.uniform(_LEAST_ASPECT, _MOST_ASPECT)
        for _ in range(_TRIES):
            angle, centre = rng.uniform(-math.pi / 2, math.pi / 2), rng.uniform(0, SIDE_PIXELS, 2)
            box = np.array((*centre, width, height, angle))
            points = corners(torch.from_numpy(box)).numpy()
            if points.min() < 0 or points.max() > SIDE_PIXELS or (taken & (_filled(box) > 0)).any():
                continue
            part = _parts(box, label)[..., None]
            image = image + part * (fill_colour(rng, image[_filled(box) > 0][None]) - image)
            taken |= _filled(box) > 0
            rows.append(f"{label} {' '.join(f'{value / SIDE_PIXELS:.6f}' for value in points.ravel())}\n")
            break
    return photograph(rng, image.astype(np.float32)), rows


rectangles = DrawnSet("rectangles", NAMES, (4,), _draw)
draw_dataset = rectangles.draw_dataset  # for `draw:` of a data YAML
