"""Precision, recall and average precision over a set of images, by YOLOv5's definitions."""

from __future__ import annotations

from collections.abc import Sequence
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
    partner_side: np.ndarray  # (k,) side of that label, 0 where there is none
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


class Joined(NamedTuple):
    """All images' records. Of n detections those of classes that have labels: class by class, in falling confidence."""

    classes: np.ndarray  # (c,) those that have labels
    instances: np.ndarray  # (c,) labels of each
    images: np.ndarray  # (c,) images that it is in
    true_row: np.ndarray  # (m,) of each label: where its class is in `classes`
    true_side: np.ndarray  # (m,)
    bounds: np.ndarray  # (c + 1,) where each class's detections begin, and where the last one's end
    overlap: np.ndarray  # (n,) and so on: see ImageRecord
    beaten: np.ndarray
    partner_side: np.ndarray
    confidence: np.ndarray
    side: np.ndarray


class Matches(NamedTuple):
    """What detections (k,) were given to; see `ImageRecord`."""

    overlap: np.ndarray
    partner: np.ndarray  # index of the label, 0 where there is none
    beaten: np.ndarray


def match_detections(
    boxes: np.ndarray, group: np.ndarray, true_boxes: np.ndarray, true_group: np.ndarray, eps: float = 1e-7
) -> Matches:
    """Give each detection to its best label of its group, which is its class in its image, if it overlaps one.

    boxes (k, 4) xyxy, most confident first within a group; true_boxes (m, 4); group, true_group: integers. At a
    threshold t a detection is right where beaten < t <= overlap: of those that reach t the most confident has the
    label.
    """
    overlap, beaten = np.zeros((2, len(boxes)), np.result_type(boxes, true_boxes))
    partner = np.zeros(len(boxes), np.int64)
    # Pairs of a detection and a label: of each detection one after the other, and its labels in their order.
    labels = np.argsort(true_group, kind="stable")
    first, last = (np.searchsorted(true_group, group, side, sorter=labels) for side in ("left", "right"))
    paired = np.flatnonzero(last > first)
    if not len(paired):
        return Matches(overlap, partner, beaten)
    counts = (last - first)[paired]
    ends = counts.cumsum()
    starts = ends - counts
    detection = np.repeat(paired, counts)
    label = labels[np.arange(ends[-1]) + np.repeat(first[paired] - starts, counts)]
    shared = _overlaps(boxes[detection], true_boxes[label], eps)
    overlap[paired] = np.maximum.reduceat(shared, starts)
    # The first label of those that overlap most.
    best = np.where(shared == np.repeat(overlap[paired], counts), np.arange(len(shared)), len(shared) - 1)
    partner[paired] = np.where(overlap[paired] > 0, label[np.minimum.reduceat(best, starts)], 0)
    # Rivals for a label in falling confidence: the largest overlap so far, by its rank, lest a sum round it.
    near = np.flatnonzero(overlap >= IOU_THRESHOLDS[0])
    near = near[np.argsort(partner[near], kind="stable")]
    values, rank = np.unique(overlap[near], return_inverse=True)
    contest = partner[near] * len(values)
    highest = np.maximum.accumulate(contest + rank)[:-1] - contest[:-1]
    beaten[near[1:]] = np.where(contest[1:] == contest[:-1], values[highest], 0)
    return Matches(overlap, partner, beaten)


def _overlaps(a: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    """Intersection over union of paired boxes, xyxy, (n, 4) each: (n,)."""
    span = (np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])).clip(min=0)
    intersection = span[:, 0] * span[:, 1]
    areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (a, b)]
    return intersection / (areas[1] + areas[0] - intersection + eps)


def join(records: Sequence[ImageRecord]) -> Joined:
    """All images' records as one, the same in whatever order they come: of equal confidences the earlier image's is
    first."""
    ordered = sorted(records, key=lambda record: record.image)
    nothing = ImageRecord(-1, *(np.zeros(0, np.float32) for _ in ImageRecord._fields[1:]))
    joined = ImageRecord(-1, *map(np.concatenate, list(zip(nothing, *ordered, strict=True))[1:]))
    classes, true_row, instances = np.unique(joined.true_label, return_inverse=True, return_counts=True)
    present = np.concatenate([classes[:0], *(np.unique(record.true_label) for record in ordered)])
    images = np.bincount(np.searchsorted(classes, present), minlength=len(classes))
    row = np.searchsorted(classes, joined.label)
    row[np.append(classes, np.nan)[row] != joined.label] = len(classes)  # of no class, and last
    row = row.astype(np.min_scalar_type(len(classes)))  # small numbers have a faster stable sort
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(len(classes) + 1))
    for start, end in pairwise(bounds):
        own = order[start:end]
        order[start:end] = own[np.argsort(-joined.confidence[own], kind="stable")]
    order = order[: bounds[-1]]
    detections = (joined.overlap, joined.beaten, joined.partner_side, joined.confidence, joined.side)
    columns = [column[order] for column in detections]
    return Joined(classes.astype(np.int64), instances, images, true_row, joined.true_side, bounds, *columns)


