"""Precision, recall and average precision, by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from models.tasks.detection import metrics
from models.tasks.detection.metrics import (
    CONFIDENT,
    IOU_THRESHOLDS,
    PAIRED,
    POINTS,
    RECALLS,
    SIZE_EDGES,
    ClassScores,
    ImageRecord,
    Matches,
    SizeScores,
    confusion_matrix,
    join,
    match_detections,
    pair_detections,
)

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


def score_classes(records: list[ImageRecord]) -> ClassScores:
    return metrics.score_classes(join(records))


def score_sizes(records: list[ImageRecord]) -> list[SizeScores]:
    return metrics.score_sizes(join(records))


def bar(height: float, at: float = 0.0) -> list[float]:
    """A box of which the one of height 1 at the same place covers so much."""
    return [at, 0, at + 1, height]


def matched(heights: Sequence[float], group: Sequence[int] = (), true_group: Sequence[int] = (0,)) -> Matches:
    """Bars given to labels of height 1, all at one place."""
    boxes, truth = np.array([bar(height) for height in heights]), np.array([bar(1.0)] * len(true_group))
    groups = np.array(group or [0] * len(heights), np.int64), np.array(true_group, np.int64)
    return match_detections(boxes.reshape(-1, 4), groups[0], truth.reshape(-1, 4), groups[1], eps=0)


def test_of_two_detections_of_a_label_the_confident_one_wins_where_it_reaches_the_threshold() -> None:
    overlap, partner, beaten = matched([0.6, 0.92])  # the first is the more confident
    assert partner.tolist() == [0, 0]
    assert overlap.tolist() == pytest.approx([0.6, 0.92])
    assert right_at(0.5, overlap, beaten) == [True, False]
    assert right_at(0.6, overlap, beaten) == [True, False]
    assert right_at(0.65, overlap, beaten) == [False, True]
    assert right_at(0.9, overlap, beaten) == [False, True]
    assert right_at(0.95, overlap, beaten) == [False, False]


def test_three_detections_of_a_label() -> None:
    overlap, _, beaten = matched([0.7, 0.6, 0.97])
    assert beaten.tolist() == pytest.approx([0, 0.7, 0.7])
    rights = np.array([right_at(t, overlap, beaten) for t in IOU_THRESHOLDS])
    assert (rights.sum(1) == 1).all()  # the label is found once at every threshold
    assert rights[:, 0].tolist() == [True] * 5 + [False] * 5


def test_a_detection_below_every_threshold_takes_nothing_away() -> None:
    overlap, _, beaten = matched([0.4, 0.6])
    assert right_at(0.5, overlap, beaten) == [False, True]


def test_each_detection_goes_to_its_best_label() -> None:
    truth = np.array([[0, 0, 1, 1], [0, 0, 1, 0.5], [0, 0, 1, 1]])
    boxes = np.array([bar(0.8), bar(0.6), bar(0.4), bar(0.5), bar(0.9, at=5)])
    group = np.zeros(5, np.int64)
    overlap, partner, beaten = match_detections(boxes, group, truth, group[:3], eps=0)
    assert partner.tolist() == [0, 1, 1, 1, 0]  # of equal ones the first
    assert overlap.tolist() == pytest.approx([0.8, 5 / 6, 0.8, 1, 0])
    assert beaten.tolist() == pytest.approx([0, 0, 5 / 6, 5 / 6, 0])


def test_only_labels_of_the_own_group_count() -> None:
    """Two labels on one spot, a detection of each group, and one of a third."""
    overlap, partner, beaten = matched([0.9, 0.8, 0.95], [7, 3, 5], [3, 7])
    assert overlap.tolist() == pytest.approx([0.9, 0.8, 0])
    assert partner.tolist() == [1, 0, 0]
    assert right_at(0.75, overlap, beaten) == [True, True, False]


def test_matching_nothing() -> None:
    for detections, labels in ((0, 3), (3, 0), (0, 0)):
        found = matched([0.9] * detections, [0] * detections, [0] * labels)
        assert [len(part) for part in found] == [detections] * 3
        assert not any(part.any() for part in found)


def plain_iou(a: np.ndarray, b: np.ndarray) -> float:
    x, y = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(x, 0) * max(y, 0)
    return inside / ((b[2] - b[0]) * (b[3] - b[1]) + (a[2] - a[0]) * (a[3] - a[1]) - inside + 1e-7)


def random_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """On a coarse grid, so that many overlap alike."""
    low = rng.integers(0, 3, (count, 2)) * 2
    return np.concatenate((low, low + rng.integers(4, 9, (count, 2))), 1).astype(np.float32)


@pytest.mark.parametrize("seed", range(30))
def test_matching_as_plainly(seed: int) -> None:
    """Detection by detection, at each threshold: right where no earlier one with the same best label was."""
    rng = np.random.default_rng(seed)
    boxes = partial(random_boxes, rng)
    found, truth, groups = boxes(40), boxes(rng.integers(12)), int(rng.integers(1, 5))
    group, true_group = rng.integers(groups, size=len(found)), rng.integers(groups, size=len(truth))
    overlap, partner, beaten = match_detections(found, group, truth, true_group)
    for threshold in IOU_THRESHOLDS:
        taken: set[int] = set()
        for k, box in enumerate(found):
            own = [(plain_iou(box, true), -m) for m, true in enumerate(truth) if true_group[m] == group[k]]
            best, label = max(own, default=(0.0, 0))
            right = best >= threshold and -label not in taken
            assert overlap[k] == best
            assert best == 0 or partner[k] == -label
            assert right == (beaten[k] < threshold <= overlap[k])
            if right:
                taken.add(-label)


# The confusion matrix


def paired(
    boxes: Sequence[Sequence[float]],
    truth: Sequence[Sequence[float]],
    group: Sequence[int] = (),
    true_group: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Detection and label of each pair; without groups all are of one image."""
    groups = np.array(group or [0] * len(boxes), np.int64), np.array(true_group or [0] * len(truth), np.int64)
    found = pair_detections(np.array(boxes).reshape(-1, 4), groups[0], np.array(truth).reshape(-1, 4), groups[1], eps=0)
    return list(zip(*(part.tolist() for part in found), strict=True))


