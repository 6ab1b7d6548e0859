"""Scores of boxes and masks: overlaps by hand and against whole maps, the table, documents and examples."""

from __future__ import annotations

import pickle
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from models.tasks import segment_metrics as records
from models.tasks.masks import DetectedMasks, SegmentationPrediction, known_masks
from models.tasks.segment_metrics import SEGMENTATION_METRICS, SegmentationMetrics, mask_overlaps
from tests.making import CLASS_NAMES, image_info
from tests.models.tasks.mask_batches import MAP, SIDE, mask_batch
from utils.batch import SegmentationBatch
from utils.console import LEAST_COLUMNS
from utils.summary import Summary

METRICS = SegmentationMetrics(CLASS_NAMES, frozenset({0, 1, 2}))
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the map


class Instance(NamedTuple):
    """A detection or a label: its class, its box, the part of it that its mask covers, and its confidence."""

    label: int
    box: Box
    mask: Box | np.ndarray | None = None  # None: the box
    confidence: float = 0.9

    def pixels(self, side: int = MAP) -> np.ndarray:
        """Return the mask, bool (side, side)."""
        if isinstance(self.mask, np.ndarray):
            return self.mask
        left, top, right, bottom = map(int, self.mask or self.box)
        pixels = np.zeros((side, side), bool)
        pixels[top:bottom, left:right] = True
        return pixels


class Case(NamedTuple):
    """An image: its labels and its detections."""

    labels: list[Instance]
    detections: list[Instance]


def made(*cases: Case, start: int = 0, side: int = MAP) -> tuple[list[SegmentationPrediction], SegmentationBatch]:
    """Return the predictions for images, and their batch as an evaluation has it. side: of the mask maps."""
    infos, predictions, targets = [], [], []
    for number, (labels, detections) in enumerate(cases):
        rows = np.array([(one.label, *center(one.box, side)) for one in labels], np.float32).reshape(-1, 5)
        shapes = tuple(outline(one) / np.float32(side) for one in labels)
        targets += [(number, *row) for row in rows.tolist()]
        boxes = torch.tensor([(*(4 * x for x in one.box), one.confidence, one.label) for one in detections])
        boxes = boxes.reshape(-1, 6).double()
        maps = np.stack([np.zeros((side, side), bool), *(one.pixels(side) for one in detections)])[1:]
        info = image_info(
            start + number, (4 * side, 4 * side), rows=rows, outlines=shapes, path=f"/data/{start + number}.jpg"
        )
        logits, corners = known_masks(torch.from_numpy(maps)), boxes[:, :4].numpy()
        source = DetectedMasks(logits, (side, side), boxes, corners, info.size, info.placement, retina=True)
        predictions.append(
            SegmentationPrediction(info.image, info.path, CLASS_NAMES, info.size, boxes, rows, 0.6, source, shapes)
        )
        infos.append(info)
    every = [one for case in cases for one in case.labels]
    windows = np.array([window(one, side) for one in every]).reshape(-1, 4)
    return predictions, mask_batch(targets, [one.pixels(side) for one in every], infos, windows=windows)


def outline(instance: Instance) -> np.ndarray:
    """Return the corners of the mask, or of the box."""
    left, top, right, bottom = instance.mask if isinstance(instance.mask, tuple) else instance.box
    return np.array(((left, top), (right, top), (right, bottom), (left, bottom)), np.float32)


def center(box: Box, side: int) -> tuple[float, ...]:
    left, top, right, bottom = (value / side for value in box)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def window(instance: Instance, side: int) -> tuple[int, ...]:
    """Return the union of the box and of the extent of the mask."""
    rows, columns = np.nonzero(instance.pixels(side))
    low, high = np.floor(instance.box[:2]), np.ceil(instance.box[2:])
    if len(rows):
        low = np.minimum(low, (columns.min(), rows.min()))
        high = np.maximum(high, (columns.max() + 1, rows.max() + 1))
    return (*low.clip(0, side).astype(int), *high.clip(0, side).astype(int))


def summary_of(*cases: Case, metrics: SegmentationMetrics = METRICS) -> Summary:
    return metrics.summarise(metrics.update(*made(*cases)))


HALF: Box = (2, 2, 6, 10)
WHOLE: Box = (2, 2, 10, 10)


