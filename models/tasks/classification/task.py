"""Image classification: the model, its loss and its scores, as one object."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from models.fuse import fuse
from models.tasks.classification.torchvision_models import build_classifier
from models.tasks.contract import Batch
from models.tasks.detection.loss import LossTerms
from models.yolo import build_model
from utils.config.options import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, Recipe, number
from utils.errors import UserError
from utils.files import csv_text
from utils.memory_format import layout
from utils.plots.drawing import Style, draw_captioned, draw_text_lines
from utils.summary import Example, Summary, confusion_text, dense_counts, sparse_counts

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, RGB, of values in 0 to 1
TOP = 5
MISTAKES = 16  # pictures of them


@dataclass(frozen=True)
class ClassificationRecipe(Recipe):
    """The keys of a hyperparameter YAML for a classifier. Defaults are the recipe `classify`."""

    momentum: float = number(0.9, BELOW_ONE)
    weight_decay: float = number(0.0001, NOT_NEGATIVE)
    nbs: int = number(0, NOT_NEGATIVE)  # every batch is a step
    warmup_epochs: float = number(0.0, NOT_NEGATIVE)
    crop_scale: float = number(0.08, Range(0, 1, above=True))  # least share of the area that a random crop takes
    fliplr: float = number(0.5, SHARE)
    flipud: float = number(0.0, SHARE)
    brightness: float = number(0.4, NOT_NEGATIVE)
    contrast: float = number(0.4, NOT_NEGATIVE)
    saturation: float = number(0.4, NOT_NEGATIVE)
    hue: float = number(0.0, Range(0, 0.5))
    randaugment: int = number(0, Range(0, 16))  # operations
    randaugment_magnitude: int = number(9, Range(0, 30))
    erasing: float = number(0.0, SHARE)
    mixup: float = number(0.0, SHARE)
    cutmix: float = number(0.0, SHARE)
    mixup_alpha: float = number(0.2, POSITIVE)
    cutmix_alpha: float = number(1.0, POSITIVE)


class ImageInfo(Protocol):
    """What this task needs to know of an image beside its pixels."""

    @property
    def image(self) -> int: ...
    @property
    def label(self) -> int: ...


class Split(Protocol):
    """A split of the data set."""

    def shown(self, index: int, side: int) -> np.ndarray: ...


class Look(NamedTuple):
    """What a model made of a batch's images."""

    outputs: Tensor  # logits (b, classes)


class ImageRecord(NamedTuple):
    """What one image adds to the metrics."""

    image: int  # its index
    label: int
    best: tuple[int, ...]  # the classes found most likely, at most 5, the likeliest first
    confidence: float  # in the likeliest


