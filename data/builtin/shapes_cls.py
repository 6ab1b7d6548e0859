"""The built-in data set "shapes-cls": one shape to an image, in a folder per class, for classification.

Shapes, backgrounds and colours are those of `data.builtin.shapes`. Every image has its own generator,
`numpy.random.default_rng([seed, 2, split, index])`, so that any image can be drawn again without the others. Image
`index` of a split shows the class `NAMES[index % 6]` and is the file `<split>/<class>/<index>.jpg`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.builtin.shapes import NAMES, SPLITS, Kind, background, draw_kind, draw_stencil, encode, paint, photograph

DRAWING = 1  # raise it with every change, here or in data/builtin/shapes.py, that alters a pixel
SIDE = 64  # pixels, height and width of every image
MARKER = "shapes-cls.json"  # in the data set's folder: which drawing this is

_STREAM = 2  # where data.builtin.shapes has a split, 0 or 1: with the same seed no generator is shared
_SIZES = (22.0, 56.0)  # pixels, a shape's longer side, drawn log-uniformly


def draw_image(seed: int, split: int, index: int) -> np.ndarray:
    """Draw one image, (64, 64, 3) uint8 BGR, with one shape wholly inside it."""
    rng = np.random.default_rng([seed, _STREAM, split, index])
    image = background(rng, SIDE)
    stencil = draw_stencil(rng, index % len(NAMES), _SIZES[0] * (_SIZES[1] / _SIZES[0]) ** rng.random())
    height, width = stencil.fill.shape
    paint(rng, image, stencil, int(rng.integers(SIDE - width + 1)), int(rng.integers(SIDE - height + 1)))
    return photograph(rng, image)


def _write_image(folder: Path, seed: int, split: int, index: int) -> None:
    """Draw one image and write its JPEG."""
    rng = np.random.default_rng([seed, _STREAM, split, index, 1])  # of its own: `draw_image` has no part in encoding
    path = folder / SPLITS[split] / NAMES[index % len(NAMES)] / f"{index:06d}.jpg"
    path.write_bytes(encode(rng, draw_image(seed, split, index)))


_KIND = Kind("shapes-cls", DRAWING, MARKER, tuple(f"{{}}/{name}" for name in NAMES), (), _write_image)


def draw_dataset(folder: Path, seed: int = 0, train: int = 1200, val: int = 300) -> Path:
    """Draw the data set into `folder` unless it is there already, and return `folder`; see `draw_kind`."""
    return draw_kind(_KIND, folder, seed, (train, val))