def test_boxes_and_masks_are_scored_separately() -> None:
    """The box is exact. The overlap of the masks, 1/2 and then 0.8, equals a threshold, and reaches it."""
    summary = summary_of(Case([Instance(0, WHOLE)], [Instance(0, WHOLE, HALF)]))
    assert tuple(summary.metrics) == SEGMENTATION_METRICS
    assert list(summary.metrics.values()) == pytest.approx([1, 1, 0.995, 0.995, 1, 1, 0.995, 0.0995], abs=1e-6)
    summary = summary_of(Case([Instance(0, WHOLE, HALF)], [Instance(0, WHOLE, (2, 2, 7, 10))]))
    assert list(summary.metrics.values())[4:] == pytest.approx([1, 1, 0.995, 0.995 * 0.7], abs=1e-6)
    assert summary.fitness == pytest.approx(0.995 + 0.1 * 0.995 + 0.9 * 0.6965)
    assert list(summary.by_class) == ["AP50(B)", "AP(B)", "AP50(M)", "AP(M)"]
    assert summary.by_class["AP(M)"] == {"disc": pytest.approx(0.6965)}


@pytest.mark.parametrize("twentieths", range(10, 20))
def test_an_overlap_that_equals_a_threshold_reaches_it(twentieths: int) -> None:
    """20 rows of a label, of which the detection has some."""
    detected = Instance(0, (0, 0, 20, 20), (0, 0, 20, twentieths))
    predictions, batch = made(Case([Instance(0, (0, 0, 20, 20))], [detected]), side=20)
    metrics = METRICS.summarise(METRICS.update(predictions, batch)).metrics
    assert metrics["mAP_0.5:0.95(M)"] == pytest.approx(0.0995 * (twentieths - 9))


def test_of_several_detections_of_a_label_the_best_masks_count() -> None:
    """The more confident detection has the better box, the other one the better mask."""
    better_box, better_mask = Instance(0, WHOLE, HALF, 0.9), Instance(0, (2, 2, 10, 9), (2, 2, 10, 9), 0.8)
    predictions, batch = made(Case([Instance(0, WHOLE)], [better_box, better_mask]))
    (record,) = METRICS.update(predictions, batch)
    assert record.boxes.overlap.tolist() == pytest.approx([1, 7 / 8], abs=1e-6)
    assert record.masks.overlap.tolist() == pytest.approx([0.5, 7 / 8], abs=1e-6)
    assert record.boxes.beaten.tolist() == pytest.approx([0, 1], abs=1e-6)
    assert record.masks.beaten.tolist() == pytest.approx([0, 0.5], abs=1e-6)


def random_case(seed: int, labels: int = 6, detections: int = 12) -> Case:
    rng = np.random.default_rng(seed)

    def instance(confidence: float) -> Instance:
        low = rng.random(2) * 10
        high = low + 2 + rng.random(2) * 8
        mask = rng.random((MAP, MAP)) < 0.6
        rows, columns = np.mgrid[:MAP, :MAP]
        mask &= (columns > low[0] - 1) & (columns < high[0] + 1) & (rows > low[1] - 1) & (rows < high[1] + 1)
        return Instance(int(rng.integers(3)), (*low, *np.minimum(high, MAP)), mask, confidence)  # type: ignore[arg-type]

    confidences = -np.sort(-rng.random(detections))
    return Case([instance(1) for _ in range(labels)], [instance(float(one)) for one in confidences])


