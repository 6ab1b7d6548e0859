"""Matching and pairing of detections and labels, by hand and against plain implementations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from models.tasks.predictions import (
    CONFUSION_IOU,
    IOU_THRESHOLDS,
    Matches,
    box_overlaps,
    match_by_overlap,
    pair_by_overlap,
)

# Matching for average precision


def right_at(threshold: float, overlap: np.ndarray, beaten: np.ndarray) -> list[bool]:
    """Return which detections are correct, as documented: beaten < t <= overlap."""
    return ((beaten < threshold) & (threshold <= overlap)).tolist()


def bar(height: float, at: float = 0.0) -> list[float]:
    """Return a box whose IoU with the one of height 1 at the same position is `height`, or 1e-7 less."""
    return [at, 0, at + 1, height]


def matched(heights: Sequence[float], group: Sequence[int] = (), true_group: Sequence[int] = (0,)) -> Matches:
    """Match bars to labels of height 1, all at one position."""
    boxes, truth = np.array([bar(height) for height in heights]), np.array([bar(1.0)] * len(true_group))
    groups = np.array(group or [0] * len(heights), np.int64), np.array(true_group, np.int64)
    return match_by_overlap(box_overlaps(boxes.reshape(-1, 4), truth.reshape(-1, 4)), *groups)


def test_of_two_detections_of_a_label_the_confident_one_is_correct_if_it_reaches_the_threshold() -> None:
    overlap, partner, beaten = matched([0.61, 0.92])  # the first is more confident
    assert partner.tolist() == [0, 0]
    assert overlap.tolist() == pytest.approx([0.61, 0.92])
    for threshold, correct in {
        0.5: [True, False],
        0.6: [True, False],
        0.65: [False, True],
        0.9: [False, True],
        0.95: [False, False],
    }.items():
        assert right_at(threshold, overlap, beaten) == correct


def test_matching_nothing() -> None:
    for detections, labels in ((0, 3), (3, 0), (0, 0)):
        matches = matched([0.9] * detections, [0] * detections, [0] * labels)
        assert [len(part) for part in matches] == [detections] * 3
        assert not any(part.any() for part in matches)


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
    boxes = partial(random_boxes, rng)
    detections, truth, groups = boxes(40), boxes(rng.integers(12)), int(rng.integers(1, 5))
    group, true_group = rng.integers(groups, size=len(detections)), rng.integers(groups, size=len(truth))
    overlap, partner, beaten = match_by_overlap(box_overlaps(detections, truth), group, true_group)
    for threshold in IOU_THRESHOLDS:
        taken: set[int] = set()
        for k, box in enumerate(detections):
            overlaps = [(plain_iou(box, true), -m) for m, true in enumerate(truth) if true_group[m] == group[k]]
            best, label = max(overlaps, default=(0.0, 0))
            right = best >= threshold and -label not in taken
            assert overlap[k] == best
            assert best == 0 or partner[k] == -label
            assert right == (beaten[k] < threshold <= overlap[k])
            if right:
                taken.add(-label)


# Pairing for the confusion matrix


def paired(
    boxes: Sequence[Sequence[float]],
    truth: Sequence[Sequence[float]],
    group: Sequence[int] = (),
    true_group: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Return detection and label of each pair; without groups all are of one image."""
    groups = np.array(group or [0] * len(boxes), np.int64), np.array(true_group or [0] * len(truth), np.int64)
    pairs = pair_by_overlap(box_overlaps(np.array(boxes).reshape(-1, 4), np.array(truth).reshape(-1, 4)), *groups)
    return list(zip(*(part.tolist() for part in pairs), strict=True))


def test_pairs_overlap_by_more_than_the_threshold() -> None:
    assert CONFUSION_IOU == 0.45
    assert paired([bar(0.45)], [bar(1)]) == []
    assert paired([bar(0.450001)], [bar(1)]) == [(0, 0)]


def test_of_equal_overlaps_the_earlier_label_and_then_the_earlier_detection_comes_first() -> None:
    assert paired([bar(0.9), bar(0.9)], [bar(1)]) == [(0, 0)]
    assert paired([bar(0.9)], [bar(1), bar(1)]) == [(0, 0)]
    assert paired([bar(0.9)] * 3, [bar(1)] * 2) == [(0, 0), (1, 1)]


def test_images_are_paired_separately_and_follow_each_other() -> None:
    boxes, truth = [bar(0.7), bar(1), bar(0.9), bar(0.5)], [bar(1), bar(1), bar(1)]
    # The second image has no label; overlaps 0.7 in the first, 0.9 and 0.5 in the third.
    assert paired(boxes, truth, [0, 1, 2, 2], [0, 2, 2]) == [(0, 0), (2, 1), (3, 2)]


def test_pairing_nothing() -> None:
    assert paired([], []) == paired([bar(1)], []) == paired([], [bar(1)]) == []


@pytest.mark.parametrize("seed", range(12))
def test_pairing_as_the_plain_implementation(seed: int) -> None:
    """The largest remaining overlap, again and again."""
    rng = np.random.default_rng(seed)
    boxes = partial(random_boxes, rng)
    detected, truth = boxes(20), boxes(rng.integers(12))
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
    pairs = pair_by_overlap(box_overlaps(detected, truth), group, true_group)
    assert list(zip(*(part.tolist() for part in pairs), strict=True)) == expected
