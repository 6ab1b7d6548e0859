"""Precision, recall and average precision, by hand and against plain implementations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from models.tasks import metrics as module
from models.tasks.metrics import (
    AP_RECALLS,
    CONFIDENT_THRESHOLD,
    CURVE_POINTS,
    DETECTION_METRICS,
    SIZE_EDGES_PIXELS,
    ClassScores,
    ImageRecord,
    SizeScores,
    confusion_matrix,
    join,
)
from models.tasks.predictions import IOU_THRESHOLDS

PERFECT = 0.995  # of 100 intervals between 101 points the last one counts half, because precision ends at 0


def record(
    image: int = 0, detections: Sequence[tuple[float, ...]] = (), labels: Sequence[tuple[float, float]] = ()
) -> ImageRecord:
    """detections: confidence, class, overlap, beaten, side, side of the label. labels: class, side."""
    confidence, label, overlap, beaten, side, partner = np.array(detections, float).reshape(-1, 6).T
    true_label, true_side = np.array(labels, float).reshape(-1, 2).T
    return ImageRecord(image, overlap, beaten, partner, confidence, label, side, true_label, true_side)


def hit(confidence: float, label: int = 0, overlap: float = 1.0, side: float = 20, partner: float = 20) -> tuple:
    return confidence, label, overlap, 0.0, side, partner


def miss(confidence: float, label: int = 0, side: float = 20) -> tuple:
    return confidence, label, 0.0, 0.0, side, 0.0


def score_classes(records: list[ImageRecord]) -> ClassScores:
    return module.score_classes(join(records))


def score_sizes(records: list[ImageRecord]) -> list[SizeScores]:
    return module.score_sizes(join(records))


# The confusion matrix


def test_confusion_by_hand() -> None:
    """Two labels of class 0 and one of 1; a hit, a detection of class 2 for 1, a false one, a weak one."""
    image = record(3, [hit(0.9), miss(0.8, 2), miss(0.7, 2), miss(CONFIDENT_THRESHOLD, 1)], [(0, 20), (1, 20), (0, 20)])
    image = image._replace(paired=np.array([[0, 0], [1, 2]], np.int32))
    expected = [[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert confusion_matrix([image], 3).tolist() == expected
    twice = confusion_matrix([record(1), image, image], 3)
    assert twice.tolist() == (2 * np.array(expected)).tolist()
    assert twice.dtype == np.int64


# Average precision


def test_average_precision_by_hand() -> None:
    """Hit, miss, hit of 2 labels: recall 1/2, 1/2, 1 and precision 1, 1/2, 2/3; the envelope is 1, then 2/3.

    By 101 points: 1 at 0 ... 0.49, 2/3 at 0.5 ... 0.99, 0 at 1.
    """
    scores = score_classes([record(0, [hit(0.9), miss(0.8), hit(0.7)], [(0, 20), (0, 20)])])
    points = [1] * 50 + [2 / 3] * 50 + [0]
    area = sum((a + b) / 2 for a, b in pairwise(points)) / 100
    assert scores.ap.tolist() == [[pytest.approx(area, abs=1e-9)] * 10]
    assert area == pytest.approx(0.5 + 0.5 * 2 / 3, abs=0.006)


def test_perfect_detections() -> None:
    records = [record(k, [hit(0.9, k % 2), hit(0.8, 1)], [(k % 2, 20), (1, 20)]) for k in range(6)]
    scores = score_classes(records)
    np.testing.assert_allclose(scores.ap, PERFECT)
    assert scores.means() == pytest.approx(dict(zip(DETECTION_METRICS, (1, 1, PERFECT, PERFECT), strict=True)))


def test_no_labels() -> None:
    records = [record(0, [miss(0.9)]), record(1)]
    scores = score_classes(records)
    assert scores.classes.tolist() == []
    assert scores.means() == dict.fromkeys(DETECTION_METRICS, 0)
    assert score_sizes(records) == []


def test_images_and_instances_are_counted() -> None:
    scores = score_classes(
        [record(0, [], [(0, 20), (0, 30), (3, 20)]), record(1, [], [(0, 20)]), record(2), record(5, [], [(3, 9)])]
    )
    assert scores.classes.tolist() == [0, 3]
    assert scores.images.tolist() == [2, 2]
    assert scores.instances.tolist() == [3, 2]


def test_precision_and_recall_are_read_where_the_smoothed_f1_is_highest() -> None:
    """One label, a hit at 0.8 and a miss at 0.2; precision falls linearly from 1 to 1/2 between them.

    The mean over a tenth of the confidences is highest where its window ends at 0.8, so at 0.75.
    """
    scores = score_classes([record(0, [hit(0.8), miss(0.2)], [(0, 20)])])
    assert scores.recall[0] == pytest.approx(1)
    assert scores.precision[0] == pytest.approx(1 - 0.5 * 0.05 / 0.6, abs=2e-3)


def test_all_classes_are_read_at_one_confidence() -> None:
    """Hits of class 0 at 0.9 and of class 1 at 0.3: the mean F1 is best up to 0.3."""
    scores = score_classes([record(0, [hit(0.9), hit(0.3, label=1), miss(0.5)], [(0, 20), (1, 20)])])
    assert scores.recall.tolist() == pytest.approx([1, 1])
    assert scores.precision.tolist() == pytest.approx([0.5, 1], abs=1e-6)


# Curves


def test_curves_by_hand() -> None:
    """Two labels, a hit at 0.8 and a miss at 0.4; precision falls linearly from 1 to 1/2 between them."""
    curves = score_classes([record(0, [hit(0.8), miss(0.4)], [(0, 20), (0, 20)])]).curves
    assert CURVE_POINTS[[0, 1, 100, 200]].tolist() == [0, 0.005, 0.5, 1]
    assert curves.precision[0, [0, 79, 81, 120, 159, 161, 200]].tolist() == pytest.approx(
        [0.5, 0.5, 0.5 + 0.5 / 80, 0.75, 1 - 0.5 / 80, 1, 1]
    )
    assert curves.recall[0, [0, 80, 120, 159, 161, 200]].tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0]
    # Precision 1 up to a recall of 1/2, then the line down to 0 from the share of right ones, 1/2.
    assert curves.envelope[0, [0, 50, 99]].tolist() == [1, 1, 1]
    assert curves.envelope[0, [100, 150, 200]].tolist() == pytest.approx([0.5, 0.25, 0])


def test_curves_without_detections_or_labels() -> None:
    curves = score_classes([record(0, [], [(0, 20)])]).curves
    assert [curve.tolist() for curve in curves] == [[[0.0] * 201]] * 3
    assert [curve.shape for curve in score_classes([record(0, [miss(0.9)])]).curves] == [(0, 201)] * 3


@pytest.mark.parametrize(("seed", "classes"), [(0, 1), (1, 2), (3, 3), (4, 8)])
def test_the_area_of_the_envelope_is_the_average_precision(seed: int, classes: int) -> None:
    scores = score_classes(matched_records(seed, classes))
    assert 0.1 < scores.ap[:, 0].mean() < 0.9
    area = np.trapezoid(scores.curves.envelope, CURVE_POINTS, axis=1)
    np.testing.assert_allclose(area, scores.ap[:, 0], rtol=0, atol=0.01)
    # At every second recall it is what the AP was made of.
    assert np.array_equal(np.trapezoid(scores.curves.envelope[:, ::2], AP_RECALLS, axis=1), scores.ap[:, 0])


@pytest.mark.parametrize("seed", range(4))
def test_curves_at_the_confidence_of_a_detection_count_what_is_above(seed: int) -> None:
    """Each has a different confidence, which is among the points."""
    rng = np.random.default_rng(seed)
    points = rng.permutation(200)[:30]
    confidences = CURVE_POINTS[points]
    right = rng.random(30) < 0.6
    detections = [hit(c) if good else miss(c) for c, good in zip(confidences, right, strict=True)]
    curves = score_classes([record(0, sorted(detections, key=lambda row: -row[0]), [(0, 20)] * 40)]).curves
    for point in points:
        above = points >= point
        assert curves.recall[0, point] == pytest.approx(right[above].sum() / 40)
        assert curves.precision[0, point] == pytest.approx(right[above].mean())


def random_records(count: int, seed: int) -> list[ImageRecord]:
    """Images with detections of few distinct confidences, so that many are equal."""
    rng = np.random.default_rng(seed)
    records = []
    for image in range(count):
        detections = [
            (rng.integers(1, 9) / 10, rng.integers(3), rng.random(), rng.random() / 2, rng.uniform(4, 120), 20.0)
            for _ in range(rng.integers(6))
        ]
        detections.sort(key=lambda row: -row[0])
        records.append(
            record(image, detections, [(rng.integers(3), rng.uniform(4, 120)) for _ in range(rng.integers(5))])
        )
    return records


def equal(a: ClassScores, b: ClassScores) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_order_of_the_records_does_not_matter() -> None:
    records = random_records(40, seed=0)
    scores, sizes = score_classes(records), score_sizes(records)
    assert 0 < scores.means()["mAP_0.5"] < 0.9
    assert len(sizes) == 5
    for seed in range(3):
        random.Random(seed).shuffle(records)
        assert equal(score_classes(records), scores)
        assert score_sizes(records) == sizes


# Object sizes


def test_a_label_of_another_size_has_no_influence() -> None:
    small = record(0, [hit(0.9, side=10, partner=10)], [(0, 10)])
    large = record(1, [], [(0, 50)])  # not detected
    wrong = record(2, [miss(0.99, side=50)])  # and a detection of nothing
    alone = score_sizes([small])
    both = score_sizes([small, large, wrong])
    assert [(s.low, s.high, s.instances) for s in both] == [(0, 16, 1), (32, 64, 1)]
    assert both[0] == alone[0]
    assert (both[0].ap50, both[0].ap) == pytest.approx((PERFECT, PERFECT))
    assert (both[1].ap50, both[1].ap) == (0, 0)


def test_a_correct_detection_counts_in_the_size_of_its_label() -> None:
    """A detection of 28 pixels of a label of 40: correct at 0.5 for the label's size, false for no other size."""
    records = [
        record(0, [hit(0.9, overlap=0.52, side=28, partner=40)], [(0, 40)]),
        record(1, [hit(0.5, side=20, partner=20)], [(0, 20)]),
    ]
    of_label, of_box = score_sizes(records)[1], score_sizes(records)[0]
    assert (of_label.low, of_label.ap50) == (32, pytest.approx(PERFECT))
    assert (of_box.low, of_box.ap50) == (16, pytest.approx(PERFECT))
    # From 0.55 on it is a false detection of its own size, above the only correct one there.
    assert of_box.ap == pytest.approx(PERFECT * (1 + 9 / 2) / 10)
    assert of_label.ap == pytest.approx(PERFECT / 10)


