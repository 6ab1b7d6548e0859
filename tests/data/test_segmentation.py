"""Segmentation data: masks aligned with the pixels, labels that are boxes, problems of outlines; masks pixel by pixel.

The promises that all data sets share are in test_contract.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.polygons import Polygons
from data.segmentation import SegmentationData, TargetMasks, evaluation_masks, training_masks
from tests.data.test_detection import NOTHING, data_of, epoch_of, evaluation_batch
from tests.making import noise, write_image
from utils.batch import SegmentationBatch


def whole_masks(windows: np.ndarray, pixels: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """Return the mask of each target as a whole mask map, bool."""
    masks, start = [], 0
    for left, top, right, bottom in windows.tolist():
        whole, end = np.zeros((height, width), bool), start + (right - left) * (bottom - top)
        whole[top:bottom, left:right] = pixels[start:end].reshape(bottom - top, right - left)
        masks.append(whole)
        start = end
    assert start == len(pixels)
    return masks


def masks_of(batch: SegmentationBatch) -> list[np.ndarray]:
    height, width = batch.images.shape[2:]
    return whole_masks(batch.windows, batch.mask_pixels.numpy(), height // 4, width // 4)


def test_without_augmentation_masks_are_the_labels(tmp_path: Path) -> None:
    """A triangle and a box, which is on top, for it has less pixels; in a letterbox of 64 x 64."""
    rows = ("2 0.25 0.25 0.25 0.5", "1 0 0 1 0 0 1")
    write_image(tmp_path / "images/a.png", noise(64, 32), *rows)
    (batch,) = epoch_of(data_of(tmp_path, kind=SegmentationData), NOTHING, batch_size=1)
    assert isinstance(batch, SegmentationBatch)
    assert batch.targets.tolist() == [[0, 1, 0.5, 0.5, 1, 0.5], [0, 2, 0.25, 0.375, 0.25, 0.25]]
    assert np.array_equal(batch.host_targets, batch.targets.numpy())
    assert batch.host_targets.dtype == np.float32
    assert (batch.mask_pixels.dtype, batch.windows.dtype) == (torch.uint8, np.int32)
    assert batch.windows.tolist() == [[0, 4, 16, 12], [2, 4, 6, 8]]
    triangle, box = masks_of(batch)
    assert box.sum() == 16
    assert not (triangle & box).any()
    assert triangle.sum() == pytest.approx(16 * 8 / 2 - 15, abs=8)
    assert batch.infos[0].outlines == ()
    (batch,) = epoch_of(data_of(tmp_path, no_overlap=True, kind=SegmentationData), NOTHING, batch_size=1)
    assert batch.targets[:, 1].tolist() == [2, 1]
    assert (masks_of(batch)[0] & masks_of(batch)[1]).sum() > 10


def test_an_evaluated_mask_has_all_its_pixels_and_its_outline(tmp_path: Path) -> None:
    write_image(tmp_path / "images/wide.png", noise(128, 32), "0 0.5 0.5 0.5 0.5", "0 0 0 0.5 0 0.5 1 0 1")
    batch = evaluation_batch(data_of(tmp_path, kind=SegmentationData))
    first, second = masks_of(batch)
    (info,) = batch.infos
    # In a letterbox of 64 x 16 from row 24 on: x 16 to 48, y 28 to 36, and x 0 to 32, y 24 to 40.
    assert (second[6:10, :8].all(), second.sum()) == (True, 32)
    assert first[7:9, 4:12].all()
    assert (first & second).sum() >= 8  # no overlap is taken from either
    assert [points.dtype for points in info.outlines] == [np.float32] * 2
    assert info.outlines[0].tolist() == [[0.25, 0.25], [0.75, 0.25], [0.75, 0.75], [0.25, 0.75]]
    assert info.outlines[1].tolist() == [[0, 0], [0.5, 0], [0.5, 1], [0, 1]]
    assert len(info.rows) == 2


# Masks of any outlines, compared pixel for pixel with masks of whole images

SHAPE = (96, 128)  # height and width
examples = settings(max_examples=40, deadline=None, derandomize=True)
# Centre, radius and directions of corners, some at the image's edges.
OUTLINE = st.tuples(
    st.integers(0, 128), st.integers(0, 96), st.integers(1, 30), st.lists(st.floats(0, 6.28), min_size=3, max_size=9)
)
OUTLINES = st.lists(OUTLINE, min_size=1, max_size=12)


def objects(drawn: list[Any]) -> tuple[Polygons, np.ndarray]:
    """Return polygons and their targets."""
    outlines = []
    for x, y, radius, angles in drawn:
        points = (x, y) + radius * np.stack((np.cos(angles), np.sin(angles)), 1)
        outlines.append(points.clip(0, SHAPE[::-1]).astype(np.float32))
    polygons = Polygons.from_outlines(outlines)
    return polygons, targets_of(polygons.extents())


def targets_of(boxes: np.ndarray) -> np.ndarray:
    shares = np.asarray(boxes, np.float32) / np.array((SHAPE[1], SHAPE[0]) * 2, np.float32)
    centre, size = (shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]
    return np.concatenate((np.arange(len(boxes), dtype=np.float32)[:, None], centre, size), 1)


def filled(outline: np.ndarray, ratio: int, kind: type = np.uint8) -> np.ndarray:
    """Return the mask of a whole image: filled at full size, then shrunk bilinearly."""
    mask = np.zeros(SHAPE, kind)
    cv2.fillPoly(mask, [outline.astype(np.int32)], 1)
    return cv2.resize(mask, (SHAPE[1] // ratio, SHAPE[0] // ratio))


def to_map(mask: np.ndarray) -> np.ndarray:
    """Bring a mask to a quarter of the image's size by nearest pixels."""
    rows, columns = (np.arange(new // 4) * old // (new // 4) for new, old in zip(SHAPE, mask.shape, strict=True))
    return mask[rows][:, columns]


def split_masks(masks: TargetMasks) -> list[np.ndarray]:
    return whole_masks(masks.windows, masks.pixels, SHAPE[0] // 4, SHAPE[1] // 4)


def in_box(target: np.ndarray) -> np.ndarray:
    """Return which pixels of the mask map are in a target's box, as the loss counts them."""
    _, x, y, width, height = target
    columns, rows = np.arange(SHAPE[1] // 4, dtype=np.float32), np.arange(SHAPE[0] // 4, dtype=np.float32)[:, None]
    x1, x2 = (x - width / 2) * np.float32(SHAPE[1] // 4), (x + width / 2) * np.float32(SHAPE[1] // 4)
    y1, y2 = (y - height / 2) * np.float32(SHAPE[0] // 4), (y + height / 2) * np.float32(SHAPE[0] // 4)
    return (columns >= x1) & (columns < x2) & (rows >= y1) & (rows < y2)


@examples
@given(st.sampled_from([1, 2, 3, 4, 5, 8, 16]), OUTLINES)
def test_training_masks_equal_those_of_whole_images(ratio: int, drawn: list[Any]) -> None:
    polygons, targets = objects(drawn)
    wholes = [filled(outline, ratio) for outline in polygons.outlines()]
    order, masks = training_masks(polygons, targets, SHAPE, ratio, overlap=False)
    assert order.tolist() == list(range(len(targets)))
    for got, whole, target in zip(split_masks(masks), wholes, targets, strict=True):
        assert np.array_equal(got, to_map(whole) * in_box(target))
    order, masks = training_masks(polygons, targets, SHAPE, ratio, overlap=True)
    assert order.tolist() == sorted(range(len(wholes)), key=lambda number: -int(wholes[number].sum()))
    owners = np.zeros_like(wholes[0], int)
    for place, number in enumerate(order.tolist(), 1):
        owners[wholes[number] > 0] = place
    for place, (got, target) in enumerate(zip(split_masks(masks), targets[order], strict=True), 1):
        assert np.array_equal(got, (to_map(owners) == place) * in_box(target))


@examples
@given(OUTLINES)
def test_evaluated_masks_equal_those_of_whole_images_with_all_their_pixels(drawn: list[Any]) -> None:
    """Even pixels outside of the box, such as one whose centre is left of it."""
    polygons, targets = objects(drawn)
    masks = split_masks(evaluation_masks(polygons, targets, SHAPE))
    for got, outline in zip(masks, polygons.outlines(), strict=True):
        assert np.array_equal(got, filled(outline, 4, np.float32) > 0.5)
    tiny = Polygons.from_outlines((np.array(((5, 5), (7, 5), (7, 7)), np.float32),))
    assert evaluation_masks(tiny, targets_of(np.array([[5, 5, 7, 7]])), SHAPE).windows.tolist() == [[1, 1, 2, 2]]
