"""Precision, recall and mean average precision by rotated overlap: the detector's metrics with other records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from models.tasks.contract import Prediction
from models.tasks.metrics import (
    DetectionMetrics,
    ImageRecord,
    as_columns,
    drawn_image,
    matched_by,
    paired_by,
)
from models.tasks.predictions import Pairs, meeting_pairs
from utils.batch import Batch

from .geometry import corners, rotated_iou, smallest_boxes
from .prediction import OrientedPrediction


class OrientedMetrics(DetectionMetrics):
    """The detector's metrics, by the overlap of oriented boxes."""

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        """Return a record for each image."""
        oriented = cast("Sequence[OrientedPrediction]", predictions)
        records = []
        for one, info in zip(oriented, batch.infos, strict=True):
            labels = info.rows[:, 0]
            drawn = drawn_boxes(one, labels) if one.image in self.drawn else None
            records.append(ImageRecord(one.image, one.scores, one.array[:, 6], labels, drawn=drawn))
        every = torch.cat([one.rows[:, :5] for one in oriented])
        every_true = torch.cat([*map(labelled_boxes, oriented)])
        hull, true_hull = (torch.cat((p.amin(1), p.amax(1)), 1).numpy() for p in map(corners, (every, every_true)))
        detection, label = meeting_pairs(hull, true_hull, *as_columns(records)[1:])
        overlap = rotated_iou(every[torch.from_numpy(detection)], every_true[torch.from_numpy(label)]).numpy()
        pairs = Pairs(detection, label, overlap)
        return paired_by(pairs, matched_by(pairs, records))


def labelled_boxes(prediction: OrientedPrediction) -> Tensor:
    """Return the boxes of the labels of an image, float32 (m, 5), in pixels of its file."""
    size = np.array(prediction.size, np.float32)
    return torch.from_numpy(smallest_boxes(outline * size for outline in prediction.label_outlines))


def drawn_boxes(prediction: OrientedPrediction, labels: np.ndarray) -> dict[str, Any]:
    """Return what is drawn of an image: the outlines of its labels, whose classes are (m,), and of its predictions."""
    true = np.stack([*prediction.label_outlines, np.zeros((4, 2))])[:-1] * prediction.size
    rows = np.concatenate((labels[:, None], true.min(1), true.max(1)), 1).astype(np.float32)
    found = prediction.corners
    detections = np.concatenate((found.min(1), found.max(1), prediction.array[:, 5:]), 1)
    return drawn_image(prediction.path, prediction.size, rows, detections, list(true), list(found))
