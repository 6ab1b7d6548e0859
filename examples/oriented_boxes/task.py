"""Detection of oriented boxes: the factory of the model, loss, predictions and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from models.ensemble import fuse
from models.heads.contract import UnavailableCriterion
from models.tasks.contract import Criterion, Image, Model, Thresholds
from models.tasks.detect import BoxTask
from models.yolo import build_model
from utils.batch import Batch
from utils.config.flags import NOT_NEGATIVE
from utils.config.hyperparameters import Augmentation, Recipes, number
from utils.errors import UserError
from utils.plots.drawing import MAX_GRID_IMAGES, grid

from .geometry import corners
from .head import DecodedOriented, OrientedDetect
from .loss import LOSS_NAMES, OrientedCriterion
from .metrics import OrientedMetrics
from .prediction import OrientedPostprocess, OrientedPrediction, draw_oriented


@dataclass(frozen=True)
class OrientedRecipe(Augmentation):
    """The keys of the hyperparameter YAML: gains of the loss terms, and the augmentation."""

    box: float = number(1.0, NOT_NEGATIVE)
    cls: float = number(1.0, NOT_NEGATIVE)
    angle: float = number(0.1, NOT_NEGATIVE)


class OrientedTask(BoxTask):
    """Objects with oriented boxes, any number in an image."""

    loss_names: ClassVar[tuple[str, ...]] = LOSS_NAMES
    recipe = OrientedRecipe
    prediction = OrientedPrediction
    recipes = Recipes(str(Path(__file__).with_name("hyp.yaml")))
    defaults: ClassVar[Mapping[str, Any]] = {"weights": "", "optimizer": "AdamW"}
    features = frozenset({"mixing", "augmentation", "padding", "detections", "suppression", "examples"})

    def __init__(self, names: Mapping[int, str], hyp: OrientedRecipe, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
        self.gains = hyp.box, hyp.cls, hyp.angle

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels."""
        model = build_model(dict(yaml), nc=len(self.names), source=source, head=OrientedDetect, imgsz=imgsz)
        model.names = dict(self.names)
        return model

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`; for an exported file every term is NaN."""
        if isinstance(model.head, OrientedDetect):
            return OrientedCriterion(self.gains, model.head)
        return UnavailableCriterion()

    def postprocess(self, model: Model, thresholds: Thresholds) -> OrientedPostprocess:
        """Return the conversion of outputs to boxes."""
        return OrientedPostprocess(self.names, thresholds)

    def metrics(self, drawn: frozenset[int] = frozenset()) -> OrientedMetrics:
        """Return precision, recall and mean average precision. drawn: indices of the images to draw."""
        return OrientedMetrics(self.names, drawn)

    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        """Return the module that maps images (b, 3, h, w), in 0 to 1, to all boxes. Raises `UserError` with --nms."""
        if suppression:
            raise UserError("--nms compares upright boxes in exported files, and these are oriented; leave it out")
        return DecodedOriented(fuse(model)).eval()

    def draw_batch(self, batch: Batch) -> Image:
        """Draw a grid of the batch's images with their targets."""
        images = [np.ascontiguousarray(one.transpose(1, 2, 0)[..., ::-1]) for one in batch.images.cpu().numpy()]
        targets = batch.targets.cpu()
        points, numbers = corners(targets[:, 2:]).numpy(), targets.numpy()
        for index, image in enumerate(images[:MAX_GRID_IMAGES]):
            classes = numbers[numbers[:, 0] == index, 1].astype(int).tolist()
            draw_oriented(image, points[numbers[:, 0] == index], classes, [self.names[label] for label in classes])
        return grid(images[:MAX_GRID_IMAGES])
