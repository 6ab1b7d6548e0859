"""The summary, documents and examples of a validation, with numbers worked out by hand."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from models.tasks.contract import Thresholds
from models.tasks.metrics import CURVE_POINTS, DETECTION_METRICS, DetectionMetrics, ImageRecord, shown_image, unmatched
from tests.making import CLASS_NAMES, grey_batch, image_info
from tests.models.tasks.batches import DISC, IMAGE, LIGHT, box, labels, predictions, random_images, shown_images
from utils.batch import ImageInfo
from utils.console import LEAST_COLUMNS, table
from utils.summary import Box, Example, Summary

METRICS = DetectionMetrics(CLASS_NAMES)


def records_of(metrics: DetectionMetrics, boxes: Sequence[Tensor], *infos: ImageInfo) -> list[ImageRecord]:
    return metrics.update(predictions(boxes, infos, metrics.names), grey_batch(*infos))


def summary_of(metrics: DetectionMetrics, boxes: Sequence[Tensor], *infos: ImageInfo) -> Summary:
    return metrics.summarise(records_of(metrics, boxes, *infos))


def three_images() -> list[ImageRecord]:
    """A disc of 20 pixels and two lights of 40, all detected exactly, and an empty image."""
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
    return records_of(METRICS, boxes, *infos)


def test_table_by_class_and_size() -> None:
    """Columns: images, instances, P, R, mAP50, mAP50-95. Average precision by 101 points reaches 0.995 at most."""
    summary = METRICS.summarise(three_images())
    head, overall, *details = summary.table()
    assert [head.split(), overall.split()] == [
        ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"],
        ["all", "3", "3", "1.0000", "1.0000", "0.9950", "0.9950"],
    ]
    assert summary.table(brief=True) == table([row for row in summary.overall if not isinstance(row, str)])
    title = details.pop(2)
    assert title == "  by size, the square root of an object's area in pixels of the image's file:"
    assert [line.split() for line in details] == [
        ["disc", "1", "1", "1.0000", "1.0000", "0.9950", "0.9950"],
        ["traffic", "light", "2", "2", "1.0000", "1.0000", "0.9950", "0.9950"],
        ["16-32", "px", "3", "1", "-", "-", "0.9950", "0.9950"],
        ["32-64", "px", "3", "2", "-", "-", "0.9950", "0.9950"],
    ]
    (width,) = {len(line) for line in [head, overall, *details]}  # columns are aligned
    assert max(width, len(title)) <= LEAST_COLUMNS


def up_to_070(records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Records of detections that are correct up to an IoU of 0.7."""
    return [record._replace(overlap=np.minimum(record.overlap, 0.72)) for record in records]


def test_metrics_and_fitness() -> None:
    summary = METRICS.summarise(up_to_070(three_images()))
    assert tuple(summary.metrics) == DETECTION_METRICS == ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
    assert list(summary.metrics.values()) == pytest.approx([1, 1, 0.995, 0.4975], abs=1e-6)
    assert summary.fitness == pytest.approx(0.1 * 0.995 + 0.9 * 0.4975)


def test_scores_by_class() -> None:
    """Of the classes that have labels."""
    by_class = METRICS.summarise(up_to_070(shown_images())).by_class
    assert list(by_class) == ["AP50", "AP"]
    assert by_class["AP50"] == pytest.approx({"disc": 0.995, "traffic light": 0})
    assert by_class["AP"] == pytest.approx({"disc": 0.4975, "traffic light": 0})


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
    assert (summary.metrics, summary.table(), summary.by_class) == (
        *(expected.metrics, expected.table()),
        expected.by_class,
    )
    for name in ("classes", "confusion", "shown"):
        assert summary.evidence[name] == expected.evidence[name] != []
    for name, curve in expected.evidence["curves"].items():
        assert torch.equal(summary.evidence["curves"][name], curve)
    assert metrics.documents(summary) == metrics.documents(expected)
    assert metrics.examples(summary) == metrics.examples(expected)


# The confusion matrix


def confusion(rows: list[tuple[float, ...]], *boxes: list[float]) -> list[list[int]]:
    """Return the nonzero cells of the confusion matrix of one image: true class, predicted class, count.

    3 is background.
    """
    summary = summary_of(METRICS, [torch.tensor(boxes).view(-1, 6)], image_info(0, IMAGE, rows=labels(*rows)))
    cells: list[list[int]] = summary.evidence["confusion"]
    return cells


