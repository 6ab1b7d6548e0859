"""Image classification: the factory of the model, loss, predictions and metrics. Named by `TASKS`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.layers import Classify
from models.tasks.classification.loss import ClassificationCriterion
from models.tasks.classification.metrics import CLASSIFICATION_METRICS, ClassificationMetrics
from models.tasks.classification.prediction import ClassificationPostprocess, ClassificationPrediction, most_probable
from models.tasks.classification.torchvision_models import build_classifier
from models.tasks.contract import ExportModule, ExportSettings, Image, Model, Task, Thresholds
from models.tasks.shared.losses import weights_by_class
from models.yolo import build_model
from utils.batch import Batch, layout
from utils.config.hyperparameters import ClassWeightKeys, Recipes, Transforms, number
from utils.config.values import BELOW_ONE, NOT_NEGATIVE
from utils.errors import UserError
from utils.plots.drawing import draw_captioned

# Mean and standard deviation of ImageNet's channels, RGB from 0 to 1.
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# Patterns in tensor names of torchvision's older DenseNet and ViT files, and their replacements.
TORCHVISION_RENAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


@dataclass(frozen=True)
class ClassificationRecipe(ClassWeightKeys, Transforms):
    """The keys of a classifier's hyperparameter YAML, with the defaults in data/hyps/classify.yaml."""

    momentum: float = number(0.9, BELOW_ONE)
    weight_decay: float = number(0.0001, NOT_NEGATIVE)
    nbs: int = number(0, NOT_NEGATIVE)  # nominal batch size; 0 makes every batch a step
    warmup_epochs: float = number(0.0, NOT_NEGATIVE)


class ClassificationTask(Task):
    """Classification by torchvision's models (`architecture:` in the model YAML) or layers with a `Classify` head."""

    recipe = ClassificationRecipe
    recipes = Recipes(trained="finetune-cls", few="classify")
    prediction = ClassificationPrediction
    # YOLOv5's default weights are a detector's.
    defaults: ClassVar[Mapping[str, Any]] = {
        "weights": "",
        "imgsz": 224,
        "epochs": 30,
        "batch_size": 32,
    }
    features = frozenset({"label smoothing", "mixing", "augmentation", "copies"})
    loss_names = ("loss",)
    metric_names = CLASSIFICATION_METRICS
    prefers_trained = True
    official_weights = r"yolov5[nsmlx]-cls\.pt"

    def __init__(self, names: Mapping[int, str], hyp: ClassificationRecipe, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
        self.label_smoothing = label_smoothing
        self.class_weights = weights_by_class(names, hyp.class_weights)
        if hyp.mixup + hyp.cutmix > 1:
            raise UserError(
                f"mixup {hyp.mixup:g} and cutmix {hyp.cutmix:g} are probabilities, and an image gets at most one "
                "of the two; give numbers that add up to 1 or less"
            )
        if len(names) < 2:
            raise UserError(
                f"a classifier needs at least two classes; the data set has {', '.join(names.values()) or 'none'}"
            )

    @classmethod
    def renamed(cls, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors by their current names: torchvision's older DenseNet and ViT files have others."""
        current = dict(state)
        for old, new in TORCHVISION_RENAMES:
            current = {old.sub(new, name): tensor for name, tensor in current.items()}
        return current

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        """Build torchvision's model, or a model of layers, for images of any size, unless layers need whole strides."""
        classes = len(self.names)
        if "architecture" in yaml or "backbone" not in yaml:
            model = build_classifier(yaml, classes, imgsz, source)
        else:
            model = build_model(dict(yaml), nc=classes, source=source, head=Classify, imgsz=imgsz)
        model.names = self.names
        return model

    def criterion(self, model: Model) -> ClassificationCriterion:
        """Return the cross-entropy, with label smoothing and class weights."""
        return ClassificationCriterion(len(self.names), self.label_smoothing, self.class_weights)

    def postprocess(self, model: Model, thresholds: Thresholds) -> ClassificationPostprocess:
        """Return the averaging of probabilities over views; no threshold applies."""
        return ClassificationPostprocess(self.names)

    def metrics(self, shown: frozenset[int] = frozenset()) -> ClassificationMetrics:
        """Return the metrics; only mistakes are drawn, whichever images are `shown`."""
        return ClassificationMetrics(self.names)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the images normalised by ImageNet's statistics, float (b, 3, h, w)."""
        mean, deviation = _statistics(batch.images.device)
        images = batch.images.float(memory_format=layout(batch.images.device))  # type: ignore[call-arg]
        return images.div_(255).sub_(mean).div_(deviation)

    def export_module(self, model: Model, settings: ExportSettings) -> ExportModule:
        """Return the model with BatchNorm folded, which maps images from `inputs` to logits (b, classes)."""
        from models.ensemble import fuse  # only here, because training does not need it

        return ExportModule(fuse(model), None)

    def draw_batch(self, batch: Batch) -> Image:
        """Draw the images above their class names, with shares if an image is a mixture of two."""
        images = [image.transpose(1, 2, 0)[..., ::-1] for image in batch.images.cpu().numpy()]
        captions = []
        for target in batch.targets.cpu():
            shares = {self.names[k]: float(target[k]) for k in most_probable(target, 2) if target[k]}
            captions.append("\n".join(name + f" {share:.2f}" * (share < 1) for name, share in shares.items()))
        return draw_captioned(images, captions)


@cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ImageNet's mean and deviation, (3, 1, 1) each, copied to a device once."""
    mean, deviation = torch.tensor((IMAGENET_MEAN, IMAGENET_DEVIATION), device=device).view(2, 3, 1, 1)
    return mean, deviation
