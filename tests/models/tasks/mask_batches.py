"""Segmenters and their batches, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from models.tasks.segment import SegmentationTask
from models.yolo import YoloModel
from tests.making import CLASS_NAMES
from utils.batch import ImageInfo, SegmentationBatch, box_windows
from utils.config.hyperparameters import Hyperparameters

SIDE, MAP = 64, 16  # pixels of the images and of their mask maps


def mask_batch(
    targets: Sequence[Sequence[float]],
    masks: Sequence[np.ndarray],
    infos: Sequence[ImageInfo] = (),
    images: int = 1,
    windows: np.ndarray | None = None,
) -> SegmentationBatch:
    """Make a batch of square images. masks: bool (h, w) of each target, on the map.

    windows: by default those of the boxes, as in training.
    """
    rows = np.array(targets, np.float32).reshape(-1, 6)
    height, width = masks[0].shape if len(masks) else (MAP, MAP)
    chosen = box_windows(rows[:, 2:], height, width) if windows is None else windows.astype(np.int32)
    parts = [mask[top:bottom, left:right] for mask, (left, top, right, bottom) in zip(masks, chosen, strict=True)]
    pixels = np.concatenate([np.zeros(0, bool), *(part.ravel() for part in parts)]).astype(np.uint8)
    pictures = torch.full((len(infos) or images, 3, height * 4, width * 4), 51, dtype=torch.uint8)
    return SegmentationBatch(pictures, torch.from_numpy(rows), tuple(infos), torch.from_numpy(pixels), chosen, rows)


def tiny_segmenter() -> dict[str, Any]:
    """Return the YAML content of a segmenter of two levels, strides 8 and 16, quick to build."""
    return {
        "nc": 3,
        "anchors": [[8, 8, 16, 12], [24, 24, 40, 32]],
        "backbone": [[-1, 1, "Conv", [8, 3, 2]] for _ in range(4)],
        "head": [[[2, 3], 1, "Segment", ["nc", "anchors", 4, 8]]],
    }


def tiny_task() -> SegmentationTask:
    return SegmentationTask(CLASS_NAMES, Hyperparameters())


def tiny_model(seed: int = 0) -> YoloModel:
    """Return a segmenter with many detections of different confidence and with masks of many shapes."""
    torch.manual_seed(seed)
    model = tiny_task().build_model(tiny_segmenter(), SIDE).eval()
    for level in model.head.m:
        nn.init.normal_(level.get_parameter("weight"), std=2)
        nn.init.normal_(level.get_parameter("bias"), std=0.5)
    return model.requires_grad_(False)
