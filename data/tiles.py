"""Windows of large images: `tiles` of a data YAML, and --tile of detect.py.

Training sees windows as if they were images. Validation and detection run all windows of an image, and the whole image
shrunk, in one batch; `Prediction.joined` makes one result of theirs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.labels import Labels
from data.polygons import part_offsets
from utils.batch import ImageInfo, Placement
from utils.config.flags import is_number

MIN_BOX_SHARE = 1 / 3  # smallest share of a box's area in a window in which it is a label
LIMITS = {"size": (32, 2**14), "overlap": (0, 0.9), "background": (0, 1)}  # of the keys of `tiles`


@dataclass(frozen=True)
class Tiles:
    """How images are cut into windows."""

    size: int  # pixels of a window's side; an image that is not larger is one window
    overlap: float = 0.2  # share of a window's side that the next one shares
    background: float = 0.1  # share of the windows without labels that training keeps

    @staticmethod
    def is_valid(values: Any) -> bool:
        """Return whether `values` are arguments of this class."""
        if not isinstance(values, dict) or type(values.get("size")) is not int or not {*values} <= {*LIMITS}:
            return False
        return all(is_number(value) and LIMITS[key][0] <= value <= LIMITS[key][1] for key, value in values.items())

    def windows(self, width: int, height: int) -> np.ndarray:
        """Return the windows of an image, row by row, int32 (n, 4): left, top, right, bottom (exclusive) in pixels.

        The last ones of a row and of a column end at the image's edge.
        """
        step = max(round(self.size * (1 - self.overlap)), 1)
        lefts, tops = ([*range(0, side - self.size, step), max(side - self.size, 0)] for side in (width, height))
        corners = np.array([(left, top) for top in tops for left in lefts], np.int32)
        return np.concatenate((corners, np.minimum(corners + self.size, (width, height))), 1, dtype=np.int32)

    def with_whole(self, width: int, height: int) -> np.ndarray:
        """Return the windows of an image and, if it has several, the whole image: see `windows`."""
        windows = self.windows(width, height)
        return np.concatenate((windows, [(0, 0, width, height)]), dtype=np.int32) if len(windows) > 1 else windows


class Windows(NamedTuple):
    """The n windows of a split's images, image by image."""

    images: np.ndarray  # int64 (n,): index of each one's image in the split
    bounds: np.ndarray  # int32 (n, 4): left, top, right, bottom (exclusive) in pixels of the file
    labels: Labels  # of the windows, as if they were images
    hidden: Labels  # the parts of objects that are not labels, because too little of them is in the window
    whole: Labels  # of the images
    lost: int  # objects of which no window has a label


def cut(labels: Labels, bounds: Sequence[np.ndarray]) -> Windows:
    """Return the windows of images with their labels; `bounds` are the windows of each image, int32 (n, 4).

    A box with at least `MIN_BOX_SHARE` of its area in a window is a label there, clipped.
    """
    visible, hidden = [np.zeros((0, 5), np.float32)], [np.zeros((0, 5), np.float32)]
    counts: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    lost = 0
    for image, windows in enumerate(bounds):
        rows, size = labels.image_rows(image), labels.sizes[image]
        half = rows[:, 3:].astype(np.float64) / 2
        corners = np.concatenate((rows[:, 1:3] - half, rows[:, 1:3] + half), 1).clip(0, 1) * np.tile(size, 2)
        low = np.maximum(corners[:, :2], windows[:, None, :2])  # (windows, boxes, 2)
        high = np.minimum(corners[:, 2:], windows[:, None, 2:])
        shares = (high - low).clip(0).prod(2) / (corners[:, 2:] - corners[:, :2]).prod(1)
        is_label = shares >= MIN_BOX_SHARE
        lost += int((~is_label.any(0)).sum())
        chosen_parts = (is_label, (shares > 0) & ~is_label)
        for chosen, parts, part_counts in zip(chosen_parts, (visible, hidden), counts, strict=True):
            window, row = chosen.nonzero()
            origin, side = windows[window, :2], windows[window, 2:] - windows[window, :2]
            a, b = low[window, row] - origin, high[window, row] - origin
            columns = (rows[row, :1], (a + b) / 2 / side, (b - a) / side)
            parts.append(np.concatenate(columns, 1).astype(np.float32))
            part_counts.append(chosen.sum(1))
    joined = np.concatenate(bounds)
    sizes = joined[:, 2:] - joined[:, :2]
    cut_labels, cut_hidden = (
        Labels(np.concatenate(parts), part_offsets(np.concatenate(part_counts)), sizes, ())
        for parts, part_counts in zip((visible, hidden), counts, strict=True)
    )
    images = np.repeat(np.arange(len(bounds)), [len(windows) for windows in bounds])
    return Windows(images, joined, cut_labels, cut_hidden, labels, lost)


def training_windows(labels: Labels, files: Sequence[Path], tiles: Tiles) -> Windows:
    """Return the windows to train on: all with labels, and `background` of the others.

    A hash of the file's name and the window's corner chooses these, so that they are the same on every machine.
    """
    windows = cut(labels, [tiles.windows(*size) for size in labels.sizes.tolist()])
    chosen = windows.labels.counts > 0
    for window in np.flatnonzero(~chosen).tolist():
        file, (left, top, *_) = files[windows.images[window]], windows.bounds[window].tolist()
        digest = hashlib.sha256(os.fsencode(f"{file.parent.name}/{file.name} {left} {top}")).digest()
        chosen[window] = int.from_bytes(digest[:8], "big") < tiles.background * 2**64
    labels, hidden = windows.labels.subset(chosen), windows.hidden.subset(chosen)
    return windows._replace(images=windows.images[chosen], bounds=windows.bounds[chosen], labels=labels, hidden=hidden)


def in_file(info: ImageInfo, image: int, size: tuple[int, int], window: Sequence[int]) -> ImageInfo:
    """Return the description of a window, given as an image of its own, as a part of image `image` of `size`."""
    scale, offset = info.placement
    moved = (offset[0] - scale[0] * window[0], offset[1] - scale[1] * window[1])
    left, top, right, bottom = window
    return info._replace(image=image, size=size, placement=Placement(scale, moved), window=(left, top, right, bottom))
