"""Windows of large images: `tiles` of a data YAML, and --tile of detect.py. See docs/large-images.md."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.labels import Labels
from data.polygons import part_offsets
from utils.batch import ImageInfo, Placement

MIN_BOX_SHARE = 1 / 3  # smallest share of a box's area in a window with which it is a label there


@dataclass(frozen=True)
class Tiles:
    """How images are cut into windows."""

    size: int  # pixels of a window's side; an image that is not larger is one window
    overlap: float = 0.2  # share of a window's side that the next one repeats
    background: float = 0.1  # share of the windows without labels that training keeps

    def bounds(self, width: int, height: int, with_whole: bool) -> np.ndarray:
        """Return the windows of an image, row by row, int32 (n, 4): left, top, right, bottom (exclusive) in pixels.
        The last row and column end at the image's edge. With `with_whole`, several are followed by the whole image."""
        step = max(round(self.size * (1 - self.overlap)), 1)
        lefts, tops = ([*range(0, side - self.size, step), max(side - self.size, 0)] for side in (width, height))
        corners = [(left, top) for top in tops for left in lefts]
        windows = [(left, top, min(left + self.size, width), min(top + self.size, height)) for left, top in corners]
        return np.array([*windows, *[(0, 0, width, height)] * (with_whole and len(windows) > 1)], np.int32)


class Windows(NamedTuple):
    """The n windows of a split's images, image by image."""

    images: np.ndarray  # int64 (n,): index of each one's image in the split
    bounds: np.ndarray  # int32 (n, 4): left, top, right, bottom (exclusive) in pixels of the file
    labels: Labels  # of the windows, as if they were images
    hidden: Labels  # the visible parts of the other objects
    whole: Labels  # of the images


def cut(labels: Labels, tiles: Tiles, with_whole: bool) -> Windows:
    """Return the windows of images. A box with `MIN_BOX_SHARE` of its area in a window is a label there, clipped."""
    bounds = [tiles.bounds(width, height, with_whole) for width, height in labels.sizes.tolist()]
    parts: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = [], []  # rows, and their number in each window
    for image, windows in enumerate(bounds):
        rows, half = labels.image_rows(image), labels.image_rows(image)[:, 3:].astype(np.float64) / 2
        corners = np.concatenate((rows[:, 1:3] - half, rows[:, 1:3] + half), 1).clip(0, 1)
        corners *= np.tile(labels.sizes[image], 2)
        low = np.maximum(corners[:, :2], windows[:, None, :2])  # (windows, boxes, 2)
        high = np.minimum(corners[:, 2:], windows[:, None, 2:])
        shares = (high - low).clip(0).prod(2) / (corners[:, 2:] - corners[:, :2]).prod(1)
        is_label = shares >= MIN_BOX_SHARE
        for part, chosen in zip(parts, (is_label, (shares > 0) & ~is_label), strict=True):
            window, row = chosen.nonzero()
            origin, side = windows[window, :2], windows[window, 2:] - windows[window, :2]
            a, b = (low[chosen] - origin) / side, (high[chosen] - origin) / side
            part.append((np.concatenate((rows[row, :1], (a + b) / 2, b - a), 1).astype(np.float32), chosen.sum(1)))
    joined = np.concatenate(bounds)
    visible, hidden = (
        Labels(np.concatenate(rows), part_offsets(np.concatenate(counts)), joined[:, 2:] - joined[:, :2], ())
        for rows, counts in (zip(*part, strict=True) for part in parts)
    )
    return Windows(np.repeat(np.arange(len(bounds)), [*map(len, bounds)]), joined, visible, hidden, labels)


def training_windows(labels: Labels, files: Sequence[Path], tiles: Tiles) -> Windows:
    """Return the windows to train on: all with labels, and of the rest those that a hash of file and place chooses."""
    windows = cut(labels, tiles, with_whole=False)
    chosen = windows.labels.counts > 0
    for window in np.flatnonzero(~chosen).tolist():
        file, (left, top, *_) = files[windows.images[window]], windows.bounds[window].tolist()
        digest = hashlib.sha256(os.fsencode(f"{file.parent.name}/{file.name} {left} {top}")).digest()
        chosen[window] = int.from_bytes(digest[:8], "big") < tiles.background * 2**64
    parts = windows.labels.subset(chosen), windows.hidden.subset(chosen)
    return Windows(windows.images[chosen], windows.bounds[chosen], *parts, labels)


def in_file(info: ImageInfo, image: int, size: tuple[int, int], window: Sequence[int]) -> ImageInfo:
    """Return `info`, which describes a window as an image of its own, for the window as a part of image `image`."""
    (left, top, right, bottom), (scale, offset) = window, info.placement
    placement = Placement(scale, (offset[0] - scale[0] * left, offset[1] - scale[1] * top))
    return info._replace(image=image, size=size, placement=placement, window=(left, top, right, bottom))
