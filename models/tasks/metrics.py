"""`DetectionMetrics`: the numbers, tables, documents and examples of a validation.

A validation makes an `ImageRecord` of each image (`image_records`), joins those of all processes (`join`), and computes
scores by class and by object size from them (`score_classes`, `score_sizes`). Made by `BoxTask.metrics`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import xywh_to_xyxy
from models.tasks.contract import Metrics, Prediction, Thresholds
from models.tasks.predictions import (
    IOU_THRESHOLDS,
    DetectionPrediction,
    Overlaps,
    box_overlaps,
    match_by_overlap,
    pair_by_overlap,
)
from utils.batch import Batch, ImageInfo
from utils.files import csv_text
from utils.summary import Box, Example, Row, Summary, confusion_text, dense_counts, sparse_counts

CONFIDENT_THRESHOLD = 0.25  # lowest confidence of detections that are drawn or in the confusion matrix
NO_PAIRS = np.zeros((0, 2), np.int32)


class ShownImage(NamedTuple):
    """Labels and confident detections of an image to draw, in pixels of the file, see `shown_image`.

    Outlines, (p, 2) each, are drawn instead of boxes, which then surround them.
    """

    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    labels: np.ndarray  # float32 (m, 5): class, xyxy
    predictions: np.ndarray  # float32 (k, 6): xyxy, confidence, class, in falling confidence
    label_outlines: Sequence[np.ndarray] = ()  # one for each row of `labels`, or none
    prediction_outlines: Sequence[np.ndarray] = ()  # one for each row of `predictions`, or none


class ImageRecord(NamedTuple):
    """The contribution of one image with k detections and m labels. A side is sqrt(area) in pixels of the file."""

    image: int  # index in the split; records are sorted by it, so that sums do not depend on the processes
    overlap: np.ndarray  # (k,) overlap with the label that the detection is matched to, 0 without one
    beaten: np.ndarray  # (k,) largest overlap of a more confident detection with that label
    partner_side: np.ndarray  # (k,) side of that label, 0 without one
    confidence: np.ndarray  # (k,)
    label: np.ndarray  # (k,) class of the detection
    side: np.ndarray  # (k,) side of the detection
    true_label: np.ndarray  # (m,) class of the label
    true_side: np.ndarray  # (m,) side of the label
    paired: np.ndarray = NO_PAIRS  # (p, 2) class of a label and of the detection paired with it
    shown: ShownImage | None = None  # None if the image is not drawn


# A record without detections and labels: concatenated with the others, so that there is at least one.
EMPTY_RECORD = ImageRecord._make((-1, *[np.zeros(0, np.float32)] * 8, NO_PAIRS, None))


def unmatched(
    image: int,
    confidence: np.ndarray,
    label: np.ndarray,
    side: np.ndarray,
    true_label: np.ndarray,
    true_side: np.ndarray,
    shown: ShownImage | None = None,
) -> ImageRecord:
    """Return the record of an image before `matched_by` and `paired_by`; detections are in falling confidence."""
    nothing = np.zeros(len(label), np.float32)
    return ImageRecord(
        image, nothing, nothing, nothing, confidence, label, side, true_label, true_side, NO_PAIRS, shown
    )


def matched_by(overlaps: Overlaps, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with matches, which precision and recall are computed from.

    Args:
        overlaps: function that returns the overlaps of detections and labels, both numbered over the whole batch
    """
    if not records:
        return []
    joined, image, true_image = _joined(records)
    classes = int(max(joined.label.max(initial=0), joined.true_label.max(initial=0))) + 1
    group, true_group = image * classes + joined.label, true_image * classes + joined.true_label
    overlap, partner, beaten = match_by_overlap(overlaps, group.astype(np.int64), true_group.astype(np.int64))
    side = np.where(overlap > 0, np.append(joined.true_side, np.float32(0))[partner], np.float32(0))
    ends = np.cumsum([len(record.label) for record in records])[:-1]
    columns = zip(*(np.split(column, ends) for column in (overlap, beaten, side)), strict=True)
    return [
        record._replace(overlap=one_overlap, beaten=one_beaten, partner_side=partner_side)
        for record, (one_overlap, one_beaten, partner_side) in zip(records, columns, strict=True)
    ]


