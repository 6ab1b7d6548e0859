"""The built-in data set "shapes-cls": `<split>/<class>/<index>.jpg` shows one shape, of the class `NAMES[index % 6]`.

Every image has its own generator, by seed, split and index. Called by data/data_yaml.py for `draw:` of a data YAML.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.builtin import shapes
from data.builtin.shapes import NAMES

CLS_SIDE_PIXELS = 64  # height and width of every image

_SPLIT_STREAM = 2  # in seeds where shapes.py has the split, 0 or 1, so that no generator is shared
_CLS_MIN_PIXELS, _CLS_MAX_PIXELS = 22.0, 56.0  # a shape's longer side, drawn log-uniformly


def draw_image(seed: int, split: int, index: int) -> np.ndarray:
    """Draw one image, (64, 64, 3) uint8 BGR, with one whole shape."""
    rng = np.random.default_rng([seed, _SPLIT_STREAM, split, index])
    image = shapes.background(rng, CLS_SIDE_PIXELS)
    size = _CLS_MIN_PIXELS * (_CLS_MAX_PIXELS / _CLS_MIN_PIXELS) ** rng.random()
    stencil = shapes.draw_stencil(rng, index % len(NAMES), size)
    height, width = stencil.fill.shape
    left, top = (int(rng.integers(CLS_SIDE_PIXELS - side + 1)) for side in (width, height))
    shapes.paint(rng, image, stencil, left, top)
    return shapes.photograph(rng, image)


def _write_image(folder: Path, seed: int, split: int, index: int) -> None:
    rng = np.random.default_rng([seed, _SPLIT_STREAM, split, index, 1])  # not the generator of `draw_image`
    path = folder / shapes.DRAWN_SPLITS[split] / NAMES[index % len(NAMES)] / f"{index:06d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shapes.encode(rng, draw_image(seed, split, index)))


def draw_dataset(folder: Path, seed: int = 0, train: int = 1200, val: int = 300) -> Path:
    """Draw the data set into `folder` unless it exists, and return `folder`; see `draw_builtin`."""
    return shapes.draw_builtin(folder, "shapes-cls", NAMES, seed, (train, val), _write_image)
