"""The detections of one image in all their forms, and their matching and pairing with labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.tasks.predictions import CONFUSION_IOU, IOU_THRESHOLDS, box_pairs, match_by_overlap, pair_by_overlap
from tests.making import image_info
from tests.models.tasks.batches import labels, predictions
from utils.plots.drawing import Style
from utils.review import Contradiction


def test_label_rows() -> None:
    infos = (image_info(size=(100, 200)), image_info(size=(30, 30)), image_info())
    boxes = [
        torch.tensor([[10, 20, 30, 60, 0.5, 2], [0, 0, 100, 200, 0.25, 0]]),
        torch.tensor([[0, 0, 10, 20, 0.875, 1.0]]),
        torch.zeros(0, 6),
    ]
    predicted = predictions(boxes, infos)
    assert [one.label_rows(False) for one in predicted] == [
        ["2 0.2 0.2 0.2 0.2", "0 0.5 0.5 1 1"],
        ["1 0.166667 0.333333 0.333333 0.666667"],
        [],
    ]
    assert predicted[0].label_rows(True) == ["2 0.2 0.2 0.2 0.2 0.5", "0 0.5 0.5 1 1 0.25"]
    assert predicted[0].label_rows(True, corners=True) == ["2 10 20 30 60 0.5", "0 0 0 100 200 0.25"]


def test_with_labels() -> None:
    """Detections that overlap a label of their class, here 20, 20, 60, 60, by more than the threshold are dropped."""
    infos = (image_info(size=(100, 200), rows=labels((1, 0.4, 0.2, 0.4, 0.2))), image_info())
    boxes = torch.tensor(
        [
            [20, 20, 60, 60, 0.9, 1],
            [20, 20, 60, 60, 0.8, 0],  # another class
            [20, 20, 60, 44, 0.7, 1],  # IoU 0.6
            [20, 20, 60, 48, 0.6, 1],  # IoU 0.7
            [0, 0, 10, 20, 0.5, 1],
        ]
    ).double()
    predicted = predictions([boxes, boxes[-1:]], infos)
    first, second = (one.with_labels().label_rows(True) for one in predicted)
    assert first == [
        "1 0.4 0.2 0.4 0.2 1",
        "0 0.4 0.2 0.4 0.2 0.8",
        "1 0.4 0.16 0.4 0.12 0.7",
        "1 0.05 0.05 0.1 0.1 0.5",
    ]
    assert second == ["1 0.05 0.05 0.1 0.1 0.5"]
    none = predictions([boxes[:0]] * 2, infos)
    assert [one.with_labels().label_rows(False) for one in none] == [["1 0.4 0.2 0.4 0.2"], []]
    assert len(predicted[0].rows) == 5  # of the metrics


# A disc, a light on its place that is a second label of it, a bar far from all detections; centre and size
DISC, TWIN, LONELY = (0, 0.2, 0.2, 0.2, 0.2), (1, 0.21, 0.2, 0.2, 0.2), (2, 0.9, 0.9, 0.1, 0.1)


def review_of(detections: list[list[float]], *rows: tuple[float, ...]) -> list[Contradiction]:
    """Return the contradictions of detections in an image of 100 x 100 pixels with labels."""
    info = image_info(size=(100, 100), rows=labels(*rows))
    (prediction,) = predictions([torch.tensor(detections).double().view(-1, 6)], (info,))
    return list(prediction.review(info).found)


@pytest.mark.parametrize(
    ("detections", "rows", "kind", "classes", "overlap", "score"),
    [
        ([[50, 50, 70, 70, 0.8, 1]], [], "missing label", (None, 1), 0, 0.8),
        ([], [LONELY], "spurious label", (2, None), None, 0),
        ([[10, 10, 30, 30, 0.8, 1], [10, 10, 30, 30, 0.2, 0]], [DISC], "wrong class", (0, 1), 1, 0.8 / 1.02),
        ([[20, 10, 40, 30, 0.8, 0]], [DISC], "poor box", (0, 0), 1 / 3, 0.8 / 0.82),
        ([[10, 10, 30, 30, 0.8, 0]], [DISC, TWIN], "duplicate", (1, 0), 19 / 21, 0.8 / 0.82 * 19 / 21),
    ],
)
def test_a_contradiction(
    detections: list[list[float]], rows: list[tuple[float, ...]], kind: str, classes: Any, overlap: Any, score: float
) -> None:
    (found,) = review_of(detections, *rows)
    assert (found.kind, found.label, found.predicted) == (kind, *classes)
    assert found.overlap == (overlap if overlap is None else pytest.approx(overlap, abs=1e-5))
    assert found.score == pytest.approx(score, abs=1e-5)
    assert found.box == pytest.approx(
        (50, 50, 70, 70) if kind == "missing label" else label_corners(rows[-1]), abs=1e-4
    )


def label_corners(row: tuple[float, ...]) -> list[float]:
    _, x, y, width, height = (100 * value for value in row)
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


@pytest.mark.parametrize(
    "detections",
    [
        [[10, 10, 30, 30, 0.3, 0], [10, 10, 30, 30, 0.2, 1]],  # the label's own class is more confident
        [[10, 10, 30, 30, 0.9, 0], [20, 10, 40, 30, 0.3, 0]],  # a part, beside the label's own detection
        [[10, 10, 30, 30, 0.05, 1]],  # not confident
        [[20, 10, 40, 30, 0.8, 1]],  # near a label that no detection supports
    ],
)
def test_no_contradiction(detections: list[list[float]]) -> None:
    assert [found.kind for found in review_of(detections, DISC) if found.kind != "missing label"] == []


def test_an_object_without_a_label_is_missed_once() -> None:
    found = review_of([[50, 50, 70, 70, 0.8, 1], [50, 50, 70, 69, 0.6, 2], [10, 10, 30, 30, 0.5, 0]])
    assert [(row.predicted, row.confidence) for row in found] == [(1, pytest.approx(0.8)), (0, pytest.approx(0.5))]


def test_array_items_and_description() -> None:
    boxes = torch.tensor([[1, 2, 3, 4, 0.75, 2], [5, 6, 7, 8, 0.5, 0], [1, 1, 2, 2, 0.25, 2]]).double()
    predicted, nothing = predictions([boxes, boxes[:0]], [image_info(), image_info()])
    assert predicted.array.dtype == np.float32
    assert predicted.array.tolist() == boxes.tolist()
    assert nothing.array.shape == (0, 6)
    assert predicted.items == [("bar", 0.75), ("disc", 0.5), ("bar", 0.25)]
    assert predicted.describe() == "1 disc, 2 bars"
    assert (nothing.items, nothing.describe()) == ([], "nothing")


def test_crops() -> None:
    image = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    boxes = torch.tensor([[2.5, 3.5, 10, 8, 0.75, 1], [5, 5, 5, 5, 0.5, 0]]).double()
    (predicted,) = predictions([boxes], [image_info()])
    ((name, crop),) = predicted.crops(image)  # the second box has no pixels
    assert name == "traffic light"
    assert np.array_equal(crop, image[3:8, 2:10])


@pytest.mark.parametrize("names", [True, False])
def test_drawing_copies_the_image_and_puts_the_most_confident_on_top(names: bool) -> None:
    image = np.zeros((100, 100, 3), np.uint8)
    boxes = torch.tensor([[20, 40, 80, 80, 0.75, 1], [20, 40, 80, 80, 0.5, 0]]).double()
    both, first = predictions([boxes, boxes[:1]], [image_info(), image_info()])
    style = Style(2, names, True)
    drawn = both.draw(image, style)
    assert not image.any()
    assert (drawn[80, 50] == first.draw(image, style)[80, 50]).all()
    assert drawn[80, 50].any()


# Matching for average precision


def bar(height: float) -> list[float]:
    """Return a box whose IoU with the one of height 1 at the same position is `height`, or 1e-7 less."""
    return [0, 0, 1, height]


def plain_iou(a: np.ndarray, b: np.ndarray) -> float:
    x, y = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(x, 0) * max(y, 0)
    return inside / ((b[2] - b[0]) * (b[3] - b[1]) + (a[2] - a[0]) * (a[3] - a[1]) - inside + 1e-7)


def random_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return boxes on a coarse grid, so that many overlaps are equal."""
    low = rng.integers(0, 3, (count, 2)) * 2
    return np.concatenate((low, low + rng.integers(4, 9, (count, 2))), 1).astype(np.float32)


