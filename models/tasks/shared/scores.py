"""Precision, recall and average precision over a set of images, by YOLOv5's definitions.

Called by the metrics of tasks whose predictions are matched to labels by an overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from models.tasks.shared.metric_matching import IOU_THRESHOLDS
from models.tasks.shared.records import CONFIDENT_THRESHOLD, EMPTY_RECORD, ImageRecord

DETECTION_METRICS = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
CLASS_METRICS = ("AP50", "AP")  # metrics of each class
F1_CONFIDENCES = np.linspace(0, 1, 1000)  # precision and recall are given at one of these confidences
F1_SMOOTHING_SHARE = 0.1  # width of the window that smooths the F1 curve, as a share of the curve's length
AP_RECALLS = np.linspace(0, 1, 101)  # edges of the trapezoids that average precision adds up
CURVE_POINTS = np.linspace(0, 1, 201)  # confidences and recalls of the curves; every second one is in `AP_RECALLS`
SIZE_EDGES_PIXELS = (0.0, 16.0, 32.0, 64.0, 96.0, float("inf"))  # COCO separates small, medium, large at 32 and 96


class Curves(NamedTuple):
    """Curves of each class that has labels, at IoU 0.5: values (c, 201) at `CURVE_POINTS`."""

    precision: np.ndarray  # precision at each confidence
    recall: np.ndarray  # recall at each confidence
    envelope: np.ndarray  # precision at each recall; the area under it is the AP


@dataclass(frozen=True)
class ClassScores:
    """Scores of each class that has labels, (c,) unless noted."""

    classes: np.ndarray  # class numbers
    images: np.ndarray  # number of images with labels of the class
    instances: np.ndarray  # number of labels of the class
    precision: np.ndarray
    recall: np.ndarray
    ap: np.ndarray  # (c, 10) at each of `IOU_THRESHOLDS`
    curves: Curves

    def means(self) -> dict[str, float]:
        """Return the `DETECTION_METRICS`: means over the classes, 0 without classes."""
        values = (self.precision, self.recall, self.ap[:, 0], self.ap)
        means = (float(value.mean()) if len(self.classes) else 0.0 for value in values)
        return dict(zip(DETECTION_METRICS, means, strict=True))


class SizeScores(NamedTuple):
    """Scores of the objects whose side, sqrt(area), lies in [low, high) pixels of the file."""

    low: float
    high: float
    instances: int
    ap50: float
    ap: float

    @property
    def title(self) -> str:
        """The row's name in a table."""
        return f"{self.low:g}{f'-{self.high:g}' if self.high < np.inf else '+'} px"


class JoinedRecords(NamedTuple):
    """The joined records, with c classes that have labels and their n detections, by class in falling confidence."""

    classes: np.ndarray  # (c,) class numbers
    instances: np.ndarray  # (c,) number of labels of each class
    images: np.ndarray  # (c,) number of images with labels of each class
    true_row: np.ndarray  # (m,) index in `classes` of each label's class
    true_side: np.ndarray  # (m,) side of each label
    bounds: np.ndarray  # (c + 1,) start of each class's detections, and the end of the last class's
    overlap: np.ndarray  # (n,), as are the following fields; see `ImageRecord`
    beaten: np.ndarray
    partner_side: np.ndarray
    confidence: np.ndarray
    side: np.ndarray


def confusion_matrix(records: Sequence[ImageRecord], classes: int) -> np.ndarray:
    """Return counts by true and predicted class, int64 (classes + 1, classes + 1); the last class is background.

    A label without a detection counts as predicted background, a detection without a label as true background.
    """
    records = [EMPTY_RECORD, *records]
    true = np.concatenate([record.true_label for record in records]).astype(np.int64)
    confident = [record.label[record.confidence > CONFIDENT_THRESHOLD] for record in records]
    predicted = np.concatenate(confident).astype(np.int64)
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    np.add.at(matrix, tuple(np.concatenate([record.paired for record in records]).T), 1)
    matrix[:-1, -1] = np.bincount(true, minlength=classes) - matrix[:-1].sum(1)
    matrix[-1, :-1] = np.bincount(predicted, minlength=classes) - matrix[:, :-1].sum(0)
    return matrix


