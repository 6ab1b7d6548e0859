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
POINTS = np.linspace(0, 1, 201)  # of the curves that are kept: confidences and recalls; every second one is of RECALLS
CONFIDENT = 0.25  # only more confident detections have a part in the confusion matrix
PAIRED = 0.45  # IoU above which such a detection is taken for a label, of whatever class
NO_PAIRS = np.zeros((0, 2), np.int32)
SMOOTHING = 0.1  # of the F1 curve, as a share of its length
SIZE_EDGES = (0.0, 16.0, 32.0, 64.0, 96.0, float("inf"))  # pixels; COCO's small, medium, large part at 32 and 96


class Shown(NamedTuple):
    """What is kept of an image to show it. Boxes in pixels of the file, cut at its edges."""

    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    labels: np.ndarray  # float32 (m, 5): class, xyxy
    predictions: np.ndarray  # float32 (k, 6): xyxy, confidence, class, in falling confidence


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
    paired: np.ndarray = NO_PAIRS  # (p, 2) classes of a label and of the detection taken for it
    shown: Shown | None = None  # of an image that is to be shown


NOTHING = ImageRecord._make((-1, *[np.zeros(0, np.float32)] * 8, NO_PAIRS, None))  # to join where there is no record


class Curves(NamedTuple):
    """Per class that has labels, at IoU 0.5, (c, 201) each at `POINTS`."""

    precision: np.ndarray  # at a confidence
    recall: np.ndarray  # at a confidence
    envelope: np.ndarray  # precision at a recall: the area under it is the AP


@dataclass(frozen=True)
class ClassScores:
    """Per class that has labels: number, images it is in, labels, precision, recall, AP at each IoU (c, 10), curves."""

    classes: np.ndarray
    images: np.ndarray
    instances: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    ap: np.ndarray
    curves: Curves

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
    paired, counts, detection, label = _pairs(group, true_group)
    if not len(paired):
        return Matches(overlap, partner, beaten)
    starts = counts.cumsum() - counts
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


class Pairs(NamedTuple):
    """All pairs of a detection and a label of one group: of each detection one after the other, and its labels in
    their order."""

    paired: np.ndarray  # (d,) the detections that have any
    counts: np.ndarray  # (d,) how many
    detection: np.ndarray  # (p,)
    label: np.ndarray  # (p,)


def _pairs(group: np.ndarray, true_group: np.ndarray) -> Pairs:
    """Pairs of detections (k,) and labels (m,) of one group."""
    labels = np.argsort(true_group, kind="stable")
    first, last = (np.searchsorted(true_group, group, side, sorter=labels) for side in ("left", "right"))
    paired = np.flatnonzero(last > first)
    counts = (last - first)[paired]
    starts = counts.cumsum() - counts
    place = np.arange(counts.sum()) + np.repeat(first[paired] - starts, counts)
    return Pairs(paired, counts, np.repeat(paired, counts), labels[place])


def pair_detections(
    boxes: np.ndarray, group: np.ndarray, true_boxes: np.ndarray, true_group: np.ndarray, eps: float = 1e-7
) -> tuple[np.ndarray, np.ndarray]:
    """Give detections and labels of a group, which is an image, to each other, one to one, in falling IoU.

    Boxes (k, 4) and (m, 4) xyxy; of equal overlaps the earlier label comes first, then the earlier detection. Returns
    the indices of the pairs' detections and labels, (p,) each, group by group.
    """
    pairs = _pairs(group, true_group)
    overlap = _overlaps(boxes[pairs.detection], true_boxes[pairs.label], eps)
    near = np.flatnonzero(overlap > PAIRED)
    detection, label = pairs.detection[near], pairs.label[near]
    order = np.lexsort((detection, label, -overlap[near], true_group[label]))
    given: dict[int, int] = {}  # label -> detection
    taken = set()
    for own, true in zip(detection[order].tolist(), label[order].tolist(), strict=True):
        if own not in taken and true not in given:
            given[true] = own
            taken.add(own)
    return np.fromiter(given.values(), np.int64, len(given)), np.fromiter(given, np.int64, len(given))