def test_the_largest_overlap_is_paired_first() -> None:
    """Whatever the confidences: the second has the label, and the first, which overlaps it too, none."""
    assert paired([bar(0.6), bar(0.9)], [bar(1)]) == [(1, 0)]


def test_who_loses_a_label_takes_the_next() -> None:
    """Overlaps 0.9 and 0.67 of the first detection with the two labels, 0.8 and 0.75 of the second."""
    assert paired([bar(0.9), bar(0.8)], [bar(1), bar(0.6)]) == [(0, 0), (1, 1)]


def test_one_detection_finds_one_label() -> None:
    assert paired([bar(0.8)], [bar(0.6), bar(1)]) == [(0, 1)]  # 0.75 and 0.8


def test_pairs_overlap_by_more_than_the_threshold() -> None:
    assert PAIRED == 0.45
    assert paired([bar(0.45)], [bar(1)]) == []
    assert paired([bar(0.4500001)], [bar(1)]) == [(0, 0)]


def test_of_equal_overlaps_the_earlier_label_and_then_the_earlier_detection_comes_first() -> None:
    assert paired([bar(0.9), bar(0.9)], [bar(1)]) == [(0, 0)]
    assert paired([bar(0.9)], [bar(1), bar(1)]) == [(0, 0)]
    assert paired([bar(0.9)] * 3, [bar(1)] * 2) == [(0, 0), (1, 1)]


def test_images_are_paired_each_for_itself_and_come_one_after_the_other() -> None:
    boxes, truth = [bar(0.7), bar(1), bar(0.9), bar(0.5)], [bar(1), bar(1), bar(1)]
    # The second image has no label; overlaps 0.7 in the first, 0.9 and 0.5 in the third.
    assert paired(boxes, truth, [0, 1, 2, 2], [0, 2, 2]) == [(0, 0), (2, 1), (3, 2)]


def test_pairing_nothing() -> None:
    assert paired([], []) == paired([bar(1)], []) == paired([], [bar(1)]) == []