def join(records: Sequence[ImageRecord]) -> JoinedRecords:
    """Join the records of all images, in any order. Detections of equal confidence are ordered by image."""
    ordered = sorted(records, key=lambda record: record.image)
    columns = list(zip(EMPTY_RECORD, *ordered, strict=True))[1:-1]
    joined = ImageRecord._make((-1, *map(np.concatenate, columns), None))
    classes, true_row, instances = np.unique(joined.true_label, return_inverse=True, return_counts=True)
    present = np.concatenate([classes[:0], *(np.unique(record.true_label) for record in ordered)])
    images = np.bincount(np.searchsorted(classes, present), minlength=len(classes))
    row = np.searchsorted(classes, joined.label)
    row[np.append(classes, np.nan)[row] != joined.label] = len(classes)  # classes without labels are last
    row = row.astype(np.min_scalar_type(len(classes)))  # small integers sort faster
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(len(classes) + 1))
    for start, end in pairwise(bounds):
        of_class = order[start:end]
        order[start:end] = of_class[np.argsort(-joined.confidence[of_class], kind="stable")]
    order = order[: bounds[-1]]
    return JoinedRecords(
        classes=classes.astype(np.int64),
        instances=instances,
        images=images,
        true_row=true_row,
        true_side=joined.true_side,
        bounds=bounds,
        overlap=joined.overlap[order],
        beaten=joined.beaten[order],
        partner_side=joined.partner_side[order],
        confidence=joined.confidence[order],
        side=joined.side[order],
    )


def score_classes(joined: JoinedRecords) -> ClassScores:
    """Return the scores of each class over all images."""
    ap = np.zeros((len(joined.classes), len(IOU_THRESHOLDS)))
    precision, recall = (np.zeros((len(joined.classes), len(F1_CONFIDENCES))) for _ in range(2))
    curves = Curves(*(np.zeros((len(joined.classes), len(CURVE_POINTS))) for _ in Curves._fields))
    for row, (detections, count) in enumerate(zip(_class_slices(joined), joined.instances, strict=True)):
        total = detections.stop - detections.start
        if not total:
            continue
        near, correct = _correct(joined, detections)
        for column, correct_at_iou in enumerate(correct.T):
            ap[row, column] = _average_precision(near[correct_at_iou], total, count)
        hits = near[correct[:, 0]]
        hits_so_far = np.bincount(hits, minlength=total).cumsum()
        falling = -joined.confidence[detections]
        precisions, recalls = hits_so_far / np.arange(1, total + 1), hits_so_far / count
        for at, precision_at, recall_at in (
            (F1_CONFIDENCES, precision, recall),
            (CURVE_POINTS, curves.precision, curves.recall),
        ):
            # Above the confidence of the first detection precision is 1 and recall 0.
            precision_at[row] = np.interp(-at, falling, precisions, left=1)
            recall_at[row] = np.interp(-at, falling, recalls, left=0)
        curves.envelope[row] = _envelope(hits, total, count, CURVE_POINTS)
    best = _best_f1(precision, recall)
    return ClassScores(joined.classes, joined.images, joined.instances, precision[:, best], recall[:, best], ap, curves)


def score_sizes(joined: JoinedRecords) -> list[SizeScores]:
    """Return the mean scores over the classes for each object size that has labels.

    Labels and unmatched detections of other sizes are ignored.
    """
    scores = []
    for low, high in pairwise(SIZE_EDGES_PIXELS):
        in_range = (joined.true_side >= low) & (joined.true_side < high)
        if in_range.any():
            ap = _size_ap(joined, np.bincount(joined.true_row[in_range], minlength=len(joined.classes)), low, high)
            scores.append(SizeScores(low, high, int(in_range.sum()), float(ap[:, 0].mean()), float(ap.mean())))
    return scores


