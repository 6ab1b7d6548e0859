"""`ClassificationTask`: torchvision's classifiers or layers of a YAML, their loss, predictions and metrics. In `TASKS`.

torchvision is imported inside functions: the import takes more than a second, and reading a file's YAML needs none.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.layers import Classify
from models.tasks.contract import (
    Criterion,
    Image,
    LossTerms,
    Metrics,
    Model,
    Postprocess,
    Prediction,
    Task,
    Thresholds,
    View,
    device_constant,
    upcast_half,
)
from models.weights import architecture
from models.yolo import build_model
from utils.batch import Batch, ClassInfo, Split, layout
from utils.config.flags import BELOW_ONE, NOT_NEGATIVE
from utils.config.hyperparameters import ClassWeightKeys, Recipes, Transforms, number
from utils.errors import UserError, first_line, nearest
from utils.files import csv_text
from utils.plots.drawing import Style, draw_captioned, draw_text_lines
from utils.review import WRONG_CLASS, Contradiction, ImageReview
from utils.summary import Row, Summary, confusion_text, sparse_counts

TOP_CLASSES = 5  # classes per image that are named, drawn, written and counted by top-5 accuracy
CLASSIFICATION_METRICS = ("accuracy_top1", "accuracy_top5")
CLASS_METRICS = ("precision", "recall")
DRAWN_MISTAKES = 16
MIN_PICTURE_SIDE_PIXELS = 160  # smallest side that a caption fits below
IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of RGB from 0 to 1
CLASSIFIER_KEYS = ("task", "architecture", "nc", "args")
# These architectures have auxiliary heads for training, which would need a loss, so they are left out. Their pretrained
# weights expect another normalisation of the images, which `transform_input` does.
AUXILIARY_ARGUMENTS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def build_classifier(yaml: Mapping[str, Any], nc: int, imgsz: int, source: str = "the model YAML") -> Model:
    """Build the network that a YAML names, for `nc` classes and images of `imgsz` pixels.

    It maps (b, 3, h, w) to logits (b, nc). State-dict keys are torchvision's. The YAML's `args` are arguments of
    torchvision's function, such as `dropout: 0.3`. Raises `UserError`, which names `source`, if the network cannot be
    built or does not accept such images.
    """
    from torchvision.models import get_model

    name, args = architecture(yaml, source), yaml.get("args") or {}
    try:
        if name in AUXILIARY_ARGUMENTS:
            args = {"transform_input": True, **args}
        model: nn.Module = get_model(name, weights=None, num_classes=nc, **AUXILIARY_ARGUMENTS.get(name, {}), **args)
        state = {key: tensor.to("meta") for key, tensor in chain(model.named_parameters(), model.named_buffers())}
        with torch.no_grad():
            functional_call(model, state, torch.zeros(2, 3, imgsz, imgsz, device="meta"))
    except Exception as error:  # a user's arguments can fail anywhere
        problem = f"with `args` {args} and --imgsz {imgsz} does not work ({first_line(error)}); most are made for 224"
        raise UserError(f"{source}: {name} {problem}") from error
    arguments = [*inspect.signature(type(model).__init__).parameters]  # some builders ignore unknown ones
    for given, known in ((yaml, CLASSIFIER_KEYS), (args, arguments)):
        if unknown := [str(key) for key in given if key not in known]:
            raise UserError(f"{source}: unknown key '{unknown[0]}'{nearest(unknown[0], known)}; correct or remove it")
    built = cast(Model, model)  # torchvision's class; the attributes make it a `Model`
    built.yaml = {**copy.deepcopy(dict(yaml)), "task": "classify", "nc": nc}
    built.names, built.stride, built.imgsz = {number: str(number) for number in range(nc)}, 1, imgsz
    return built


def most_probable(probabilities: Tensor, count: int = TOP_CLASSES) -> tuple[int, ...]:
    """Return the most probable classes in falling probability; equally probable classes are ordered by number."""
    return tuple(probabilities.sort(descending=True, stable=True).indices[:count].tolist())


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationPrediction(Prediction):
    """The probabilities of the classes in one image."""

    probabilities: Tensor  # float32 (classes,), on the CPU

    @property
    def array(self) -> np.ndarray:
        """Return the probability of each class, float32 (classes,)."""
        return self.probabilities.numpy().astype(np.float32)

    probs = array

    @property
    def top5(self) -> list[tuple[str, float]]:
        """The five most probable classes, by name, and their probabilities."""
        return self.items

    @property
    def scores(self) -> np.ndarray:
        """The five highest probabilities, float32 (k,); fewer if there are fewer classes."""
        return np.asarray(self.array[self.classes])

    @property
    def classes(self) -> np.ndarray:
        """The five most probable classes, int64 (k,)."""
        return np.array(most_probable(self.probabilities), np.int64)

    def describe(self) -> str:
        """Format the five most probable classes: `cat 0.90, dog 0.10`."""
        return ", ".join(f"{name} {probability:.2f}" for name, probability in self.items)

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the five most probable classes in its corner."""
        texts = [style.text(name, probability) for name, probability in self.items]
        return draw_text_lines(image, list(filter(None, texts)), style.thickness)

    def crops(self, image: Image) -> list[tuple[str, Image]]:
        return [(self.items[0][0], image)]

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return the names of the five most probable classes, each after its probability if `with_confidence`."""
        return [f"{probability:.6g} " * with_confidence + name for name, probability in self.items]

    def review(self, info: ClassInfo) -> ImageReview:
        """Return whether another class is the most probable, scored by the difference of the probabilities."""
        best, probability = int(self.classes[0]), float(self.scores[0])
        score = probability - float(self.array[info.label])
        found = Contradiction(WRONG_CLASS, score, info.label, best, probability, None)
        return ImageReview(self.image, self.path, [found] * (best != info.label))


class ClassificationView(NamedTuple):
    """The outputs of a model for the images of a batch."""

    outputs: Tensor  # logits (b, classes)


class ClassificationPostprocess(Postprocess):
    """Average the probabilities of all views of one or several models."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[ClassificationView]:
        versions = (inputs, inputs.flip(3)) if augment else (inputs,)
        return [ClassificationView(model(images)) for images in versions]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[ClassificationPrediction]:
        probabilities = torch.stack([view.outputs.float().softmax(1) for view in views]).mean(0).cpu()
        return [
            ClassificationPrediction(info.image, info.path, self.names, image)
            for info, image in zip(batch.infos, probabilities, strict=True)
        ]


