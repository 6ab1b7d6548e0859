"""Data of oriented boxes: images with label files of rows `class x1 y1 x2 y2 x3 y3 x4 y4`, shares of width and height.

Images, augmentation and loaders are those of a detector; what is added are the boxes around the outlines of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from data.augment import Sample
from data.batches import Item
from data.dataset import split_identity
from data.detection import (
    NO_PLACEMENT,
    DetectionData,
    DetectionSplit,
    EvaluationItems,
    TrainingItems,
    to_tensors,
)
from data.labels import Content
from data.sampler import SampleIndex
from data.segmentation import outlined
from utils.config.hyperparameters import Recipe

from .geometry import smallest_boxes


def oriented_targets(sample: Sample) -> Tensor:
    """Return class and box, float32 (k, 6), of the visible part of each object; boxes are in pixels of the batch."""
    assert sample.polygons is not None  # `OrientedData.content`
    boxes = smallest_boxes(sample.polygons.outlines())
    return torch.from_numpy(np.concatenate((sample.classes[:, None], boxes), 1).astype(np.float32))


class OrientedTrainingItems(TrainingItems):
    """Augmented items."""

    masks = True  # outlines are cut where they leave the image

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        augmented = self.augmented(sample)
        to_tensors(augmented, pixels)
        self.images.release()
        return pixels, oriented_targets(augmented), self.info(sample.image, NO_PLACEMENT)


class OrientedEvaluationItems(EvaluationItems):
    """Letterboxed items, whose infos have the outlines of the labels."""

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        fitted, placement = self.fitted(sample)
        to_tensors(fitted, pixels)
        assert self.labels.polygons is not None  # `OrientedData.content`
        first, end = self.labels.offsets[sample.image : sample.image + 2].tolist()
        outlines = self.labels.polygons.between(first, end).outlines()
        return pixels, oriented_targets(fitted), self.info(sample.image, placement)._replace(outlines=outlines)


@dataclass(frozen=True)
class OrientedSplit(DetectionSplit):
    """The images of one split that can be read, and their labels, all with outlines."""

    def identity(self) -> dict[str, str]:
        """Return hashes of the files' names, and of the classes and corners of each image."""
        labels, polygons = self.labels, self.labels.polygons
        assert polygons is not None  # `OrientedData.content`
        arrays = (labels.rows, labels.counts, polygons.points, polygons.offsets)
        return split_identity(self.images, b"".join(array.tobytes() for array in arrays))


@dataclass
class OrientedData(DetectionData):
    """A data set of oriented boxes at one image size: its splits, checked, and loaders over them."""

    training_items: ClassVar[type[TrainingItems]] = OrientedTrainingItems
    evaluation_items: ClassVar[type[EvaluationItems]] = OrientedEvaluationItems

    @staticmethod
    def content(hyp: Recipe | None) -> Content:
        """Return what is read of label files: outlines. A row of four numbers after the class is an upright box."""
        return "outlines"

    def split(self, name: str, hyp: Recipe | None = None) -> OrientedSplit:
        """Read and check a split: see `DetectionData`."""
        split = super().split(name, hyp)
        return OrientedSplit(split.images, outlined(split.labels), split.problems)

    @staticmethod
    def item(image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        """Return an image fitted into `sides`, without labels: see `DetectionData`."""
        pixels, _, info = DetectionData.item(image, name, sides, stride, full)
        return pixels, torch.zeros(0, 6), info
