"""`SegmentationMetrics`: the numbers, tables, documents and examples of a validation, for boxes and for masks.

Made by `SegmentationTask.metrics`; called by val.py and train.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import EPSILON
from models.tasks.contract import Prediction
from models.tasks.masks import DetectedMasks, SegmentationPrediction, target_masks
from models.tasks.metrics import (
    CLASS_COLUMNS,
    DETECTION_METRICS,
    FITNESS_WEIGHTS,
    DetectionMetrics,
    ImageRecord,
    ap_by_class,
    class_rows,
    curve_rows,
    detection_evidence,
    image_records,
    join,
    matched_by,
    score_classes,
    score_evidence,
    score_sizes,
    score_tables,
)
from models.tasks.predictions import Overlaps
from utils.batch import Batch, SegmentationBatch
from utils.files import csv_text
from utils.summary import Example, Summary

MAX_MASK_VALUES = 2**22  # pixels of the masks that are compared at a time, about 40 MB
# Overlaps are fractions of small numbers of pixels and often equal a threshold. With this factor they then reach it, as
# in YOLOv5's fp32 arithmetic, where `EPSILON` has no effect.
TIE = 1 + 1e-7
KINDS = ("B", "M")  # YOLOv5's suffixes for boxes and masks
SEGMENTATION_METRICS = tuple(f"{name}({kind})" for kind in KINDS for name in DETECTION_METRICS)
TITLES = ("Class", "Images", "Labels", "box P", "R", "mAP50", "50-95", "mask P", "R", "mAP50", "50-95")

Outlines: TypeAlias = list[list[int]]  # x y x y ... in pixels of the file, for each object


class SegmentationRecord(NamedTuple):
    """The contribution of one image. The record of masks differs from the record of boxes in its matches only."""

    boxes: ImageRecord
    masks: ImageRecord
    outlines: dict[str, Outlines] | None = None  # of `labels` and `predictions`; None if the image is not drawn


def segmentation_records(
    predictions: Sequence[SegmentationPrediction], batch: SegmentationBatch, shown: Collection[int] = ()
) -> list[SegmentationRecord]:
    """Return a record for each image of a batch; `shown` are the indices of the images to draw."""
    of_boxes = image_records([one.rows for one in predictions], batch.infos, shown)
    of_masks = matched_by(mask_overlaps(predictions, batch), [record._replace(shown=None) for record in of_boxes])
    records = []
    for boxes, masks, prediction in zip(of_boxes, of_masks, predictions, strict=True):
        outlines = None
        if boxes.shown:
            confident = prediction.outlines_of(range(len(boxes.shown.predictions)))  # those that are drawn
            sets = {"labels": prediction.label_outlines, "predictions": confident}
            outlines = {name: [_pixels(points, prediction.size) for points in these] for name, these in sets.items()}
        records.append(SegmentationRecord(boxes, masks, outlines))
    return records


def _pixels(points: np.ndarray, size: tuple[int, int]) -> list[int]:
    """Convert an outline (p, 2) from shares of width and height to x y x y ... in pixels."""
    pixels: list[int] = (points * np.array(size, np.float32)).astype(np.int32).ravel().tolist()
    return pixels


def mask_overlaps(predictions: Sequence[SegmentationPrediction], batch: SegmentationBatch) -> Overlaps:
    """Return a function that computes the IoU of the masks of detections and labels, numbered over the batch.

    The masks are compared at the maps' size, a detection's within its box. Only those are computed whose box meets the
    window of a label that they are paired with.
    """
    sources = [one.source for one in predictions]
    starts = list(accumulate((len(one.boxes) for one in sources), initial=0))

    def overlaps(detection: np.ndarray, label: np.ndarray) -> np.ndarray:
        result = np.zeros(len(detection))
        if not len(detection):
            return result
        boxes = torch.cat([one.map_boxes for one in sources]).cpu().numpy()[detection]
        windows = batch.windows[label].astype(np.int64)
        meets = (np.minimum(boxes[:, 2:], windows[:, 2:]) > np.maximum(boxes[:, :2], windows[:, :2])).all(1)
        (near,) = np.nonzero(meets)
        image = np.searchsorted(starts, detection[near], side="right") - 1
        positions, counts, end = [], [], 0  # of the pairs in `counts`
        for number in np.unique(image).tolist():
            rows, row = np.unique(detection[near[image == number]], return_inverse=True)
            labels, column = np.unique(label[near[image == number]], return_inverse=True)
            positions.append(end + row * len(labels) + column)
            counts.append(_count_pixels(sources[number], rows - starts[number], batch, labels))
            end += counts[-1].shape[1]
        if counts:
            # One copy for all images, as every copy waits for the device.
            intersection, union = torch.cat(counts, 1).cpu().numpy().astype(np.float64)[:, np.concatenate(positions)]
            result[near[np.argsort(image, kind="stable")]] = np.minimum(intersection / (union + EPSILON) * TIE, 1)
        return result

    return overlaps


def _count_pixels(source: DetectedMasks, rows: np.ndarray, batch: SegmentationBatch, labels: np.ndarray) -> Tensor:
    """Return the pixels of intersections and unions of detections and labels of an image, (2, rows * labels)."""
    truth = target_masks(batch, labels, source.map_size).flatten(1)
    areas, counts = truth.sum(1), []
    for chunk in np.array_split(rows, math.ceil(len(rows) * truth.shape[1] / MAX_MASK_VALUES)):
        masks = source.on_map(chunk).flatten(1).float()
        intersection = masks @ truth.T
        counts.append(torch.stack((intersection, masks.sum(1)[:, None] + areas - intersection)))
    return torch.cat(counts, 1).flatten(1)


class SegmentationMetrics(DetectionMetrics):
    """The detector's metrics, for boxes and for masks."""

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[Any]:
        """Return a `SegmentationRecord` for each image."""
        return segmentation_records(
            cast("Sequence[SegmentationPrediction]", predictions), cast("SegmentationBatch", batch), self.shown
        )

    def summarise(self, records: Sequence[Any]) -> Summary:
        """Return the metrics of a split, tables by class and by object size, and the evidence for `documents`."""
        ordered: list[SegmentationRecord] = sorted(records, key=lambda record: record.boxes.image)
        of_boxes = [record.boxes for record in ordered]
        joined = [join(of_boxes), join([record.masks for record in ordered])]
        boxes, masks = scores = [score_classes(one) for one in joined]
        metrics = dict(zip(SEGMENTATION_METRICS, [*boxes.means().values(), *masks.means().values()], strict=True))
        fitness = sum(weight * metrics[f"{name}({kind})"] for kind in KINDS for name, weight in FITNESS_WEIGHTS.items())
        sizes = [score_sizes(one) for one in joined]
        overall, details = score_tables(TITLES, self.names, len(ordered), scores, sizes)
        outlines = [record.outlines for record in ordered if record.outlines]
        evidence = detection_evidence(of_boxes, boxes, len(self.names))
        evidence["masks"] = {**score_evidence(masks), "outlines": outlines}
        by_class = {
            f"{name}({kind})": values
            for kind, one in zip(KINDS, scores, strict=True)
            for name, values in ap_by_class(one, self.names).items()
        }
        headline = {"mAP box": metrics["mAP_0.5:0.95(B)"], "mask": metrics["mAP_0.5:0.95(M)"]}
        return Summary(
            *(metrics, fitness, overall, details, evidence),
            by_class=by_class,
            headline=headline,
            highest_fitness=float(len(KINDS)),
        )

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return the detector's CSV files, with mask columns in classes.csv, and the masks' curves and outlines."""
        documents = super().documents(summary)
        if not documents:
            return {}
        evidence, names = summary.evidence, list(self.names.values())
        classes, masks = evidence["classes"], evidence["masks"]
        curves = masks["curves"]
        by_class = [
            [*of_boxes, *of_masks[3:]]
            for of_boxes, of_masks in zip(class_rows(names, classes), class_rows(names, masks["classes"]), strict=True)
        ]
        by_confidence = curve_rows(names, classes, curves["precision"], curves["recall"])
        by_recall = curve_rows(names, classes, curves["envelope"])
        outlines = _outline_rows(names, evidence["shown"], masks["outlines"])
        return {
            **documents,
            "classes.csv": csv_text((*CLASS_COLUMNS, *(f"mask_{name}" for name in CLASS_COLUMNS[3:])), by_class),
            "mask_curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
            "mask_PR_curve.csv": csv_text(("class", "recall", "precision"), by_recall),
            "val_masks.csv": csv_text(("image", "kind", "class", "confidence", "outline"), outlines),
        }

    def examples(self, summary: Summary) -> list[Example]:
        """Return the images to draw, with their boxes and outlines, ordered by index."""
        masks = summary.evidence.get("masks", {"outlines": []})
        return [
            example._replace(
                label_outlines=_shares(outlines["labels"], example.size),
                prediction_outlines=_shares(outlines["predictions"], example.size),
            )
            for example, outlines in zip(super().examples(summary), masks["outlines"], strict=True)
        ]


def _shares(outlines: Outlines, size: tuple[int, int]) -> list[tuple[float, ...]]:
    """Convert outlines from pixels of the file to their centres as shares of its width and height."""
    return [tuple((value + 0.5) / size[number % 2] for number, value in enumerate(outline)) for outline in outlines]


def _outline_rows(
    names: Sequence[str], shown: Sequence[Mapping[str, Any]], outlines: Sequence[Mapping[str, Outlines]]
) -> Iterator[list[str]]:
    """Iterate over the rows of val_masks.csv, one for each label and prediction of the images to draw.

    Args:
        names: class names, in the order of their numbers
        shown: images to draw, see `detection_evidence`
        outlines: outlines of the labels and predictions of each of these images
    """
    for image, of_image in zip(shown, outlines, strict=True):
        for (label, *_), outline in zip(image["labels"], of_image["labels"], strict=True):
            yield [image["path"], "label", names[int(label)], "", " ".join(map(str, outline))]
        for (*_, confidence, label), outline in zip(image["predictions"], of_image["predictions"], strict=True):
            row = [names[int(label)], f"{confidence:.6g}", " ".join(map(str, outline))]
            yield [image["path"], "prediction", *row]
