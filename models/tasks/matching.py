"""Pair detections with labels by the overlap of upright boxes (`box_overlaps`), masks, or other shapes.

Called by records.py for the metrics, and by predictions that --save-hybrid writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from models.heads.contract import EPSILON

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # COCO's thresholds
CONFUSION_IOU = 0.45  # IoU above which the confusion matrix pairs a detection with a label of any class


# A function that returns the floating-point overlaps (p,) of pairs, given the indices of detections and labels, (p,).
Overlaps = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Matches(NamedTuple):
    """The label that each of k detections is matched to; see `ImageRecord`."""

    overlap: np.ndarray  # (k,) IoU with the matched label, 0 without one
    partner: np.ndarray  # (k,) index of the matched label, 0 without one
    beaten: np.ndarray  # (k,) largest IoU of a more confident detection with the matched label


class Pairs(NamedTuple):
    """All pairs of a detection and a label in the same group, by detection, then by label."""

    paired: np.ndarray  # (d,) indices of the detections that have pairs
    counts: np.ndarray  # (d,) number of pairs of each of these detections
    detection: np.ndarray  # (p,) index of each pair's detection
    label: np.ndarray  # (p,) index of each pair's label


def match_by_overlap(overlaps: Overlaps, group: np.ndarray, true_group: np.ndarray) -> Matches:
    """Match each of k detections to the label that it overlaps most in its group (its class in its image).

    At a threshold t a detection is correct if beaten < t <= overlap: it is the most confident of the label's detections
    that reach t.

    Args:
        overlaps: function that returns the overlaps of pairs; called once, for all pairs of the same group
        group: group (k,) of each detection, an integer; a group's detections are in falling confidence
        true_group: group (m,) of each label, an integer
    """
    paired, counts, detection, label = _pairs(group, true_group)
    shared = overlaps(detection, label)
    overlap, beaten = np.zeros((2, len(group)), shared.dtype)
    partner = np.zeros(len(group), np.int64)
    if not len(paired):
        return Matches(overlap, partner, beaten)
    starts = counts.cumsum() - counts
    overlap[paired] = np.maximum.reduceat(shared, starts)
    # The first of the labels with the largest overlap.
    best = np.where(shared == np.repeat(overlap[paired], counts), np.arange(len(shared)), len(shared) - 1)
    partner[paired] = np.where(overlap[paired] > 0, label[np.minimum.reduceat(best, starts)], 0)
    # The largest overlap so far among one label's detections in falling confidence, as a rank: sums of ranks are exact.
    near = np.flatnonzero(overlap >= IOU_THRESHOLDS[0])
    near = near[np.argsort(partner[near], kind="stable")]
    values, rank = np.unique(overlap[near], return_inverse=True)
    contest = partner[near] * len(values)
    highest = np.maximum.accumulate(contest + rank)[:-1] - contest[:-1]
    beaten[near[1:]] = np.where(contest[1:] == contest[:-1], values[highest], 0)
    return Matches(overlap, partner, beaten)


def pair_by_overlap(overlaps: Overlaps, group: np.ndarray, true_group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair detections and labels of a group (an image) one to one in falling overlap, for the confusion matrix.

    Ties are ordered by label, then by detection. Returns the indices of the pairs' detections and labels, (p,) each,
    group by group.

    Args:
        overlaps: function that returns the overlaps of pairs; called once, for all pairs of the same group
        group: group (k,) of each detection, an integer
        true_group: group (m,) of each label, an integer
    """
    pairs = _pairs(group, true_group)
    overlap = overlaps(pairs.detection, pairs.label)
    near = np.flatnonzero(overlap > CONFUSION_IOU)
    detection, label = pairs.detection[near], pairs.label[near]
    order = np.lexsort((detection, label, -overlap[near], true_group[label]))
    detection_of: dict[int, int] = {}  # label -> detection
    paired = set()
    for one, true in zip(detection[order].tolist(), label[order].tolist(), strict=True):
        if one not in paired and true not in detection_of:
            detection_of[true] = one
            paired.add(one)
    count = len(detection_of)
    return np.fromiter(detection_of.values(), np.int64, count), np.fromiter(detection_of, np.int64, count)


def _pairs(group: np.ndarray, true_group: np.ndarray) -> Pairs:
    """Return the pairs of a detection and a label whose groups, (k,) and (m,), are equal."""
    labels = np.argsort(true_group, kind="stable")
    first, last = (np.searchsorted(true_group, group, side, sorter=labels) for side in ("left", "right"))
    paired = np.flatnonzero(last > first)
    counts = (last - first)[paired]
    starts = counts.cumsum() - counts
    index = np.arange(counts.sum()) + np.repeat(first[paired] - starts, counts)
    return Pairs(paired, counts, np.repeat(paired, counts), labels[index])


def box_overlaps(boxes: np.ndarray, true_boxes: np.ndarray) -> Overlaps:
    """Return a function that computes the IoU of upright boxes, xyxy (k, 4) and (m, 4), in the same unit."""

    def overlaps(detection: np.ndarray, label: np.ndarray) -> np.ndarray:
        a, b = boxes[detection], true_boxes[label]
        span = (np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])).clip(min=0)
        intersection: np.ndarray = span[:, 0] * span[:, 1]
        areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (a, b)]
        return np.asarray(intersection / (areas[1] + areas[0] - intersection + EPSILON))

    return overlaps
