"""The detections of one image, `DetectionPrediction`, and their matching with labels by overlap (boxes, masks)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import EPSILON, xywh_to_xyxy, xyxy_to_xywh
from models.tasks.contract import Image, Prediction, Thresholds
from utils.batch import CocoImage, ImageInfo
from utils.errors import plural
from utils.plots.drawing import Style, draw_boxes

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # COCO's thresholds
JOINED_CANDIDATES_PER_DETECTION = 10  # detections of an image's windows that are compared, the most confident
CUT_TOLERANCE_PIXELS = 2.0  # of the network: a detection that is nearer to a window's edge is cut by it
CUT_SHARE = 0.7  # share of a cut detection's area inside a whole one above which it is a part of that object
CONFUSION_IOU = 0.45  # IoU above which the confusion matrix pairs a detection with a label of any class

# A function that returns the floating-point overlaps (p,) of pairs, given the indices of detections and labels, (p,).
Overlaps = Callable[[np.ndarray, np.ndarray], np.ndarray]


def match_by_overlap(overlaps: Overlaps, group: np.ndarray, true_group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match each of k detections to the label that it overlaps most in its group (its class in its image).

    Returns the IoU with that label, 0 without one, and the largest IoU of a more confident detection with that label,
    (k,) each. At a threshold t a detection is correct if the second number < t <= the first: it is the most confident
    of the label's detections that reach t.

    Groups are integers, `group` (k,) of the detections, which are in falling confidence in each group, and `true_group`
    (m,) of the labels. `overlaps` is called once, for all pairs of the same group.
    """
    detection, label = _pairs(group, true_group)
    pair_overlap = overlaps(detection, label)
    overlap, rival_overlap = np.zeros((2, len(group)), pair_overlap.dtype)
    if not len(detection):
        return overlap, rival_overlap
    starts = np.flatnonzero(np.diff(detection, prepend=-1))  # of the pairs of each detection that has pairs
    paired, counts = detection[starts], np.diff(starts, append=len(detection))
    overlap[paired] = np.maximum.reduceat(pair_overlap, starts)
    # The first of the labels with the largest overlap.
    best = np.where(pair_overlap == np.repeat(overlap[paired], counts), np.arange(len(label)), len(label) - 1)
    matched = np.zeros(len(group), np.int64)
    matched[paired] = label[np.minimum.reduceat(best, starts)]
    # The largest overlap so far among one label's detections in falling confidence, as a rank: sums of ranks are exact.
    near = np.flatnonzero(overlap >= IOU_THRESHOLDS[0])
    near = near[np.argsort(matched[near], kind="stable")]
    values, rank = np.unique(overlap[near], return_inverse=True)
    contest = matched[near] * len(values)
    highest = np.maximum.accumulate(contest + rank)[:-1] - contest[:-1]
    rival_overlap[near[1:]] = np.where(contest[1:] == contest[:-1], values[highest], 0)
    return overlap, rival_overlap


def pair_by_overlap(overlaps: Overlaps, group: np.ndarray, true_group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair detections and labels of a group (an image) one to one in falling overlap, for the confusion matrix.

    Ties are ordered by label, then by detection. Returns the indices of the pairs' detections and labels, (p,) each,
    group by group. The arguments are those of `match_by_overlap`; detections may be in any order.
    """
    detection, label = _pairs(group, true_group)
    overlap = overlaps(detection, label)
    near = np.flatnonzero(overlap > CONFUSION_IOU)
    detection, label = detection[near], label[near]
    order = np.lexsort((detection, label, -overlap[near], true_group[label]))
    labels: dict[int, int] = {}  # of each paired detection
    paired_labels = set()
    for found, true in zip(detection[order].tolist(), label[order].tolist(), strict=True):
        if found not in labels and true not in paired_labels:
            labels[found] = true
            paired_labels.add(true)
    return np.fromiter(labels, np.int64), np.fromiter(labels.values(), np.int64)


def _pairs(group: np.ndarray, true_group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the detection and the label (p,) of all pairs whose groups are equal, by detection, then by label."""
    labels = np.argsort(true_group, kind="stable")
    first, last = (np.searchsorted(true_group, group, side, sorter=labels) for side in ("left", "right"))
    counts = last - first
    starts = counts.cumsum() - counts
    index = np.arange(counts.sum()) + np.repeat(first - starts, counts)
    return np.repeat(np.arange(len(group)), counts), labels[index]


def box_overlaps(boxes: np.ndarray, true_boxes: np.ndarray) -> Overlaps:
    """Return a function that computes the IoU of upright boxes, xyxy (k, 4) and (m, 4), in the same unit."""

    def overlaps(detection: np.ndarray, label: np.ndarray) -> np.ndarray:
        a, b = boxes[detection], true_boxes[label]
        span = (np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])).clip(min=0)
        intersection: np.ndarray = span[:, 0] * span[:, 1]
        areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (a, b)]
        return np.asarray(intersection / (areas[1] + areas[0] - intersection + EPSILON))

    return overlaps


