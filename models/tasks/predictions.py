"""The detections of one image, `DetectionPrediction`, and their matching with labels by overlap (boxes, masks)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import EPSILON, xywh_to_xyxy, xyxy_to_xywh
from models.tasks.contract import Image, Prediction, Thresholds
from utils.batch import CocoImage, ImageInfo
from utils.errors import UserError, plural
from utils.plots.drawing import Style, draw_boxes
from utils.review import DUPLICATE, MIN_CONFIDENCE, MISSING, POOR_BOX, SPURIOUS, WRONG_CLASS, Contradiction, ImageReview
from utils.user_code import class_named

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # COCO's thresholds
JOINED_CANDIDATES_PER_DETECTION = 10  # detections of an image's windows that are compared, the most confident
CUT_TOLERANCE_PIXELS = 2.0  # of the network: a detection that is nearer to a window's edge is cut by it
CUT_SHARE = 0.7  # share of a cut detection's area inside a whole one above which it is a part of that object
CONFUSION_IOU = 0.45  # IoU above which the confusion matrix pairs a detection with a label of any class
SAME_OBJECT, NEAR = 0.5, 0.1  # IoU from which two boxes are of one object, or near each other, in a review
CONFIDENT = 0.1  # least confidence of a detection that contradicts a label
SUPPORT_OFFSET = 0.02  # added to a label's support: without any, the more confident contradiction is first


class Pairs(NamedTuple):
    """Pairs of a detection and a label of one image, by detection, then by label."""

    detection: np.ndarray  # indices, int64 (p,)
    label: np.ndarray  # indices, int64 (p,)
    overlap: np.ndarray  # IoU, (p,)

    def only(self, chosen: np.ndarray) -> Pairs:
        """Return the pairs that are `chosen`, bool (p,)."""
        return Pairs(*(column[chosen] for column in self))


def meeting_pairs(
    boxes: np.ndarray, true_boxes: np.ndarray, image: np.ndarray, true_image: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the detection and the label (p,) of all pairs in one image whose upright boxes intersect, and a few more.

    Boxes are xyxy (k, 4) and (m, 4) in pixels of the image, which `image` (k,) and `true_image` (m,) number from 0,
    rising.
    """
    # Whole pixels in float32 are compared twice as fast, and outward rounding loses no pair.
    left, top = np.floor(boxes[:, :2].T).astype(np.float32)[..., None]
    right, bottom = np.ceil(boxes[:, 2:].T).astype(np.float32)[..., None]
    true_left, true_top = np.floor(true_boxes[:, :2].T).astype(np.float32)
    true_right, true_bottom = np.ceil(true_boxes[:, 2:].T).astype(np.float32)
    numbers = np.arange(true_image.max(initial=-1) + 2)
    ranges = [pairwise(np.searchsorted(column, numbers).tolist()) for column in (image, true_image)]
    found = [np.zeros((2, 0), np.int64)]
    for (start, end), (true_start, true_end) in zip(*ranges, strict=True):
        rows, labels = slice(start, end), slice(true_start, true_end)
        meets = left[rows] < true_right[labels]
        meets &= right[rows] > true_left[labels]
        meets &= top[rows] < true_bottom[labels]
        meets &= bottom[rows] > true_top[labels]
        found.append(np.add(np.nonzero(meets), ((start,), (true_start,))))
    detection, label = np.concatenate(found, 1)
    return detection, label


def box_pairs(boxes: np.ndarray, true_boxes: np.ndarray, image: np.ndarray, true_image: np.ndarray) -> Pairs:
    """Return the pairs of upright boxes in one image that intersect, and a few more; see `meeting_pairs`."""
    detection, label = meeting_pairs(boxes, true_boxes, image, true_image)
    return Pairs(detection, label, box_overlap(boxes[detection], true_boxes[label]))


def box_overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the IoU of paired upright boxes, xyxy (p, 4) each, in the same unit: (p,)."""
    intersection = shared_area(a, b)
    areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (a, b)]
    return np.asarray(intersection / (areas[1] + areas[0] - intersection + EPSILON))


def shared_area(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the area that paired upright boxes, xyxy (p, 4) each, have in common: (p,)."""
    span = (np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])).clip(min=0)
    return np.asarray(span[:, 0] * span[:, 1])


