"""A detector's metrics: records, scores, the summary, its documents and examples, by hand and against plain code."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from models.tasks.contract import Thresholds
from models.tasks.metrics import (
    AP_RECALLS,
    CURVE_POINTS,
    DETECTION_METRICS,
    DetectionMetrics,
    ImageRecord,
    drawn_image,
    image_records,
    score_classes,
)
from models.tasks.predictions import IOU_THRESHOLDS
from tests.making import CLASS_NAMES, grey_batch, image_info
from tests.models.tasks.batches import DISC, IMAGE, LIGHT, box, drawn_images, labels, predictions, random_images
from utils.batch import ImageInfo
from utils.console import TERMINAL, table
from utils.summary import Box, Summary

METRICS = DetectionMetrics(CLASS_NAMES)
PERFECT = 0.995  # of 100 intervals between 101 points the last one counts half, because precision ends at 0


def records_of(metrics: DetectionMetrics, boxes: Sequence[Tensor], *infos: ImageInfo) -> list[ImageRecord]:
    return metrics.update(predictions(boxes, infos, metrics.names), grey_batch(*infos))


def summary_of(metrics: DetectionMetrics, boxes: Sequence[Tensor], *infos: ImageInfo) -> Summary:
    return metrics.summarise(records_of(metrics, boxes, *infos))


# Records


@pytest.mark.parametrize("seed", range(4))
def test_the_record_of_an_image_does_not_depend_on_the_others_and_is_compact(seed: int) -> None:
    boxes, infos = random_images(seed)
    together = image_records(boxes, infos)
    for rows, info, record in zip(boxes, infos, together, strict=True):
        (alone,) = image_records([rows], [info])
        assert all(np.array_equal(*pair) for pair in zip(alone, record, strict=True))
    many = [image_info(k, IMAGE, rows=labels((0, 0.5, 0.5, 0.2, 0.2))) for k in range(4)]
    assert len(pickle.dumps(image_records([torch.rand(300, 6).double()] * 4, many)[0])) < 300 * 50


# Scores by class


def record(image: int = 0, detections: Sequence[tuple[float, ...]] = (), true: Sequence[float] = ()) -> ImageRecord:
    """detections: confidence, class, overlap, rival's overlap. true: classes of the labels."""
    confidence, label, overlap, rival_overlap = np.array(detections, float).reshape(-1, 4).T
    return ImageRecord(image, confidence, label, np.array(true, float), overlap, rival_overlap)


def hit(confidence: float, label: int = 0) -> tuple[float, ...]:
    return confidence, label, 1.0, 0.0


def miss(confidence: float, label: int = 0) -> tuple[float, ...]:
    return confidence, label, 0.0, 0.0


def test_classes_images_and_instances() -> None:
    exact = score_classes([record(k, [hit(0.9, k % 2), hit(0.8, 1)], [k % 2, 1]) for k in range(6)])
    assert exact.means() == pytest.approx(dict(zip(DETECTION_METRICS, (1, 1, PERFECT, PERFECT), strict=True)))
    counted = score_classes([record(0, [], [0, 0, 3]), record(1, [], [0]), record(2), record(5, [], [3])])
    assert [values.tolist() for values in (counted.classes, counted.images, counted.instances)] == [
        *([0, 3], [2, 2], [3, 2])
    ]
    nothing = score_classes([record(0, [miss(0.9)]), record(1)])
    assert (nothing.classes.tolist(), nothing.means()) == ([], dict.fromkeys(DETECTION_METRICS, 0))


def test_precision_and_recall_are_read_where_the_smoothed_f1_is_highest() -> None:
    """One label, a hit at 0.8 and a miss at 0.2; precision falls linearly from 1 to 1/2 between them.

    The mean over a tenth of the confidences is highest where its window ends at 0.8, so at 0.75.
    """
    scores = score_classes([record(0, [hit(0.8), miss(0.2)], [0])])
    assert scores.recall[0] == pytest.approx(1)
    assert scores.precision[0] == pytest.approx(1 - 0.5 * 0.05 / 0.6, abs=2e-3)
    # Hits of class 0 at 0.9 and of class 1 at 0.3: the mean F1 is best up to 0.3, for all classes.
    scores = score_classes([record(0, [hit(0.9), hit(0.3, 1), miss(0.5)], [0, 1])])
    assert scores.recall.tolist() == pytest.approx([1, 1])
    assert scores.precision.tolist() == pytest.approx([0.5, 1], abs=1e-6)


