"""`DetectionMetrics`: the numbers, tables, documents and examples of a validation.

A validation makes an `ImageRecord` of each image (`image_records`), and computes scores by class from those of all
processes (`score_classes`). Made by `BoxTask.metrics`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import xywh_to_xyxy
from models.tasks.contract import Metrics, Prediction, Thresholds
from models.tasks.predictions import (
    IOU_THRESHOLDS,
    DetectionPrediction,
    Pairs,
    box_pairs,
    match_by_overlap,
    pair_by_overlap,
)
from utils.batch import Batch, ImageInfo
from utils.console import log
from utils.files import csv_text
from utils.summary import Box, Example, Row, Summary, confusion_text, sparse_counts

CONFIDENT_THRESHOLD = 0.25  # lowest confidence of detections that are drawn or in the confusion matrix
MAX_MAP_CONFIDENCE = 0.01  # highest threshold at which mAP is comparable, see docs/validation.md
DETECTION_METRICS = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
FITNESS_WEIGHTS = {"mAP_0.5": 0.1, "mAP_0.5:0.95": 0.9}  # YOLOv5's weights
CLASS_COLUMNS = ("precision", "recall", "AP50", "AP50-95")  # columns of classes.csv for each set of scores
BOX_COLUMNS = ("image", "kind", "class", "confidence", "x1", "y1", "x2", "y2")  # columns of val_boxes.csv
F1_CONFIDENCES = np.linspace(0, 1, 1000)  # precision and recall are given at one of these confidences
F1_SMOOTHING_SHARE = 0.1  # width of the window that smooths the F1 curve, as a share of the curve's length
AP_RECALLS = np.linspace(0, 1, 101)  # edges of the trapezoids that average precision adds up
CURVE_POINTS = np.linspace(0, 1, 201)  # confidences and recalls of the curves; every second one is in `AP_RECALLS`
NO_NUMBERS, NO_PAIRS = np.zeros(0, np.float32), np.zeros((0, 2), np.int32)


# Records of images


class ImageRecord(NamedTuple):
    """The contribution of one image with k detections, in falling confidence, and m labels.

    `matched_by` and `paired_by` add the fields from `overlap` on.
    """

    image: int  # index in the split
    confidence: np.ndarray  # (k,)
    label: np.ndarray  # (k,) class of the detection
    true_label: np.ndarray  # (m,) class of the label
    overlap: np.ndarray = NO_NUMBERS  # (k,) overlap with the label that the detection is matched to, 0 without one
    rival_overlap: np.ndarray = NO_NUMBERS  # (k,) largest overlap of a more confident detection with that label
    paired: np.ndarray = NO_PAIRS  # (p, 2) class of a label and of the detection paired with it
    drawn: dict[str, Any] | None = None  # see `drawn_image`; None if the image is not drawn


# Concatenated with the others, so that there is at least one record.
EMPTY_RECORD = ImageRecord(-1, NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)


def matched_by(pairs: Pairs, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with matches, which precision and recall are computed from.

    `pairs` have detections and labels that are numbered over the whole batch; those of different classes do not count.
    """
    joined, *_ = as_columns(records)
    same_class = joined.label[pairs.detection] == joined.true_label[pairs.label]
    matches = match_by_overlap(pairs.only(same_class), len(joined.label))
    ends = np.cumsum([len(record.label) for record in records])[:-1]
    columns = zip(*(np.split(column, ends) for column in matches), strict=True)
    return [
        record._replace(overlap=overlap, rival_overlap=rival_overlap)
        for record, (overlap, rival_overlap) in zip(records, columns, strict=True)
    ]


