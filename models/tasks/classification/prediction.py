"""A classifier's result for one image, and its computation from logits.

Made by `ClassificationTask.postprocess`; used by val.py, detect.py and the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.tasks.contract import Image, Model, Postprocess, Prediction, View
from utils.batch import Batch
from utils.plots.drawing import draw_text_lines

if TYPE_CHECKING:
    from utils.plots.drawing import Style

TOP_CLASSES = 5  # classes per image that are named, drawn, written and counted by top-5 accuracy


def most_probable(probabilities: Tensor, count: int = TOP_CLASSES) -> tuple[int, ...]:
    """Return the most probable classes in falling probability; equally probable classes are ordered by number."""
    return tuple(probabilities.sort(descending=True, stable=True).indices[:count].tolist())


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationPrediction(Prediction):
    """The probabilities of the classes in one image."""

    probabilities: Tensor  # float32 (classes,), on the CPU

    VALUES = (*Prediction.VALUES, "probs", "top5")

    @property
    def array(self) -> np.ndarray:
        """Return the probability of each class, float32 (classes,)."""
        return self.probabilities.numpy().astype(np.float32)

    @property
    def probs(self) -> np.ndarray:
        """The probability of each class, float32 (classes,)."""
        return self.array

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
        """Return the whole image, with the name of its most probable class."""
        return [(self.items[0][0], image)]

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return the names of the five most probable classes, each after its probability if `with_confidence`."""
        return [f"{probability:.6g} " * with_confidence + name for name, probability in self.items]


class ClassificationView(NamedTuple):
    """The outputs of a model for the images of a batch."""

    outputs: Tensor  # logits (b, classes)


class ClassificationPostprocess(Postprocess):
    """Average the probabilities of all views of one or several models."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[ClassificationView]:
        """Run `model` on `inputs` and, if `augment`, on their mirror images."""
        versions = (inputs, inputs.flip(3)) if augment else (inputs,)
        return [ClassificationView(model(images)) for images in versions]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[ClassificationPrediction]:
        """Return the probabilities of each image."""
        probabilities = torch.stack([view.outputs.float().softmax(1) for view in views]).mean(0).cpu()
        return [
            ClassificationPrediction(info.image, info.path, self.names, image)
            for info, image in zip(batch.infos, probabilities, strict=True)
        ]
