"""One outline for objects of several parts and for masks, and COCO's run-length encoding."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest

from data.outlines import decode_rle, joined, mask_outline
from data.polygons import is_inside


def area(points: list[tuple[float, float]]) -> float:
    x, y = np.array(points, float).T
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def inside(points: list[tuple[float, float]], shape: tuple[int, int]) -> np.ndarray:
    """Return the pixels whose centres an outline goes around, uint8 (height, width)."""
    outline = np.array(points)
    centres = [[(x + 0.5, y + 0.5) for x in range(shape[1])] for y in range(shape[0])]
    return np.array([[is_inside(np.array(centre), outline) for centre in row] for row in centres], np.uint8)


def test_joined_outlines_enclose_the_area_of_their_parts() -> None:
    parts = [[(0, 0), (4, 0), (4, 4), (0, 4)], [(10, 1), (12, 1), (12, 3)], [(5, 9), (7, 9), (7, 11), (5, 11)]]
    assert area(joined(parts)) == pytest.approx(sum(map(area, parts)))
    assert joined(parts[:1]) == parts[0]


def test_parts_are_joined_at_the_first_of_their_nearest_points(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for pairs in (2**20, 7):
        monkeypatch.setattr("data.outlines.COMPARED_PAIRS", pairs)
        for _ in range(20):
            first, second = ([tuple(map(float, point)) for point in rng.integers(0, 6, (9, 2))] for _ in range(2))
            _, here, there = min((math.dist(a, b), i, j) for i, a in enumerate(first) for j, b in enumerate(second))
            expected = [*first[: here + 1], *second[there:], *second[: there + 1], *first[here:]]
            assert joined([first, second]) == expected


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


def test_straight_edges_have_no_points_between_corners() -> None:
    mask = np.zeros((20, 30), np.uint8)
    mask[4:10, 3:20] = 1
    assert sorted(mask_outline(mask)) == [(3, 4), (3, 10), (20, 4), (20, 10)]
    mask[6:8, 10:12] = 0
    assert len(mask_outline(mask)) == 4 + 4 + 2  # the connection has both ends twice
    assert len(mask_outline(np.eye(20, dtype=np.uint8), tolerance=1.0)) < len(mask_outline(np.eye(20, dtype=np.uint8)))


def test_a_simpler_outline_has_fewer_points_and_nearly_the_same_area() -> None:
    mask = np.zeros((100, 100), np.uint8)
    cv2.circle(mask, (50, 50), 40, 1, -1)
    cv2.circle(mask, (50, 50), 20, 0, -1)
    exact, simple = mask_outline(mask), mask_outline(mask, tolerance=1.5)
    assert len(simple) < 0.3 * len(exact)
    assert (inside(simple, mask.shape) != mask).mean() < 0.03


@pytest.mark.parametrize("text", [False, True])
def test_run_lengths_are_columns_of_pixels(text: bool) -> None:
    # 3 x 4 pixels: two columns and one pixel, a hole of two pixels, the rest
    lengths = [0, 7, 2, 3]
    counts = "072L" if text else lengths  # the last one is 3 - 7
    assert decode_rle(counts, [3, 4]).tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 0, 1]]


def test_run_lengths_as_text_are_differences_of_5_bits() -> None:
    # 5, 100 = 3 * 32 + 4, 5, 90 = 100 - 10, 200 = 5 + 195
    text = "5" + chr(48 + 32 + 4) + "3" + "5" + chr(48 + 22) + chr(48 + 32 + 3) + chr(48 + 6)
    mask = decode_rle(text, (20, 20))
    assert mask.T.ravel().tolist() == [0] * 5 + [1] * 100 + [0] * 5 + [1] * 90 + [0] * 200
    assert np.array_equal(decode_rle(text.encode(), (20, 20)), mask)


@pytest.mark.parametrize("counts", [[3, 4], [], [20, -4], "07"])
def test_run_lengths_must_fill_the_image(counts: object) -> None:
    with pytest.raises(ValueError, match=r"runs of .* pixels in a mask of 4 x 4"):
        decode_rle(counts, [4, 4])


def test_a_mask_in_thousands_of_parts_has_no_outline() -> None:
    noise = np.random.default_rng(0).integers(0, 2, (200, 200), np.uint8)
    assert mask_outline(noise) == []
    assert mask_outline(np.kron(np.eye(30, dtype=np.uint8), np.ones((3, 3), np.uint8)))