# Against plain implementations


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
    """Return records as from matching: at most one hit per label, few distinct confidences."""
    rng = np.random.default_rng(seed)
    records = []
    for image in rng.permutation(images):
        labels = [(rng.integers(classes), rng.choice([10, 16, 31.5, 32, 70, 96, 120])) for _ in range(rng.integers(5))]
        detections = []
        for label, side in labels:
            highest = 0.0
            for confidence in -np.sort(-rng.integers(1, 9, rng.integers(4)) / 10):
                overlap = rng.choice([0.4, 0.5, IOU_THRESHOLDS[3], 0.72, 0.95, 1])
                detections.append((confidence, label, overlap, highest, side * rng.choice([0.9, 1, 1.1]), side))
                highest = max(highest, overlap)
        detections += [miss(rng.integers(1, 9) / 10, rng.integers(classes + 1), rng.uniform(5, 120)) for _ in range(3)]
        records.append(record(image, sorted(detections, key=lambda row: -row[0]), labels))
    return records


@pytest.mark.parametrize(("seed", "classes"), [(0, 1), (1, 2), (2, 3), (3, 3), (4, 8)])
def test_average_precision_as_the_plain_implementation(seed: int, classes: int) -> None:
    records = matched_records(seed, classes)
    np.testing.assert_allclose(score_classes(records).ap, plain_scores(records, 0, float("inf")), rtol=0, atol=1e-12)
    sizes = {size.low: (size.ap50, size.ap) for size in score_sizes(records)}
    for low, high in pairwise(SIZE_EDGES_PIXELS):
        expected = np.array(plain_scores(records, low, high))
        assert (low in sizes) == bool(len(expected))
        if low in sizes:
            np.testing.assert_allclose(sizes[low], (expected[:, 0].mean(), expected.mean()), rtol=0, atol=1e-12)


def test_images_are_counted_as_the_plain_implementation() -> None:
    records = matched_records(0, 4)
    scores = score_classes(records)
    seen = [sum(number in record.true_label for record in records) for number in scores.classes]
    assert scores.images.tolist() == seen