def test_confusion_counts_true_and_predicted_classes() -> None:
    assert confusion([DISC, LIGHT], box(10, 30, 0.9, 0), box(50, 90, 0.8, 1)) == [[0, 0, 1], [1, 1, 1]]
    assert confusion([DISC, LIGHT], box(10, 30, 0.9, 2), box(50, 90, 0.8, 1)) == [[0, 2, 1], [1, 1, 1]]


def test_a_second_detection_of_a_label_is_background() -> None:
    assert confusion([DISC], box(10, 30, 0.5, 0), box(10, 29, 0.9, 0)) == [[0, 0, 1], [3, 0, 1]]
    # The larger overlap is paired, even if it is of another class and less confident.
    assert confusion([DISC], box(10, 29, 0.9, 0), box(10, 30, 0.3, 1)) == [[0, 1, 1], [3, 0, 1]]


def test_misses_and_false_detections() -> None:
    assert confusion([DISC, LIGHT]) == [[0, 3, 1], [1, 3, 1]]
    assert confusion([], box(10, 30, 0.9, 2), box(50, 90, 0.8, 2)) == [[3, 2, 2]]
    assert confusion([DISC], box(50, 90, 0.8, 0)) == [[0, 3, 1], [3, 0, 1]]  # elsewhere
    assert confusion([DISC], box(10, 24, 0.8, 0)) == [[0, 0, 1]]  # 14 x 14 of 20 x 20: 0.49
    assert confusion([DISC], box(10, 23, 0.8, 0)) == [[0, 3, 1], [3, 0, 1]]  # 13 x 13: 0.42
    assert confusion([]) == []


def test_confusion_counts_confident_detections() -> None:
    assert confusion([DISC], box(10, 30, 0.25, 0)) == [[0, 3, 1]]
    assert confusion([DISC], box(10, 30, 0.2500001, 0)) == [[0, 0, 1]]


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_confusion_adds_up_to_labels_and_detections(seed: int) -> None:
    boxes, infos = random_images(seed)
    matrix = np.zeros((4, 4), int)
    for true, predicted, count in summary_of(METRICS, boxes, *infos).evidence["confusion"]:
        matrix[true, predicted] = count
    truth = np.concatenate([info.rows[:, 0] for info in infos]).astype(int)
    confident = np.concatenate([image[image[:, 4] > 0.25, 5] for image in boxes]).astype(int)
    assert matrix[:3].sum(1).tolist() == np.bincount(truth, minlength=3).tolist()
    assert matrix[:, :3].sum(0).tolist() == np.bincount(confident, minlength=3).tolist()
    assert 0 < matrix[:3, :3].sum() < min(len(truth), len(confident))


# Documents, examples, and the evidence that they are made of


def test_documents() -> None:
    documents = METRICS.documents(METRICS.summarise(shown_images()))
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


def test_documents_without_any_label() -> None:
    boxes = [torch.tensor([box(10, 30, 0.9, 1)]), torch.zeros(0, 6)]
    documents = METRICS.documents(summary_of(METRICS, boxes, image_info(0, IMAGE), image_info(1, IMAGE)))
    assert documents["classes.csv"].splitlines()[1:] == ["disc,0,0,,,,", "traffic light,0,0,,,,", "bar,0,0,,,,"]
    assert documents["confusion_matrix.csv"].splitlines()[-1] == "background,0,1,0,0"
    assert [len(documents[name].splitlines()) for name in ("curves.csv", "PR_curve.csv", "val_boxes.csv")] == [1, 1, 1]


def test_a_summary_of_an_older_version_without_evidence() -> None:
    summary = Summary({}, 0.0, [], [])
    assert METRICS.documents(summary) == {}
    assert METRICS.examples(summary) == []


def test_examples() -> None:
    empty, detected, missed = METRICS.examples(METRICS.summarise(shown_images()))
    assert empty == Example('a, "b".jpg', 2, (64, 48), [], [])
    assert detected == Example(
        "b.jpg",
        4,
        (200, 100),
        [Box(0, None, (0.375, 0.25, 0.625, 0.75))],
        [Box(0, 0.5, (0.375, 0.25, 0.625, 0.75)), Box(2, 0.5, (0.05, 0.2, 0.15, 0.4))],
    )
    assert missed[:3] == ("c.jpg", 7, IMAGE)
    ((label, confidence, corners, outline),) = missed.labels
    assert outline == ()
    assert (label, confidence) == (1, None)
    assert corners == pytest.approx((0.7, 0.375, 1, 0.625))
    ((label, confidence, corners, outline),) = missed.predictions
    assert (label, confidence) == (2, 0.25)
    assert corners == pytest.approx((0, 0, 1 / 3, 0.5))
    assert {type(side) for side in corners} == {float}