def confusion_matrix(records: Sequence[ImageRecord], classes: int) -> np.ndarray:
    """Counts by true and predicted class, int64 (classes + 1, classes + 1); the last is background.

    A label without a detection was taken for background, a detection without a label is background.
    """
    records = [NOTHING, *records]
    true = np.concatenate([record.true_label for record in records]).astype(np.int64)
    found = np.concatenate([record.label[record.confidence > CONFIDENT] for record in records]).astype(np.int64)
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    np.add.at(matrix, tuple(np.concatenate([record.paired for record in records]).T), 1)
    matrix[:-1, -1] = np.bincount(true, minlength=classes) - matrix[:-1].sum(1)
    matrix[-1, :-1] = np.bincount(found, minlength=classes) - matrix[:, :-1].sum(0)
    return matrix


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
    columns = list(zip(NOTHING, *ordered, strict=True))[1:-1]
    joined = ImageRecord._make((-1, *map(np.concatenate, columns), None))
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
    curves = Curves(*(np.zeros((len(joined.classes), len(POINTS))) for _ in Curves._fields))
    for row, (own, count) in enumerate(zip(_slices(joined), joined.instances, strict=True)):
        total = own.stop - own.start
        if not total:
            continue
        near, correct = _correct(joined, own)
        for column, right in enumerate(correct.T):
            ap[row, column] = _average_precision(near[right], total, count)
        right = near[correct[:, 0]]
        hits = np.bincount(right, minlength=total).cumsum()
        confidence = -joined.confidence[own]
        share, found = hits / np.arange(1, total + 1), hits / count
        for at, shares, founds in ((CONFIDENCES, precision, recall), (POINTS, curves.precision, curves.recall)):
            # Before the first detection 1 and 0
            shares[row] = np.interp(-at, confidence, share, left=1)
            founds[row] = np.interp(-at, confidence, found, left=0)
        curves.envelope[row] = _envelope(right, total, count, POINTS)
    best = _best_f1(precision, recall)
    return ClassScores(joined.classes, joined.images, joined.instances, precision[:, best], recall[:, best], ap, curves)


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
    """Area under the falling envelope of precision over recall, by 101 points; see `_envelope`."""
    return float(np.trapezoid(_envelope(hits, total, count, RECALLS), RECALLS)) if len(hits) else 0.0


def _envelope(hits: np.ndarray, total: int, count: int, at: np.ndarray) -> np.ndarray:
    """The falling envelope of precision over recall, at the recalls `at`, which rise from 0 to 1: (n,) like them.

    hits: the places of the right ones among `total` detections in falling confidence; `count` labels. From one hit's
    recall on the envelope is the next hit's; from the last one's it is a line down to 0 at a recall of 1.
    """
    if not len(hits):
        return np.zeros(len(at))
    found = np.arange(1, len(hits) + 1)
    recall = found / count
    envelope = np.maximum.accumulate((found / (hits + 1))[::-1])[::-1]
    end = recall[-1]
    tail = np.interp(at, (end, 1.0), (len(hits) / total, 0.0)) if end < 1 else np.zeros(len(at))
    heights = np.append(envelope, 0.0)[np.searchsorted(recall, at, side="right")]
    return np.where(end > at, heights, tail)


def _best_f1(precision: np.ndarray, recall: np.ndarray) -> int:
    """Where on `CONFIDENCES` the smoothed mean F1 over the classes is highest. precision, recall: (c, 1000)."""
    if not len(precision):
        return 0
    f1 = (2 * precision * recall / (precision + recall + 1e-16)).mean(0)
    width = round(len(f1) * SMOOTHING * 2) // 2 + 1  # odd
    padded = np.pad(f1, width // 2, mode="edge")
    return int(np.convolve(padded, np.ones(width) / width, mode="valid").argmax())