@pytest.mark.parametrize("seed", range(20))
def test_pairing_as_plainly(seed: int) -> None:
    """The largest overlap that is left, again and again."""
    rng = np.random.default_rng(seed)
    boxes = partial(random_boxes, rng)
    found, truth = boxes(20), boxes(rng.integers(12))
    group, true_group = np.sort(rng.integers(3, size=20)), np.sort(rng.integers(3, size=len(truth)))
    expected = []
    for image in range(3):
        own, true = set(np.flatnonzero(group == image)), set(np.flatnonzero(true_group == image))
        while left := [(plain_iou(found[k], truth[m]), -m, -k) for k in own for m in true]:
            best, label, detection = max(left)
            if best <= PAIRED:
                break
            expected.append((-detection, -label))
            own.remove(-detection)
            true.remove(-label)
    pairs = pair_detections(found, group, truth, true_group)
    assert list(zip(*(part.tolist() for part in pairs), strict=True)) == expected


def test_confusion_by_hand() -> None:
    """Two labels of class 0 and one of 1; a right detection, one of class 2 for 1, one for nothing, one too weak."""
    spotted = record(3, [hit(0.9), miss(0.8, 2), miss(0.7, 2), miss(CONFIDENT, 1)], [(0, 20), (1, 20), (0, 20)])
    spotted = spotted._replace(paired=np.array([[0, 0], [1, 2]], np.int32))
    expected = [[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert confusion_matrix([spotted], 3).tolist() == expected
    twice = confusion_matrix([record(1), spotted, spotted], 3)
    assert twice.tolist() == (2 * np.array(expected)).tolist()
    assert twice.dtype == np.int64


def test_confusion_of_nothing() -> None:
    assert confusion_matrix([], 1).tolist() == [[0, 0], [0, 0]]
    assert confusion_matrix([record(0, [], [(0, 9)])], 1).tolist() == [[0, 1], [0, 0]]
    assert confusion_matrix([record(0, [miss(0.9)])], 1).tolist() == [[0, 0], [1, 0]]


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


# Curves


def test_curves_by_hand() -> None:
    """Two labels, one found at 0.8; a mistake at 0.4. In between precision falls on a line from 1 to 1/2."""
    curves = score_classes([record(0, [hit(0.8), miss(0.4)], [(0, 20), (0, 20)])]).curves
    assert POINTS[[0, 1, 100, 200]].tolist() == [0, 0.005, 0.5, 1]
    assert curves.precision[0, [0, 79, 81, 120, 159, 161, 200]].tolist() == pytest.approx(
        [0.5, 0.5, 0.5 + 0.5 / 80, 0.75, 1 - 0.5 / 80, 1, 1]
    )
    assert curves.recall[0, [0, 80, 120, 159, 161, 200]].tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0]
    # Precision 1 up to a recall of 1/2, then the line down to 0 from the share of right ones, 1/2.
    assert curves.envelope[0, [0, 50, 99]].tolist() == [1, 1, 1]
    assert curves.envelope[0, [100, 150, 200]].tolist() == pytest.approx([0.5, 0.25, 0])


def test_curves_without_detections_or_labels() -> None:
    found = score_classes([record(0, [], [(0, 20)])]).curves
    assert [curve.tolist() for curve in found] == [[[0.0] * 201]] * 3
    assert [curve.shape for curve in score_classes([record(0, [miss(0.9)])]).curves] == [(0, 201)] * 3


@pytest.mark.parametrize(("seed", "classes"), [(0, 1), (1, 2), (3, 3), (4, 8)])
def test_the_area_of_the_envelope_is_the_average_precision(seed: int, classes: int) -> None:
    scores = score_classes(matched_records(seed, classes))
    assert 0.1 < scores.ap[:, 0].mean() < 0.9
    area = np.trapezoid(scores.curves.envelope, POINTS, axis=1)
    np.testing.assert_allclose(area, scores.ap[:, 0], rtol=0, atol=0.01)
    # At every second recall it is what the AP was made of.
    assert np.array_equal(np.trapezoid(scores.curves.envelope[:, ::2], RECALLS, axis=1), scores.ap[:, 0])


@pytest.mark.parametrize("seed", range(4))
def test_curves_at_the_confidence_of_a_detection_count_what_is_above(seed: int) -> None:
    """Where each has one of its own, which is among the points."""
    rng = np.random.default_rng(seed)
    places = rng.permutation(200)[:30]
    confidences = POINTS[places]
    right = rng.random(30) < 0.6
    found = [hit(c) if good else miss(c) for c, good in zip(confidences, right, strict=True)]
    curves = score_classes([record(0, sorted(found, key=lambda row: -row[0]), [(0, 20)] * 40)]).curves
    for place in places:
        above = places >= place
        assert curves.recall[0, place] == pytest.approx(right[above].sum() / 40)
        assert curves.precision[0, place] == pytest.approx(right[above].mean())


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


# Against a plain way


def plain_ap(right: list[bool], count: int) -> float:
    """Precision over recall after each detection, its falling envelope, read at 101 points; 0 without detections."""
    if not right:
        return 0.0
    hits = np.cumsum(right)
    recall, precision = hits / count, hits / np.arange(1, len(right) + 1)
    at, values = np.array([0, *recall, 1]), np.array([1, *precision, 0])
    envelope = [values[k:].max() for k in range(len(values))]
    points = np.linspace(0, 1, 101)
    return float(np.trapezoid(np.interp(points, at, envelope), points))


def plain_scores(records: list[ImageRecord], low: float, high: float) -> list[list[float]]:
    """AP of each class with labels in [low, high) at each threshold, going through all detections."""
    rows = [
        (-values[3], record.image, k, *values)
        for record in records
        for k, values in enumerate(zip(*(column.tolist() for column in record[1:7]), strict=True))
    ]
    labels = [pair for r in records for pair in zip(r.true_label, r.true_side, strict=True) if low <= pair[1] < high]
    scores = []
    for number in sorted({label for label, _ in labels}):
        scores.append([])
        for threshold in IOU_THRESHOLDS:
            right = []
            for *_, overlap, beaten, partner, _, label, side in sorted(rows):
                correct = beaten < threshold <= overlap
                if label == number and low <= (partner if correct else side) < high:
                    right.append(correct)
            scores[-1].append(plain_ap(right, sum(label == number for label, _ in labels)))
    return scores


def matched_records(seed: int, classes: int, images: int = 12) -> list[ImageRecord]:
    """Images as they come from matching: a label is found once at most; few distinct confidences."""
    rng = np.random.default_rng(seed)
    records = []
    for image in rng.permutation(images):
        labels = [(rng.integers(classes), rng.choice([10, 16, 31.5, 32, 70, 96, 120])) for _ in range(rng.integers(5))]
        found = []
        for label, side in labels:
            highest = 0.0
            for confidence in -np.sort(-rng.integers(1, 9, rng.integers(4)) / 10):
                overlap = rng.choice([0.4, 0.5, IOU_THRESHOLDS[3], 0.72, 0.95, 1])
                found.append((confidence, label, overlap, highest, side * rng.choice([0.9, 1, 1.1]), side))
                highest = max(highest, overlap)
        found += [miss(rng.integers(1, 9) / 10, rng.integers(classes + 1), rng.uniform(5, 120)) for _ in range(3)]
        records.append(record(image, sorted(found, key=lambda row: -row[0]), labels))
    return records


@pytest.mark.parametrize(("seed", "classes"), [(0, 1), (1, 2), (2, 3), (3, 3), (4, 8)])
def test_average_precision_as_plainly(seed: int, classes: int) -> None:
    records = matched_records(seed, classes)
    np.testing.assert_allclose(score_classes(records).ap, plain_scores(records, 0, float("inf")), rtol=0, atol=1e-12)
    sizes = {size.low: (size.ap50, size.ap) for size in score_sizes(records)}
    for low, high in pairwise(SIZE_EDGES):
        expected = np.array(plain_scores(records, low, high))
        assert (low in sizes) == bool(len(expected))
        if low in sizes:
            np.testing.assert_allclose(sizes[low], (expected[:, 0].mean(), expected.mean()), rtol=0, atol=1e-12)


def test_images_are_counted_as_plainly() -> None:
    records = matched_records(0, 4)
    scores = score_classes(records)
    seen = [sum(number in record.true_label for record in records) for number in scores.classes]
    assert scores.images.tolist() == seen