class ClassificationCriterion(Criterion):
    """Cross-entropy of logits (b, classes) against targets (b, classes): shares of the classes, which add up to 1.

    With `class_weights`, by class number, an image of weight 2 counts as two equal images, and each share of a mixture
    has its class's weight.
    """

    def __init__(self, classes: int, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()) -> None:
        self.classes, self.label_smoothing, self.class_weights = classes, label_smoothing, tuple(class_weights)
        self.min_divisor = min((1.0, *class_weights))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerms:
        """Return the loss of logits (b, classes), in fp32 or fp64, as one term: a weighted sum over the images."""
        logits, targets = upcast_half(outputs), batch.targets
        images = targets.new_ones(len(targets), 1)  # number of images that each counts as
        if self.class_weights:
            targets = targets * device_constant(self.class_weights, targets.device).to(targets)
            images = targets.sum(1, keepdim=True)
        smoothed = targets * (1 - self.label_smoothing) + images * (self.label_smoothing / self.classes)
        total = -(smoothed * logits.log_softmax(1)).sum().view(1, 1)
        return LossTerms(total, images.sum().to(total).view(1, 1), torch.ones_like(total), self.min_divisor)

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the mean over the images of a step."""
        return means.sum()

    def weight(self, batch: Batch) -> float:
        """Return the number of images: the validation loss is the mean over all images."""
        return len(batch.infos)


class ImageRecord(NamedTuple):
    """The contribution of one image to the metrics."""

    image: int  # index in the split
    label: int
    best: tuple[int, ...]  # the most probable classes, at most 5, most probable first
    confidence: float  # probability of the most probable class


class ClassificationMetrics(Metrics):
    """Top-1 and top-5 accuracy, and precision and recall of each class; top-1 accuracy is the fitness."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        infos: Sequence[ClassInfo] = batch.infos
        records = []
        for prediction, info in zip(cast(Sequence[ClassificationPrediction], predictions), infos, strict=True):
            best = most_probable(prediction.probabilities)
            records.append(ImageRecord(info.image, info.label, best, float(prediction.probabilities[best[0]])))
        return records

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """Return the metrics of a split; fitness is the share of images whose most probable class is correct."""
        confusion = np.zeros((len(self.names), len(self.names)), np.int64)
        np.add.at(confusion, ([record.label for record in records], [record.best[0] for record in records]), 1)
        top1 = float(np.trace(confusion)) / len(records)
        top5 = sum(record.label in record.best for record in records) / len(records)
        mistakes = [record for record in records if record.label != record.best[0]]
        mistakes = sorted(mistakes, key=lambda record: (-record.confidence, record.image))[:DRAWN_MISTAKES]
        drawn = [[record.image, record.label, record.best[0], record.confidence] for record in mistakes]
        right, images = np.diag(confusion), confusion.sum(1)
        scores = right / np.maximum(confusion.sum(0), 1), right / np.maximum(images, 1)  # `CLASS_METRICS`; 0 for 0 / 0
        by_class = {
            metric: {name: float(values[k]) for k, name in self.names.items() if confusion[k].any()}
            for metric, values in zip(CLASS_METRICS, scores, strict=True)
        }
        top = {"top-1": top1, "top-5": top5} if len(self.names) > TOP_CLASSES else {"top-1": top1}
        overall: Row = ("all", len(records), *(float(values.mean()) for values in scores), *top.values())
        columns = (self.names.values(), images.tolist(), *(values.tolist() for values in scores))
        return Summary(
            dict(zip(CLASSIFICATION_METRICS, (top1, top5), strict=True)),
            top1,
            [("Class", "Images", "P", "R", *top), overall],
            [(*row, *"-" * len(top)) for row in zip(*columns, strict=True)],
            {"confusion": sparse_counts(confusion), "mistakes": drawn},
            by_class=by_class,
            headline=dict(reversed(top.items())),
        )

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return classes.csv, with images, precision and recall of each class, and confusion_matrix.csv."""
        by_class = [(name, images, f"{p:.9g}", f"{r:.9g}") for name, images, p, r, *_ in summary.details]
        return {
            "classes.csv": csv_text(("class", "images", "precision", "recall"), by_class),
            "confusion_matrix.csv": confusion_text(summary.evidence["confusion"], list(self.names.values())),
        }

    def pictures(self, summary: Summary, split: Split, side: int) -> dict[str, Image]:
        """Return mistakes.jpg, the most confident mistakes, if there are any."""
        mistakes = summary.evidence["mistakes"]
        if not mistakes:
            return {}
        images = [split.display_image(image, max(side, MIN_PICTURE_SIDE_PIXELS)) for image, *_ in mistakes]
        captions = [
            f"{self.names[predicted]} {confidence:.2f}\nis {self.names[label]}"
            for _, label, predicted, confidence in mistakes
        ]
        return {"mistakes.jpg": draw_captioned(images, captions)}


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
    defaults: ClassVar[Mapping[str, Any]] = {"weights": "", "imgsz": 224, "epochs": 30, "batch_size": 32}
    features = frozenset({"label smoothing", "mixing", "augmentation", "copies"})
    loss_names = ("loss",)
    metric_names = CLASSIFICATION_METRICS
    prefers_trained = True
    official_weights = r"yolov5[nsmlx]-cls\.pt"

    def __init__(self, names: Mapping[int, str], hyp: ClassificationRecipe, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
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
        if "architecture" in yaml or "backbone" not in yaml:
            model = build_classifier(yaml, len(self.names), imgsz, source)
        else:
            model = build_model(dict(yaml), nc=len(self.names), source=source, head=Classify, imgsz=imgsz)
        model.names = self.names
        return model

    def criterion(self, model: Model) -> ClassificationCriterion:
        return ClassificationCriterion(len(self.names), self.label_smoothing, self.class_weights)

    def postprocess(self, model: Model, thresholds: Thresholds) -> ClassificationPostprocess:
        """Return the averaging of probabilities over views; no threshold applies."""
        return ClassificationPostprocess(self.names)

    def metrics(self, drawn: frozenset[int] = frozenset()) -> ClassificationMetrics:
        """Return the metrics; only mistakes are drawn, whichever images are `drawn`."""
        return ClassificationMetrics(self.names)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the images normalised by ImageNet's statistics, float (b, 3, h, w)."""
        mean, deviation = device_constant(IMAGENET_STATISTICS, batch.images.device).view(2, 3, 1, 1)
        images = batch.images.float(memory_format=layout(batch.images.device))  # type: ignore[call-arg]
        return images.div_(255).sub_(mean).div_(deviation)

    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        """Return the model, which maps images from `inputs` to logits (b, classes)."""
        from models.ensemble import fuse

        return fuse(model)

    def draw_batch(self, batch: Batch) -> Image:
        """Draw the images above their class names, with shares if an image is a mixture of two."""
        images = [image.transpose(1, 2, 0)[..., ::-1] for image in batch.images.cpu().numpy()]
        captions = []
        for target in batch.targets.cpu():
            shares = {self.names[k]: float(target[k]) for k in most_probable(target, 2) if target[k]}
            captions.append("\n".join(name + f" {share:.2f}" * (share < 1) for name, share in shares.items()))
        return draw_captioned(images, captions)
