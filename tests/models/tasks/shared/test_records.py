"""Records of objects that are not boxes: discs, whose overlap is any function of two of them."""

from __future__ import annotations

import numpy as np

from models.tasks.metrics import (
    CONFIDENT_THRESHOLD,
    confusion_matrix,
    join,
    matched_by,
    paired_by,
    score_classes,
    shown_image,
    unmatched,
)

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


def test_no_images() -> None:
    assert matched_by(closeness(np.zeros((0, 2)), np.zeros((0, 2)), []), []) == []
    assert paired_by(closeness(np.zeros((0, 2)), np.zeros((0, 2)), []), []) == []


def test_outlines_of_what_is_drawn_follow_their_predictions() -> None:
    """In falling confidence, without those that are not confident."""
    predictions = np.float32([(0, 0, 1, 1, 0.5, 0), (0, 0, 2, 2, 0.1, 0), (0, 0, 3, 3, 0.7, 1)])
    outlines = [np.full((4, 2), k) for k in range(3)]
    shown = shown_image("a.jpg", (8, 8), np.float32([(1, 0, 0, 4, 4)]), predictions, [np.full((4, 2), 9)], outlines)
    assert shown.predictions[:, 3].tolist() == [3, 1]
    assert [int(outline[0, 0]) for outline in shown.prediction_outlines] == [2, 0]
    assert [int(outline[0, 0]) for outline in shown.label_outlines] == [9]
    assert shown_image("a.jpg", (8, 8), shown.labels, predictions).prediction_outlines == ()
