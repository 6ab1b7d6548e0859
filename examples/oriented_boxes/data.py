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
from data.dataset import Item
from data.detection import NO_PLACEMENT, DetectionData, EvaluationItems, TrainingItems, to_tensors
from data.labels import RowRules
from data.sampler import SampleIndex
from utils.config.hyperparameters import Recipe

from .geometry import smallest_boxes


class CornerRules(RowRules):
    """Rules for rows of four corners, which may be outside of the image: half of a large object may be seen."""

    def outline(self, values: list[float]) -> list[float]:
        """Return the coordinates as they are. Raises ValueError unless they are four corners around an area."""
        if len(values) != 8:
            raise ValueError(f"{len(values or range(4)) + 1} numbers instead of {self.forms}")
        super().outline(values)
        return values


FOUR_CORNERS = CornerRules("box", "9 (class and four corners)", outlines=True, by_points=True, tolerance=0.5)


def oriented_targets(sample: Sample) -> Tensor:
    """Return class and box, float32 (k, 6), of the visible part of each object; boxes are in pixels of the batch."""
    assert sample.polygons is not None  # `OrientedData.row_rules`
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
        assert self.labels.polygons is not None  # `OrientedData.row_rules`
        first, end = self.labels.offsets[sample.image : sample.image + 2].tolist()
        outlines = self.labels.polygons.select_range(first, end).outlines()
        return pixels, oriented_targets(fitted), self.info(sample.image, placement)._replace(outlines=outlines)


@dataclass
class OrientedData(DetectionData):
    """A data set of oriented boxes at one image size: its splits, checked, and loaders over them."""

    training_items: ClassVar[type[TrainingItems]] = OrientedTrainingItems
    evaluation_items: ClassVar[type[EvaluationItems]] = OrientedEvaluationItems

    @staticmethod
    def row_rules(hyp: Recipe | None) -> RowRules:
        """Return how the rows of label files are read: four corners, whatever the hyperparameters."""
        return FOUR_CORNERS

    @classmethod
    def item(cls, image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        """Return an image fitted into `sides`, without labels: see `DetectionData`."""
        pixels, _, info = super().item(image, name, sides, stride, full)
        return pixels, torch.zeros(0, 6), info