@pytest.mark.parametrize("most", [2**22, 600])  # pixels at once: 2 masks
def test_overlaps_are_those_of_whole_masks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_MASK_VALUES", most)
    cases = [random_case(0), Case([], [Instance(0, WHOLE)]), random_case(1), Case([Instance(1, WHOLE)], [])]
    predictions, batch = made(*cases)
    overlaps = mask_overlaps(predictions, batch)
    detection, label, expected = [], [], []
    d0 = l0 = 0
    for case in cases:
        for d, one in enumerate(case.detections):
            rows, columns = np.mgrid[:MAP, :MAP]
            left, top, right, bottom = one.box
            cut = one.pixels() & (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
            for k, true in enumerate(case.labels):
                detection.append(d0 + d)
                label.append(l0 + k)
                both = (cut & true.pixels()).sum()
                expected.append(both / (cut.sum() + true.pixels().sum() - both + 1e-7))
        d0, l0 = d0 + len(case.detections), l0 + len(case.labels)
    order = np.random.default_rng(0).permutation(len(detection))
    computed = overlaps(np.array(detection)[order], np.array(label)[order])
    np.testing.assert_allclose(computed, np.array(expected)[order], atol=1e-6)
    assert (computed > 0.2).sum() > 10
    assert overlaps(np.zeros(0, int), np.zeros(0, int)).tolist() == []


def test_the_summary_does_not_depend_on_the_processes_that_made_the_records() -> None:
    cases = [random_case(seed) for seed in range(6)]
    expected = summary_of(*cases)
    pieces = [METRICS.update(*made(*cases[start : start + 2], start=start)) for start in (0, 2, 4)]
    gathered = pickle.loads(pickle.dumps([record for piece in pieces for record in piece]))
    random.Random(0).shuffle(gathered)
    summary = METRICS.summarise(gathered)
    assert summary.metrics == expected.metrics
    assert summary.table() == expected.table()
    assert METRICS.documents(summary) == METRICS.documents(expected)
    assert METRICS.examples(summary) == METRICS.examples(expected)
    assert 0 < summary.metrics["mAP_0.5:0.95(B)"] < 1


def test_tables_and_documents() -> None:
    """Box scores, then mask scores."""
    exact = Case([Instance(0, WHOLE), Instance(1, (12, 12, 15, 15))], [Instance(0, WHOLE, HALF)])
    lines = summary_of(exact).table()
    head, overall, *details = [line.split() for line in lines]
    scores = ["P", "R", "mAP50", "50-95"]
    assert head == ["Class", "Images", "Labels", "box", *scores, "mask", *scores]
    assert overall == ["all", "1", "2", "0.500", "0.500", "0.497", "0.497", "0.500", "0.500", "0.497", "0.050"]
    assert details[0] == ["disc", "1", "1", "1.000", "1.000", "0.995", "0.995", "1.000", "1.000", "0.995", "0.100"]
    assert details[3] == ["0-16", "px", "1", "1", "-", "-", "0.000", "0.000", "-", "-", "0.000", "0.000"]
    assert max(map(len, lines)) <= LEAST_COLUMNS

    detections = [Instance(0, WHOLE, (2, 2, 7, 10)), Instance(2, WHOLE, None, 0.2)]
    summary = summary_of(Case([Instance(0, WHOLE, HALF)], detections), Case([], []))
    documents = METRICS.documents(summary)
    of_boxes = ["classes.csv", "confusion_matrix.csv", "curves.csv", "PR_curve.csv", "val_boxes.csv"]
    assert list(documents) == [*of_boxes, "mask_curves.csv", "mask_PR_curve.csv", "val_masks.csv"]
    head, disc, light, *_ = (line.split(",") for line in documents["classes.csv"].splitlines())
    assert head[-4:] == ["mask_precision", "mask_recall", "mask_AP50", "mask_AP50-95"]
    assert [float(x) for x in disc[5:]] == pytest.approx([0.995, 0.995, 1, 1, 0.995, 0.6965])
    assert light == ["traffic light", "0", "0", *[""] * 8]
    assert documents["mask_PR_curve.csv"].splitlines()[0] == "class,recall,precision"
    rows = documents["val_masks.csv"].splitlines()
    assert rows[:2] == ["image,kind,class,confidence,outline", "/data/0.jpg,label,disc,,8 8 24 8 24 40 8 40"]
    (prediction,) = rows[2:]
    *cells, points = prediction.split(",")
    assert cells == ["/data/0.jpg", "prediction", "disc", "0.9"]
    x, y = np.array(points.split(), int).reshape(-1, 2).T
    assert (x.min(), x.max(), y.min(), y.max()) == (8, 27, 8, 39)

    example, _ = METRICS.examples(summary)
    assert list(example.label_outlines) == [tuple((x + 0.5) / SIDE for x in (8, 8, 24, 8, 24, 40, 8, 40))]
    (outline,) = example.prediction_outlines
    assert len(outline) >= 8
    assert len(example.labels) == len(example.predictions) == 1
    empty = Summary({}, 0.0, [], [])
    assert (METRICS.documents(empty), METRICS.examples(empty)) == ({}, [])