def _size_ap(joined: JoinedRecords, counts: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the AP of every class that has labels in the range of sides, (classes with counts > 0, 10).

    Args:
        counts: number of labels of each class in the range, (c,)
        low: smallest side in pixels
        high: side in pixels that ends the range, exclusive
    """
    inside, partner_inside = ((side >= low) & (side < high) for side in (joined.side, joined.partner_side))
    ap = np.zeros((len(counts), len(IOU_THRESHOLDS)))
    for row, (detections, count) in enumerate(zip(_class_slices(joined), counts, strict=True)):
        if not count:
            continue
        near, correct = _correct(joined, detections)
        inside_so_far = inside[detections].cumsum()
        # A correct detection has its label's size, not its own box's, which shifts all later ranks.
        for column, correct_at_iou in enumerate(correct.T):
            rank = near[correct_at_iou]
            if len(rank):
                label_inside = partner_inside[detections][rank]
                shift = label_inside.cumsum() - inside[detections][rank].cumsum()
                hits = (inside_so_far[rank] + shift - 1)[label_inside]
                ap[row, column] = _average_precision(hits, inside_so_far[-1] + shift[-1], count)
    return ap[counts > 0]


def _class_slices(joined: JoinedRecords) -> list[slice]:
    """Return the detections of each class."""
    return [slice(start, end) for start, end in pairwise(joined.bounds.tolist())]


def _correct(joined: JoinedRecords, detections: slice) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks (k,) of a class's detections that may be correct, and the IoUs where they are, bool (k, 10)."""
    near = np.flatnonzero(joined.overlap[detections] >= IOU_THRESHOLDS[0])
    overlap, beaten = joined.overlap[detections][near, None], joined.beaten[detections][near, None]
    return near, (overlap >= IOU_THRESHOLDS) & (beaten < IOU_THRESHOLDS)


def _average_precision(hits: np.ndarray, total: int, count: int) -> float:
    """Return the area under the falling envelope of precision over recall, from 101 points; see `_envelope`."""
    return float(np.trapezoid(_envelope(hits, total, count, AP_RECALLS), AP_RECALLS)) if len(hits) else 0.0


def _envelope(hits: np.ndarray, total: int, count: int, at: np.ndarray) -> np.ndarray:
    """Return the falling envelope of precision at given recalls, (n,).

    Between the recalls of two hits the envelope is the second hit's precision; after the last hit it is a line to 0 at
    a recall of 1.

    Args:
        hits: ranks of the correct detections among all of the class, in falling confidence
        total: number of detections
        count: number of labels
        at: recalls (n,), rising from 0 to 1
    """
    if not len(hits):
        return np.zeros(len(at))
    correct = np.arange(1, len(hits) + 1)
    recall = correct / count
    envelope = np.maximum.accumulate((correct / (hits + 1))[::-1])[::-1]
    end = recall[-1]
    tail = np.interp(at, (end, 1.0), (len(hits) / total, 0.0)) if end < 1 else np.zeros(len(at))
    heights = np.append(envelope, 0.0)[np.searchsorted(recall, at, side="right")]
    return np.where(end > at, heights, tail)


def _best_f1(precision: np.ndarray, recall: np.ndarray) -> int:
    """Return the index in `F1_CONFIDENCES` at which the smoothed mean F1 over the classes is highest.

    Args:
        precision: precision (c, 1000) of each class at `F1_CONFIDENCES`
        recall: recall (c, 1000) of each class at `F1_CONFIDENCES`
    """
    if not len(precision):
        return 0
    f1 = (2 * precision * recall / (precision + recall + 1e-16)).mean(0)
    width = round(len(f1) * F1_SMOOTHING_SHARE * 2) // 2 + 1  # odd
    padded = np.pad(f1, width // 2, mode="edge")
    return int(np.convolve(padded, np.ones(width) / width, mode="valid").argmax())
