"""Rows of label files: `parse_rows` reads them by the `RowRules` of a data set. Called by data/labels.py."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import shortened

MAX_EDGES_AT_A_HEIGHT = 1000  # edges of an outline at a height, on average
COORDINATE_TOLERANCE = 1e-3  # how far outside [0, 1] a coordinate may be by rounding
OUTLINE_TOLERANCE = 0.01  # how far outside an outline's points may be; they are moved to the image's edge
MIN_PIXEL_COORDINATE = 2.0  # coordinates from here on are taken for pixels instead of shares of a side
MAX_CLASS = 2**20  # exclusive bound of a class, which float32 holds exactly
MIN_OUTLINE_WIDTH = 1e-5  # share of a side: an outline that is narrower is a line


@dataclass(frozen=True)
class RowRules:
    """The rules by which a data set reads the rows of label files.

    The fields, and the file that defines the class, are part of the label cache's key.

    Attributes:
        noun: word for a row's points in messages
        forms: description in messages of how many numbers a row may have
        outlines: whether the points are read too, not only the box around them
        by_points: whether two rows are the same object if their points are equal, instead of their boxes
        tolerance: how far outside of [0, 1] the coordinates of points may be, below 1
        keypoints: how many numbers of key points may follow a box, which are not used; if any, no row is a polygon
    """

    noun: str = "outline"
    forms: str = "5 (box) or an odd count from 7 (polygon)"
    outlines: bool = False
    by_points: bool = False
    tolerance: float = OUTLINE_TOLERANCE
    keypoints: int = 0

    def outline(self, values: list[float]) -> list[float]:
        """Return the coordinates x1 y1 x2 y2 ... of a row, moved to the image's edge if they are outside of the image.

        Coordinates that are outside only by rounding do not change. Raises ValueError with the reason if the row is
        invalid.

        Args:
            values: coordinates in the file; [] for a box, which is passed too if `outlines` is true
        """
        if all(-COORDINATE_TOLERANCE <= value <= 1 + COORDINATE_TOLERANCE for value in values):
            return values
        return [min(max(value, 0.0), 1.0) for value in values]


class EnclosingRules(RowRules):
    """Rules for outlines that enclose an area."""

    def outline(self, values: list[float]) -> list[float]:
        """Return the coordinates as `RowRules` does.

        Raises ValueError for a line, or for an outline that takes seconds to fill.
        """
        values = super().outline(values)
        points = points_of(values)
        if values and _is_line(points):
            raise ValueError(f"the {self.noun} has no area")
        # The edges at a height, on average; OpenCV's time to fill the outline grows with the square of it.
        if values and np.abs(np.diff(points[:, 1], append=points[:1, 1])).sum() > MAX_EDGES_AT_A_HEIGHT:
            raise ValueError(f"the {self.noun} goes up and down more than {MAX_EDGES_AT_A_HEIGHT // 2} times")
        return values


BOXES = RowRules()
POLYGONS = RowRules(outlines=True)  # boxes, and the outlines of those that have one
OUTLINES = EnclosingRules(outlines=True, by_points=True)


class Row(NamedTuple):
    """A row of a label file, normalised."""

    box: tuple[float, float, float, float, float]  # class and xywh
    points: list[float]  # x1 y1 x2 y2 ...; [] for a box


def points_of(values: Sequence[float]) -> np.ndarray:
    """Return coordinates x1 y1 x2 y2 ... as points, float32 (k, 2)."""
    return np.array(values, np.float32).reshape(-1, 2)


def parse_rows(
    text: str, file: Path | str, rules: RowRules = BOXES, ids: Sequence[Any] = ()
) -> tuple[list[Row], list[str]]:
    """Return the rows of a label file in its order, and problems with lines that are left out.

    A line is a box, `class x y w h`, or a polygon, `class x1 y1 x2 y2 x3 y3 ...`, normalised.

    Args:
        file: label file, or the `origin` of `ImageRows`, for messages
        ids: name of each line in messages, as in `ImageRows`, instead of its number
    """

    def place(number: int) -> str:
        return f"{file} {ids[number - 1]}" if ids else f"{file}, line {number}"

    rows: dict[tuple[float, ...], Row] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.split():
            try:
                row = _parse_row(words, rules)
            except ValueError as error:
                problems.append(f"{place(number)}: {error}; row left out")
                continue
            key = (*row.box, *row.points) if rules.by_points else row.box
            if key in rows:
                noun = rules.noun if key[5:] else "box"
                problems.append(f"{place(number)}: the same {noun} again; row left out")
            rows.setdefault(key, row)
    return list(rows.values()), problems


def _parse_row(words: Sequence[str], rules: RowRules) -> Row:
    """Return the row that the words of a line describe. Raises ValueError with the reason if they are invalid."""
    text = "".join(words)
    try:
        row = tuple(map(float, words)) if text.isascii() and "_" not in text else ()  # float reads 1_0 as 10
    except ValueError:
        row = ()
    if not row:
        raise ValueError("not all words are numbers")
    if rules.keypoints and len(row) == 5 + rules.keypoints:
        row = row[:5]
    if len(row) == 5:
        label, x, y, width, height = row
        if 0 <= label == label // 1 < MAX_CLASS and 0 <= x <= 1 and 0 <= y <= 1 and 0 < width <= 1 and 0 < height <= 1:
            return Row(row, rules.outline([]) if rules.outlines else [])  # nearly all rows
    label, *values = row
    is_box = len(values) == 4
    if not is_box and (rules.keypoints or len(values) < 6 or len(values) % 2):
        raise ValueError(f"{len(words)} numbers instead of {rules.forms}")
    if not 0 <= label == label // 1 < MAX_CLASS:
        raise ValueError(f"class {shortened(words[0])} is not a whole number from 0")
    if not all(map(math.isfinite, values)):
        raise ValueError("a coordinate is not finite")
    if max(values) >= MIN_PIXEL_COORDINATE:
        raise ValueError("coordinates in pixels; divide x and width by the image's width, y and height by its height")
    tolerance = COORDINATE_TOLERANCE if is_box else rules.tolerance
    if not all(-tolerance <= value <= 1 + tolerance for value in values):
        raise ValueError("coordinates outside 0 to 1 (they are shares of the image's width and height)")
    box = _with_area(values if is_box else _polygon_box(values))
    if is_box:
        return Row((label, *box), rules.outline([]) if rules.outlines else [])
    points = rules.outline(values)
    return Row((label, *(box if points is values else _with_area(_polygon_box(points)))), points)


def _with_area(box: Sequence[float]) -> tuple[float, float, float, float]:
    """Return a box, xywh. Raises ValueError if it has no area."""
    x, y, width, height = box
    if width <= 0 or height <= 0:
        raise ValueError("the box has no area")
    return x, y, width, height


def _polygon_box(points: Sequence[float]) -> tuple[float, float, float, float]:
    """Return centre and size of the box around x1 y1 x2 y2 ..."""
    xs, ys = points[0::2], points[1::2]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    return (low_x + high_x) / 2, (low_y + high_y) / 2, high_x - low_x, high_y - low_y


def _is_line(points: np.ndarray) -> bool:
    """Return whether all points (k, 2) are on one line."""
    x, y = (points - points[0]).astype(np.float64).T
    farthest = np.argmax(x * x + y * y)
    across = np.abs(x * y[farthest] - y * x[farthest]).max()  # distance from the line, times the line's length
    return bool(across < MIN_OUTLINE_WIDTH * np.hypot(x[farthest], y[farthest]))


def label_name(image: str) -> str:
    """Return the path of an image's label file: the last folder `images` becomes `labels`, and the suffix .txt.

    Paths are text, because `Path` is slow for many images.
    """
    name = image.rfind(os.sep) + 1
    suffix = image.rfind(".", name + 1)  # a leading dot starts no suffix
    return f"{_label_folder(image[:name])}{image[name : suffix if suffix > 0 else None]}.txt"


@lru_cache(4096)
def _label_folder(folder: str) -> str:
    """Return the label folder of an image folder. Both end with a separator, or are empty."""
    before, images, after = f"{os.sep}{folder}".rpartition(f"{os.sep}images{os.sep}")
    return f"{before}{os.sep}labels{os.sep}{after}"[len(os.sep) :] if images else folder
