"""`ImageRecord`: the contribution of one image to the metrics of a validation, which travels between processes.

Made for `DetectionMetrics.update`; read by scores.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.heads.boxes import xywh_to_xyxy
from models.tasks.shared.metric_matching import Overlaps, match_by_overlap, match_detections, pair_detections
from utils.batch import ImageInfo

CONFIDENT_THRESHOLD = 0.25  # confidence of detections that are drawn or in the confusion matrix
NO_PAIRS = np.zeros((0, 2), np.int32)


class ShownImage(NamedTuple):
    """Labels and confident detections of an image to draw. Boxes are in pixels of the file, clipped to it."""

    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    labels: np.ndarray  # float32 (m, 5): class, xyxy
    predictions: np.ndarray  # float32 (k, 6): xyxy, confidence, class, in falling confidence


class ImageRecord(NamedTuple):
    """The contribution of one image: k detections, m labels. A side is sqrt(area) in pixels of the file."""

    image: int  # index in the split; records are sorted by it, so that sums do not depend on the processes
    overlap: np.ndarray  # (k,) IoU with the label that the detection is matched to, 0 if there is none
    beaten: np.ndarray  # (k,) the largest IoU with that label of a more confident detection
    partner_side: np.ndarray  # (k,) side of that label, 0 if there is none
    confidence: np.ndarray  # (k,)
    label: np.ndarray  # (k,) class
    side: np.ndarray  # (k,)
    true_label: np.ndarray  # (m,) class
    true_side: np.ndarray  # (m,)
    paired: np.ndarray = NO_PAIRS  # (p, 2) classes of a label and of the detection paired with it
    shown: ShownImage | None = None  # None if the image is not drawn


# Without detections and labels: what is concatenated if there is no record.
EMPTY_RECORD = ImageRecord._make((-1, *[np.zeros(0, np.float32)] * 8, NO_PAIRS, None))


def image_records(
    boxes_of: Sequence[Tensor], infos: Sequence[ImageInfo], shown: Collection[int] = ()
) -> list[ImageRecord]:
    """Return a record for each image of a batch.

    boxes_of: detections of each image, (k, 6): xyxy in pixels of its file, confidence, class, in falling confidence.
    shown: indices of the images to draw.
    """
    if not infos:
        return []
    counts, true_counts = [len(boxes) for boxes in boxes_of], [len(info.rows) for info in infos]
    image, true_image = (np.repeat(np.arange(len(infos)), each) for each in (counts, true_counts))
    detections = torch.cat(list(boxes_of)).numpy()
    rows = np.concatenate([info.rows for info in infos])
    boxes, (confidence, label) = detections[:, :4], detections[:, 4:].astype(np.float32).T.copy()
    sizes = np.array([info.size * 2 for info in infos], np.float32)
    truth, true_label = xywh_to_xyxy(torch.from_numpy(rows[:, 1:5])).numpy() * sizes[true_image], rows[:, 0]
    group, true_group = _groups(image, label, true_image, true_label)
    overlap, partner, beaten = match_detections(boxes, group, truth, true_group)
    true_side = _side(truth)
    partner_side = _partner_side(true_side, overlap, partner)
    confident = np.flatnonzero(confidence > CONFIDENT_THRESHOLD)
    paired, paired_label = pair_detections(boxes[confident], image[confident], truth, true_image)
    pairs = np.stack((true_label[paired_label], label[confident[paired]]), 1).astype(np.int32)
    per_image = zip(
        infos,
        boxes_of,
        _split(counts, overlap, beaten, partner_side, confidence, label, _side(boxes)),
        _split(true_counts, true_label, true_side),
        _split(np.bincount(true_image[paired_label], minlength=len(infos)), pairs),
        strict=True,
    )
    return [
        ImageRecord._make((info.image, *detected, *true, *both, _shown(boxes, info) if info.image in shown else None))
        for info, boxes, detected, true, both in per_image
    ]


def matched_by(overlaps: Overlaps, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with other matches: by `overlaps` instead of those of boxes.

    overlaps: of detections and labels, both numbered over the whole batch.
    """
    counts, true_counts = [len(one.label) for one in records], [len(one.true_label) for one in records]
    image, true_image = (np.repeat(np.arange(len(records)), each) for each in (counts, true_counts))
    columns = list(zip(EMPTY_RECORD, *records, strict=True))[1:-1]
    joined = ImageRecord._make((-1, *map(np.concatenate, columns), None))
    groups = _groups(image, joined.label, true_image, joined.true_label)
    overlap, partner, beaten = match_by_overlap(overlaps, *groups)
    partner_side = _partner_side(joined.true_side, overlap, partner)
    return [
        record._replace(overlap=one_overlap, beaten=one_beaten, partner_side=side)
        for record, (one_overlap, one_beaten, side) in zip(
            records, _split(counts, overlap, beaten, partner_side), strict=True
        )
    ]


def _groups(
    image: np.ndarray, label: np.ndarray, true_image: np.ndarray, true_label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Number the classes of all images: return the number of each detection (k,) and of each label (m,)."""
    classes = int(max(label.max(initial=0), true_label.max(initial=0))) + 1
    return (image * classes + label).astype(np.int64), (true_image * classes + true_label).astype(np.int64)


def _partner_side(true_side: np.ndarray, overlap: np.ndarray, partner: np.ndarray) -> np.ndarray:
    """Return the side of the label that each detection is matched to, 0 if there is none, (k,)."""
    return np.asarray(np.where(overlap > 0, np.append(true_side, np.float32(0))[partner], np.float32(0)))


def _shown(boxes: Tensor, info: ImageInfo) -> ShownImage:
    """Return the labels and confident detections of an image. boxes: (k, 6)."""
    limit = np.array(info.size * 2, np.float32)
    corners = xywh_to_xyxy(torch.tensor(info.rows[:, 1:5])).numpy() * limit
    labels = np.concatenate((info.rows[:, :1], corners.clip(0, limit)), 1)
    confident = boxes.numpy().astype(np.float32)
    confident = confident[confident[:, 4] >= CONFIDENT_THRESHOLD]
    return ShownImage(info.path, info.size, labels, confident[np.argsort(-confident[:, 4], kind="stable")])


def _split(counts: Sequence[int] | np.ndarray, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Split columns of the rows of all images by image, given the `counts` of rows."""
    return zip(*(np.split(column, np.cumsum(counts)[:-1]) for column in columns), strict=True)


def _side(boxes: np.ndarray) -> np.ndarray:
    """Return the square root of the area of xyxy boxes, (n,)."""
    width, height = (boxes[:, 2:4] - boxes[:, :2]).clip(min=0).T
    return np.asarray(np.sqrt(width * height))
