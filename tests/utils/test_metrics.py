"""Precision, recall and average precision, by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from utils.metrics import IOU_THRESHOLDS, ClassScores, ImageRecord, match_detections, score_classes, score_sizes

PERFECT = 0.995  # the area by 101 points falls to 0 at the last of them: 100 intervals, the last one half full


def record(
    image: int = 0, detections: Sequence[tuple[float, ...]] = (), labels: Sequence[tuple[float, float]] = ()
) -> ImageRecord:
    """detections: confidence, class, overlap, beaten, own side, the label's side; labels: class, side."""
    confidence, label, overlap, beaten, side, partner = np.array(detections, float).reshape(-1, 6).T
    true_label, true_side = np.array(labels, float).reshape(-1, 2).T
    return ImageRecord(image, overlap, beaten, partner, confidence, label, side, true_label, true_side)


def hit(confidence: float, label: int = 0, overlap: float = 1.0, side: float = 20, partner: float = 20) -> tuple:
    return confidence, label, overlap, 0.0, side, partner


def miss(confidence: float, label: int = 0, side: float = 20) -> tuple:
    return confidence, label, 0.0, 0.0, side, 0.0


# Matching


def right_at(threshold: float, overlap: np.ndarray, beaten: np.ndarray) -> list[bool]:
    """As documented: beaten < t <= overlap."""
    return ((beaten < threshold) & (threshold <= overlap)).tolist()


def matched(overlaps: list[list[float]], same: list[list[bool]] | None = None) -> tuple[np.ndarray, ...]:
    values = np.array(overlaps)
    return match_detections(values, np.ones_like(values, bool) if same is None else np.array(same))


def test_of_two_detections_of_a_label_the_confident_one_wins_where_it_reaches_the_threshold() -> None:
    overlap, partner, beaten = matched([[0.6, 0.92]])  # the first is the more confident
    assert partner.tolist() == [0, 0]
    assert overlap.tolist() == [0.6, 0.92]
    assert right_at(0.5, overlap, beaten) == [True, False]
    assert right_at(0.6, overlap, beaten) == [True, False]
    assert right_at(0.65, overlap, beaten) == [False, True]
    assert right_at(0.9, overlap, beaten) == [False, True]
    assert right_at(0.95, overlap, beaten) == [False, False]


def test_three_detections_of_a_label() -> None:
    overlap, _, beaten = matched([[0.7, 0.6, 0.97]])
    assert beaten.tolist() == [0, 0.7, 0.7]
    rights = np.array([right_at(t, overlap, beaten) for t in IOU_THRESHOLDS])
    assert (rights.sum(1) == 1).all()  # the label is found once at every threshold
    assert rights[:, 0].tolist() == [True] * 5 + [False] * 5


def test_a_detection_below_every_threshold_takes_nothing_away() -> None:
    overlap, _, beaten = matched([[0.4, 0.6]])
    assert right_at(0.5, overlap, beaten) == [False, True]


def test_each_detection_goes_to_its_best_label() -> None:
    overlap, partner, beaten = matched([[0.8, 0.6, 0.1], [0.7, 0.9, 0.55]])
    assert partner.tolist() == [0, 1, 1]
    assert overlap.tolist() == [0.8, 0.9, 0.55]
    assert beaten.tolist() == [0, 0, 0.9]


def test_only_labels_of_the_own_class_count() -> None:
    same = [[True, False], [False, False]]
    overlap, partner, _ = matched([[0.6, 0.9], [0.9, 0.8]], same)
    assert overlap.tolist() == [0.6, 0]
    assert partner[0] == 0


def test_rivals_must_be_of_the_same_class() -> None:
    """Two labels on one spot, and a detection of each class."""
    overlap, _, beaten = matched([[0.9, 0.8], [0.9, 0.8]], [[True, False], [False, True]])
    assert right_at(0.75, overlap, beaten) == [True, True]


def test_matching_nothing() -> None:
    for shape in ((0, 3), (3, 0), (0, 0)):
        found = match_detections(np.zeros(shape), np.zeros(shape, bool))
        assert [len(part) for part in found] == [shape[1]] * 3
        assert not any(part.any() for part in found)