def test_predictions_to_draw_are_confident_and_in_falling_confidence() -> None:
    metrics = DetectionMetrics(CLASS_NAMES, frozenset([0]))
    boxes = torch.tensor([box(1, 9, 0.5, 0), box(2, 9, 0.75, 1), box(3, 9, 0.5, 2), box(4, 9, 0.1, 0)])
    summary = summary_of(metrics, [boxes], image_info(0, IMAGE))
    (example,) = metrics.examples(summary)
    assert [(one.label, one.confidence) for one in example.predictions] == [(1, 0.75), (0, 0.5), (2, 0.5)]
    rows = metrics.documents(summary)["val_boxes.csv"].splitlines()[1:]
    assert [row.split(",")[2] for row in rows] == ["traffic light", "disc", "bar"]


def test_evidence_survives_a_state_file() -> None:
    """Saved as tensors and plain values; a path may contain any bytes."""
    with torch.inference_mode():
        records = shown_images()
        (odd,) = [record for record in records if record.image == 4]
        assert odd.shown is not None
        records[records.index(odd)] = odd._replace(shown=odd.shown._replace(path="/data/\udcff.jpg"))
        summary = METRICS.summarise(records)
    file = io.BytesIO()
    torch.save(asdict(summary), file)
    file.seek(0)
    loaded = Summary(**torch.load(file, weights_only=True))
    assert METRICS.documents(loaded) == METRICS.documents(summary)
    assert METRICS.examples(loaded) == METRICS.examples(summary)
    assert loaded.by_class == summary.by_class
    assert "/data/\udcff.jpg,label" in METRICS.documents(loaded)["val_boxes.csv"]


@pytest.mark.parametrize(("conf_thres", "warned"), [(0.001, False), (0.01, False), (0.02, True), (0.25, True)])
def test_a_confidence_threshold_that_changes_map_is_a_warning(conf_thres: float, warned: bool) -> None:
    warnings = METRICS.threshold_warnings(Thresholds(conf_thres))
    assert [warning.startswith(f"warning: --conf-thres {conf_thres} cuts") for warning in warnings] == [True] * warned


def test_outlines_of_records_are_drawn_instead_of_their_boxes() -> None:
    """A task whose records have outlines, such as four corners, gets them in val_boxes.csv and in its examples."""
    labels, predictions = np.float32([(1, 10, 0, 30, 20)]), np.float32([(0, 0, 20, 40, 0.5, 2), (0, 0, 8, 8, 0.1, 2)])
    corners = np.float32([(20, 0), (30, 10), (20, 20), (10, 10)])
    outlined = shown_image("/data/a.jpg", (40, 80), labels, predictions, [corners], [corners * 2, corners])
    nothing = np.zeros(0, np.float32)
    records = [
        unmatched(0, nothing, nothing, nothing, nothing, nothing, outlined),
        unmatched(
            1,
            nothing,
            nothing,
            nothing,
            nothing,
            nothing,
            shown_image("/data/b.jpg", (9, 9), labels[:0], predictions[:0]),
        ),
    ]
    summary = METRICS.summarise(records)
    assert METRICS.documents(summary)["val_boxes.csv"].splitlines() == [
        "image,kind,class,confidence,x1,y1,x2,y2,outline",
        f"/data/a.jpg,label,{CLASS_NAMES[1]},,10,0,30,20,20 0 30 10 20 20 10 10",
        f"/data/a.jpg,prediction,{CLASS_NAMES[2]},0.5,0,0,20,40,40 0 60 20 40 40 20 20",
        "/data/b.jpg,image,,,,,,,",
    ]
    example, _ = METRICS.examples(summary)
    assert example.labels == [Box(1, None, (0.25, 0, 0.75, 0.25), (0.5, 0, 0.75, 0.125, 0.5, 0.25, 0.25, 0.125))]
    assert example.predictions[0].outline == (1, 0, 1.5, 0.25, 1, 0.5, 0.5, 0.25)