def test_curves_by_hand() -> None:
    """Two labels, a hit at 0.8 and a miss at 0.4; precision falls linearly from 1 to 1/2 between them."""
    curves = score_classes([record(0, [hit(0.8), miss(0.4)], [0, 0])]).curves
    assert CURVE_POINTS[[0, 1, 100, 200]].tolist() == [0, 0.005, 0.5, 1]
    assert curves.precision[0, [0, 79, 81, 120, 159, 161, 200]].tolist() == pytest.approx(
        [0.5, 0.5, 0.5 + 0.5 / 80, 0.75, 1 - 0.5 / 80, 1, 1]
    )
    assert curves.recall[0, [0, 80, 120, 159, 161, 200]].tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0]
    # Precision 1 up to a recall of 1/2, then the line down to 0 from the share of right ones, 1/2.
    assert curves.envelope[0, [0, 50, 99]].tolist() == [1, 1, 1]
    assert curves.envelope[0, [100, 150, 200]].tolist() == pytest.approx([0.5, 0.25, 0])
    curves = score_classes([record(0, [], [0])]).curves
    assert [curve.tolist() for curve in curves] == [[[0.0] * 201]] * 3


def plain_ap(right: list[bool], count: int) -> float:
    """Precision over recall after each detection, its falling envelope, read at 101 points; 0 without detections."""
    if not right:
        return 0.0
    hits = np.cumsum(right)
    recall, precision = hits / count, hits / np.arange(1, len(right) + 1)
    at, values = np.array([0, *recall, 1]), np.array([1, *precision, 0])
    envelope = [values[k:].max() for k in range(len(values))]
    return float(np.trapezoid(np.interp(AP_RECALLS, at, envelope), AP_RECALLS))


def plain_scores(records: list[ImageRecord]) -> list[list[float]]:
    """AP of each class with labels at each threshold, going through all detections."""
    rows = []
    for one in records:
        columns = (one.confidence, one.label, one.overlap, one.rival_overlap)
        for k, (confidence, *row) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            rows.append((-confidence, one.image, k, *row))
    true = [label for one in records for label in one.true_label]
    return [
        [
            plain_ap([rival < t <= overlap for *_, label, overlap, rival in sorted(rows) if label == k], true.count(k))
            for t in IOU_THRESHOLDS
        ]
        for k in sorted(set(true))
    ]


def matched_records(seed: int, classes: int, images: int = 12) -> list[ImageRecord]:
    """Return records as from matching: at most one hit per label, few distinct confidences."""
    rng = np.random.default_rng(seed)
    records = []
    for image in rng.permutation(images):
        true, detections = rng.integers(classes, size=rng.integers(5)), []
        for label in true:
            highest = 0.0
            for confidence in -np.sort(-rng.integers(1, 9, rng.integers(4)) / 10):
                overlap = rng.choice([0.4, 0.5, IOU_THRESHOLDS[3], 0.72, 0.95, 1])
                detections.append((confidence, label, overlap, highest))
                highest = max(highest, overlap)
        detections += [miss(rng.integers(1, 9) / 10, rng.integers(classes + 1)) for _ in range(3)]
        records.append(record(image, sorted(detections, key=lambda row: -row[0]), true))
    return records


@pytest.mark.parametrize(("seed", "classes"), [(0, 1), (1, 2), (2, 3), (4, 8)])
def test_scores_as_the_plain_implementation(seed: int, classes: int) -> None:
    """In any order of the records. The area under an envelope is the average precision."""
    records = matched_records(seed, classes)
    scores = score_classes(records)
    np.testing.assert_allclose(scores.ap, plain_scores(records), rtol=0, atol=1e-12)
    images = [sum(number in one.true_label for one in records) for number in scores.classes]
    assert scores.images.tolist() == images
    random.Random(seed).shuffle(records)
    for one, other in zip(vars(scores).values(), vars(score_classes(records)).values(), strict=True):
        assert np.array_equal(one, other)
    envelope = scores.curves.envelope
    np.testing.assert_allclose(np.trapezoid(envelope, CURVE_POINTS, axis=1), scores.ap[:, 0], rtol=0, atol=0.01)
    assert np.array_equal(np.trapezoid(envelope[:, ::2], AP_RECALLS, axis=1), scores.ap[:, 0])


# The summary


def three_images() -> list[ImageRecord]:
    """A disc and two lights, all detected up to an IoU of 0.7, and an empty image."""
    infos = (
        image_info(0, IMAGE, rows=labels((0, 0.5, 0.5, 0.2, 0.2), (1, 0.3, 0.3, 0.4, 0.4))),
        image_info(1, IMAGE, rows=labels((1, 0.3, 0.3, 0.4, 0.4))),
        image_info(2, IMAGE),
    )
    boxes = [
        torch.tensor([[40, 40, 60, 60, 0.9, 0], [10, 10, 50, 50, 0.8, 1.0]]),
        torch.tensor([[10, 10, 50, 50, 0.9, 1.0]]),
        torch.zeros(0, 6),
    ]
    records = records_of(METRICS, boxes, *infos)
    return [record._replace(overlap=np.minimum(record.overlap, 0.72)) for record in records]


