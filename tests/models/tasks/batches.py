"""Labels, predictions and records for the tests of this package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.tasks.metrics import ImageRecord, image_records
from models.tasks.predictions import DetectionPrediction
from tests.making import CLASS_NAMES, image_info
from utils.batch import ImageInfo

IMAGE = (100, 100)  # width and height, pixels
DISC, LIGHT = (0, 0.2, 0.2, 0.2, 0.2), (1, 0.7, 0.7, 0.4, 0.4)  # labels at 10, 10, 30, 30 and 50, 50, 90, 90


def labels(*rows: tuple[float, ...]) -> np.ndarray:
    """Return labels (m, 5): class, normalised xywh."""
    return np.array(rows, np.float32).reshape(-1, 5)


def predictions(
    boxes: Sequence[Tensor], infos: Sequence[ImageInfo], names: dict[int, str] = CLASS_NAMES, iou_thres: float = 0.6
) -> list[DetectionPrediction]:
    """Return the predictions of boxes (k, 6) in pixels of the files."""
    return [
        DetectionPrediction(info.image, info.path, names, info.size, rows, info.rows, iou_thres)
        for rows, info in zip(boxes, infos, strict=True)
    ]


def random_images(seed: int) -> tuple[list[Tensor], tuple[ImageInfo, ...]]:
    """Batch of 0 to 3 labels and detections near them, on a coarse grid, so that many overlaps are equal."""
    rng = np.random.default_rng(seed)
    boxes, infos = [], []
    for image in range(12):
        rows = [(rng.integers(2), *(rng.integers(3, 8, 4) / 20)) for _ in range(rng.integers(4))]
        corners = rng.integers(0, 10, (rng.integers(9), 2)) * 5
        xyxy = np.concatenate((corners, corners + rng.integers(4, 8, corners.shape) * 5), 1)
        confidence = -np.sort(-rng.integers(1, 5, (len(xyxy), 1)) / 5, axis=0)
        boxes.append(torch.from_numpy(np.concatenate((xyxy, confidence, rng.integers(0, 3, confidence.shape)), 1)))
        infos.append(image_info(image, (100, 100), rows=labels(*rows)))
    return boxes, tuple(infos)


def box(low: float, high: float, confidence: float, label: int) -> list[float]:
    """Return a square box on the diagonal, as a row of predictions."""
    return [low, low, high, high, confidence, label]


def drawn_images() -> list[ImageRecord]:
    """Return records of an empty image, a detected disc, a missed light next to a false bar, and one not to draw."""
    infos = (
        image_info(7, IMAGE, rows=labels((1, 0.9, 0.5, 0.4, 0.25)), path="/data/c.jpg"),  # 70, 37.5, 110, 62.5
        image_info(2, (64, 48), path='/data/a, "b".jpg'),
        image_info(1, IMAGE, path="/data/hidden.jpg"),
        image_info(4, (200, 100), rows=labels((0, 0.5, 0.5, 0.25, 0.5)), path="/data/b.jpg"),  # 75, 25, 125, 75
    )
    boxes = [
        torch.tensor([[0, 0, 100 / 3, 50, 0.25, 2], [0, 0, 9, 9, 0.249, 2]]).double(),
        torch.tensor([[0, 0, 9, 9, 0.2, 2.0]]).double(),
        torch.tensor([[0, 0, 9, 9, 0.9, 2.0]]).double(),
        torch.tensor([[75, 25, 125, 75, 0.5, 0], [10, 20, 30, 40, 0.5, 2]]).double(),
    ]
    return image_records(boxes, infos, drawn={2, 4, 7})
