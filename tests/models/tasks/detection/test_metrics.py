"""`DetectionMetrics`: from predictions to the summary of a validation, with numbers worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from models.tasks.detection.metrics import DETECTION_METRICS, DetectionMetrics
from models.tasks.detection.records import ImageRecord
from tests.models.tasks.detection.batches import (
    DISC,
    IMAGE,
    LIGHT,
    NAMES,
    Info,
    batch,
    box,
    labels,
    predictions,
    random_images,
    shown_images,
)


def three_images() -> list[ImageRecord]:
    """A disc of 20 pixels and two lights of 40, all detected exactly, and an empty image."""
    infos = (
        Info(image=0, size=(100, 100), rows=labels((0, 0.5, 0.5, 0.2, 0.2), (1, 0.3, 0.3, 0.4, 0.4))),
        Info(image=1, size=(100, 100), rows=labels((1, 0.3, 0.3, 0.4, 0.4))),
        Info(image=2, size=(100, 100)),
    )
    boxes = [
        torch.tensor([[40, 40, 60, 60, 0.9, 0], [10, 10, 50, 50, 0.8, 1.0]]),
        torch.tensor([[10, 10, 50, 50, 0.9, 1.0]]),
        torch.zeros(0, 6),
    ]
    return DetectionMetrics(NAMES).update(predictions(boxes, infos), batch(*infos))


def test_the_overall_row() -> None:
    """all images instances P R mAP50 mAP50-95; 101 points reach 0.995 at most."""
    head, overall = DetectionMetrics(NAMES).summarise(three_images()).overall
    assert head.split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert overall.split() == ["all", "3", "3", "1.0000", "1.0000", "0.9950", "0.9950"]


def test_the_overall_row_without_a_correct_detection() -> None:
    infos = (Info(image=1), Info(image=2, rows=labels((0, 0.5, 0.5, 0.2, 0.2))))
    boxes = [torch.tensor([[40, 5, 60, 45, 0.9, 1.0]]), torch.zeros(0, 6)]
    metrics = DetectionMetrics(NAMES)
    summary = metrics.summarise(metrics.update(predictions(boxes, infos), batch(*infos)))
    assert summary.overall[1].split() == ["all", "2", "1", "0.0000", "0.0000", "0.0000", "0.0000"]


def test_details_per_class_and_size() -> None:
    details = DetectionMetrics(NAMES).summarise(three_images()).details
    assert [line.split() for line in details] == [
        ["disc", "1", "1", "1.0000", "1.0000", "0.9950", "0.9950"],
        ["traffic", "light", "2", "2", "1.0000", "1.0000", "0.9950", "0.9950"],
        ["16-32", "px", "3", "1", "-", "-", "0.9950", "0.9950"],
        ["32-64", "px", "3", "2", "-", "-", "0.9950", "0.9950"],
    ]
    assert len({len(line) for line in details}) == 1  # columns


def test_metrics_and_fitness() -> None:
    spoilt = [record._replace(overlap=np.minimum(record.overlap, 0.72)) for record in three_images()]  # right up to 0.7
    summary = DetectionMetrics(NAMES).summarise(spoilt)
    assert tuple(summary.metrics) == DETECTION_METRICS == ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
    assert list(summary.metrics.values()) == pytest.approx([1, 1, 0.995, 0.4975], abs=1e-6)
    assert summary.fitness == pytest.approx(0.1 * 0.995 + 0.9 * 0.4975)


def test_scores_by_class() -> None:
    metrics = DetectionMetrics(NAMES)
    summary = metrics.summarise(shown_images())
    assert {name: list(values) for name, values in summary.by_class.items()} == {
        "AP50": ["disc", "traffic light"],  # no bar has a label
        "AP": ["disc", "traffic light"],
    }
    assert summary.by_class["AP50"] == pytest.approx({"disc": 0.995, "traffic light": 0})
    records = [record._replace(overlap=np.minimum(record.overlap, 0.72)) for record in shown_images()]
    assert metrics.summarise(records).by_class["AP"] == pytest.approx({"disc": 0.4975, "traffic light": 0})


@pytest.mark.parametrize("seed", range(3))
def test_the_summary_does_not_depend_on_the_processes_that_made_the_records(seed: int) -> None:
    """One process with one batch, or several with others."""
    metrics = DetectionMetrics(NAMES, frozenset(range(0, 12, 2)))
    boxes, infos = random_images(seed)
    given = predictions(boxes, infos)
    wanted = metrics.summarise(metrics.update(given, batch(*infos)))
    records = [record for k in range(0, 12, 5) for record in metrics.update(given[k : k + 5], batch(*infos[k : k + 5]))]
    random.Random(seed).shuffle(records)
    summary = metrics.summarise(records)
    assert (summary.metrics, summary.details, summary.by_class) == (wanted.metrics, wanted.details, wanted.by_class)
    for name in ("classes", "confusion", "shown"):
        assert summary.evidence[name] == wanted.evidence[name] != []
    for name, curve in wanted.evidence["curves"].items():
        assert torch.equal(summary.evidence["curves"][name], curve)
    assert metrics.documents(summary) == metrics.documents(wanted)
    assert metrics.examples(summary) == metrics.examples(wanted)


# The confusion matrix


def confusion(rows: list[tuple[float, ...]], *boxes: list[float]) -> list[list[int]]:
    """Cells of the confusion matrix of one image; 3 is background."""
    metrics, info = DetectionMetrics(NAMES), Info(0, IMAGE, rows=labels(*rows))
    records = metrics.update(predictions([torch.tensor(boxes).view(-1, 6)], [info]), batch(info))
    cells: list[list[int]] = metrics.summarise(records).evidence["confusion"]
    return cells


def test_confusion_counts_true_and_predicted_classes() -> None:
    assert confusion([DISC, LIGHT], box(10, 30, 0.9, 0), box(50, 90, 0.8, 1)) == [[0, 0, 1], [1, 1, 1]]
    assert confusion([DISC, LIGHT], box(10, 30, 0.9, 2), box(50, 90, 0.8, 1)) == [[0, 2, 1], [1, 1, 1]]


def test_a_second_detection_of_a_label_is_of_the_background() -> None:
    assert confusion([DISC], box(10, 30, 0.5, 0), box(10, 29, 0.9, 0)) == [[0, 0, 1], [3, 0, 1]]
    # The nearer one has the label, though it is of another class and less confident.
    assert confusion([DISC], box(10, 29, 0.9, 0), box(10, 30, 0.3, 1)) == [[0, 1, 1], [3, 0, 1]]


def test_misses_and_false_detections() -> None:
    assert confusion([DISC, LIGHT]) == [[0, 3, 1], [1, 3, 1]]
    assert confusion([], box(10, 30, 0.9, 2), box(50, 90, 0.8, 2)) == [[3, 2, 2]]
    assert confusion([DISC], box(50, 90, 0.8, 0)) == [[0, 3, 1], [3, 0, 1]]  # elsewhere
    assert confusion([DISC], box(10, 24, 0.8, 0)) == [[0, 0, 1]]  # 14 x 14 of 20 x 20: 0.49
    assert confusion([DISC], box(10, 23, 0.8, 0)) == [[0, 3, 1], [3, 0, 1]]  # 13 x 13: 0.42
    assert confusion([]) == []


def test_confusion_is_of_confident_detections() -> None:
    assert confusion([DISC], box(10, 30, 0.25, 0)) == [[0, 3, 1]]
    assert confusion([DISC], box(10, 30, 0.2500001, 0)) == [[0, 0, 1]]


def test_images_are_not_confused_with_each_other() -> None:
    """The detection of the second image lies where the first has a label, and the third is empty."""
    infos = (Info(0, IMAGE, rows=labels(DISC)), Info(1, IMAGE), Info(2, IMAGE))
    boxes = [torch.zeros(0, 6), torch.tensor([box(10, 30, 0.9, 0)]), torch.zeros(0, 6)]
    metrics = DetectionMetrics(NAMES)
    records = metrics.update(predictions(boxes, infos), batch(*infos))
    assert metrics.summarise(records).evidence["confusion"] == [[0, 3, 1], [3, 0, 1]]


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_confusion_adds_up_to_labels_and_detections(seed: int) -> None:
    boxes, infos = random_images(seed)
    metrics, matrix = DetectionMetrics(NAMES), np.zeros((4, 4), int)
    records = metrics.update(predictions(boxes, infos), batch(*infos))
    for true, predicted, count in metrics.summarise(records).evidence["confusion"]:
        matrix[true, predicted] = count
    truth = np.concatenate([info.rows[:, 0] for info in infos]).astype(int)
    confident = np.concatenate([image[image[:, 4] > 0.25, 5] for image in boxes]).astype(int)
    assert matrix[:3].sum(1).tolist() == np.bincount(truth, minlength=3).tolist()
    assert matrix[:, :3].sum(0).tolist() == np.bincount(confident, minlength=3).tolist()
    assert 0 < matrix[:3, :3].sum() < min(len(truth), len(confident))
