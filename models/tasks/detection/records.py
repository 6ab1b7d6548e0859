"""Make records of images with upright boxes, for the detection metrics. Called by `DetectionMetrics.update`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from models.heads.boxes import xywh_to_xyxy
from models.tasks.shared.metric_matching import box_overlaps
from models.tasks.shared.records import ImageRecord, ShownImage, matched_by, paired_by, shown_image, unmatched
from utils.batch import ImageInfo


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
        drawn = _shown(rows, true_boxes, info) if info.image in shown else None
        sides = _side(rows[:, :4]), _side(true_boxes)
        records.append(unmatched(info.image, confidence, label, sides[0], info.rows[:, 0], sides[1], drawn))
    overlaps = box_overlaps(np.concatenate(detections)[:, :4], np.concatenate(truth))
    return paired_by(overlaps, matched_by(overlaps, records))


def _corners(info: ImageInfo) -> np.ndarray:
    """Return the boxes of the labels, xyxy in pixels of the file, float32 (m, 4)."""
    corners = xywh_to_xyxy(torch.from_numpy(info.rows[:, 1:5])).numpy() * np.array(info.size * 2, np.float32)
    return np.asarray(corners)


def _shown(rows: np.ndarray, true_boxes: np.ndarray, info: ImageInfo) -> ShownImage:
    """Return the labels and confident detections of an image, with the labels clipped to it.

    Args:
        rows: detections (k, 6) of the image
        true_boxes: boxes (m, 4) of the labels, xyxy in pixels of the file
    """
    labels = np.concatenate((info.rows[:, :1], true_boxes.clip(0, np.array(info.size * 2, np.float32))), 1)
    return shown_image(info.path, info.size, labels, rows.astype(np.float32))


def _side(boxes: np.ndarray) -> np.ndarray:
    """Return the square roots of the areas of xyxy boxes, (n,)."""
    width, height = (boxes[:, 2:4] - boxes[:, :2]).clip(min=0).T
    return np.asarray(np.sqrt(width * height))
