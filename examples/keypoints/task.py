"""Keypoints by heat maps: the factory of the model, loss, predictions and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np
from torch import Tensor, nn

from models.ensemble import fuse
from models.tasks.contract import Image, Model, Task, Thresholds
from models.yolo import build_model
from utils.batch import Batch
from utils.config.flags import SHARE
from utils.config.hyperparameters import Recipe, Recipes, number
from utils.plots.drawing import draw_captioned

from .head import Heatmap
from .loss import HeatmapCriterion
from .metrics import METRIC_NAMES, HeatmapMetrics
from .prediction import HeatmapPostprocess, HeatmapPrediction

HYP = Path(__file__).with_name("hyp.yaml")


@dataclass(frozen=True)
class HeatmapRecipe(Recipe):
    """The keys of the hyperparameter YAML."""

    fliplr: float = number(0.5, SHARE)


class HeatmapTask(Task):
    """One keypoint of each class in an image, at most."""

    recipe = HeatmapRecipe
    recipes = Recipes(str(HYP))
    defaults: ClassVar[Mapping[str, Any]] = {"weights": "", "imgsz": 64}
    features = frozenset({"detections", "copies"})
    loss_names = ("heat_loss",)
    metric_names = METRIC_NAMES
    prediction = HeatmapPrediction

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        model = build_model(dict(yaml), nc=len(self.names), source=source, head=Heatmap, imgsz=imgsz)
        model.names = self.names
        return model

    def criterion(self, model: Model) -> HeatmapCriterion:
        return HeatmapCriterion()

    def postprocess(self, model: Model, thresholds: Thresholds) -> HeatmapPostprocess:
        return HeatmapPostprocess(self.names, thresholds)

    def metrics(self, drawn: frozenset[int] = frozenset()) -> HeatmapMetrics:
        return HeatmapMetrics(self.names, drawn)

    def inputs(self, batch: Batch) -> Tensor:
        return batch.images.float().div_(255)

    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        return fuse(model)

    def draw_batch(self, batch: Batch) -> Image:
        images = [np.ascontiguousarray(one.transpose(1, 2, 0)[..., ::-1]) for one in batch.images.cpu().numpy()]
        for image, _, x, y in batch.targets.tolist():
            height, width = images[int(image)].shape[:2]
            cv2.circle(images[int(image)], (int(x * width), int(y * height)), 3, (255, 255, 255))
        return draw_captioned(images, [info.path for info in batch.infos])
