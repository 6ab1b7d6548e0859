"""The built-in data set "shapes-seg": the outlines of the visible parts of shapes that cover each other.

Every image has its own generator, by seed, split and index. Called by data/data_yaml.py for `draw:` of a data YAML.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.builtin import shapes
from data.builtin.shapes import NAMES, SIDE_PIXELS, SUBPIXELS
from data.polygons import Points, mask_outline

_SEG_SPLIT_STREAM = 3  # in seeds where shapes.py has the split, 0 or 1, so that no generator is shared
_FEWEST, _MOST = 5, 9  # number of shapes in an image
_SEG_MIN_PIXELS = 14.0  # least longer side of a shape: a quarter of it, at which masks are learned, shows its form
_OUTLINE_TOLERANCE = 1.5  # sub-pixels


Outlined = tuple[int, Points]  # the class of an object, and the outline of its visible part, in pixels


def draw_image(seed: int, split: int, index: int) -> tuple[np.ndarray, list[Outlined]]:
    """Draw one image, (160, 160, 3) uint8 BGR, and return it with its objects."""
    rng = np.random.default_rng([seed, _SEG_SPLIT_STREAM, split, index])
    image = shapes.background(rng)
    placed = shapes.arrange(rng, _FEWEST, _MOST, _SEG_MIN_PIXELS)
    on_top = np.zeros((SIDE_PIXELS * SUBPIXELS, SIDE_PIXELS * SUBPIXELS), np.uint8)  # sub-pixels: the number of a shape
    corners = []
    for number, shape in enumerate(placed, 1):
        shapes.paint(rng, image, shape.stencil, shape.left, shape.top)
        left, top = SUBPIXELS * shape.left, SUBPIXELS * shape.top
        part = shape.stencil.window(shape.left, shape.top, SIDE_PIXELS)
        x1, y1, x2, y2 = (SUBPIXELS * side for side in part)
        on_top[y1:y2, x1:x2][shape.stencil.fine[y1 - top : y2 - top, x1 - left : x2 - left] > 0] = number
        corners.append((x1, y1, x2, y2))
    objects = []
    for number, (shape, (x1, y1, x2, y2)) in enumerate(zip(placed, corners, strict=True), 1):
        outline = mask_outline((on_top[y1:y2, x1:x2] == number).view(np.uint8), _OUTLINE_TOLERANCE)
        points = [((x + x1) / SUBPIXELS, (y + y1) / SUBPIXELS) for x, y in outline]
        objects.append((shape.stencil.label, points))
    return shapes.photograph(rng, image), objects


def _write_image(folder: Path, seed: int, split: int, index: int) -> None:
    image, objects = draw_image(seed, split, index)
    rng = np.random.default_rng([seed, _SEG_SPLIT_STREAM, split, index, 1])  # not the generator of `draw_image`
    rows = [
        f"{label} {' '.join(f'{value / SIDE_PIXELS:.5f}' for point in outline for value in point)}\n"
        for label, outline in objects
    ]
    shapes.write_labelled(folder, split, index, shapes.encode(rng, image), rows)


def draw_dataset(folder: Path, seed: int = 0, train: int = 640, val: int = 160) -> Path:
    """Draw the data set into `folder` unless it exists, and return `folder`; see `draw_builtin`."""
    return shapes.draw_builtin(folder, "shapes-seg", NAMES, seed, (train, val), _write_image)
