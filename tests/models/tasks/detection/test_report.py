"""Documents and examples of a validation, and the evidence that they are made of."""

from __future__ import annotations

import io
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from models.tasks.detection.metrics import DetectionMetrics
from models.tasks.detection.scores import CURVE_POINTS
from tests.models.tasks.detection.batches import (
    DISC,
    IMAGE,
    NAMES,
    Info,
    batch,
    box,
    labels,
    predictions,
    shown_images,
)
from utils.summary import Box, Example, Summary

METRICS = DetectionMetrics(NAMES)


def summary_of(metrics: DetectionMetrics, boxes: list[Tensor], *infos: Info) -> Summary:
    return metrics.summarise(metrics.update(predictions(boxes, infos, metrics.names), batch(*infos)))


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
        "/data/c.jpg,label,traffic light,,70,37.5,100,62.5\n"  # cut at the edge
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
    documents = METRICS.documents(summary_of(METRICS, boxes, Info(0, IMAGE), Info(1, IMAGE)))
    assert documents["classes.csv"].splitlines()[1:] == ["disc,0,0,,,,", "traffic light,0,0,,,,", "bar,0,0,,,,"]
    assert documents["confusion_matrix.csv"].splitlines()[-1] == "background,0,1,0,0"
    assert [len(documents[name].splitlines()) for name in ("curves.csv", "PR_curve.csv", "val_boxes.csv")] == [1, 1, 1]


def test_documents_of_one_class() -> None:
    metrics = DetectionMetrics({0: "item"})
    summary = summary_of(metrics, [torch.tensor([box(10, 30, 0.9, 0)])], Info(0, IMAGE, rows=labels(DISC)))
    documents = metrics.documents(summary)
    assert documents["confusion_matrix.csv"] == "true \\ predicted,item,background\nitem,1,0\nbackground,0,0\n"
    assert documents["classes.csv"].splitlines()[1:] == ["item,1,1,1,1,0.995,0.995"]
    assert len(documents["curves.csv"].splitlines()) == 202


def test_a_run_from_before_there_was_evidence() -> None:
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
    ((label, confidence, corners),) = missed.labels
    assert (label, confidence) == (1, None)
    assert corners == pytest.approx((0.7, 0.375, 1, 0.625))
    assert [(one.label, one.confidence) for one in missed.predictions] == [(2, 0.25)]
    assert missed.predictions[0].xyxy == pytest.approx((0, 0, 1 / 3, 0.5))
    assert {type(side) for one in missed.predictions for side in one.xyxy} == {float}


def test_predictions_are_shown_in_falling_confidence() -> None:
    metrics = DetectionMetrics(NAMES, frozenset([0]))
    boxes = torch.tensor([box(1, 9, 0.5, 0), box(2, 9, 0.75, 1), box(3, 9, 0.5, 2), box(4, 9, 0.1, 0)])
    summary = summary_of(metrics, [boxes], Info(0, IMAGE))
    (example,) = metrics.examples(summary)
    assert [(one.label, one.confidence) for one in example.predictions] == [(1, 0.75), (0, 0.5), (2, 0.5)]
    rows = metrics.documents(summary)["val_boxes.csv"].splitlines()[1:]
    assert [row.split(",")[1:4] for row in rows] == [
        ["prediction", "traffic light", "0.75"],
        ["prediction", "disc", "0.5"],
        ["prediction", "bar", "0.5"],
    ]


def test_evidence_goes_through_a_file() -> None:
    """As a state holds it: copied, saved, and read without running anything; a path may hold any bytes."""
    with torch.inference_mode():
        records = shown_images()
        (odd,) = [record for record in records if record.image == 4]
        assert odd.shown is not None
        records[records.index(odd)] = odd._replace(shown=odd.shown._replace(path="/data/\udcff.jpg"))
        summary = METRICS.summarise(records)
    file = io.BytesIO()
    torch.save(asdict(summary), file)
    file.seek(0)
    again = Summary(**torch.load(file, weights_only=True))
    assert METRICS.documents(again) == METRICS.documents(summary)
    assert METRICS.examples(again) == METRICS.examples(summary)
    assert again.by_class == summary.by_class
    assert "/data/\udcff.jpg,label" in METRICS.documents(again)["val_boxes.csv"]


def test_evidence_is_small() -> None:
    """Of 80 classes: three curves of 201 numbers of four bytes each, and little else."""
    metrics = DetectionMetrics({k: f"class {k}" for k in range(80)})
    infos = [Info(k, rows=labels((k % 80, 0.5, 0.5, 0.2, 0.2))) for k in range(160)]
    summary = summary_of(metrics, [torch.rand(30, 6).double()] * 160, *infos)
    assert all(curve.dtype == torch.float32 for curve in summary.evidence["curves"].values())
    file = io.BytesIO()
    torch.save(summary.evidence, file)
    assert 3 * 80 * 201 * 4 < file.tell() < 3 * 80 * 201 * 4 + 30_000
