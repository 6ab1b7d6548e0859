"""Precision, recall and mean average precision by rotated overlap: the detector's metrics with other overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from models.tasks.contract import Prediction
from models.tasks.detection.metrics import DetectionMetrics
from models.tasks.shared.records import ImageRecord, image_records, matched_by
from utils.batch import Batch

from .geometry import corners, rotated_iou, smallest_boxes
from .prediction import OrientedPrediction


class OrientedMetrics(DetectionMetrics):
    """The detector's metrics; sizes are those of the oriented boxes."""

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        """Return a record for each image."""
        given = cast("Sequence[OrientedPrediction]", predictions)
        detected, true = [one.rows[:, :5] for one in given], [labelled_boxes(one) for one in given]
        every, every_true = torch.cat(detected), torch.cat(true)

        def overlaps(detection: np.ndarray, label: np.ndarray) -> np.ndarray:
            return rotated_iou(every[torch.from_numpy(detection)], every_true[torch.from_numpy(label)]).numpy()

        records = image_records([upright(one.rows) for one in given], batch.infos, self.shown)
        sides = zip(records, map(side, detected), map(side, true), strict=True)
        return matched_by(overlaps, [one._replace(side=found, true_side=label) for one, found, label in sides])


def side(boxes: Tensor) -> np.ndarray:
    """Return the square roots of the areas of boxes (k, 5), float32 (k,)."""
    return boxes[:, 2:4].prod(1).sqrt().float().numpy()


def labelled_boxes(prediction: OrientedPrediction) -> Tensor:
    """Return the boxes of the labels of an image, float32 (m, 5), in pixels of its file."""
    size = np.array(prediction.size, np.float32)
    return torch.from_numpy(smallest_boxes(outline * size for outline in prediction.label_outlines))


def upright(rows: Tensor) -> Tensor:
    """Return the upright boxes around detections (k, 7), with confidence and class: (k, 6)."""
    points = corners(rows[:, :5])
    return torch.cat((points.amin(1), points.amax(1), rows[:, 5:]), 1)
