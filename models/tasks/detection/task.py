"""`DetectionTask`: the factory of a detector's model, criterion, postprocess and metrics. Named in models/tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from models.fuse import fuse
from models.layers import Detect
from models.tasks.contract import (
    Criterion,
    ExportModule,
    ExportSettings,
    Image,
    Model,
    Task,
    Thresholds,
)
from models.tasks.detection.anchors import adapt_anchors
from models.tasks.detection.export_module import DecodedDetector, SuppressedDetector, graph_suppression
from models.tasks.detection.head_transfer import keep_head
from models.tasks.detection.loss import LOSS_NAMES, DetectionCriterion, LossSettings, UnavailableCriterion
from models.tasks.detection.metrics import DetectionMetrics
from models.tasks.detection.postprocess import DetectionPostprocess
from models.tasks.detection.scores import DETECTION_METRICS
from models.yolo import YoloModel, build_model
from utils.batch import Batch, BoxSplit
from utils.config.hyperparameters import Hyperparameters
from utils.config.select import select
from utils.memory_format import layout
from utils.plots.drawing import draw_targets


class DetectionTask(Task):
    """Object detection, as in YOLOv5."""

    loss_names: ClassVar[tuple[str, ...]] = LOSS_NAMES
    metric_names: ClassVar[tuple[str, ...]] = DETECTION_METRICS
    recipe = Hyperparameters
    official_weights = r"yolov5[nsmlx]6?\.pt"
    hub_tag = "object-detection"
    head: ClassVar[type[Detect]] = Detect  # of the models
    # Of exported files, without and with suppression.
    export_modules: ClassVar[tuple[type[DecodedDetector], type[SuppressedDetector]]] = (
        DecodedDetector,
        SuppressedDetector,
    )

    def __init__(self, names: Mapping[int, str], hyp: Hyperparameters, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
        self.anchors = round(hyp.anchors)  # per level, to search for; 0: the YAML's own
        self.keeps_head, self.anchor_recall = bool(hyp.keep_head), hyp.anchor_recall
        self.loss_settings = select(LossSettings, hyp, label_smoothing=label_smoothing)

    def model_yaml(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's YAML, with the hyperparameters' number of anchors per level if it is set."""
        return {**yaml, "anchors": self.anchors} if self.anchors else dict(yaml)

    def fresh_tensors(self, from_yaml: bool) -> tuple[str, ...]:
        """Return `anchors` if the YAML or the hyperparameters replace those of the weight file."""
        return ("anchors",) if from_yaml or self.anchors else ()

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> YoloModel:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels, at least 2 strides."""
        model = build_model(dict(yaml), nc=len(self.names), source=source, head=self.head, imgsz=imgsz)
        model.names = dict(self.names)
        return model

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, with gains scaled to it; for an exported file every term is NaN."""
        if not isinstance(model, YoloModel):
            return UnavailableCriterion()
        head = model.detect
        return DetectionCriterion(self.loss_settings.scaled(head.nl, head.nc, model.imgsz), head)

    def postprocess(self, model: Model, thresholds: Thresholds) -> DetectionPostprocess:
        """Return the conversion of outputs to detections. Raises `UserError` for an unknown class in `thresholds`."""
        return DetectionPostprocess(self.names, thresholds)

    def metrics(self, shown: frozenset[int] = frozenset()) -> DetectionMetrics:
        """Return precision, recall and mean average precision. shown: indices of the images to draw."""
        return DetectionMetrics(self.names, shown)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the images as float32 (b, 3, h, w) in 0 to 1."""
        return batch.images.float(memory_format=layout(batch.images.device)).div_(255)  # type: ignore[call-arg]

    def export_module(self, model: Model, settings: ExportSettings) -> ExportModule:
        """Return the module that maps images (b, 3, h, w), in 0 to 1, to boxes, or with `nms` to detections.

        Shapes: see the classes of `export_modules`.
        """
        assert isinstance(model, YoloModel)  # export.py reads no exported files
        decoded, suppressed = self.export_modules
        decoding = decoded(fuse(model)).eval()
        if not settings.nms:
            return ExportModule(decoding, None)
        suppression = graph_suppression(settings)
        return ExportModule(suppressed(decoding, suppression).eval(), suppression._asdict())

    def draw_batch(self, batch: Batch) -> Image:
        """Draw a grid of the batch's images with their targets."""
        return draw_targets(batch.images.cpu().numpy(), batch.targets.cpu().numpy(), self.names)

    def keep_head(self, model: Model, state: Mapping[str, Tensor], names: Mapping[int, str]) -> str:
        """Copy boxes, objectness, and classes of equal names from a weight file, if the hyperparameters say so."""
        assert isinstance(model, YoloModel)
        is_other = self.keeps_head and dict(names) != self.names
        return keep_head(model, state, names, self.names) if is_other else ""

    def adapt(self, model: Model, split: BoxSplit) -> list[str]:
        """Run AutoAnchor; return a message."""
        assert isinstance(model, YoloModel)
        sides = split.side_lengths(model.imgsz)
        return [adapt_anchors(model, sides, self.loss_settings.anchor_t, self.anchor_recall)]
