"""Outlines of objects: `Polygons` in flat arrays, processed all at once; and the outlines of masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import cv2
import numpy as np

CORNER_INSET = 1 / 256  # how far inside of a rectangle its corners are compared with a polygon, in units of the points
MAX_MISFIT = 0.1  # largest distance of an outline's edge from its box's, in units of the box's side
MAX_PARTS = 1000  # parts of a mask, with its holes; the time to join them grows with the square


def part_offsets(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the start of each part of a flat array by the parts' lengths, and the end of the last, int64 (n + 1)."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


@dataclass(frozen=True, eq=False)
class Polygons:
    """The outlines of m objects, in two flat arrays: a loop over the objects of an image is slow.

    The last point of an outline is connected to the first. A pixel is inside if the outline goes around it an odd
    number of times, so that an outline may go around holes.
    """

    points: np.ndarray  # (p, 2), x and y
    offsets: np.ndarray  # int64 (m + 1); object j has points offsets[j] to offsets[j + 1], none if not known or visible

    @staticmethod
    def from_outlines(outlines: Sequence[np.ndarray]) -> Polygons:
        """Return the polygons with these points, (k, 2) each."""
        points = np.concatenate([np.zeros((0, 2), np.float32), *outlines])
        return Polygons(points, part_offsets(list(map(len, outlines))))

    @staticmethod
    def concatenate(parts: Sequence[Polygons]) -> Polygons:
        """Return all polygons of `parts`, which must not be empty."""
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([part.counts for part in parts])
        return Polygons(np.concatenate([part.points for part in parts]), part_offsets(counts))

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of points of each polygon, (m,)."""
        return np.diff(self.offsets)

    def outline(self, number: int) -> np.ndarray:
        """Return the points of one polygon, (k, 2)."""
        return self.points[self.offsets[number] : self.offsets[number + 1]]

    def outlines(self) -> tuple[np.ndarray, ...]:
        """Return the points of each polygon, (k, 2) each."""
        return tuple(map(self.outline, range(len(self.counts))))

    def select_range(self, first: int, end: int) -> Polygons:
        """Return polygons `first` to `end` - 1."""
        offsets = self.offsets[first : end + 1]
        return Polygons(self.points[offsets[0] : offsets[-1]], offsets - offsets[0])

    def subset(self, chosen: np.ndarray) -> Polygons:
        """Return the polygons for which `chosen`, bool (m,), is true."""
        if chosen.all():
            return self
        return Polygons(self.points[np.repeat(chosen, self.counts)], part_offsets(self.counts[chosen]))

    def with_points(self, points: np.ndarray) -> Polygons:
        """Return the same polygons at other coordinates, (p, 2)."""
        return replace(self, points=points)

    def extents(self) -> np.ndarray:
        """Return the box around each polygon, (m, 4) xyxy, zeros for one without points."""
        extents = np.zeros((len(self.counts), 4), self.points.dtype)
        drawn = self.counts > 0
        if drawn.any():
            starts = self.offsets[:-1][drawn]
            extents[drawn, :2] = np.minimum.reduceat(self.points, starts)
            extents[drawn, 2:] = np.maximum.reduceat(self.points, starts)
        return extents

    def fitted(self, boxes: np.ndarray) -> Polygons:
        """Return the polygons scaled to fill their boxes, (m, 4) xywh.

        One with an edge that is further from the box's than MAX_MISFIT of the box's side loses its points.
        """
        extents, sides = self.extents(), boxes[:, 2:]
        corners = np.concatenate((boxes[:, :2] - sides / 2, boxes[:, :2] + sides / 2), 1)
        fits = (np.abs(extents - corners) <= MAX_MISFIT * np.tile(sides, 2)).all(1)
        counts = np.where(fits, self.counts, 0)
        owners, spans = np.repeat(np.arange(len(boxes)), counts), extents[:, 2:] - extents[:, :2]
        shares = (self.points[np.repeat(fits, self.counts)] - extents[owners, :2]) / spans[owners]
        return Polygons(shares * sides[owners] + corners[owners, :2], part_offsets(counts))

    def cut(self, bounds: np.ndarray) -> tuple[Polygons, np.ndarray]:
        """Return the parts of the polygons inside rectangles, and the box around each part, (m, 4) xyxy, or zeros.

        After Sutherland and Hodgman 1974, for all polygons that cross an edge at once. Parts of one polygon that are
        separate stay connected along the edges. The boxes leave out such connections around a corner. `bounds` are one
        rectangle, xyxy (4,), or one for each polygon, (m, 4).
        """
        extents = self.extents()
        bounds = np.broadcast_to(bounds, extents.shape)
        beyond = ((extents[:, :2] < bounds[:, :2]) | (extents[:, 2:] > bounds[:, 2:])).max(1)
        if not beyond.any():
            return self, extents
        inside = self.subset(~beyond)
        outside = ((extents[:, 2:] <= bounds[:, :2]) | (extents[:, :2] >= bounds[:, 2:])).max(1)
        crossing = beyond & ~outside
        whole, limits = self.subset(crossing), bounds[crossing].astype(self.points.dtype)
        points, owners = _cut(whole, limits)
        counts, is_real = np.bincount(owners, minlength=len(limits)), ~_is_connection(points, owners, whole, limits)
        real_counts = np.bincount(owners[is_real], minlength=len(limits))
        extents[outside] = 0
        extents[crossing] = Polygons(points[is_real], part_offsets(real_counts)).extents()
        all_counts = np.where(beyond, 0, self.counts)
        all_counts[crossing] = counts
        joined, is_cut = np.empty((all_counts.sum(), 2), self.points.dtype), np.repeat(crossing, all_counts)
        joined[is_cut], joined[~is_cut] = points, inside.points
        return Polygons(joined, part_offsets(all_counts)), extents