class ClassificationTask:
    """The verbs that the training loop calls. `names` are the classes."""

    recipe = ClassificationRecipe
    # What flags are where the command line says nothing: of the model there are no official weights.
    defaults: Mapping[str, Any] = {
        "weights": "",
        "hyp": "data/hyps/classify.yaml",
        "imgsz": 224,
        "epochs": 30,
        "batch_size": 32,
    }
    # Flags that mean nothing to this task, and why.
    refused: Mapping[str, str] = {
        "save_hybrid": "is for detectors: an image has one class here, and its label says which",
        "nms": "is for detectors: a classifier has no boxes; export it without",
        "save_json": "is for detectors: COCO's results are boxes; --save-txt writes the classes that were found",
    }
    loss_names = ("loss",)
    metric_names = ("accuracy_top1", "accuracy_top5")
    stride = 1  # images of any size will do

    def __init__(self, names: Mapping[int, str], hyp: ClassificationRecipe, label_smoothing: float = 0.0) -> None:
        if hyp.mixup + hyp.cutmix > 1:
            raise UserError(
                f"mixup {hyp.mixup:g} and cutmix {hyp.cutmix:g} are probabilities of which one image gets at most one; "
                "give numbers that add up to 1 or less"
            )
        if len(names) < 2:
            raise UserError(
                f"a classifier tells at least two classes apart, and the data has {', '.join(names.values())}"
            )
        self.names, self.label_smoothing = dict(names), label_smoothing
        self.shown: frozenset[int] = frozenset()  # images whose boxes the evidence keeps: here there are none
        self.augment = False  # show the images mirrored too

    def describe(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """A model's YAML with what the recipe asks for: nothing."""
        return dict(yaml)

    def not_taken(self, from_yaml: bool) -> tuple[str, ...]:
        """Parts of the names of tensors that are not taken from a weight file: none."""
        return ()

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> nn.Module:
        """The model of a YAML for this task's classes and images of `imgsz` pixels. `source`: where it is from."""
        self.imgsz = imgsz
        classes = len(self.names)
        if "architecture" in yaml or "backbone" not in yaml:
            model = build_classifier(yaml, classes, imgsz, source)
        else:
            model = build_model(dict(yaml), nc=classes, source=source)
        model.names = self.names  # type: ignore[assignment]
        return model

    def adopt(self, stride: int, imgsz: int) -> None:
        """Take on a model that this task has not built, an exported one, for images of `imgsz` pixels."""
        self.imgsz = imgsz

    def exportable(self, model: nn.Module, options: Any) -> tuple[nn.Module, None]:
        """What an exported file computes, of images normalised as `inputs` does: logits (b, classes). `options`: none
        of them matters."""
        return fuse(model), None

    def adapt(self, model: nn.Module, split: Any) -> list[str]:
        """Fit the model to the training images: there is nothing to fit."""
        return []

    def inputs(self, batch: Batch[ImageInfo]) -> Tensor:
        """What the model is called with: float (b, 3, h, w), normalised by ImageNet's statistics."""
        mean, deviation = _statistics(batch.images.device)
        images = batch.images.float(memory_format=layout(batch.images.device))  # type: ignore[call-arg]
        return images.div_(255).sub_(mean).div_(deviation)

    def hints(self, batch: Batch[ImageInfo]) -> tuple[Tensor, ...]:
        """What the model is told beside the images when only its losses are wanted: nothing."""
        return ()

    def losses(self, outputs: Tensor, batch: Batch[ImageInfo]) -> LossTerms:
        """The cross-entropy of logits (b, classes), as a sum and its count."""
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        smoothed = batch.targets * (1 - self.label_smoothing) + self.label_smoothing / len(self.names)
        total = -(smoothed * logits.log_softmax(1)).sum()
        return LossTerms(total.view(1, 1), total.new_full((1, 1), len(logits)), total.new_ones(1, 1))

    def objective(self, means: Tensor, images: int) -> Tensor:
        """What is differentiated: the mean over the images of a step."""
        return means.sum()

    def weight(self, batch: Batch[ImageInfo]) -> int:
        """The weight of a batch's losses in those of a validation: its images, so that the mean is over all images."""
        return len(batch.infos)

    def looks(self, model: nn.Module, inputs: Tensor) -> list[Look]:
        """What the model makes of `inputs`, and with `augment` of their mirror images."""
        shown = (inputs, inputs.flip(3)) if self.augment else (inputs,)
        return [Look(model(images)) for images in shown]

    def predict(self, looks: Sequence[Look], batch: Batch[ImageInfo]) -> Tensor:
        """The probability of each class, (b, classes): the mean over the looks, which may be of several models."""
        return torch.stack([look.outputs.float().softmax(1) for look in looks]).mean(0).cpu()

    def set_thresholds(
        self,
        conf_thres: float,
        iou_thres: float,
        max_det: int,
        classes: Collection[int] = (),
        agnostic: bool = False,
        one_class: bool = False,
    ) -> None:
        """Thresholds of a detector; they change nothing here."""

    def plain(self, prediction: Tensor) -> np.ndarray:
        """The probability of each class, float32 (classes,)."""
        return prediction.numpy().astype(np.float32)

    def findings(self, prediction: Tensor) -> list[tuple[str, float]]:
        """The five likeliest classes of an image and their probabilities."""
        return [(self.names[k], float(prediction[k])) for k in _best(prediction)]

    def told(self, prediction: Tensor) -> str:
        """The five likeliest classes of an image, in words."""
        return ", ".join(f"{name} {share:.2f}" for name, share in self.findings(prediction))

    def drawn(self, image: np.ndarray, prediction: Tensor, style: Style) -> np.ndarray:
        """An image, uint8 (h, w, 3) BGR, with its five likeliest classes."""
        texts = [style.text(name, share) for name, share in self.findings(prediction)]
        return draw_text_lines(image, list(filter(None, texts)))

    def crops(self, image: np.ndarray, prediction: Tensor) -> list[tuple[str, np.ndarray]]:
        """The whole image, with the name of its likeliest class."""
        return [(self.findings(prediction)[0][0], image)]

    def text_rows(
        self,
        predictions: Tensor,
        batch: Batch[ImageInfo],
        with_confidence: bool,
        hybrid: bool = False,
        corners: bool = False,
    ) -> list[list[str]]:
        """Each image's five likeliest classes by name, behind the probability if it is wanted; `hybrid` is refused, and
        there are no `corners`."""
        rows = []
        for probabilities in predictions:
            best = _best(probabilities)
            rows.append([f"{probabilities[k]:.6g} " * with_confidence + self.names[k] for k in best])
        return rows

    def results(self, predictions: Tensor, batch: Batch[ImageInfo]) -> list[Any]:
        """What was found in each image, for COCO's results: no boxes."""
        return []

    def picture(self, batch: Batch[ImageInfo]) -> np.ndarray:
        """The batch's images with their classes, uint8 (h, w, 3) BGR."""
        images = [image.transpose(1, 2, 0)[..., ::-1] for image in batch.images.cpu().numpy()]
        captions = []
        for shares in batch.targets.cpu():
            found = {self.names[k]: float(shares[k]) for k in _best(shares, 2) if shares[k]}
            captions.append("\n".join(name + f" {share:.2f}" * (share < 1) for name, share in found.items()))
        return draw_captioned(images, captions)

    def score(self, predictions: Tensor, batch: Batch[ImageInfo]) -> list[ImageRecord]:
        """What each image adds to the metrics."""
        found = []
        for probabilities, info in zip(predictions, batch.infos, strict=True):
            best = _best(probabilities)
            found.append(ImageRecord(info.image, info.label, best, float(probabilities[best[0]])))
        return found

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """The metrics of a whole set, its table, and `fitness`: the share of images whose likeliest class is right."""
        confusion = np.zeros((len(self.names), len(self.names)), np.int64)
        for record in records:
            confusion[record.label, record.best[0]] += 1
        top1 = float(np.trace(confusion)) / len(records)
        top5 = sum(record.label in record.best for record in records) / len(records)
        mistakes = [record for record in records if record.label != record.best[0]]
        mistakes = sorted(mistakes, key=lambda record: (-record.confidence, record.image))[:MISTAKES]
        shown = [[record.image, record.label, record.best[0], record.confidence] for record in mistakes]
        evidence = {"confusion": sparse_counts(confusion), "mistakes": shown}
        overall, details = self._table(confusion, top1, top5)
        metrics = dict(zip(self.metric_names, (top1, top5), strict=True))
        return Summary(metrics, top1, overall, details, evidence, by_class=self._by_class(confusion))

    def _by_class(self, confusion: np.ndarray) -> dict[str, dict[str, float]]:
        """Precision and recall of the classes that have images."""
        seen = {k: name for k, name in self.names.items() if confusion[k].any()}
        return {
            metric: {name: float(values[k]) for k, name in seen.items()}
            for metric, values in zip(("precision", "recall"), precision_and_recall(confusion), strict=True)
        }

    def _table(self, confusion: np.ndarray, top1: float, top5: float) -> tuple[list[str], list[str]]:
        """The table's head with the row of all classes, and a row per class."""
        row = "{:>22} {:>9} {:>9} {:>9} {:>9} {:>9}"
        precision, recall = precision_and_recall(confusion)
        head = row.format("Class", "Images", "P", "R", "top-1", "top-5")
        means = (f"{values.mean():.4f}" for values in (precision, recall))
        overall = row.format("all", confusion.sum(), *means, f"{top1:.4f}", f"{top5:.4f}")
        details = [
            row.format(name[:22], confusion[k].sum(), f"{precision[k]:.4f}", f"{recall[k]:.4f}", "-", "-")
            for k, name in self.names.items()
        ]
        return [head, overall], details

    def documents(self, summary: Summary) -> dict[str, str]:
        """Text files for the run folder, by name: counts, precision and recall by class, and the confusion matrix."""
        confusion = dense_counts(summary.evidence["confusion"], len(self.names))
        precision, recall = precision_and_recall(confusion)
        names = list(self.names.values())
        by_class = [
            (name, int(confusion[k].sum()), f"{precision[k]:.9g}", f"{recall[k]:.9g}") for k, name in enumerate(names)
        ]
        return {
            "classes.csv": csv_text(("class", "images", "precision", "recall"), by_class),
            "confusion_matrix.csv": confusion_text(confusion, names),
        }

    def examples(self, summary: Summary) -> list[Example]:
        """The images that are shown with their boxes: none."""
        return []

    def pictures(self, summary: Summary, split: Split) -> dict[str, np.ndarray]:
        """Pictures for the run folder, by name, uint8 (h, w, 3) BGR: the most confident mistakes."""
        mistakes = summary.evidence["mistakes"]
        if not mistakes:
            return {}
        images = [split.shown(image, max(self.imgsz, 160)) for image, *_ in mistakes]
        captions = [
            f"{self.names[predicted]} {confidence:.2f}\nis {self.names[label]}"
            for _, label, predicted, confidence in mistakes
        ]
        return {"mistakes.jpg": draw_captioned(images, captions)}


def precision_and_recall(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each class, (c,), from counts (c, c) by true and predicted class; 0 where there is nothing to divide by."""
    right = np.diag(confusion).astype(np.float64)
    predicted, true = confusion.sum(0), confusion.sum(1)
    return right / np.maximum(predicted, 1), right / np.maximum(true, 1)


@cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, deviation = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return mean, deviation


def _best(probabilities: Tensor, count: int = TOP) -> tuple[int, ...]:
    """The likeliest classes, the likeliest first; of equal ones that of the smaller number."""
    return tuple(probabilities.sort(descending=True, stable=True).indices[:count].tolist())