def cut_by_window(boxes: Tensor, info: ImageInfo) -> Tensor:
    """Return which boxes (k, 4) end at an edge of their window that is not one of the image, bool (k,)."""
    edges = torch.tensor(info.window, dtype=boxes.dtype)
    inner = edges != torch.tensor((0, 0, *info.size))
    distances = (boxes - edges) * torch.tensor((1, 1, -1, -1)) * torch.tensor(info.placement.scale * 2)
    return ((distances < CUT_TOLERANCE_PIXELS) & inner).any(1)


@dataclass(frozen=True, eq=False, repr=False)
class DetectionPrediction(Prediction):
    """The detections of one image, in falling confidence."""

    size: tuple[int, int]  # width and height of the file's image, pixels
    rows: Tensor  # float64 (k, 6): xyxy in pixels of the file, confidence, class
    labels: np.ndarray  # float32 (m, 5): class, normalised xywh
    iou_thres: float  # overlap with a label above which `with_labels` drops a detection

    @property
    def array(self) -> np.ndarray:
        """The detections, float32 (k, 6): xyxy in pixels of the file, confidence, class."""
        return np.array(self.rows.numpy(), np.float32)

    xyxy = array  # YOLOv5's name

    @property
    def xywh(self) -> np.ndarray:
        """The detections, float32 (k, 6): centre and size in pixels of the file, confidence, class."""
        return self._with_boxes(xyxy_to_xywh(self.rows[:, :4]))

    @property
    def xyxyn(self) -> np.ndarray:
        """`xyxy` with boxes as shares of the file's width and height."""
        return self._with_boxes(self.rows[:, :4] / torch.tensor(self.size * 2))

    @property
    def xywhn(self) -> np.ndarray:
        """`xywh` with boxes as shares of the file's width and height."""
        return self._with_boxes(xyxy_to_xywh(self.rows[:, :4]) / torch.tensor(self.size * 2))

    def _with_boxes(self, boxes: Tensor) -> np.ndarray:
        """Return `array` with its boxes replaced by `boxes` (k, 4)."""
        return np.array(torch.cat((boxes, self.rows[:, 4:]), 1).numpy(), np.float32)

    @property
    def boxes(self) -> np.ndarray:
        """The boxes, float32 (k, 4): xyxy in pixels of the file."""
        return self.array[:, :4]

    @property
    def scores(self) -> np.ndarray:
        return self.array[:, 4]

    @property
    def classes(self) -> np.ndarray:
        return np.asarray(self.rows[:, 5].long().numpy())

    def columns(self) -> dict[str, Any]:
        """Return YOLOv5's columns: the corners of the boxes, confidences, class numbers and names."""
        return {**dict(zip(("xmin", "ymin", "xmax", "ymax"), self.boxes.T, strict=True)), **super().columns()}

    def describe(self) -> str:
        """Format the number of detections of each class: `2 persons, 1 dog`, or `nothing`."""
        counts = sorted(Counter(self.classes.tolist()).items())
        return ", ".join(plural(count, self.names[label]) for label, count in counts) or "nothing"

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the boxes drawn on it, the most confident on top."""
        rows = self.rows.flip(0)
        classes = [int(label) for label in rows[:, 5].tolist()]
        texts = [style.text(self.names[k], value) for k, value in zip(classes, rows[:, 4].tolist(), strict=True)]
        drawn: Image = image.copy()
        draw_boxes(drawn, rows[:, :4].numpy(), classes, texts, style.thickness)
        return drawn

    def crops(self, image: Image) -> list[tuple[str, Image]]:
        parts = []
        for left, top, right, bottom, _, label in self.rows.tolist():
            part = image[math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)]
            if part.size:
                parts.append((self.names[int(label)], part))
        return parts

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file: class, box and, if `with_confidence`, the confidence."""
        boxes = self.rows[:, :4] if corners else xyxy_to_xywh(self.rows[:, :4]) / torch.tensor(self.size * 2)
        rows = torch.cat((boxes, self.rows[:, 4:5]) if with_confidence else (boxes,), 1)
        return [
            f"{int(label)} {' '.join(f'{value:.6g}' for value in row)}"
            for label, row in zip(self.rows[:, 5], rows.tolist(), strict=True)
        ]

    def with_labels(self) -> DetectionPrediction:
        """Return the labels, with a confidence of 1, then the detections that overlap no label of their class by more
        than `iou_thres`."""
        return replace(self, rows=torch.cat((self.label_boxes(), self.rows[self.unlabelled()])))

    def label_boxes(self) -> Tensor:
        """Return the labels in the form of `rows`, with a confidence of 1."""
        label = torch.from_numpy(self.labels).double()
        truth = xywh_to_xyxy(label[:, 1:5]) * torch.tensor(self.size * 2)
        return torch.cat((truth, torch.ones(len(label), 1), label[:, :1]), 1)

    def unlabelled(self) -> Tensor:
        """Return the rows of the detections that match no label, int64 (u,); see `with_labels`."""
        both = (self.rows, self.label_boxes())
        overlaps = box_overlaps(*(rows[:, :4].numpy() for rows in both))
        overlap, _ = match_by_overlap(overlaps, *(rows[:, 5].long().numpy() for rows in both))
        (rows,) = np.nonzero(overlap <= self.iou_thres)
        return torch.from_numpy(rows)

    def joined(self, others: Sequence[Any], infos: Sequence[ImageInfo], thresholds: Thresholds) -> DetectionPrediction:
        """Return the detections of an image from those of its windows, which suppress each other in its pixels, after
        those are dropped that the edge of a window cuts and that lie in one that is not cut."""
        from torchvision.ops import nms  # imported here because it takes over a second

        parts = [self, *others]
        is_cut = torch.cat([cut_by_window(part.rows[:, :4], info) for part, info in zip(parts, infos, strict=True)])
        rows = torch.cat([part.rows for part in parts])
        order = rows[:, 4].argsort(descending=True, stable=True)[: JOINED_CANDIDATES_PER_DETECTION * thresholds.max_det]
        rows, is_cut = rows[order], is_cut[order]
        planes = rows[:, :4] + rows[:, 5:] * (0.0 if thresholds.agnostic_nms else 1.0 + max(self.size))  # a class each
        cut, whole = planes[is_cut, None], planes[~is_cut]
        span = (torch.minimum(cut[..., 2:], whole[:, 2:]) - torch.maximum(cut[..., :2], whole[:, :2])).clamp(min=0)
        areas = (cut[..., 2:] - cut[..., :2]).prod(2)
        remaining = torch.ones(len(rows), dtype=torch.bool)
        remaining[is_cut] = (span.prod(2) <= CUT_SHARE * areas).all(1)
        rows, planes = rows[remaining], planes[remaining]
        return replace(self, rows=rows[nms(planes, rows[:, 4], thresholds.iou_thres)[: thresholds.max_det]])

    def coco_rows(self) -> CocoImage:
        return CocoImage(self.image, self.path, self.rows.numpy())
