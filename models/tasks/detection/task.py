"""`DetectionTask`: the factory of a detector's model, criterion, postprocess and metrics. Named in models/tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from models.heads.anchors.head import Detect
from models.heads.anchors.loss import LOSS_NAMES
from models.heads.contract import DetectionHead, head_of
from models.heads.dfl.head import DetectDFL
from models.layers import Head
from models.loading import head_prefix, head_tensors
from models.tasks.contract import (
    Criterion,
    ExportModule,
    ExportSettings,
    Image,
    Model,
    Prediction,
    Task,
    Thresholds,
)
from models.tasks.detection.export_module import DecodedDetector, SuppressedDetector, graph_suppression
from models.tasks.detection.metrics import DetectionMetrics
from models.tasks.detection.postprocess import DetectionPostprocess
from models.tasks.detection.prediction import DetectionPrediction
from models.tasks.shared.losses import UnavailableCriterion, weights_by_class
from models.tasks.shared.scores import DETECTION_METRICS
from models.yolo import YoloModel, build_model, head_class
from utils.batch import Batch, BoxSplit, layout
from utils.config.hyperparameters import Augmentation, Hyperparameters, Recipes, keys_of
from utils.plots.drawing import draw_targets


class DetectionTask(Task):
    """Object detection, as in YOLOv5."""

    loss_names: ClassVar[tuple[str, ...]] = LOSS_NAMES
    metric_names: ClassVar[tuple[str, ...]] = DETECTION_METRICS
    recipe = Hyperparameters
    recipes = Recipes(trained="finetune", few="scratch-small", many="low", yolov5="low")
    prediction: ClassVar[type[Prediction] | None] = DetectionPrediction
    official_weights = r"yolov5[nsmlx]6?\.pt|v9-[tsmc]\.pt"
    features = frozenset(
        {"mixing", "augmentation", "padding", "detections", "suppression", "boxes", "copies", "examples"}
    )
    heads: ClassVar[tuple[type[Head], ...]] = (Detect, DetectDFL)  # heads that its models may have; the usual one first
    # Modules of exported files, without and with suppression.
    export_modules: ClassVar[tuple[type[DecodedDetector], type[SuppressedDetector]]] = (
        DecodedDetector,
        SuppressedDetector,
    )

    def __init__(self, names: Mapping[int, str], hyp: Hyperparameters, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
        self.hyp, self.label_smoothing = hyp, label_smoothing
        self.class_weights = weights_by_class(names, hyp.class_weights)
        self.anchors = round(hyp.anchors)  # number of anchors per level to search for; 0 keeps the YAML's anchors

    @classmethod
    def features_of(cls, yaml: Mapping[str, Any]) -> frozenset[str]:
        """Return `features` and the features of the head of a YAML's model."""
        head = head_class(yaml)
        return cls.features | (head.features if head and issubclass(head, DetectionHead) else frozenset())

    def unread(self, yaml: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the detector's keys that neither augmentation nor the head of a YAML's model reads.

        Keys that a derived task adds are not among them.
        """
        head = head_class(yaml)
        if head is None or not issubclass(head, DetectionHead):
            return ()  # building the model reports it
        read = keys_of(Augmentation) | {"keep_head"} | head.hyperparameters
        return tuple(key for key in Hyperparameters.__dataclass_fields__ if key not in read)

    def model_yaml(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's YAML with the recipe's `anchors`, if set, and without `auxiliary` if `tal_aux` is 0."""
        changed = {**yaml, "anchors": self.anchors} if self.anchors else dict(yaml)
        if not self.hyp.tal_aux:
            changed.pop("auxiliary", None)
        return changed

    def fresh_tensors(self, from_yaml: bool) -> tuple[str, ...]:
        """Return `anchors` if the YAML or the hyperparameters replace the weight file's anchors."""
        return ("anchors",) if from_yaml or self.anchors else ()

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> YoloModel:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels, at least 2 strides."""
        model = build_model(dict(yaml), nc=len(self.names), source=source, head=self.heads, imgsz=imgsz)
        model.names = dict(self.names)
        return model

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        """Return the names of the terms of the loss of `model`'s head."""
        head = type(model.head) if model.head else head_class(model.yaml)
        return head.loss_names if head and issubclass(head, DetectionHead) else self.loss_names

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, as its head defines it; for an exported file every term is NaN."""
        if model.head is None:
            return UnavailableCriterion(len(self.loss_names_of(model)))
        return head_of(model).criterion(self.hyp, self.label_smoothing, model.imgsz, self.class_weights)

    def postprocess(self, model: Model, thresholds: Thresholds) -> DetectionPostprocess:
        """Return the conversion of outputs to detections. Raises `UserError` for an unknown class in `thresholds`."""
        return DetectionPostprocess(self.names, thresholds)

    def metrics(self, shown: frozenset[int] = frozenset()) -> DetectionMetrics:
        """Return precision, recall and mean average precision; `shown` are the indices of the images to draw."""
        return DetectionMetrics(self.names, shown)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the images as float32 (b, 3, h, w) in 0 to 1."""
        return batch.images.float(memory_format=layout(batch.images.device)).div_(255)  # type: ignore[call-arg]

    def export_module(self, model: Model, settings: ExportSettings) -> ExportModule:
        """Return the module that maps images (b, 3, h, w), in 0 to 1, to boxes, or with `nms` to detections.

        The classes in `export_modules` give the shapes.
        """
        decoded, suppressed = self.export_modules
        from models.ensemble import fuse  # only here, because training does not need it

        decoding = decoded(fuse(model)).eval()
        if not settings.nms:
            return ExportModule(decoding, None)
        suppression = graph_suppression(settings)
        return ExportModule(suppressed(decoding, suppression).eval(), suppression._asdict())

    def draw_batch(self, batch: Batch) -> Image:
        """Draw a grid of the batch's images with their targets."""
        return draw_targets(batch.images.cpu().numpy(), batch.targets.cpu().numpy(), self.names)

    def keep_head(self, model: Model, state: Mapping[str, Tensor], names: Mapping[int, str]) -> str:
        """Copy boxes, objectness and classes of equal names from a weight file, if the key `keep_head` is set."""
        parts = head_tensors(model)
        fits = all(name not in state or state[name].shape == part.shape for name, part in parts.items())
        if not self.hyp.keep_head or (fits and dict(names) == self.names):
            return ""
        return head_of(model).keep(head_prefix(model), state, names, self.names)

    def adapt(self, model: Model, split: BoxSplit) -> list[str]:
        """Adapt the head to the training boxes, by AutoAnchor if it has anchors; return messages."""
        return head_of(model).adapt(model, split, self.hyp)
