"""The record of an image, with numbers worked out by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from models.tasks.metrics import (
    CONFIDENT_THRESHOLD,
    confusion_matrix,
    image_records,
    join,
    matched_by,
    paired_by,
    score_classes,
    shown_image,
    unmatched,
)
from tests.making import image_info
from tests.models.tasks.batches import labels, random_images


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


# Objects that are not boxes: discs, whose overlap is any function of two of them

RADIUS = 10.0


def closeness(found: np.ndarray, true: np.ndarray, asked: list[int]):
    """Return an overlap of discs by the distance of their centres, (k, 2) and (m, 2), that falls from 1 to 0."""

    def overlaps(detection: np.ndarray, label: np.ndarray) -> np.ndarray:
        asked.append(len(detection))
        distance = np.hypot(*(found[detection] - true[label]).T)
        return np.maximum(1 - distance / RADIUS, 0)

    return overlaps


def test_any_overlap_gives_precision_recall_and_the_confusion_matrix() -> None:
    """Two images: a disc found exactly, one found as another class; and a label that only a doubtful disc is near."""
    found = np.array([(5, 5), (31, 30), (70, 70.0)])
    true = np.array([(5, 5), (30, 30), (70, 71.0)])
    ones = np.ones(3, np.float32)
    records = [
        unmatched(4, np.float32([0.9, 0.8]), np.float32([0, 1]), ones[:2], np.float32([0, 0]), ones[:2]),
        unmatched(2, np.float32([CONFIDENT_THRESHOLD]), np.float32([1]), ones[:1], np.float32([1]), ones[:1]),
    ]
    asked: list[int] = []
    overlaps = closeness(found, true, asked)
    records = paired_by(overlaps, matched_by(overlaps, records))
    assert asked == [2 + 0 + 1, 2 * 2]  # pairs of one class and image; of one image, of confident detections
    assert [record.overlap.tolist() for record in records] == [[1, 0], [0.9]]
    assert [record.paired.tolist() for record in records] == [[[0, 0], [0, 1]], []]
    assert confusion_matrix(records, 2).tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]
    scores = score_classes(join(records))
    assert scores.classes.tolist() == [0, 1]
    assert scores.instances.tolist() == [2, 1]
    assert (scores.ap[1] > 0).tolist() == [True] * 9 + [False]  # 0.9 reaches all thresholds but 0.95


def test_outlines_of_what_is_drawn_follow_their_predictions() -> None:
    """In falling confidence, without those that are not confident."""
    predictions = np.float32([(0, 0, 1, 1, 0.5, 0), (0, 0, 2, 2, 0.1, 0), (0, 0, 3, 3, 0.7, 1)])
    outlines = [np.full((4, 2), k) for k in range(3)]
    shown = shown_image("a.jpg", (8, 8), np.float32([(1, 0, 0, 4, 4)]), predictions, [np.full((4, 2), 9)], outlines)
    assert shown.predictions[:, 3].tolist() == [3, 1]
    assert [int(outline[0, 0]) for outline in shown.prediction_outlines] == [2, 0]
    assert [int(outline[0, 0]) for outline in shown.label_outlines] == [9]
    assert shown_image("a.jpg", (8, 8), shown.labels, predictions).prediction_outlines == ()
