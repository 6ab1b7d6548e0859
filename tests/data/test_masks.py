"""Masks of objects, compared pixel for pixel with masks of whole images."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.masks import NO_MASKS, TargetMasks, evaluation_masks, training_masks
from data.polygons import Polygons
from utils.batch import box_windows

SHAPE = (96, 128)  # height and width


def objects(seed: int, count: int = 12) -> tuple[Polygons, np.ndarray]:
    """Return random outlines, half of them at the image's edges, and their targets."""
    rng = np.random.default_rng(seed)
    outlines = []
    for number in range(count):
        centre = rng.uniform(0, SHAPE[::-1]) if number % 2 else rng.uniform(30, 60, 2)
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 9)))
        radii = rng.uniform(0.3, 1, len(angles)) * rng.choice((4, 12, 30))
        points = centre + np.stack((np.cos(angles), np.sin(angles)), 1) * radii[:, None]
        outlines.append(points.clip(0, SHAPE[::-1]).astype(np.float32))
    polygons = Polygons.of(outlines)
    return polygons, targets_of(polygons.extents())


def targets_of(boxes: np.ndarray) -> np.ndarray:
    sides = np.array((SHAPE[1], SHAPE[0]) * 2, np.float32)
    shares = np.asarray(boxes, np.float32) / sides
    centre, size = (shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]
    return np.concatenate((np.arange(len(boxes), dtype=np.float32)[:, None], centre, size), 1)