def paired_by(pairs: Pairs, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with the pairs of the confusion matrix, regardless of class; see `matched_by`."""
    joined, _, true_image = as_columns(records)
    confident = joined.confidence > CONFIDENT_THRESHOLD
    detection, label = pair_by_overlap(pairs.only(confident[pairs.detection]), true_image)
    classes = np.stack((joined.true_label[label], joined.label[detection]), 1).astype(np.int32)
    ends = np.bincount(true_image[label], minlength=len(records)).cumsum()[:-1]
    return [record._replace(paired=part) for record, part in zip(records, np.split(classes, ends), strict=True)]


def drawn_image(
    path: str,
    size: tuple[int, int],
    labels: np.ndarray,
    predictions: np.ndarray,
    label_outlines: Sequence[np.ndarray] = (),
    prediction_outlines: Sequence[np.ndarray] = (),
) -> dict[str, Any]:
    """Return what is drawn of an image, as plain values: its labels, then the confident ones of its predictions.

    An object is its kind, class, confidence, box and outline x y x y ...; confidences fall.

    Args:
        size: width and height of the file's image, pixels
        labels: (m, 5): class, xyxy in pixels of the file
        predictions: (k, 6), in any order: xyxy, confidence, class
        label_outlines, prediction_outlines: points (p, 2) of each, if they are not upright boxes
    """
    confident = np.flatnonzero(predictions[:, 4] >= CONFIDENT_THRESHOLD)
    order = confident[np.argsort(-predictions[confident, 4], kind="stable")]
    objects = [["label", int(label), None, box] for label, *box in labels.tolist()]
    objects += [["prediction", int(label), score, box] for *box, score, label in predictions[order].tolist()]
    outlines = [*(label_outlines or [NO_NUMBERS] * len(labels))]
    outlines += [prediction_outlines[k] if prediction_outlines else NO_NUMBERS for k in order]
    objects = [[*row, outline.ravel().tolist()] for row, outline in zip(objects, outlines, strict=True)]
    return {"path": path, "size": list(size), "objects": objects}


def image_records(
    image_boxes: Sequence[Tensor], infos: Sequence[ImageInfo], drawn: Collection[int] = ()
) -> list[ImageRecord]:
    """Return a record for each image of a batch, with what to draw if its index is among `drawn`.

    `image_boxes` are the detections (k, 6) of each image in falling confidence: xyxy in pixels of its file, confidence,
    class.
    """
    records = []
    detections, true_boxes = [boxes.numpy() for boxes in image_boxes], []
    for rows, info in zip(detections, infos, strict=True):
        limits = np.array(info.size * 2, np.float32)
        corners = xywh_to_xyxy(torch.from_numpy(info.rows[:, 1:5])).numpy() * limits
        confidence, label = rows[:, 4:].astype(np.float32).T.copy()
        record = ImageRecord(info.image, confidence, label, info.rows[:, 0])
        if info.image in drawn:
            labels = np.concatenate((info.rows[:, :1], corners.clip(0, limits)), 1)
            record = record._replace(drawn=drawn_image(info.path, info.size, labels, rows.astype(np.float32)))
        records.append(record)
        true_boxes.append(corners)
    pairs = box_pairs(np.concatenate(detections)[:, :4], np.concatenate(true_boxes), *as_columns(records)[1:])
    return paired_by(pairs, matched_by(pairs, records))


def as_columns(records: Sequence[ImageRecord]) -> tuple[ImageRecord, np.ndarray, np.ndarray]:
    """Return the columns of all records as one record, and the number of each detection's and each label's record."""
    columns = list(zip(EMPTY_RECORD, *records, strict=True))[1:-1]
    numbers = np.arange(len(records))
    image = np.repeat(numbers, [len(record.label) for record in records])
    true_image = np.repeat(numbers, [len(record.true_label) for record in records])
    return ImageRecord._make((-1, *map(np.concatenate, columns), None)), image, true_image


# Scores by class


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

    def rows(self) -> list[list[Any]]:
        """Return number, images, instances, precision, recall, AP50 and AP of each class, as plain values."""
        scores = (self.precision, self.recall, self.ap[:, 0], self.ap.mean(1))
        columns = (self.classes, self.images, self.instances, *scores)
        return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def confusion_matrix(records: Sequence[ImageRecord], classes: int) -> np.ndarray:
    """Return counts by true and predicted class, int64 (classes + 1, classes + 1); the last class is background.

    A label without a detection counts as predicted background, a detection without a label as true background.
    """
    joined, _, _ = as_columns(records)
    predicted = joined.label[joined.confidence > CONFIDENT_THRESHOLD]
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    np.add.at(matrix, tuple(joined.paired.T), 1)
    matrix[:-1, -1] = np.bincount(joined.true_label.astype(np.int64), minlength=classes) - matrix[:-1].sum(1)
    matrix[-1, :-1] = np.bincount(predicted.astype(np.int64), minlength=classes) - matrix[:, :-1].sum(0)
    return matrix


def score_classes(records: Sequence[ImageRecord]) -> ClassScores:
    """Return the scores of each class over all images, whose records may be in any order."""
    ordered = sorted(records, key=lambda record: record.image)  # so that sums do not depend on the processes
    joined, _, _ = as_columns(ordered)
    classes, instances = np.unique(joined.true_label, return_counts=True)
    present = np.concatenate([classes[:0], *(np.unique(record.true_label) for record in ordered)])
    images = np.bincount(np.searchsorted(classes, present), minlength=len(classes))
    ap = np.zeros((len(classes), len(IOU_THRESHOLDS)))
    precision, recall = (np.zeros((len(classes), len(F1_CONFIDENCES))) for _ in range(2))
    curves = Curves(*(np.zeros((len(classes), len(CURVE_POINTS))) for _ in Curves._fields))
    for row, (detections, count) in enumerate(zip(_by_class(joined, classes), instances, strict=True)):
        if not (total := len(detections)):
            continue
        near = np.flatnonzero(joined.overlap[detections] >= IOU_THRESHOLDS[0])  # ranks of those that may be correct
        overlap, rival = joined.overlap[detections][near, None], joined.rival_overlap[detections][near, None]
        correct = (overlap >= IOU_THRESHOLDS) & (rival < IOU_THRESHOLDS)
        for column, correct_at_iou in enumerate(correct.T):
            envelope = _envelope(near[correct_at_iou], total, count, AP_RECALLS)
            ap[row, column] = np.trapezoid(envelope, AP_RECALLS)
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
    return ClassScores(classes.astype(np.int64), images, instances, precision[:, best], recall[:, best], ap, curves)


def _by_class(joined: ImageRecord, classes: np.ndarray) -> Iterator[np.ndarray]:
    """Iterate over the detections of each class, by index, in falling confidence; equal ones by image."""
    row = np.searchsorted(classes, joined.label)
    row[np.append(classes, np.nan)[row] != joined.label] = len(classes)  # classes without labels are last
    row = row.astype(np.min_scalar_type(len(classes)))  # small integers sort faster
    order = np.argsort(row, kind="stable")
    for start, end in pairwise(np.searchsorted(row[order], np.arange(len(classes) + 1)).tolist()):
        detections = order[start:end]
        yield detections[np.argsort(-joined.confidence[detections], kind="stable")]


def _envelope(hits: np.ndarray, total: int, count: int, at: np.ndarray) -> np.ndarray:
    """Return the falling envelope of precision at the recalls `at`, (n,), which rise from 0 to 1; 0 without hits.

    Between the recalls of two hits the envelope is the second hit's precision; after the last hit it is a line to 0 at
    a recall of 1. `hits` are the ranks of the correct ones among `total` detections of a class in falling confidence,
    and `count` is its number of labels.
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


# Summary, documents, examples


class DetectionMetrics(Metrics):
    """Precision, recall and mean average precision.

    A subclass may have several sets of scores, such as boxes' and masks'; its records are tuples of `ImageRecord`, one
    for each set, and the first set's have the confusion matrix and the images to draw, whose indices are `drawn`.
    """

    sets: ClassVar[Mapping[str, str]] = {"": ""}  # suffix of a set's metrics -> prefix of its files and columns
    titles: ClassVar[Row] = ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")
    headline: ClassVar[Mapping[str, str]] = {"mAP50": "mAP_0.5", "mAP50-95": "mAP_0.5:0.95"}
    has_masks: ClassVar[bool] = False  # whether outlines are filled in pictures; otherwise drawn instead of the boxes

    def __init__(self, names: Mapping[int, str], drawn: frozenset[int] = frozenset()) -> None:
        self.names, self.drawn = dict(names), drawn

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[Any]:
        boxes = [prediction.rows for prediction in cast("Sequence[DetectionPrediction]", predictions)]
        return image_records(boxes, batch.infos, self.drawn)

    def summarise(self, records: Sequence[Any]) -> Summary:
        """Return the metrics of a split, the table by class, and the evidence for `documents` and `examples`."""
        number = len(self.sets)
        record_sets = [[record[k] for record in records] for k in range(number)] if number > 1 else [records]
        scores = [score_classes(set_records) for set_records in record_sets]
        tables = [class_scores.rows() for class_scores in scores]
        metrics: dict[str, float] = {}
        by_class: dict[str, dict[str, float]] = {}
        score_evidence: list[dict[str, Any]] = []
        fitness = 0.0
        for suffix, class_scores, table in zip(self.sets, scores, tables, strict=True):
            means = class_scores.means()
            metrics |= {f"{name}{suffix}": value for name, value in means.items()}
            for name, weight in FITNESS_WEIGHTS.items():
                fitness += weight * means[name]
            for name, column in (("AP50", 5), ("AP", 6)):
                by_class[f"{name}{suffix}"] = {self.names[row[0]]: row[column] for row in table}
            curves = {name: torch.from_numpy(curve).float() for name, curve in class_scores.curves._asdict().items()}
            score_evidence.append({"classes": table, **curves})
        details: list[Row] = [
            (self.names[row[0]], *row[1:], *(score for other in others for score in other[3:]))
            for row, *others in zip(*tables, strict=True)
        ]
        images = sorted(((record.image, record.drawn) for record in record_sets[0] if record.drawn), key=itemgetter(0))
        evidence = {
            "scores": score_evidence,
            "confusion": sparse_counts(confusion_matrix(record_sets[0], len(self.names))),
            "drawn": [{"image": image, **drawn} for image, drawn in images],
        }
        instances = sum(row[2] for row in tables[0])
        return Summary(
            metrics,
            fitness,
            [self.titles, ("all", len(records), instances, *metrics.values())],
            details,
            evidence,
            by_class=by_class,
            headline={title: metrics[name] for title, name in self.headline.items()},
            highest_fitness=float(len(self.sets)),
        )

    def check_thresholds(self, thresholds: Thresholds) -> None:
        """Log a warning if `conf_thres` ends the precision-recall curves so early that mAP changes."""
        if thresholds.conf_thres > MAX_MAP_CONFIDENCE:
            log(
                f"warning: --conf-thres {thresholds.conf_thres:g} cuts the precision-recall curves, so mAP is not "
                f"comparable with other runs'; give {MAX_MAP_CONFIDENCE:g} or less, such as 0.001, the default"
            )

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return CSV files: scores and counts by class, curves, and the boxes and outlines of the images to draw."""
        evidence, names = summary.evidence, list(self.names.values())
        class_columns = [f"{prefix}{name}" for prefix in self.sets.values() for name in CLASS_COLUMNS]
        documents = {
            "classes.csv": csv_text(("class", "images", "instances", *class_columns), _class_rows(names, evidence)),
            "confusion_matrix.csv": confusion_text(evidence["confusion"], [*names, "background"]),
        }
        for prefix, scores in zip(self.sets.values(), evidence["scores"], strict=True):
            by_confidence = _curve_rows(names, scores, "precision", "recall")
            by_recall = _curve_rows(names, scores, "envelope")
            documents[f"{prefix}curves.csv"] = csv_text(("class", "confidence", "precision", "recall"), by_confidence)
            documents[f"{prefix}PR_curve.csv"] = csv_text(("class", "recall", "precision"), by_recall)
        objects = list(_object_rows(names, evidence["drawn"]))
        if self.has_masks:
            outlines = ((*row[:4], row[-1]) for row in objects if row[1] != "image")
            documents["val_masks.csv"] = csv_text(("image", "kind", "class", "confidence", "outline"), outlines)
        outlined = any(row[-1] for row in objects) and not self.has_masks
        columns = (*BOX_COLUMNS, "outline") if outlined else BOX_COLUMNS
        documents["val_boxes.csv"] = csv_text(columns, (row[: len(columns)] for row in objects))
        return documents

    def examples(self, summary: Summary) -> list[Example]:
        """Return the images to draw, with their boxes and outlines as shares of width and height, ordered by index."""
        examples = []
        for image in summary.evidence["drawn"]:
            boxes: dict[str, list[Box]] = {"label": [], "prediction": []}
            for kind, label, confidence, *points in image["objects"]:
                xyxy, outline = (tuple(x / image["size"][k % 2] for k, x in enumerate(numbers)) for numbers in points)
                boxes[kind].append(Box(label, confidence, xyxy, outline))
            name, size = Path(image["path"]).name, tuple(image["size"])
            examples.append(Example(name, image["image"], size, boxes["label"], boxes["prediction"]))
        return examples


def _class_rows(names: Sequence[str], evidence: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Iterate over the rows of classes.csv, one for every class."""
    tables = [{row[0]: row for row in scores["classes"]} for scores in evidence["scores"]]
    for number, name in enumerate(names):
        if number in tables[0]:
            cells = (f"{score:.9g}" for table in tables for score in table[number][3:])
            yield [name, *tables[0][number][1:3], *cells]
        else:
            yield [name, 0, 0, *[""] * len(CLASS_COLUMNS) * len(tables)]


def _curve_rows(names: Sequence[str], scores: Mapping[str, Any], *curves: str) -> Iterator[list[str]]:
    """Iterate over the rows of a curve's file: class, point and values, for every class that has labels."""
    points = [f"{point:.4g}" for point in CURVE_POINTS]
    for (number, *_), *values in zip(scores["classes"], *(scores[name].tolist() for name in curves), strict=True):
        for point, *row in zip(points, *values, strict=True):
            yield [names[number], point, *(f"{value:.6g}" for value in row)]


def _object_rows(names: Sequence[str], images: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Iterate over the objects of images to draw: `BOX_COLUMNS` and outline; an image without objects has a row."""
    for image in images:
        for kind, label, confidence, box, outline in image["objects"]:
            score = "" if confidence is None else f"{confidence:.6g}"
            corners = (f"{value:.6g}" for value in box)
            points = " ".join(f"{value:.6g}" for value in outline)
            yield [image["path"], kind, names[label], score, *corners, points]
        if not image["objects"]:
            yield [image["path"], "image", *[""] * 7]