def test_a_summary_by_hand() -> None:
    """Columns: images, instances, P, R, mAP50, mAP50-95. Average precision by 101 points reaches 0.995 at most."""
    summary = METRICS.summarise(three_images())
    assert tuple(summary.metrics) == DETECTION_METRICS == ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
    assert list(summary.metrics.values()) == pytest.approx([1, 1, 0.995, 0.4975], abs=1e-6)
    assert (summary.fitness, summary.highest_fitness) == (pytest.approx(0.1 * 0.995 + 0.9 * 0.4975), 1)
    assert list(summary.headline.values()) == pytest.approx([0.995, 0.4975], abs=1e-6)
    lines = summary.table()
    assert [line.split() for line in lines] == [
        ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"],
        ["all", "3", "3", "1.000", "1.000", "0.995", "0.497"],
        ["disc", "1", "1", "1.000", "1.000", "0.995", "0.497"],
        ["traffic", "light", "2", "2", "1.000", "1.000", "0.995", "0.497"],
    ]
    (width,) = set(map(len, lines))  # columns are aligned
    assert width <= TERMINAL[0]
    assert summary.table(brief=True) == table(summary.overall)
    assert summary.by_class == {
        "AP50": pytest.approx({"disc": 0.995, "traffic light": 0.995}),
        "AP": pytest.approx({"disc": 0.4975, "traffic light": 0.4975}),
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_summary_does_not_depend_on_the_processes_that_made_the_records(seed: int) -> None:
    """One process with one batch, or several with others."""
    metrics = DetectionMetrics(CLASS_NAMES, frozenset(range(0, 12, 2)))
    boxes, infos = random_images(seed)
    expected = summary_of(metrics, boxes, *infos)
    batches = [slice(start, start + 5) for start in range(0, 12, 5)]
    records = [record for part in batches for record in records_of(metrics, boxes[part], *infos[part])]
    random.Random(seed).shuffle(records)
    summary = metrics.summarise(records)
    assert summary.metrics == expected.metrics
    assert summary.table() == expected.table()
    assert metrics.documents(summary) == metrics.documents(expected)
    assert metrics.examples(summary) == metrics.examples(expected)


@pytest.mark.parametrize(("conf_thres", "warned"), [(0.001, False), (0.01, False), (0.02, True), (0.25, True)])
def test_a_confidence_threshold_that_changes_map_is_a_warning(
    conf_thres: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    METRICS.check_thresholds(Thresholds(conf_thres))
    assert (f"--conf-thres {conf_thres}" in capsys.readouterr().out) == warned


@pytest.mark.parametrize(
    ("rows", "boxes", "expected"),  # nonzero cells: true class, predicted class, count; 3 is background
    [
        ([DISC, LIGHT], [(10, 30, 0.9, 0), (50, 90, 0.8, 1)], [[0, 0, 1], [1, 1, 1]]),
        ([DISC, LIGHT], [(10, 30, 0.9, 2), (50, 90, 0.8, 1)], [[0, 2, 1], [1, 1, 1]]),
        # A second detection is background. The larger overlap is paired, also of another class and less confident.
        ([DISC], [(10, 30, 0.5, 0), (10, 29, 0.9, 0)], [[0, 0, 1], [3, 0, 1]]),
        ([DISC], [(10, 29, 0.9, 0), (10, 30, 0.3, 1)], [[0, 1, 1], [3, 0, 1]]),
        ([DISC, LIGHT], [], [[0, 3, 1], [1, 3, 1]]),
        ([], [(10, 30, 0.9, 2), (50, 90, 0.8, 2)], [[3, 2, 2]]),
        ([DISC], [(50, 90, 0.8, 0)], [[0, 3, 1], [3, 0, 1]]),  # elsewhere
        ([DISC], [(10, 24, 0.8, 0)], [[0, 0, 1]]),  # 14 x 14 of 20 x 20: 0.49
        ([DISC], [(10, 23, 0.8, 0)], [[0, 3, 1], [3, 0, 1]]),  # 13 x 13: 0.42
        ([], [], []),
        ([DISC], [(10, 30, 0.25, 0)], [[0, 3, 1]]),  # not confident
        ([DISC], [(10, 30, 0.2500001, 0)], [[0, 0, 1]]),
    ],
)
def test_confusion_by_hand(rows: list[tuple[float, ...]], boxes: list[tuple[float, ...]], expected: list) -> None:
    given = torch.tensor([box(*one) for one in boxes]).view(-1, 6)  # type: ignore[arg-type]
    summary = summary_of(METRICS, [given], image_info(0, IMAGE, rows=labels(*rows)))
    assert summary.evidence["confusion"] == expected


# Documents and examples


def test_documents() -> None:
    documents = METRICS.documents(METRICS.summarise(drawn_images()))
    assert set(documents) == {"classes.csv", "confusion_matrix.csv", "curves.csv", "PR_curve.csv", "val_boxes.csv"}
    assert documents["classes.csv"] == (
        "class,images,instances,precision,recall,AP50,AP50-95\n"
        "disc,1,1,1,1,0.995,0.995\n"
        "traffic light,1,1,0,0,0,0\n"
        "bar,0,0,,,,\n"
    )
    assert documents["confusion_matrix.csv"] == (
        "true \\ predicted,disc,traffic light,bar,background\n"
        "disc,1,0,0,0\n"
        "traffic light,0,0,0,1\n"
        "bar,0,0,0,0\n"
        "background,0,0,2,0\n"
    )
    assert documents["val_boxes.csv"] == (
        "image,kind,class,confidence,x1,y1,x2,y2\n"
        '"/data/a, ""b"".jpg",image,,,,,,\n'
        "/data/b.jpg,label,disc,,75,25,125,75\n"
        "/data/b.jpg,prediction,disc,0.5,75,25,125,75\n"
        "/data/b.jpg,prediction,bar,0.5,10,20,30,40\n"
        "/data/c.jpg,label,traffic light,,70,37.5,100,62.5\n"  # clipped
        "/data/c.jpg,prediction,bar,0.25,0,0,33.3333,50\n"
    )
    points = [f"{point:g}" for point in CURVE_POINTS]
    assert documents["curves.csv"].splitlines() == [
        "class,confidence,precision,recall",
        *(f"disc,{point},1,{int(float(point) <= 0.5)}" for point in points),
        *(f"traffic light,{point},0,0" for point in points),
    ]
    assert documents["PR_curve.csv"].splitlines() == [
        "class,recall,precision",
        *(f"disc,{point},{int(float(point) < 1)}" for point in points),
        *(f"traffic light,{point},0" for point in points),
    ]


def test_what_is_drawn_is_confident_and_in_falling_confidence() -> None:
    """A task whose records have outlines, such as four corners, gets them in val_boxes.csv and in its examples."""
    found = np.float32([(0, 0, 1, 1, 0.5, 0), (0, 0, 2, 2, 0.1, 0), (0, 0, 20, 40, 0.7, 2), (0, 0, 3, 3, 0.5, 1)])
    corners = np.float32([(20, 0), (30, 10), (20, 20), (10, 10)])
    outlines = [corners, corners, corners * 2, corners]
    outlined = drawn_image("/data/a.jpg", (40, 80), np.float32([(1, 10, 0, 30, 20)]), found, [corners], outlines)
    empty = drawn_image("/data/b.jpg", (9, 9), np.zeros((0, 5)), found[:0])
    nothing = np.zeros(0, np.float32)
    records = [ImageRecord(k, nothing, nothing, nothing, drawn=drawn) for k, drawn in enumerate((outlined, empty))]
    summary = METRICS.summarise(records)
    head, label, first, *others, last = METRICS.documents(summary)["val_boxes.csv"].splitlines()
    assert head == "image,kind,class,confidence,x1,y1,x2,y2,outline"
    assert label == "/data/a.jpg,label,traffic light,,10,0,30,20,20 0 30 10 20 20 10 10"
    assert first == "/data/a.jpg,prediction,bar,0.7,0,0,20,40,40 0 60 20 40 40 20 20"
    assert [row.split(",")[2] for row in others] == ["disc", "traffic light"]
    assert last == "/data/b.jpg,image,,,,,,,"
    example, _ = METRICS.examples(summary)
    assert example.labels == [Box(1, None, (0.25, 0, 0.75, 0.25), (0.5, 0, 0.75, 0.125, 0.5, 0.25, 0.25, 0.125))]
    assert example.predictions[0].outline == (1, 0, 1.5, 0.25, 1, 0.5, 0.5, 0.25)


def test_evidence_survives_a_state_file() -> None:
    """Saved as tensors and plain values; a path may contain any bytes."""
    with torch.inference_mode():
        records = [
            one._replace(drawn={**one.drawn, "path": "/data/\udcff.jpg"}) if one.drawn else one
            for one in drawn_images()
        ]
        summary = METRICS.summarise(records)
    file = io.BytesIO()
    torch.save(asdict(summary), file)
    file.seek(0)
    loaded = Summary(**torch.load(file, weights_only=True))
    assert METRICS.documents(loaded) == METRICS.documents(summary)
    assert METRICS.examples(loaded) == METRICS.examples(summary)
    assert loaded.by_class == summary.by_class
    assert "/data/\udcff.jpg,label" in METRICS.documents(loaded)["val_boxes.csv"]
