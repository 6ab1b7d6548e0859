"""`SegmentationMetrics`: the numbers, tables, documents and examples of a validation, for boxes and for masks.

Made by `SegmentationTask.metrics`; called by val.py and train.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import EPSILON
from models.tasks.contract import Prediction
from models.tasks.masks import DetectedMasks, SegmentationPrediction, cut_by_boxes
from models.tasks.metrics import (
    CLASS_COLUMNS,
    DETECTION_METRICS,
    FITNESS_WEIGHTS,
    DetectionMetrics,
    ImageRecord,
    ShownImage,
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
from utils.batch import Batch, SegmentationBatch
from utils.files import csv_text
from utils.summary import Example, Summary

MAX_MASK_VALUES = 2**22  # pixels of the masks that are compared at a time, about 40 MB
# Overlaps are fractions of small numbers of pixels and often equal a threshold. With this factor they then reach it, as
# in YOLOv5's fp32 arithmetic, where `EPSILON` has no effect.
TIE = 1 + 1e-7


class ShownOutlines(NamedTuple):
    """The outlines of the rows of a `ShownImage`, int (p, 2) each: x and y in pixels of the file."""

    labels: list[np.ndarray]
    predictions: list[np.ndarray]


class SegmentationRecord(NamedTuple):
    """The contribution of one image. The record of masks differs from the record of boxes in its matches only."""

    boxes: ImageRecord
    masks: ImageRecord
    outlines: ShownOutlines | None = None  # None if the image is not drawn


def segmentation_records(
    predictions: Sequence[SegmentationPrediction], batch: SegmentationBatch, shown: Collection[int] = ()
) -> list[SegmentationRecord]:
    """Return a record for each image of a batch; `shown` are the indices of the images to draw."""
    of_boxes = image_records([one.rows for one in predictions], batch.infos, shown)
    overlaps = MaskOverlaps(predictions, batch)
    of_masks = matched_by(overlaps, [record._replace(shown=None) for record in of_boxes])
    return [
        SegmentationRecord(boxes, masks, _outlines(prediction, boxes.shown) if boxes.shown else None)
        for boxes, masks, prediction in zip(of_boxes, of_masks, predictions, strict=True)
    ]


def _outlines(prediction: SegmentationPrediction, shown: ShownImage) -> ShownOutlines:
    """Return the outlines of the labels and of the detections to draw, which are the most confident ones."""
    confident = range(len(shown.predictions))
    outlined = [
        [(points * np.array(prediction.size, np.float32)).astype(np.int32) for points in outlines]
        for outlines in (prediction.label_outlines, prediction.source.outlines(confident))
    ]
    return ShownOutlines(*outlined)


class MaskOverlaps:
    """Computes the intersection over union of the masks of a batch's detections and labels, at the maps' size.

    Detections' masks are cropped to their boxes. A mask is computed only if its box meets the window of a label's mask
    of the same class.
    """

    def __init__(self, predictions: Sequence[SegmentationPrediction], batch: SegmentationBatch) -> None:
        self._masks = [one.source for one in predictions if isinstance(one.source, DetectedMasks)]
        self._truth, self._windows = batch.mask_pixels, batch.windows.astype(np.int64)
        sides = np.maximum(self._windows[:, 2:] - self._windows[:, :2], 0)
        self._truth_ends = (sides[:, 0] * sides[:, 1]).cumsum()
        self._starts = list(accumulate((len(one.boxes) for one in self._masks), initial=0))
        assert sum(len(info.rows) for info in batch.infos) == len(self._windows)  # a target for every row

    def __call__(self, detection: np.ndarray, label: np.ndarray) -> np.ndarray:
        """Return the overlaps of pairs, float64 (p,), given the detections' and labels' numbers in the batch."""
        overlaps = np.zeros(len(detection))
        if not len(detection):
            return overlaps
        boxes = torch.cat([one.map_boxes for one in self._masks]).cpu().numpy()[detection]
        windows = self._windows[label]
        meets = (np.minimum(boxes[:, 2:], windows[:, 2:]) > np.maximum(boxes[:, :2], windows[:, :2])).all(1)
        (near,) = np.nonzero(meets)
        image = np.searchsorted(self._starts, detection[near], side="right") - 1
        pairs, values = [], []
        for number in np.unique(image).tolist():
            of_image = near[image == number]
            labels, column = np.unique(label[of_image], return_inverse=True)
            rows, row = np.unique(detection[of_image], return_inverse=True)
            pairs.append((of_image, row * len(labels) + column))
            values.append(self._of_image(number, rows - self._starts[number], labels).flatten(1))
        if not values:
            return overlaps
        starts = accumulate((value.shape[1] for value in values), initial=0)
        # One copy for all images, as every copy waits for the device.
        intersection, union = torch.cat(values, 1).cpu().numpy().astype(np.float64)
        every = np.minimum(intersection / (union + EPSILON) * TIE, 1)
        for start, (of_image, position) in zip(starts, pairs, strict=False):
            overlaps[of_image] = every[start + position]
        return overlaps

    def _of_image(self, image: int, rows: np.ndarray, labels: np.ndarray) -> Tensor:
        """Return the pixels of intersections and unions on an image, (2, rows, labels).

        Args:
            image: number of the image in the batch
            rows: numbers of the detections in the image
            labels: numbers of the labels in the batch
        """
        detected = self._masks[image]
        truth = self._true_masks(labels, detected.maps.size)
        areas = truth.sum(1)
        parts = []
        for chunk in _chunks(rows.tolist(), max(1, MAX_MASK_VALUES // truth.shape[1])):
            inside = cut_by_boxes(detected.maps.inside(chunk), detected.map_boxes[chunk]).flatten(1).float()
            intersection = inside @ truth.T
            parts.append(torch.stack((intersection, inside.sum(1)[:, None] + areas - intersection)))
        return torch.cat(parts, 1)

    def _true_masks(self, labels: np.ndarray, size: tuple[int, int]) -> Tensor:
        """Return the masks of labels as floats of 0 and 1, (labels, h * w)."""
        height, width = size
        truth = torch.zeros(len(labels), height, width, device=self._truth.device)
        for mask, label in zip(truth, labels.tolist(), strict=True):
            left, top, right, bottom = self._windows[label].tolist()
            end = int(self._truth_ends[label])
            pixels = self._truth[end - (bottom - top) * (right - left) : end]
            mask[top:bottom, left:right] = pixels.view(bottom - top, right - left)
        return truth.flatten(1)


def _chunks(rows: list[int], most: int) -> Iterator[list[int]]:
    """Iterate over parts of a list with at most `most` items each."""
    return (rows[start : start + most] for start in range(0, len(rows), most))


KINDS = ("B", "M")  # YOLOv5's suffixes for boxes and masks
SEGMENTATION_METRICS = tuple(f"{name}({kind})" for kind in KINDS for name in DETECTION_METRICS)
TITLES = ("Class", "Images", "Labels", "box P", "R", "mAP50", "50-95", "mask P", "R", "mAP50", "50-95")


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
        outlines = [
            {kind: [points.ravel().tolist() for points in shapes] for kind, shapes in record.outlines._asdict().items()}
            for record in ordered
            if record.outlines
        ]
        evidence = {
            **detection_evidence(of_boxes, boxes, len(self.names)),
            "masks": {**score_evidence(masks), "outlines": outlines},
        }
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
        outlines_head = ("image", "kind", "class", "confidence", "outline")
        return {
            **documents,
            "classes.csv": csv_text((*CLASS_COLUMNS, *(f"mask_{name}" for name in CLASS_COLUMNS[3:])), by_class),
            "mask_curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
            "mask_PR_curve.csv": csv_text(("class", "recall", "precision"), by_recall),
            "val_masks.csv": csv_text(outlines_head, _outline_rows(names, evidence["shown"], masks["outlines"])),
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


def _shares(outlines: Sequence[Sequence[int]], size: tuple[int, int]) -> list[tuple[float, ...]]:
    """Convert outlines x y x y ... from pixels of the file to their centres as shares of its width and height."""
    return [tuple((value + 0.5) / size[number % 2] for number, value in enumerate(outline)) for outline in outlines]


def _outline_rows(
    names: Sequence[str], shown: Sequence[Mapping[str, Any]], outlines: Sequence[Mapping[str, Sequence[Sequence[int]]]]
) -> Iterator[list[str]]:
    """Iterate over the rows of val_masks.csv, one for each label and prediction with an outline.

    Args:
        names: class names, in the order of their numbers
        shown: images to draw, see `detection_evidence`
        outlines: for each of these images the outlines of its labels and predictions, x y x y ... in pixels of the file
    """
    for image, of_image in zip(shown, outlines, strict=True):
        for (label, *_), outline in zip(image["labels"], of_image["labels"], strict=True):
            yield [image["path"], "label", names[int(label)], "", " ".join(map(str, outline))]
        for (*_, confidence, label), outline in zip(image["predictions"], of_image["predictions"], strict=True):
            row = [names[int(label)], f"{confidence:.6g}", " ".join(map(str, outline))]
            yield [image["path"], "prediction", *row]