# Average precision


def test_average_precision_by_hand() -> None:
    """Right, wrong, right of 2 labels: recall 1/2, 1/2, 1 and precision 1, 1/2, 2/3; the envelope is 1, then 2/3.

    By 101 points: 1 at 0 ... 0.49, 2/3 at 0.5 ... 0.99, 0 at 1.
    """
    scores = score_classes([record(0, [hit(0.9), miss(0.8), hit(0.7)], [(0, 20), (0, 20)])])
    points = [1] * 50 + [2 / 3] * 50 + [0]
    area = sum((a + b) / 2 for a, b in pairwise(points)) / 100
    assert scores.ap.tolist() == [[pytest.approx(area, abs=1e-9)] * 10]
    assert area == pytest.approx(0.5 + 0.5 * 2 / 3, abs=0.006)


def test_average_precision_where_half_is_never_found() -> None:
    """One of two labels, before any mistake: precision 1 up to a recall of 1/2, from there on a line down to 0 at 1."""
    scores = score_classes([record(0, [hit(0.9)], [(0, 20), (0, 20)])])
    assert scores.ap[0, 0] == pytest.approx(0.5 + 0.25, abs=0.006)
    assert scores.recall[0] == pytest.approx(0.5)


def test_perfect_detections() -> None:
    records = [record(k, [hit(0.9, k % 2), hit(0.8, 1)], [(k % 2, 20), (1, 20)]) for k in range(6)]
    scores = score_classes(records)
    np.testing.assert_allclose(scores.ap, PERFECT)
    assert scores.means() == pytest.approx({"precision": 1, "recall": 1, "mAP50": PERFECT, "mAP50-95": PERFECT})


def test_overlap_decides_at_each_threshold() -> None:
    scores = score_classes([record(0, [hit(0.9, overlap=0.72)], [(0, 20)])])
    np.testing.assert_allclose(scores.ap, [[PERFECT] * 5 + [0] * 5])
    assert scores.means()["mAP50-95"] == pytest.approx(PERFECT / 2)


def test_confidence_orders_the_detections_of_all_images() -> None:
    """The mistake of image 1 comes before the find of image 0, so precision is 1/2 throughout."""
    scores = score_classes([record(0, [hit(0.3)], [(0, 20)]), record(1, [miss(0.9)])])
    np.testing.assert_allclose(scores.ap[0], PERFECT / 2)


def test_no_detections() -> None:
    scores = score_classes([record(0, [], [(0, 20), (2, 20)])])
    assert scores.classes.tolist() == [0, 2]
    assert scores.means() == {"precision": 0, "recall": 0, "mAP50": 0, "mAP50-95": 0}


def test_no_labels() -> None:
    records = [record(0, [miss(0.9)]), record(1)]
    scores = score_classes(records)
    assert scores.classes.tolist() == []
    assert scores.means() == {"precision": 0, "recall": 0, "mAP50": 0, "mAP50-95": 0}
    assert score_sizes(records) == []


def test_classes_that_no_label_has_do_not_count() -> None:
    scores = score_classes([record(0, [hit(0.9), miss(0.8, label=5)], [(0, 20)])])
    assert scores.classes.tolist() == [0]
    np.testing.assert_allclose(scores.ap, PERFECT)


def test_images_and_instances_are_counted() -> None:
    scores = score_classes(
        [record(0, [], [(0, 20), (0, 30), (3, 20)]), record(1, [], [(0, 20)]), record(2), record(5, [], [(3, 9)])]
    )
    assert scores.classes.tolist() == [0, 3]
    assert scores.images.tolist() == [2, 2]
    assert scores.instances.tolist() == [3, 2]


def test_precision_and_recall_are_read_where_the_smoothed_f1_is_highest() -> None:
    """One label, found at 0.8, and a mistake at 0.2, between which precision falls from 1 to 1/2 on a line.

    The mean over a tenth of the confidences is highest where its window ends at 0.8, so at 0.75.
    """
    scores = score_classes([record(0, [hit(0.8), miss(0.2)], [(0, 20)])])
    assert scores.recall[0] == pytest.approx(1)
    assert scores.precision[0] == pytest.approx(1 - 0.5 * 0.05 / 0.6, abs=2e-3)