def match_by_overlap(pairs: Pairs, detections: int) -> tuple[np.ndarray, np.ndarray]:
    """Match each of `detections` to the label that it overlaps most, among its `pairs`: those of its class.

    Returns the IoU with that label, 0 without one, and the largest IoU of a more confident detection with that label,
    (k,) each. At a threshold t a detection is correct if the second number < t <= the first: it is the most confident
    of the label's detections that reach t. The detections of each class in an image are in falling confidence.
    """
    detection, label, pair_overlap = pairs
    overlap, rival_overlap = np.zeros((2, detections), pair_overlap.dtype)
    if not len(detection):
        return overlap, rival_overlap
    starts = np.flatnonzero(np.diff(detection, prepend=-1))  # of the pairs of each detection that has pairs
    paired, counts = detection[starts], np.diff(starts, append=len(detection))
    overlap[paired] = np.maximum.reduceat(pair_overlap, starts)
    # The first of the labels with the largest overlap.
    best = np.where(pair_overlap == np.repeat(overlap[paired], counts), np.arange(len(label)), len(label) - 1)
    matched = np.zeros(detections, np.int64)
    matched[paired] = label[np.minimum.reduceat(best, starts)]
    # The largest overlap so far among one label's detections in falling confidence, as a rank: sums of ranks are exact.
    near = np.flatnonzero(overlap >= IOU_THRESHOLDS[0])
    near = near[np.argsort(matched[near], kind="stable")]
    values, rank = np.unique(overlap[near], return_inverse=True)
    contest = matched[near] * len(values)
    highest = np.maximum.accumulate(contest + rank)[:-1] - contest[:-1]
    rival_overlap[near[1:]] = np.where(contest[1:] == contest[:-1], values[highest], 0)
    return overlap, rival_overlap