def paired_by(overlaps: Overlaps, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with the pairs of the confusion matrix, regardless of class; see `matched_by`."""
    if not records:
        return []
    joined, image, true_image = _joined(records)
    confident = np.flatnonzero(joined.confidence > CONFIDENT_THRESHOLD)
    detection, label = pair_by_overlap(lambda one, true: overlaps(confident[one], true), image[confident], true_image)
    pairs = np.stack((joined.true_label[label], joined.label[confident[detection]]), 1).astype(np.int32)
    ends = np.bincount(true_image[label], minlength=len(records)).cumsum()[:-1]
    return [record._replace(paired=own) for record, own in zip(records, np.split(pairs, ends), strict=True)]


def shown_image(
    path: str,
    size: tuple[int, int],
    labels: np.ndarray,
    predictions: np.ndarray,
    label_outlines: Sequence[np.ndarray] = (),
    prediction_outlines: Sequence[np.ndarray] = (),
) -> ShownImage:
    """Return what is drawn of an image: its labels, and the confident ones of `predictions`, in any order."""
    confident = np.flatnonzero(predictions[:, 4] >= CONFIDENT_THRESHOLD)
    order = confident[np.argsort(-predictions[confident, 4], kind="stable")]
    outlines = [prediction_outlines[k] for k in order] if prediction_outlines else ()
    return ShownImage(path, size, labels, predictions[order], label_outlines, outlines)


def _joined(records: Sequence[ImageRecord]) -> tuple[ImageRecord, np.ndarray, np.ndarray]:
    """Return the columns of all records as one record, and the number of each detection's and each label's record."""
    columns = list(zip(EMPTY_RECORD, *records, strict=True))[1:-1]
    numbers = np.arange(len(records))
    image = np.repeat(numbers, [len(record.label) for record in records])
    true_image = np.repeat(numbers, [len(record.true_label) for record in records])
    return ImageRecord._make((-1, *map(np.concatenate, columns), None)), image, true_image


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
    joined, _, _ = _joined(ordered)
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
    columns = (joined.overlap, joined.beaten, joined.partner_side, joined.confidence, joined.side)
    in_order = (column[order] for column in columns)
    return JoinedRecords(classes.astype(np.int64), instances, images, true_row, joined.true_side, bounds, *in_order)


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
    """Return the AP (c, 10) of the classes that have labels, `counts` many, with sides in [low, high) pixels."""
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
    """Return the falling envelope of precision at the recalls `at`, (n,), which rise from 0 to 1.

    Between the recalls of two hits the envelope is the second hit's precision; after the last hit it is a line to 0 at
    a recall of 1.

    Args:
        hits: ranks of the correct ones among `total` detections of a class, in falling confidence
        count: number of labels
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
    """Return the index in `F1_CONFIDENCES` at which the smoothed mean F1 is highest, from curves (c, 1000) by class."""
    if not len(precision):
        return 0
    f1 = (2 * precision * recall / (precision + recall + 1e-16)).mean(0)
    width = round(len(f1) * F1_SMOOTHING_SHARE * 2) // 2 + 1  # odd
    padded = np.pad(f1, width // 2, mode="edge")
    return int(np.convolve(padded, np.ones(width) / width, mode="valid").argmax())


FITNESS_WEIGHTS = {"mAP_0.5": 0.1, "mAP_0.5:0.95": 0.9}  # YOLOv5's weights
CLASS_COLUMNS = ("class", "images", "instances", "precision", "recall", "AP50", "AP50-95")  # columns of classes.csv
SIZES_TITLE = "  by size, the square root of an object's area in pixels of the image's file:"


def score_tables(
    titles: Row,
    names: Mapping[int, str],
    images: int,
    scores: Sequence[ClassScores],
    sizes: Sequence[Sequence[SizeScores]],
) -> tuple[list[Row | str], list[Row | str]]:
    """Return the table in two parts: titles and the row for all classes; rows per class and per object size.

    Args:
        titles: titles of the columns: name, images, labels, and four scores for each set
        scores: scores by class, a set for boxes or one each for boxes and masks
        sizes: scores by object size of each set
    """
    means = [value for one in scores for value in one.means().values()]
    overall: Row = ("all", images, int(scores[0].instances.sum()), *means)
    details: list[Row | str] = []
    for first, *others in zip(*map(class_values, scores), strict=True):
        details.append((names[first[0]], *first[1:], *(score for values in others for score in values[3:])))
    if sizes[0]:
        details.append(SIZES_TITLE)
    for of_sets in zip(*sizes, strict=True):
        values = [value for one in of_sets for value in ("-", "-", one.ap50, one.ap)]
        details.append((of_sets[0].title, images, of_sets[0].instances, *values))
    return [titles, overall], details


def ap_by_class(scores: ClassScores, names: Mapping[int, str]) -> dict[str, dict[str, float]]:
    """Return AP50 and AP of each class that has labels, by class name."""
    return {
        name: {names[int(k)]: float(value) for k, value in zip(scores.classes, values, strict=True)}
        for name, values in zip(CLASS_METRICS, (scores.ap[:, 0], scores.ap.mean(1)), strict=True)
    }


def class_values(scores: ClassScores) -> list[list[Any]]:
    """Return the number, images, labels and scores of each class that has labels, as plain values."""
    columns = (scores.precision, scores.recall, scores.ap[:, 0], scores.ap.mean(1))
    counts = (scores.classes, scores.images, scores.instances)
    return [list(row) for row in zip(*(values.tolist() for values in (*counts, *columns)), strict=True)]


def score_evidence(scores: ClassScores) -> dict[str, Any]:
    """Return the input of `class_rows` and the curves, as plain values and tensors."""
    return {
        "classes": class_values(scores),
        "curves": {
            name: torch.from_numpy(values.astype(np.float32)) for name, values in scores.curves._asdict().items()
        },
    }


def class_rows(names: Sequence[str], classes: Sequence[Sequence[float]]) -> Iterator[list[Any]]:
    """Iterate over the rows of classes.csv, one for every class; `classes` is the result of `class_values`."""
    by_number = {row[0]: row for row in classes}
    for number, name in enumerate(names):
        if number in by_number:
            _, images, instances, *scores = by_number[number]
            yield [name, images, instances, *(f"{score:.9g}" for score in scores)]
        else:
            yield [name, 0, 0, *[""] * 4]


def curve_rows(names: Sequence[str], classes: Sequence[Sequence[float]], *curves: Tensor) -> Iterator[list[str]]:
    """Iterate over the rows of a curve's file: class, point and values, for every class that has labels.

    Args:
        classes: rows that begin with the number of a class that has labels
        curves: values (c, 201) of each class at `CURVE_POINTS`
    """
    points = [f"{point:.4g}" for point in CURVE_POINTS]
    for (number, *_), *values in zip(classes, *(curve.tolist() for curve in curves), strict=True):
        for point, *row in zip(points, *values, strict=True):
            yield [names[int(number)], point, *(f"{value:.6g}" for value in row)]


def image_records(
    boxes_of: Sequence[Tensor], infos: Sequence[ImageInfo], shown: Collection[int] = ()
) -> list[ImageRecord]:
    """Return a record for each image of a batch.

    Args:
        boxes_of: detections (k, 6) of each image in falling confidence: xyxy in pixels of its file, confidence, class
        infos: origin and labels of each image
        shown: indices of the images to draw
    """
    if not infos:
        return []
    records = []
    detections = [boxes.numpy() for boxes in boxes_of]
    truth = [_corners(info) for info in infos]
    for rows, true_boxes, info in zip(detections, truth, infos, strict=True):
        confidence, label = rows[:, 4:].astype(np.float32).T.copy()
        drawn = None
        if info.image in shown:
            inside = true_boxes.clip(0, np.array(info.size * 2, np.float32))
            labels = np.concatenate((info.rows[:, :1], inside), 1)
            drawn = shown_image(info.path, info.size, labels, rows.astype(np.float32))
        sides = _side(rows[:, :4]), _side(true_boxes)
        records.append(unmatched(info.image, confidence, label, sides[0], info.rows[:, 0], sides[1], drawn))
    overlaps = box_overlaps(np.concatenate(detections)[:, :4], np.concatenate(truth))
    return paired_by(overlaps, matched_by(overlaps, records))


def _corners(info: ImageInfo) -> np.ndarray:
    """Return the boxes of the labels, xyxy in pixels of the file, float32 (m, 4)."""
    corners = xywh_to_xyxy(torch.from_numpy(info.rows[:, 1:5])).numpy() * np.array(info.size * 2, np.float32)
    return np.asarray(corners)


def _side(boxes: np.ndarray) -> np.ndarray:
    """Return the square roots of the areas of xyxy boxes, (n,)."""
    width, height = (boxes[:, 2:4] - boxes[:, :2]).clip(min=0).T
    return np.asarray(np.sqrt(width * height))


MAX_MAP_CONFIDENCE = 0.01  # highest threshold at which mAP is comparable, see docs/validation.md
TITLES = ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")


class DetectionMetrics(Metrics):
    """Precision, recall and mean average precision.

    Args:
        names: class names, by number
        shown: indices of the images to draw
    """

    def __init__(self, names: Mapping[int, str], shown: frozenset[int] = frozenset()) -> None:
        self.names, self.shown = dict(names), shown

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        """Return a record for each image."""
        boxes = [prediction.rows for prediction in cast("Sequence[DetectionPrediction]", predictions)]
        return image_records(boxes, batch.infos, self.shown)

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """Return the metrics of a split, tables by class and by object size, and the evidence for `documents`."""
        joined = join(records)
        scores = score_classes(joined)
        metrics = scores.means()
        fitness = sum(weight * metrics[name] for name, weight in FITNESS_WEIGHTS.items())
        overall, details = score_tables(TITLES, self.names, len(records), [scores], [score_sizes(joined)])
        evidence = detection_evidence(records, scores, len(self.names))
        headline = {"mAP50": metrics["mAP_0.5"], "mAP": metrics["mAP_0.5:0.95"]}
        by_class = ap_by_class(scores, self.names)
        return Summary(metrics, fitness, overall, details, evidence, by_class=by_class, headline=headline)

    def threshold_warnings(self, thresholds: Thresholds) -> list[str]:
        """Return a warning if `conf_thres` ends the precision-recall curves so early that mAP changes."""
        if thresholds.conf_thres <= MAX_MAP_CONFIDENCE:
            return []
        return [
            f"warning: --conf-thres {thresholds.conf_thres:g} cuts the precision-recall curves, so mAP is not "
            f"comparable with other runs'; give {MAX_MAP_CONFIDENCE:g} or less, such as 0.001, the default"
        ]

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return CSV files: scores and counts by class, curves, and the boxes of the images to draw.

        Returns {} if the summary lacks evidence, as in a run that an older version began.
        """
        evidence, names = summary.evidence, list(self.names.values())
        if not evidence:
            return {}
        classes, curves = evidence["classes"], evidence["curves"]
        confusion = dense_counts(evidence["confusion"], len(names) + 1)
        by_confidence = curve_rows(names, classes, curves["precision"], curves["recall"])
        boxes_head = ["image", "kind", "class", "confidence", "x1", "y1", "x2", "y2"]
        outlined = any(f"{kind}_outlines" in image for image in evidence["shown"] for kind in ("label", "prediction"))
        return {
            "classes.csv": csv_text(CLASS_COLUMNS, class_rows(names, classes)),
            "confusion_matrix.csv": confusion_text(confusion, [*names, "background"]),
            "curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
            "PR_curve.csv": csv_text(("class", "recall", "precision"), curve_rows(names, classes, curves["envelope"])),
            "val_boxes.csv": csv_text(
                boxes_head + ["outline"] * outlined, _box_rows(names, evidence["shown"], outlined)
            ),
        }

    def examples(self, summary: Summary) -> list[Example]:
        """Return the images to draw, with their boxes, ordered by index."""
        return [
            Example(
                Path(image["path"]).name,
                image["image"],
                tuple(image["size"]),
                [
                    _normalised(label, None, box, outline, image["size"])
                    for (label, *box), outline in _rows(image, "label")
                ],
                [
                    _normalised(label, score, box, outline, image["size"])
                    for (*box, score, label), outline in _rows(image, "prediction")
                ],
            )
            for image in summary.evidence.get("shown", [])
        ]


def detection_evidence(records: Sequence[ImageRecord], scores: ClassScores, classes: int) -> dict[str, Any]:
    """Return the plain values that documents and examples are made from, regardless of the order of the records.

    The keys are part of the format of a run's saved state.
    """
    shown = sorted(((record.image, record.shown) for record in records if record.shown), key=lambda pair: pair[0])
    return {
        **score_evidence(scores),
        "confusion": sparse_counts(confusion_matrix(records, classes)),
        "shown": [
            {
                "image": image,
                "path": boxes.path,
                "size": list(boxes.size),
                "labels": boxes.labels.tolist(),
                "predictions": boxes.predictions.tolist(),
                **_plain_outlines(boxes),
            }
            for image, boxes in shown
        ],
    }


def _plain_outlines(shown: ShownImage) -> dict[str, list[list[float]]]:
    """Return the outlines of labels and of predictions, if there are any, as lists x y x y ..."""
    of_kinds = {"label_outlines": shown.label_outlines, "prediction_outlines": shown.prediction_outlines}
    return {kind: [points.ravel().tolist() for points in outlines] for kind, outlines in of_kinds.items() if outlines}


def _rows(image: Mapping[str, Any], kind: str) -> Iterator[tuple[list[float], list[float]]]:
    """Iterate over an image's labels or predictions, each with its outline x y x y ..., empty if there is none."""
    rows = image[f"{kind}s"]
    return zip(rows, image.get(f"{kind}_outlines") or [[]] * len(rows), strict=True)


def _box_rows(names: Sequence[str], shown: Sequence[Mapping[str, Any]], outlined: bool) -> Iterator[list[str]]:
    """Iterate over the rows of val_boxes.csv: labels and predictions of each image, or one row if it has neither."""
    for image in shown:
        for kind in ("label", "prediction"):
            for row, outline in _rows(image, kind):
                label, *numbers = row if kind == "label" else (row[5], row[4], *row[:4])
                cells = [image["path"], kind, names[int(label)], *[""] * (kind == "label")]
                cells += [f"{value:.6g}" for value in numbers]
                yield cells + [" ".join(f"{value:.6g}" for value in outline)] * outlined
        if not image["labels"] and not image["predictions"]:
            yield [image["path"], "image", *[""] * (6 + outlined)]


def _normalised(
    label: float, confidence: float | None, xyxy: Sequence[float], outline: Sequence[float], size: Sequence[int]
) -> Box:
    """Convert a box and its outline from pixels of the file to shares of the file's width and height."""
    left, top, right, bottom = (value / size[number % 2] for number, value in enumerate(xyxy))
    points = tuple(value / size[number % 2] for number, value in enumerate(outline))
    return Box(int(label), confidence, (left, top, right, bottom), points)
