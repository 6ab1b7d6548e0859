"""Precision, recall and average precision over a set of images, by YOLOv5's definitions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
CONFIDENCES = np.linspace(0, 1, 1000)  # where precision and recall are read
RECALLS = np.linspace(0, 1, 101)
SMOOTHING = 0.1  # of the F1 curve, as a share of its length
SIZE_EDGES = (0.0, 16.0, 32.0, 64.0, 96.0, float("inf"))  # pixels; COCO's small, medium, large part at 32 and 96


class ImageRecord(NamedTuple):
    """What one image adds to the metrics. k detections, m labels; sides are sqrt(area) in pixels of the file."""

    image: int  # its index: records are put into this order, so that sums do not depend on who made them
    overlap: np.ndarray  # (k,) IoU with the label that the detection was given to, 0 where there is none
    beaten: np.ndarray  # (k,) the largest IoU with that label of a more confident detection
    partner_side: np.ndarray  # (k,) side of that label
    confidence: np.ndarray  # (k,)
    label: np.ndarray  # (k,) class
    side: np.ndarray  # (k,)
    true_label: np.ndarray  # (m,) class
    true_side: np.ndarray  # (m,)


@dataclass(frozen=True)
class ClassScores:
    """Per class that has labels: number, images it is in, labels, precision, recall, and AP at each IoU (c, 10)."""

    classes: np.ndarray
    images: np.ndarray
    instances: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    ap: np.ndarray

    def means(self) -> dict[str, float]:
        """Means over the classes; 0 where there are none."""
        if not len(self.classes):
            return dict.fromkeys(("precision", "recall", "mAP50", "mAP50-95"), 0.0)
        values = (self.precision, self.recall, self.ap[:, 0], self.ap)
        return dict(zip(("precision", "recall", "mAP50", "mAP50-95"), (float(v.mean()) for v in values), strict=True))


class SizeScores(NamedTuple):
    """Scores of the objects whose side lies in [low, high) pixels."""

    low: float
    high: float
    instances: int
    ap50: float
    ap: float


def match_detections(overlaps: np.ndarray, same_class: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give each detection to its best label of its class. overlaps: (m labels, k detections), most confident first.

    Returns, (k,) each: the overlap with that label, the label's index, and the largest overlap with the same label of a
    more confident detection. At a threshold t a detection is right where beaten < t <= overlap: of those that reach t
    the most confident has the label.
    """
    labels, detections = overlaps.shape
    beaten = np.zeros(detections)
    if not labels:
        return np.zeros(detections), np.zeros(detections, np.int64), beaten
    allowed = np.where(same_class, overlaps, 0)
    overlap, partner = allowed.max(0), allowed.argmax(0)
    near = np.flatnonzero(overlap >= IOU_THRESHOLDS[0])
    for label in np.unique(partner[near]):
        rivals = near[partner[near] == label]
        beaten[rivals[1:]] = np.maximum.accumulate(overlap[rivals])[:-1]
    return overlap, partner, beaten


def score_classes(records: list[ImageRecord]) -> ClassScores:
    """Scores per class over all images."""
    joined = _join(records)
    classes, instances = np.unique(joined.true_label, return_counts=True)
    images = np.array([sum(bool((record.true_label == c).any()) for record in records) for c in classes], np.int64)
    correct = _correct(joined)
    ap = np.zeros((len(classes), len(IOU_THRESHOLDS)))
    precision, recall = np.zeros((len(classes), len(CONFIDENCES))), np.zeros((len(classes), len(CONFIDENCES)))
    for row, (number, count) in enumerate(zip(classes, instances, strict=True)):
        own = joined.label == number
        if own.any():
            curves = _Curves.of(correct[own], count)
            ap[row] = curves.average_precision()
            precision[row], recall[row] = curves.at_confidences(joined.confidence[own])
    best = _best_f1(precision, recall)
    return ClassScores(classes.astype(np.int64), images, instances, precision[:, best], recall[:, best], ap)


