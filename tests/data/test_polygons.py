"""Outlines in flat arrays: parts of them, and cuts at rectangles compared with points inside."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.polygons import Polygons, is_inside, mask_outline

SQUARE = np.array(((2, 2), (6, 2), (6, 6), (2, 6)), np.float32)
NONE = np.zeros((0, 2), np.float32)
# Around the corner at (0, 0), which is outside; 4 to 6 on the left edge and 4 to 6 on the top edge are inside.
BENT = np.array(((1, 4), (1, 6), (-3, 6), (-3, -3), (6, -3), (6, 1), (4, 1), (4, -2), (-2, -2), (-2, 4)), np.float32)


@pytest.mark.parametrize(
    ("outline", "bounds", "extent"),
    [
        pytest.param(SQUARE, (2, 2, 6, 6), (2, 2, 6, 6), id="exactly inside"),
        pytest.param(SQUARE, (6, 0, 9, 9), (0, 0, 0, 0), id="only touching"),
        pytest.param(NONE, (0, 0, 9, 9), (0, 0, 0, 0), id="no points"),
        pytest.param(BENT, (0, 0, 9, 9), (0, 0, 6, 6), id="around a corner"),
        # A triangle without the corner (0, 0): clipped points would reach it.
        pytest.param(np.array(((-4, 5), (5, -4), (5, 5)), np.float32), (0, 0, 9, 9), (0, 0, 5, 5), id="triangle"),
    ],
)
def test_a_cut_polygon_has_the_extent_of_its_part_inside(
    outline: np.ndarray, bounds: tuple[int, ...], extent: tuple[float, ...]
) -> None:
    part, extents = Polygons.from_outlines((SQUARE, outline)).cut(np.array(((0, 0, 9, 9), bounds)))
    assert extents.tolist() == [[2, 2, 6, 6], pytest.approx(extent, abs=1e-6)]
    assert part.counts[0] == 4
    assert (len(part.outline(1)) == 0) == (extent == (0, 0, 0, 0))


def test_a_cut_covers_the_same_points_inside() -> None:
    """Of random polygons, most of which cross themselves; the boxes are around the covered points."""
    rng = np.random.default_rng(0)
    outlines = [rng.uniform(-6, 14, (rng.integers(3, 12), 2)).astype(np.float32) for _ in range(40)]
    bounds = np.tile((0, 0, 8, 8), (len(outlines), 1))
    bounds[::3] = 2, 1, 5, 7
    part, extents = Polygons.from_outlines(outlines).cut(bounds)
    step, cut = 0.25, 0
    grid = np.stack(np.meshgrid(*[np.arange(step / 2, 8, step)] * 2), -1).reshape(-1, 2) + 1e-3
    for outline, after, box, extent in zip(outlines, part.outlines(), bounds, extents, strict=True):
        points = grid[((grid > box[:2]) & (grid < box[2:])).all(1)]
        before = np.array([is_inside(point, outline) for point in points])
        same = before == [len(after) > 0 and is_inside(point, after) for point in points]
        assert same.all()
        if before.any():
            covered = points[before]
            around = np.concatenate((covered.min(0), covered.max(0)))
            assert (np.abs(around - extent) < 4 * step).all()  # a point of the outline may be sharp
            assert (extent[:2] <= around[:2]).all()
            assert (extent[2:] >= around[2:]).all()
            cut += 1
    assert cut > 30


def inside(points: list[tuple[float, float]], shape: tuple[int, int]) -> np.ndarray:
    """Return the pixels whose centres an outline goes around, uint8 (height, width)."""
    outline = np.array(points)
    centres = [[(x + 0.5, y + 0.5) for x in range(shape[1])] for y in range(shape[0])]
    return np.array([[is_inside(np.array(centre), outline) for centre in row] for row in centres], np.uint8)


def test_the_outline_of_a_mask_goes_around_its_pixels_and_no_others() -> None:
    """Of noise: parts that touch at a corner, holes, parts in holes."""
    rng = np.random.default_rng(0)
    for number in range(30):
        mask = (rng.random(rng.integers(3, 16, 2)) < rng.choice([0.2, 0.5, 0.9])).astype(np.uint8)
        if number % 3 == 0:
            mask = cv2.medianBlur(mask, 3)
        points = mask_outline(mask)
        assert np.array_equal(inside(points, mask.shape), mask) if mask.any() else points == []
        if mask.any():
            y, x = np.nonzero(mask)
            assert np.min(points, 0).tolist() == [x.min(), y.min()]
            assert np.max(points, 0).tolist() == [x.max() + 1, y.max() + 1]


def test_a_mask_in_thousands_of_parts_has_no_outline() -> None:
    noise = np.random.default_rng(0).integers(0, 2, (200, 200), np.uint8)
    assert mask_outline(noise) == []
    assert mask_outline(np.kron(np.eye(30, dtype=np.uint8), np.ones((3, 3), np.uint8)))
