"""Outlines of masks, and one outline for an object of several parts or with holes, as label files need.

Called by data/formats.py and data/builtin/shapes_seg.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import cv2
import numpy as np

MAX_PARTS = 1000  # parts of a mask, with its holes; the time to join them grows with the square
COMPARED_PAIRS = 2**20  # pairs of points that are compared at a time, which takes 8 MB
EQUAL_DISTANCES = 1 + 1e-9  # squared distances in this ratio are compared again, exactly

Points = list[tuple[float, float]]


def joined(parts: Sequence[Points]) -> Points:
    """Join outlines into one, each to the next at their nearest points. The connections enclose no area.

    A hole is a part like any other: an area that the outline goes around twice is outside.
    """
    outline = list(parts[0])
    for part in parts[1:]:
        _, here, there = min((math.dist(outline[i], part[j]), i, j) for i, j in _near_pairs(outline, part))
        outline = [*outline[: here + 1], *part[there:], *part[: there + 1], *outline[here:]]
    return outline


def _near_pairs(outline: Points, part: Points) -> Iterator[tuple[int, int]]:
    """Yield the indices of pairs of points, one of each outline; all pairs of the least distance are among them."""
    first, second = np.array(outline), np.array(part)
    step = max(COMPARED_PAIRS // len(second), 1)
    chunks = [first[start : start + step] for start in range(0, len(first), step)]
    squares = [((chunk[:, None] - second) ** 2).sum(2) for chunk in chunks]
    least = min(float(each.min()) for each in squares) * EQUAL_DISTANCES
    for number, each in enumerate(squares):
        for i, j in np.argwhere(each <= least).tolist():
            yield number * step + i, j


def mask_outline(mask: np.ndarray, tolerance: float = 0.0) -> Points:
    """Return the outline of a mask, uint8 (h, w) of 0 and 1, along the edges of its pixels; [] if it is empty.

    Parts and holes are joined into one outline; [] if there are too many of them.

    Args:
        tolerance: largest deviation of the outline, pixels
    """
    # Of a mask twice as large, the pixels at an edge k are 2 k on its right and lower side, 2 k - 1 on the others.
    large = cv2.resize(mask, None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
    contours, levels = cv2.findContours(large, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    if not 0 < len(contours) <= MAX_PARTS:
        return []
    # A hole follows its part, so that both are joined: columns of a level are next, previous, first hole, parent.
    parents = [parent if parent >= 0 else number for number, parent in enumerate(levels[0, :, 3].tolist())]
    order = sorted(range(len(contours)), key=lambda number: (parents[number], levels[0, number, 3] >= 0))
    parts = []
    for number in order:
        corners = _corners((contours[number][:, 0] + 1) // 2)
        if tolerance:
            corners = cv2.approxPolyDP(corners[:, None], tolerance, True)[:, 0]
        if len(corners) > 2:
            parts.append([(float(x), float(y)) for x, y in corners.tolist()])
    return joined(parts) if parts else []


def _corners(points: np.ndarray) -> np.ndarray:
    """Return the points (k, 2) of an outline along pixel edges without the points inside of straight lines, int32."""
    points = points[(points != np.roll(points, 1, 0)).any(1)]
    before, after = points - np.roll(points, 1, 0), np.roll(points, -1, 0) - points
    return points[before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]].astype(np.int32)


def decode_rle(counts: str | bytes | Sequence[int], size: Sequence[int]) -> np.ndarray:
    """Return the mask of COCO's run-length encoding, uint8 (h, w) of 0 and 1.

    Raises ValueError if the runs do not fill the image.

    Args:
        counts: lengths of runs of 0 and 1 in turn, column by column; as text, each length is written in groups of 5
            bits, lowest first, as characters from '0', with 32 added if more follow, and from the fourth length on as
            the difference from the last but one
        size: height and width of the mask
    """
    lengths = _lengths(counts) if isinstance(counts, (str, bytes)) else list(counts)
    height, width = map(int, size)
    if min(lengths, default=0) < 0 or sum(lengths) != height * width:
        raise ValueError(f"runs of {sum(lengths)} pixels in a mask of {height} x {width}")
    values = np.arange(len(lengths), dtype=np.uint8) % 2
    return np.ascontiguousarray(np.repeat(values, lengths).reshape(width, height).T)


def _lengths(text: str | bytes) -> list[int]:
    lengths: list[int] = []
    value = shift = 0
    for character in text.encode() if isinstance(text, str) else text:
        bits = character - ord("0")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16 and 1) << shift  # negative numbers have the highest bit of the last group
            lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
            value = shift = 0
    return lengths