def pair_by_overlap(pairs: Pairs, true_image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair detections and labels of an image one to one in falling overlap, for the confusion matrix.

    Ties are ordered by label, then by detection. Returns the indices of the pairs' detections and labels, (p,) each,
    image by image; `true_image` (m,) are the images of all labels.
    """
    detection, label, overlap = pairs.only(pairs.overlap > CONFUSION_IOU)
    order = np.lexsort((detection, label, -overlap, true_image[label]))
    labels: dict[int, int] = {}  # of each paired detection
    paired_labels = set()
    for found, true in zip(detection[order].tolist(), label[order].tolist(), strict=True):
        if found not in labels and true not in paired_labels:
            labels[found] = true
            paired_labels.add(true)
    return np.fromiter(labels, np.int64), np.fromiter(labels.values(), np.int64)


def overlap_matrix(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the IoU of all pairs of the boxes in the first four columns, (k, m)."""
    pairs = np.indices((len(rows), len(others))).reshape(2, -1)
    return box_overlap(rows[pairs[0], :4], others[pairs[1], :4]).reshape(len(rows), len(others))


def contradictions(rows: np.ndarray, labels: np.ndarray) -> tuple[list[Contradiction], list[tuple[int, float]]]:
    """Return the contradictions between an image's detections and labels; and the class and support of each label.

    Both are (n, 6): xyxy, confidence, class, the detections in falling confidence. A detection supports the label of
    its class that it overlaps most, by `SAME_OBJECT` at least; a label's support is the highest confidence of these.
    """
    labels = np.concatenate((labels, np.zeros((1, 6))))  # one more, which nothing overlaps, as arrays need a maximum
    confidence, classes, true_classes = rows[:, 4].tolist(), rows[:, 5].astype(int), labels[:, 5].astype(int)
    overlap = overlap_matrix(rows, labels)
    of_class = np.where(classes[:, None] == true_classes, overlap, 0)
    is_support = of_class.max(1) >= SAME_OBJECT
    support = np.zeros(len(labels))
    np.maximum.at(support, of_class[is_support].argmax(1), rows[is_support, 4])
    found: dict[tuple[str, int], Contradiction] = {}  # by kind and label, or detection: a label's most confident one

    def add(kind: str, label: int, against: float, predicted: int, shared: float, weight: float = 1.0) -> None:
        score = weight * against / (against + float(support[label]) + SUPPORT_OFFSET)
        values = (score, int(true_classes[label]), predicted, against, shared)
        found.setdefault((kind, label), Contradiction(kind, *values, tuple(labels[label, :4].tolist())))

    missing: list[int] = []
    for row in np.flatnonzero(~is_support & (rows[:, 4] >= CONFIDENT)).tolist():
        against, predicted, weaker = confidence[row], int(classes[row]), support < confidence[row]
        label, own = int(overlap[row].argmax()), int((of_class[row] * weaker).argmax())
        shared = float(overlap[row, label])
        if shared >= SAME_OBJECT:
            if weaker[label]:
                add(WRONG_CLASS, label, against, predicted, shared)
        elif of_class[row, own] * weaker[own] >= NEAR:
            add(POOR_BOX, own, against, predicted, float(overlap[row, own]))
        # A label without support that is near may be of this object; an earlier missing label is of the same one.
        elif (overlap[row, support < CONFIDENT] < NEAR).all() and (
            (overlap_matrix(rows[[row]], rows[missing]) < SAME_OBJECT).all()
        ):
            missing, box = [*missing, row], tuple(rows[row, :4].tolist())
            found[MISSING, row] = Contradiction(MISSING, against, None, predicted, against, shared, box)
    twins = np.where(overlap_matrix(labels, labels) >= SAME_OBJECT, support, 0).argmax(1).tolist()
    for label, twin in enumerate(twins[:-1]):
        box, label_class = tuple(labels[label, :4].tolist()), int(true_classes[label])
        if (overlap[:, label] < NEAR).all():
            found[SPURIOUS, label] = Contradiction(SPURIOUS, 0.0, label_class, None, None, None, box)
        elif support[twin] > max(support[label], CONFIDENT):
            shared = overlap_matrix(labels[[label]], labels[[twin]]).item()
            add(DUPLICATE, label, float(support[twin]), int(true_classes[twin]), shared, weight=shared)
    return [*found.values()], list(zip(true_classes[:-1].tolist(), support[:-1].tolist(), strict=True))


def tracking_class(import_path: str) -> type[Any]:
    """Return a class of a package of requirements-track.txt. Raises `UserError` if a package is not installed."""
    try:
        return class_named(import_path)
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; pip install --no-deps -r requirements-track.txt") from None


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
        """Return YOLOv5's columns: the corners of the boxes, confidences, class numbers and names; and the tracks."""
        tracks = {} if self.ids is None else {"track": self.ids}
        return {**dict(zip(("xmin", "ymin", "xmax", "ymax"), self.boxes.T, strict=True)), **super().columns(), **tracks}

    def describe(self) -> str:
        """Format the number of detections of each class: `2 persons, 1 dog`, or `nothing`."""
        counts = sorted(Counter(self.classes.tolist()).items())
        return ", ".join(plural(count, self.names[label]) for label, count in counts) or "nothing"

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the boxes drawn on it, the most confident on top."""
        rows = self.rows.flip(0)
        classes = [int(label) for label in rows[:, 5].tolist()]
        texts = [style.text(self.names[k], value) for k, value in zip(classes, rows[:, 4].tolist(), strict=True)]
        if self.ids is not None:
            pairs = zip(texts, self.ids[::-1].tolist(), strict=True)
            texts = [text if track < 0 else f"#{track} {text}".rstrip() for text, track in pairs]
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
        """Return lines of a label file: class, box and, if `with_confidence`, the confidence; the track if tracked."""
        boxes = self.rows[:, :4] if corners else xyxy_to_xywh(self.rows[:, :4]) / torch.tensor(self.size * 2)
        rows = torch.cat((boxes, self.rows[:, 4:5]) if with_confidence else (boxes,), 1)
        return self.with_tracks(
            f"{int(label)} {' '.join(f'{value:.6g}' for value in row)}"
            for label, row in zip(self.rows[:, 5], rows.tolist(), strict=True)
        )

    def with_tracks(self, lines: Iterable[str]) -> list[str]:
        """Return the lines of a label file, each with its track if there are any."""
        return [*map("{} {}".format, lines, self.ids)] if self.ids is not None else [*lines]

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
        rows, labels = self.rows.numpy(), self.label_boxes().numpy()
        pairs = box_pairs(rows[:, :4], labels[:, :4], np.zeros(len(rows), int), np.zeros(len(labels), int))
        same_class = rows[pairs.detection, 5] == labels[pairs.label, 5]
        overlap, _ = match_by_overlap(pairs.only(same_class), len(rows))
        return torch.from_numpy(np.flatnonzero(overlap <= self.iou_thres))

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
        cut, whole = planes[is_cut].numpy(), planes[~is_cut].numpy()
        part, other = meeting_pairs(cut, whole, *(np.zeros(len(boxes), int) for boxes in (cut, whole)))
        inside = shared_area(cut[part], whole[other]) > CUT_SHARE * shared_area(cut[part], cut[part])
        remaining = torch.ones(len(rows), dtype=torch.bool)
        remaining[is_cut.nonzero()[:, 0][part[inside]]] = False
        rows, planes = rows[remaining], planes[remaining]
        return replace(self, rows=rows[nms(planes, rows[:, 4], thresholds.iou_thres)[: thresholds.max_det]])

    def to_supervision(self, with_masks: bool = True) -> Any:
        """Return the detections as supervision.Detections, with a segmenter's masks if `with_masks`: they take time."""
        mask = getattr(self, "masks", None) if with_masks else None
        data = {"class_name": np.array([name for name, _ in self.items], str)}
        return tracking_class("supervision:Detections")(
            xyxy=self.boxes, mask=mask, confidence=self.scores, class_id=self.classes, tracker_id=self.ids, data=data
        )

    def coco_rows(self) -> CocoImage:
        return CocoImage(self.image, self.path, self.rows.numpy())

    def review(self, info: Any) -> ImageReview:
        """Return the contradictions between the labels' boxes and the detections."""
        labels, rows = self.label_boxes().numpy(), self.rows.numpy()
        drawn = rows[rows[:, 4] >= MIN_CONFIDENCE]
        return ImageReview(self.image, self.path, *contradictions(rows, labels), self.size, labels, drawn)
