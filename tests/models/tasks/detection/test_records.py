"""The record of an image, with numbers worked out by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from models.tasks.metrics import image_records
from tests.making import image_info
from tests.models.tasks.detection.batches import labels, random_images


def test_record_by_hand() -> None:
    info = image_info(image=7, size=(100, 50), rows=labels((1, 0.5, 0.5, 0.2, 0.8), (2, 0.1, 0.1, 0.1, 0.1)))
    # The first label is 40, 5, 60, 45: an exact detection, three quarters of it, an exact one of another class.
    boxes = torch.tensor([[40, 5, 60, 45, 0.9, 1], [40, 5, 60, 35, 0.8, 1], [40, 5, 60, 45, 0.7, 0]])
    (record,) = image_records([boxes], [info])
    assert record.image == 7
    assert record.overlap == pytest.approx([1, 0.75, 0], abs=1e-6)
    assert record.beaten == pytest.approx([0, 1, 0], abs=1e-6)
    assert record.confidence == pytest.approx([0.9, 0.8, 0.7])
    assert record.label.tolist() == [1, 1, 0]
    assert record.side == pytest.approx([800**0.5, 600**0.5, 800**0.5])
    assert record.partner_side[:2] == pytest.approx([800**0.5, 800**0.5])
    assert record.true_label.tolist() == [1, 2]
    assert record.true_side == pytest.approx([800**0.5, 50**0.5])


def test_images_without_labels_or_detections() -> None:
    boxes = torch.tensor([[40, 5, 60, 45, 0.9, 1.0]])
    background, missed = image_records(
        [boxes, torch.zeros(0, 6)], [image_info(image=1), image_info(image=2, rows=labels((0, 0.5, 0.5, 0.2, 0.2)))]
    )
    assert (background.overlap.tolist(), background.true_label.tolist()) == ([0], [])
    assert (missed.confidence.tolist(), missed.true_label.tolist()) == ([], [0])


@pytest.mark.parametrize("seed", range(8))
def test_the_record_of_an_image_does_not_depend_on_the_others(seed: int) -> None:
    boxes, infos = random_images(seed)
    together = image_records(boxes, infos)
    for rows, info, record in zip(boxes, infos, together, strict=True):
        (alone,) = image_records([rows], [info])
        assert all(np.array_equal(*pair) for pair in zip(alone, record, strict=True))
    assert image_records([], []) == []


def test_records_are_compact() -> None:
    """Less than 50 bytes per detection travel between processes, none of another image."""
    infos = [image_info(k, (100, 100), rows=labels((0, 0.5, 0.5, 0.2, 0.2))) for k in range(4)]
    records = image_records([torch.rand(300, 6).double()] * 4, infos)
    assert len(pickle.dumps(records[0])) < 300 * 50


def test_only_records_of_shown_images_hold_boxes() -> None:
    infos = [image_info(k, rows=labels((0, 0.5, 0.5, 0.2, 0.2))) for k in range(3)]
    boxes = [torch.tensor([[10, 20, 30, 40, 0.9, 2.0]])] * 3
    assert [record.shown for record in image_records(boxes, infos)] == [None] * 3
    first, second, third = image_records(boxes, infos, {1, 7})
    assert (first.shown, third.shown) == (None, None)
    assert second.shown is not None
    assert len(pickle.dumps(second)) < len(pickle.dumps(first)) + 700