def score_classes(joined: Joined) -> ClassScores:
    """Scores per class over all images."""
    ap = np.zeros((len(joined.classes), len(IOU_THRESHOLDS)))
    precision, recall = (np.zeros((len(joined.classes), len(CONFIDENCES))) for _ in range(2))
    for row, (own, count) in enumerate(zip(_slices(joined), joined.instances, strict=True)):
        total = own.stop - own.start
        if not total:
            continue
        near, correct = _correct(joined, own)
        for column, right in enumerate(correct.T):
            ap[row, column] = _average_precision(near[right], total, count)
        hits = np.bincount(near[correct[:, 0]], minlength=total).cumsum()
        confidence = -joined.confidence[own]
        # Before the first detection 1 and 0
        precision[row] = np.interp(-CONFIDENCES, confidence, hits / np.arange(1, total + 1), left=1)
        recall[row] = np.interp(-CONFIDENCES, confidence, hits / count, left=0)
    best = _best_f1(precision, recall)
    return ClassScores(joined.classes, joined.images, joined.instances, precision[:, best], recall[:, best], ap)


def score_sizes(joined: Joined) -> list[SizeScores]:
    """Scores per object size, means over the classes; a label or unmatched detection of another size has no say."""
    scores = []
    for low, high in pairwise(SIZE_EDGES):
        wanted = (joined.true_side >= low) & (joined.true_side < high)
        if wanted.any():
            ap = _size_ap(joined, np.bincount(joined.true_row[wanted], minlength=len(joined.classes)), low, high)
            scores.append(SizeScores(low, high, int(wanted.sum()), float(ap[:, 0].mean()), float(ap.mean())))
    return scores


def _size_ap(joined: Joined, counts: np.ndarray, low: float, high: float) -> np.ndarray:
    """AP of every class that has labels in the range, (classes of counts > 0, 10). counts: (c,) labels in the range."""
    inside, partner_inside = ((side >= low) & (side < high) for side in (joined.side, joined.partner_side))
    ap = np.zeros((len(counts), len(IOU_THRESHOLDS)))
    for row, (own, count) in enumerate(zip(_slices(joined), counts, strict=True)):
        if not count:
            continue
        near, correct = _correct(joined, own)
        so_far = inside[own].cumsum()
        # The side of a right detection is its label's: its own does not count, which moves up all from there on.
        for column, right in enumerate(correct.T):
            places = near[right]
            if len(places):
                instead = partner_inside[own][places]
                moved = instead.cumsum() - inside[own][places].cumsum()
                hits = (so_far[places] + moved - 1)[instead]
                ap[row, column] = _average_precision(hits, so_far[-1] + moved[-1], count)
    return ap[counts > 0]


def _slices(joined: Joined) -> list[slice]:
    """Where each class's detections are."""
    return [slice(start, end) for start, end in pairwise(joined.bounds.tolist())]


def _correct(joined: Joined, own: slice) -> tuple[np.ndarray, np.ndarray]:
    """Of a class's detections the places (k,) of those that may be right, and at which IoU they are (k, 10)."""
    near = np.flatnonzero(joined.overlap[own] >= IOU_THRESHOLDS[0])
    overlap, beaten = joined.overlap[own][near, None], joined.beaten[own][near, None]
    return near, (overlap >= IOU_THRESHOLDS) & (beaten < IOU_THRESHOLDS)


def _average_precision(hits: np.ndarray, total: int, count: int) -> float:
    """Area under the falling envelope of precision over recall, by 101 points.

    hits: the places of the right ones among `total` detections in falling confidence; `count` labels. From one hit's
    recall on the envelope is the next hit's; from the last one's it is a line down to 0 at a recall of 1.
    """
    if not len(hits):
        return 0.0
    found = np.arange(1, len(hits) + 1)
    recall = found / count
    envelope = np.maximum.accumulate((found / (hits + 1))[::-1])[::-1]
    end = recall[-1]
    tail = np.interp(RECALLS, (end, 1.0), (len(hits) / total, 0.0)) if end < 1 else np.zeros(len(RECALLS))
    heights = np.append(envelope, 0.0)[np.searchsorted(recall, RECALLS, side="right")]
    return float(np.trapezoid(np.where(end > RECALLS, heights, tail), RECALLS))


def _best_f1(precision: np.ndarray, recall: np.ndarray) -> int:
    """Where on `CONFIDENCES` the smoothed mean F1 over the classes is highest. precision, recall: (c, 1000)."""
    if not len(precision):
        return 0
    f1 = (2 * precision * recall / (precision + recall + 1e-16)).mean(0)
    width = round(len(f1) * SMOOTHING * 2) // 2 + 1  # odd
    padded = np.pad(f1, width // 2, mode="edge")
    return int(np.convolve(padded, np.ones(width) / width, mode="valid").argmax())