def whole_masks(polygons: Polygons, ratio: int) -> list[np.ndarray]:
    """Return the masks of whole images: filled at full size, then shrunk bilinearly."""
    masks = []
    for outline in polygons.outlines():
        mask = np.zeros(SHAPE, np.uint8)
        cv2.fillPoly(mask, [outline.astype(np.int32)], 1)
        masks.append(cv2.resize(mask, (SHAPE[1] // ratio, SHAPE[0] // ratio)))
    return masks


def to_map(mask: np.ndarray) -> np.ndarray:
    """Bring a mask to a quarter of the image's size by nearest pixels."""
    height, width = SHAPE[0] // 4, SHAPE[1] // 4
    rows, columns = (np.arange(new) * old // new for new, old in zip((height, width), mask.shape, strict=True))
    return mask[rows][:, columns]


def split(masks: TargetMasks) -> list[np.ndarray]:
    """Return the mask of each target as a whole mask map."""
    wholes, start = [], 0
    for left, top, right, bottom in masks.windows.tolist():
        end = start + (right - left) * (bottom - top)
        whole = np.zeros((SHAPE[0] // 4, SHAPE[1] // 4), np.uint8)
        whole[top:bottom, left:right] = masks.pixels[start:end].reshape(bottom - top, right - left)
        wholes.append(whole)
        start = end
    assert start == len(masks.pixels)
    return wholes


def in_box(target: np.ndarray) -> np.ndarray:
    """Return which pixels of the mask map are in a target's box, as the loss counts them."""
    _, x, y, width, height = target
    columns, rows = np.arange(SHAPE[1] // 4, dtype=np.float32), np.arange(SHAPE[0] // 4, dtype=np.float32)[:, None]
    x1, x2 = (x - width / 2) * np.float32(SHAPE[1] // 4), (x + width / 2) * np.float32(SHAPE[1] // 4)
    y1, y2 = (y - height / 2) * np.float32(SHAPE[0] // 4), (y + height / 2) * np.float32(SHAPE[0] // 4)
    return (columns >= x1) & (columns < x2) & (rows >= y1) & (rows < y2)


def test_a_window_has_the_pixels_in_the_box() -> None:
    boxes = [[8, 10, 16, 22], [9, 10, 16.1, 22], [0, 0, 128, 96], [5, 5, 7, 7], [5, 5, 9, 7]]
    windows = box_windows(targets_of(np.array(boxes))[:, 1:], 24, 32)
    assert windows.tolist() == [[2, 3, 4, 6], [3, 3, 5, 6], [0, 0, 32, 24], [2, 2, 2, 2], [2, 2, 3, 2]]
    for window, target in zip(windows.tolist(), targets_of(np.array(boxes)), strict=True):
        inside = np.zeros((24, 32), bool)
        inside[window[1] : window[3], window[0] : window[2]] = True
        assert np.array_equal(inside, in_box(target))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8, 16])
def test_training_masks_equal_those_of_whole_images(ratio: int) -> None:
    for seed in range(8):
        polygons, targets = objects(seed)
        wholes = whole_masks(polygons, ratio)
        order, masks = training_masks(polygons, targets, SHAPE, ratio, overlap=False)
        assert order.tolist() == list(range(len(targets)))
        for got, whole, target in zip(split(masks), wholes, targets, strict=True):
            assert np.array_equal(got, to_map(whole) * in_box(target))
        order, masks = training_masks(polygons, targets, SHAPE, ratio, overlap=True)
        assert order.tolist() == sorted(range(len(wholes)), key=lambda number: -int(wholes[number].sum()))
        owners = np.zeros_like(wholes[0], int)
        for place, number in enumerate(order.tolist(), 1):
            owners[wholes[number] > 0] = place
        for place, (got, target) in enumerate(zip(split(masks), targets[order], strict=True), 1):
            assert np.array_equal(got, (to_map(owners) == place) * in_box(target))


def test_evaluated_masks_equal_those_of_whole_images_with_all_their_pixels() -> None:
    sums, outside = 0, 0
    for seed in range(8):
        polygons, targets = objects(seed)
        masks = evaluation_masks(polygons, targets, SHAPE)
        for got, outline, target in zip(split(masks), polygons.outlines(), targets, strict=True):
            mask = np.zeros(SHAPE, np.float32)
            cv2.fillPoly(mask, [outline.astype(np.int32)], 1.0)
            expected = cv2.resize(mask, (SHAPE[1] // 4, SHAPE[0] // 4)) > 0.5
            assert np.array_equal(got, expected)
            sums += expected.sum()
            outside += (expected & ~in_box(target)).sum()
    assert sums > 1000
    assert outside > 0  # such as a pixel whose centre is left of the box
    boxes = targets_of(np.array([[5, 5, 7, 7]]))
    tiny = Polygons.of((np.array(((5, 5), (7, 5), (7, 7)), np.float32),))
    assert evaluation_masks(tiny, boxes, SHAPE).windows.tolist() == [[1, 1, 2, 2]]


def test_smaller_objects_are_on_top_and_equal_ones_in_order() -> None:
    large, small = [[0, 0], [63, 0], [63, 63], [0, 63]], [[8, 8], [23, 8], [23, 23], [8, 23]]
    polygons = Polygons.of([np.array(points, np.float32) for points in (small, large, small)])
    order, masks = training_masks(polygons, targets_of(polygons.extents()), SHAPE, 4, overlap=True)
    assert order.tolist() == [1, 0, 2]
    assert [whole.sum() for whole in split(masks)] == [16 * 16 - 16, 0, 16]
    _, masks = training_masks(polygons, targets_of(polygons.extents()), SHAPE, 4, overlap=False)
    assert [whole.sum() for whole in split(masks)] == [16, 256, 16]


def test_a_hole_is_not_part_of_the_mask() -> None:
    """An outline with a bridge to its hole, from 16 to 48 in 0 to 64."""
    outer, hole = [[0, 0], [64, 0], [64, 64], [0, 64], [0, 0]], [[16, 16], [16, 48], [48, 48], [48, 16], [16, 16]]
    polygons = Polygons.of((np.array([*outer, *hole], np.float32),))
    targets = targets_of(polygons.extents())
    for masks in (training_masks(polygons, targets, SHAPE, 4, True)[1], evaluation_masks(polygons, targets, SHAPE)):
        (whole,) = split(masks)
        assert whole[6:11, 6:11].sum() == 0
        assert whole[:4, :16].all()
        assert whole[12:16, :16].all()


def test_an_image_without_objects_has_no_masks() -> None:
    targets = np.zeros((0, 5), np.float32)
    for overlap in (False, True):
        order, masks = training_masks(Polygons.of(()), targets, SHAPE, 4, overlap)
        assert order.tolist() == []
        for got in (masks, evaluation_masks(Polygons.of(()), targets, SHAPE)):
            for array, expected in zip(got, NO_MASKS, strict=True):
                assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