@pytest.mark.parametrize("seed", range(12))
def test_matching_as_the_plain_implementation(seed: int) -> None:
    """At each threshold a detection is correct if no earlier one with the same best label was."""
    rng = np.random.default_rng(seed)
    detections, truth, groups = random_boxes(rng, 40), random_boxes(rng, rng.integers(12)), int(rng.integers(1, 5))
    group, true_group = (np.sort(rng.integers(groups, size=len(boxes))) for boxes in (detections, truth))
    overlap, rival_overlap = match_by_overlap(box_pairs(detections, truth, group, true_group), len(detections))
    for threshold in IOU_THRESHOLDS:
        taken: set[int] = set()
        for k, box in enumerate(detections):
            overlaps = [(plain_iou(box, true), -m) for m, true in enumerate(truth) if true_group[m] == group[k]]
            best, label = max(overlaps, default=(0.0, 0))
            right = best >= threshold and -label not in taken
            assert overlap[k] == best
            assert right == (rival_overlap[k] < threshold <= overlap[k])
            if right:
                taken.add(-label)


# Pairing for the confusion matrix


def test_pairs_overlap_by_more_than_the_threshold() -> None:
    boxes, group = np.array([bar(0.45), bar(0.450001)]), np.arange(2)  # in two images
    pairs = pair_by_overlap(box_pairs(boxes, np.array([bar(1), bar(1)]), group, group), group)
    assert [part.tolist() for part in pairs] == [[1], [1]]


@pytest.mark.parametrize("seed", range(12))
def test_pairing_as_the_plain_implementation(seed: int) -> None:
    """The largest remaining overlap, again and again."""
    rng = np.random.default_rng(seed)
    detected, truth = random_boxes(rng, 20), random_boxes(rng, rng.integers(12))
    group, true_group = np.sort(rng.integers(3, size=20)), np.sort(rng.integers(3, size=len(truth)))
    expected = []
    for image in range(3):
        detections, true = set(np.flatnonzero(group == image)), set(np.flatnonzero(true_group == image))
        while remaining := [(plain_iou(detected[k], truth[m]), -m, -k) for k in detections for m in true]:
            best, label, detection = max(remaining)
            if best <= CONFUSION_IOU:
                break
            expected.append((-detection, -label))
            detections.remove(-detection)
            true.remove(-label)
    pairs = pair_by_overlap(box_pairs(detected, truth, group, true_group), true_group)
    assert list(zip(*(part.tolist() for part in pairs), strict=True)) == expected
