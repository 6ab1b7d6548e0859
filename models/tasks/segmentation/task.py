"""`SegmentationTask`: the factory of a segmenter's model, criterion, postprocess and metrics. Named in models/tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from models.heads.anchors.head import Segment
from models.heads.anchors.loss import loss_settings
from models.heads.contract import head_of
from models.heads.dfl.head import DetectDFL
from models.tasks.contract import Criterion, Image, Model, Thresholds
from models.tasks.detection.task import DetectionTask
from models.tasks.segmentation.export_module import DecodedSegmenter, SuppressedSegmenter
from models.tasks.segmentation.loss import LOSS_NAMES, SegmentationCriterion
from models.tasks.segmentation.metrics import SEGMENTATION_METRICS, SegmentationMetrics
from models.tasks.segmentation.postprocess import SegmentationPostprocess
from models.tasks.segmentation.prediction import SegmentationPrediction
from models.tasks.shared.losses import UnavailableCriterion
from models.yolo import YoloModel, head_class
from utils.batch import MASK_STRIDE, Batch, SegmentationBatch
from utils.errors import UserError
from utils.plots.drawing import MAX_GRID_IMAGES, draw_targets, tint


class SegmentationTask(DetectionTask):
    """Instance segmentation, as in YOLOv5: a detector whose boxes have masks."""

    loss_names = LOSS_NAMES
    metric_names = SEGMENTATION_METRICS
    official_weights = r"yolov5[nsmlx]-seg\.pt"
    prediction = SegmentationPrediction
    features = DetectionTask.features - {"copies"} | {"masks"}
    heads = (Segment,)
    export_modules = (DecodedSegmenter, SuppressedSegmenter)

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> YoloModel:
        """Build the model of a YAML. Raises `UserError` unless the prototypes are a quarter of the images."""
        if head_class(yaml) is DetectDFL:
            raise UserError(
                f"{source}: a DetectDFL head has no masks; take a model with Segment, such as yolov5n-seg.yaml"
            )
        model = super().build_model(yaml, imgsz, source)
        stride = int(head_of(model).stride[0]) // 2  # `Proto` doubles height and width
        if stride != MASK_STRIDE:
            raise UserError(
                f"{source}: the first map of Segment has stride {2 * stride}, and masks need {2 * MASK_STRIDE}; "
                "name a row of that stride first"
            )
        return model

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        """Return the names of the terms."""
        return LOSS_NAMES

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, with gains scaled to it; for an exported file every term is NaN."""
        if not isinstance(head := model.head, Segment):
            return UnavailableCriterion(len(LOSS_NAMES))
        settings = loss_settings(self.hyp, self.label_smoothing)
        return SegmentationCriterion(settings.scaled(head.nl, head.nc, model.imgsz), head, self.class_weights)

    def postprocess(  # type: ignore[override]
        self, model: Model, thresholds: Thresholds
    ) -> SegmentationPostprocess:
        """Return the conversion of outputs to instances. Raises `UserError` for an unknown class in `thresholds`."""
        return SegmentationPostprocess(self.names, thresholds)

    def metrics(self, shown: frozenset[int] = frozenset()) -> SegmentationMetrics:
        """Return precision, recall and mean average precision of boxes and masks; `shown` are images to draw."""
        return SegmentationMetrics(self.names, shown)

    def draw_batch(self, batch: Batch) -> Image:
        """Draw a grid of the batch's images with their boxes and masks."""
        given = cast("SegmentationBatch", batch)
        images, pixels = given.images[:MAX_GRID_IMAGES].cpu().numpy()[:, ::-1].copy(), given.mask_pixels.cpu().numpy()
        sides = given.windows[:, 2:] - given.windows[:, :2]
        ends = sides.prod(1).cumsum().tolist()
        square = np.ones((MASK_STRIDE, MASK_STRIDE), bool)
        targets = given.host_targets[:, :2].astype(int).tolist()
        for (image, label), window, (width, height), end in zip(
            targets, (given.windows * MASK_STRIDE).tolist(), sides.tolist(), ends, strict=True
        ):
            if image < len(images):
                left, top, right, bottom = window
                mask = np.kron(pixels[end - width * height : end].reshape(height, width) > 0, square)
                tint(images[image].transpose(1, 2, 0)[top:bottom, left:right], mask, label)
        return draw_targets(images[:, ::-1], given.targets.cpu().numpy(), self.names)
