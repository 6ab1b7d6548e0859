"""Keypoints from heat maps: the most probable cell of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from models.tasks.contract import Image, Model, Postprocess, Prediction, Thresholds, View
from utils.batch import Batch
from utils.plots.drawing import draw_text_lines

if TYPE_CHECKING:
    from utils.plots.drawing import Style

CROP_PIXELS = 4  # on each side of a keypoint


@dataclass(frozen=True, eq=False, repr=False)
class HeatmapPrediction(Prediction):
    """The keypoints of one image."""

    size: tuple[int, int]  # width and height of the file's image, pixels
    points: np.ndarray  # float32 (k, 4): x and y in pixels of the file, confidence, class
    labels: np.ndarray  # float32 (m, 3): class, normalised x and y

    @property
    def array(self) -> np.ndarray:
        return self.points

    @property
    def scores(self) -> np.ndarray:
        return self.points[:, 2]

    @property
    def classes(self) -> np.ndarray:
        return self.points[:, 3].astype(np.int64)

    def describe(self) -> str:
        counts = Counter(name for name, _ in self.items)
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"

    def draw(self, image: Image, style: Style) -> Image:
        drawn = draw_text_lines(image, [style.text(*item) for item in self.items])
        for x, y, *_ in self.points.tolist():
            cv2.circle(drawn, (int(x), int(y)), 3, (255, 255, 255), style.thickness)
        return drawn

    def crops(self, image: Image) -> list[tuple[str, Image]]:
        parts = []
        for (name, _), (x, y, *_) in zip(self.items, self.points.tolist(), strict=True):
            left, top = max(int(x) - CROP_PIXELS, 0), max(int(y) - CROP_PIXELS, 0)
            parts.append((name, image[top : int(y) + CROP_PIXELS, left : int(x) + CROP_PIXELS]))
        return parts

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        width, height = (1, 1) if corners else self.size
        return [
            f"{int(label)} {x / width:.6g} {y / height:.6g}" + f" {confidence:.6g}" * with_confidence
            for x, y, confidence, label in self.points.tolist()
        ]


class HeatmapView(NamedTuple):
    outputs: Tensor  # logits (b, classes, h, w)
    mirrored: bool = False


class HeatmapPostprocess(Postprocess):
    """Average the maps of all views and take the highest cell of each class."""

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        self.names, self.thresholds = names, thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[HeatmapView]:
        views = [HeatmapView(model(inputs))]
        return [*views, HeatmapView(model(inputs.flip(3)), mirrored=True)] if augment else views

    def __call__(self, views: Sequence[View], batch: Batch) -> list[HeatmapPrediction]:
        maps = [view.outputs.float().sigmoid() for view in views]
        maps = [
            one.flip(3) if isinstance(view, HeatmapView) and view.mirrored else one
            for view, one in zip(views, maps, strict=True)
        ]
        mean = torch.stack(maps).mean(0).cpu()
        return [
            HeatmapPrediction(info.image, info.path, self.names, info.size, self._points(one, info.size), info.labels)
            for one, info in zip(mean, batch.infos, strict=True)
        ]

    def _points(self, maps: Tensor, size: tuple[int, int]) -> np.ndarray:
        """Return the keypoints (k, 4) of maps (classes, h, w), the most confident first."""
        classes, height, width = maps.shape
        confidence, cell = maps.flatten(1).max(1)
        x, y = (cell % width + 0.5) * size[0] / width, (cell // width + 0.5) * size[1] / height
        points = torch.stack((x, y, confidence, torch.arange(classes).float()), 1).numpy()
        allowed = points[:, 2] > self.thresholds.conf_thres
        if self.thresholds.classes:
            allowed &= np.isin(points[:, 3], self.thresholds.classes)
        points = points[allowed]
        return points[np.argsort(-points[:, 2], kind="stable")][: self.thresholds.max_det]
