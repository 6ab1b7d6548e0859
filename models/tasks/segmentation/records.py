"""`SegmentationRecord`: the contribution of one image to the metrics of boxes and of masks.

Made for `SegmentationMetrics.update`. It holds overlaps instead of masks, so that processes can exchange it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.heads.boxes import EPSILON
from models.tasks.detection.records import image_records
from models.tasks.segmentation.masks import DetectedMasks
from models.tasks.segmentation.prediction import SegmentationPrediction
from models.tasks.segmentation.views import cut_by_boxes
from models.tasks.shared.records import ImageRecord, ShownImage, matched_by
from utils.batch import SegmentationBatch

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