def _cut(polygons: Polygons, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut polygons at rectangles, (m, 4); return the points (p, 2), and the polygon of each point, (p,)."""
    points, owners = polygons.points, np.repeat(np.arange(len(bounds)), polygons.counts)
    for side in range(4):
        axis = side % 2
        limits = bounds[owners, side]
        depths = points[:, axis] - limits if side < 2 else limits - points[:, axis]
        inside = depths >= 0
        if inside.all():
            continue
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        successors = np.arange(1, len(points) + 1)
        successors[np.append(starts[1:], len(points)) - 1] = starts
        crosses = inside != inside[successors]
        first, second = np.flatnonzero(crosses), successors[crosses]
        share = depths[first] / (depths[first] - depths[second])
        candidates = np.repeat(points[:, None], 2, axis=1)  # each point, and where the edge after it is cut
        candidates[first, 1] += share[:, None] * (points[second] - points[first])
        candidates[first, 1, axis] = limits[first]
        chosen = np.stack((inside, crosses), 1)
        points, owners = candidates[chosen], np.repeat(owners[:, None], 2, axis=1)[chosen]
    return points, owners


def _is_connection(points: np.ndarray, owners: np.ndarray, whole: Polygons, bounds: np.ndarray) -> np.ndarray:
    """Return which points of cut polygons are corners of their rectangle that the polygon does not cover, bool (p,).

    All other points are on the outline. `whole` are the polygons before the cut; the others are as `_cut` has them.
    """
    limits = bounds[owners]
    at_low, at_high = points == limits[:, :2], points == limits[:, 2:]
    connections: np.ndarray = (at_low | at_high).all(1)
    for number in np.flatnonzero(connections).tolist():
        corner = points[number] + CORNER_INSET * (at_low[number].astype(float) - at_high[number])
        connections[number] = not is_inside(corner, whole.outline(owners[number]))
    return connections


def is_inside(point: np.ndarray, outline: np.ndarray) -> bool:
    """Return whether an outline (k, 2) goes around a point (2,) an odd number of times."""
    x, y = (outline - point).T
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    passes = np.flatnonzero((y > 0) != (next_y > 0))
    x, y, next_x, next_y = x[passes], y[passes], next_x[passes], next_y[passes]
    return bool(np.count_nonzero(x - y * (next_x - x) / (next_y - y) > 0) % 2)


def join_outlines(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join outlines (k, 2) into one, each to the next at their nearest points. The connections enclose no area.

    A hole is a part like any other: an area that the outline goes around twice is outside.
    """
    outline = parts[0]
    for part in parts[1:]:
        squares = ((outline[:, None] - part) ** 2).sum(2)
        here, there = divmod(int(squares.argmin()), len(part))
        outline = np.concatenate((outline[: here + 1], part[there:], part[: there + 1], outline[here:]))
    return outline


def mask_outline(mask: np.ndarray, tolerance: float = 0.0) -> list[tuple[float, float]]:
    """Return the outline of a mask, uint8 (h, w) of 0 and 1, along the edges of its pixels, within `tolerance` pixels.

    Parts and holes are joined into one outline; [] if there are none or too many of them.
    """
    left, top, width, height = cv2.boundingRect(mask)
    if not width:
        return []
    # Of a mask twice as large, the pixels at an edge k are 2 k on its right and lower side, 2 k - 1 on the others.
    part = mask[top : top + height, left : left + width]
    large = cv2.resize(part, None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
    contours, levels = cv2.findContours(large, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    if not 0 < len(contours) <= MAX_PARTS:
        return []
    # A hole follows its part, so that both are joined: columns of a level are next, previous, first hole, parent.
    parents = [parent if parent >= 0 else number for number, parent in enumerate(levels[0, :, 3].tolist())]
    order = sorted(range(len(contours)), key=lambda number: (parents[number], levels[0, number, 3] >= 0))
    parts = []
    for number in order:
        points = (contours[number][:, 0] + 1) // 2 + (left, top)
        points = points[(points != np.roll(points, 1, 0)).any(1)]
        before, after = points - np.roll(points, 1, 0), np.roll(points, -1, 0) - points
        is_corner = before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]  # not inside of a straight line
        corners = points[is_corner].astype(np.int32)
        if tolerance:
            corners = cv2.approxPolyDP(corners[:, None], tolerance, True)[:, 0]
        if len(corners) > 2:
            parts.append(corners.astype(float))
    return list(map(tuple, join_outlines(parts).tolist())) if parts else []