def score_sizes(records: list[ImageRecord]) -> list[SizeScores]:
    """Scores per object size, means over the classes; a label or unmatched detection of another size has no say."""
    joined = _join(records)
    scores = []
    for low, high in pairwise(SIZE_EDGES):
        wanted = (joined.true_side >= low) & (joined.true_side < high)
        if wanted.any():
            ap = _size_ap(joined, wanted, low, high)
            scores.append(SizeScores(low, high, int(wanted.sum()), float(ap[:, 0].mean()), float(ap.mean())))
    return scores


def _size_ap(joined: ImageRecord, wanted: np.ndarray, low: float, high: float) -> np.ndarray:
    """AP of every class that has labels in the range, (c, 10)."""
    classes, counts = np.unique(joined.true_label[wanted], return_counts=True)
    correct = _correct(joined)
    side = np.where(correct, joined.partner_side[:, None], joined.side[:, None])
    counted = (side >= low) & (side < high)
    ap = np.zeros((len(classes), len(IOU_THRESHOLDS)))
    for row, (number, count) in enumerate(zip(classes, counts, strict=True)):
        own = joined.label == number
        for column in range(len(IOU_THRESHOLDS)):
            chosen = own & counted[:, column]
            if chosen.any():
                ap[row, column] = _Curves.of(correct[chosen, column : column + 1], count).average_precision()[0]
    return ap


def _join(records: list[ImageRecord]) -> ImageRecord:
    """All images' records as one, in the order of the images, detections sorted by falling confidence."""
    ordered = sorted(records, key=lambda record: record.image)
    nothing = ImageRecord(-1, *(np.zeros(0) for _ in ImageRecord._fields[1:]))
    columns = [np.concatenate(column) for column in list(zip(nothing, *ordered, strict=True))[1:]]
    order = np.argsort(-columns[3], kind="stable")
    return ImageRecord(-1, *(column[order] for column in columns[:6]), *columns[6:])


def _correct(joined: ImageRecord) -> np.ndarray:
    """Which detections are right at each IoU threshold, (k, 10)."""
    return (joined.overlap[:, None] >= IOU_THRESHOLDS) & (joined.beaten[:, None] < IOU_THRESHOLDS)


class _Curves(NamedTuple):
    """Recall and precision after each detection, in order of falling confidence: (k, thresholds)."""

    recall: np.ndarray
    precision: np.ndarray

    @classmethod
    def of(cls, correct: np.ndarray, count: int) -> _Curves:
        hits, misses = correct.cumsum(0), (~correct).cumsum(0)
        return cls(hits / (count + 1e-16), hits / (hits + misses))

    def average_precision(self) -> np.ndarray:
        """Area under the falling envelope of precision over recall, by 101 points: (thresholds,)."""
        areas = []
        for recall, precision in zip(self.recall.T, self.precision.T, strict=True):
            at = np.concatenate(([0.0], recall, [1.0]))
            envelope = np.maximum.accumulate(np.concatenate(([1.0], precision, [0.0]))[::-1])[::-1]
            areas.append(np.trapezoid(np.interp(RECALLS, at, envelope), RECALLS))
        return np.array(areas)

    def at_confidences(self, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Precision and recall at IoU 0.5 for each of `CONFIDENCES`; before the first detection 1 and 0."""
        precision = np.interp(-CONFIDENCES, -confidence, self.precision[:, 0], left=1)
        recall = np.interp(-CONFIDENCES, -confidence, self.recall[:, 0], left=0)
        return precision, recall


def _best_f1(precision: np.ndarray, recall: np.ndarray) -> int:
    """Where on `CONFIDENCES` the smoothed mean F1 over the classes is highest. precision, recall: (c, 1000)."""
    if not len(precision):
        return 0
    f1 = (2 * precision * recall / (precision + recall + 1e-16)).mean(0)
    width = round(len(f1) * SMOOTHING * 2) // 2 + 1  # odd
    padded = np.pad(f1, width // 2, mode="edge")
    return int(np.convolve(padded, np.ones(width) / width, mode="valid").argmax())