def test_all_classes_are_read_at_one_confidence() -> None:
    """Class 0 is found at 0.9, and class 1 at 0.3 only: the best mean F1 is where both are found, up to 0.3."""
    scores = score_classes([record(0, [hit(0.9), hit(0.3, label=1), miss(0.5)], [(0, 20), (1, 20)])])
    assert scores.recall.tolist() == pytest.approx([1, 1])
    assert scores.precision.tolist() == pytest.approx([0.5, 1], abs=1e-6)


def random_records(count: int, seed: int) -> list[ImageRecord]:
    """Images with detections of few distinct confidences, so that many are equal."""
    rng = np.random.default_rng(seed)
    records = []
    for image in range(count):
        found = [
            (rng.integers(1, 9) / 10, rng.integers(3), rng.random(), rng.random() / 2, rng.uniform(4, 120), 20.0)
            for _ in range(rng.integers(6))
        ]
        found.sort(key=lambda row: -row[0])
        records.append(record(image, found, [(rng.integers(3), rng.uniform(4, 120)) for _ in range(rng.integers(5))]))
    return records


def equal(a: ClassScores, b: ClassScores) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_order_of_the_records_does_not_matter() -> None:
    records = random_records(40, seed=0)
    scores, sizes = score_classes(records), score_sizes(records)
    assert 0 < scores.means()["mAP50"] < 0.9
    assert len(sizes) == 5
    for seed in range(3):
        random.Random(seed).shuffle(records)
        assert equal(score_classes(records), scores)
        assert score_sizes(records) == sizes


# Object sizes


def test_a_label_of_another_size_has_no_influence() -> None:
    small = record(0, [hit(0.9, side=10, partner=10)], [(0, 10)])
    large = record(1, [], [(0, 50)])  # never found
    wrong = record(2, [miss(0.99, side=50)])  # and one imagined
    alone = score_sizes([small])
    both = score_sizes([small, large, wrong])
    assert [(s.low, s.high, s.instances) for s in both] == [(0, 16, 1), (32, 64, 1)]
    assert both[0] == alone[0]
    assert (both[0].ap50, both[0].ap) == pytest.approx((PERFECT, PERFECT))
    assert (both[1].ap50, both[1].ap) == (0, 0)


def test_a_mistake_counts_where_its_own_size_is() -> None:
    """A mistake above the only find halves the precision, of its own size alone."""
    records = [
        record(0, [hit(0.5, side=10, partner=10), hit(0.5, side=50, partner=50)], [(0, 10), (0, 50)]),
        record(1, [miss(0.9, side=12)]),
    ]
    small, large = score_sizes(records)
    assert small.ap50 == pytest.approx(PERFECT / 2)
    assert large.ap50 == pytest.approx(PERFECT)


def test_a_find_counts_where_its_label_is() -> None:
    """A label of 40 pixels found by a box of 28: right at low thresholds for the label's size, wrong nowhere else."""
    records = [
        record(0, [hit(0.9, overlap=0.52, side=28, partner=40)], [(0, 40)]),
        record(1, [hit(0.5, side=20, partner=20)], [(0, 20)]),
    ]
    of_label, of_box = score_sizes(records)[1], score_sizes(records)[0]
    assert (of_label.low, of_label.ap50) == (32, pytest.approx(PERFECT))
    assert (of_box.low, of_box.ap50) == (16, pytest.approx(PERFECT))
    # From 0.55 on it is a mistake of its own size, above the only find there.
    assert of_box.ap == pytest.approx(PERFECT * (1 + 9 / 2) / 10)
    assert of_label.ap == pytest.approx(PERFECT / 10)


def test_sizes_are_means_over_the_classes_that_have_them() -> None:
    records = [record(0, [hit(0.9, side=10, partner=10)], [(0, 10), (1, 10), (2, 200)])]
    small, large = score_sizes(records)
    assert (small.instances, small.ap50) == (2, pytest.approx(PERFECT / 2))
    assert (large.low, large.high, large.instances, large.ap50) == (96, float("inf"), 1, 0)
