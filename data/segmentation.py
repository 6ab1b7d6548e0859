"""Segmentation data: images with outlined objects, as batches. Named by `TASKS`; see data/dataset.py.

Images, boxes and augmentation work as in data/detection.py; a label that is a box counts as a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batches import Item, empty_pixels
from data.dataset import split_identity
from data.detection import (
    NO_PLACEMENT,
    DetectionData,
    DetectionSplit,
    EvaluationItems,
    TrainingItems,
    to_tensors,
)
from data.detection import collate as collate_boxes
from data.labels import OUTLINES, Labels, RowRules
from data.masks import NO_MASKS, TargetMasks, evaluation_masks, training_masks
from data.polygons import Polygons, offsets_of
from data.sampler import SampleIndex
from utils.batch import ImageInfo, SegmentationBatch
from utils.config.hyperparameters import Recipe

# The corners of a box, from its centre, in units of its sides.
CORNERS = np.array(((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)), np.float32)


class MaskedInfo(NamedTuple):
    """What an item has besides pixels and targets."""

    info: ImageInfo
    masks: TargetMasks


class MaskedTrainingItems(TrainingItems):
    """Augmented items with masks."""

    masks = True

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        augmented = self.augmented(sample)
        pixels, targets = to_tensors(augmented, pixels)
        self.images.release()
        assert augmented.polygons is not None  # `SegmentationData.row_rules`
        ratio, overlap = self.options.mask_ratio, not self.options.no_overlap
        order, masks = training_masks(augmented.polygons, targets.numpy(), sample.shape, ratio, overlap)
        return pixels, targets[torch.from_numpy(order)], MaskedInfo(self.info(sample.image, NO_PLACEMENT), masks)


class MaskedEvaluationItems(EvaluationItems):
    """Letterboxed items with masks."""

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        fitted, placement = self.fitted(sample)
        pixels, targets = to_tensors(fitted, pixels)
        assert fitted.polygons is not None  # `SegmentationData.row_rules`
        assert self.labels.polygons is not None
        masks = evaluation_masks(fitted.polygons, targets.numpy(), sample.shape)
        first, end = self.labels.offsets[sample.image : sample.image + 2].tolist()
        outlines = self.labels.polygons.between(first, end).outlines()
        info = self.info(sample.image, placement)._replace(outlines=outlines)
        return pixels, targets, MaskedInfo(info, masks)


def collate(items: Sequence[Item]) -> SegmentationBatch:
    """Join items of one shape."""
    described: list[MaskedInfo] = [item[2] for item in items]
    masks = [each.masks for each in described]
    batch = collate_boxes([(*item[:2], each.info) for item, each in zip(items, described, strict=True)])
    count = sum(len(each.pixels) for each in masks)
    mask_pixels = empty_pixels(count) if count else torch.zeros(0, dtype=torch.uint8)
    np.concatenate([each.pixels for each in masks], out=mask_pixels.numpy())
    windows = np.concatenate([each.windows for each in masks])
    # A copy: the tensor's memory may be moved into memory shared between processes.
    host_targets = batch.targets.numpy().copy()
    return SegmentationBatch(batch.images, batch.targets, batch.infos, mask_pixels, windows, host_targets)


@dataclass(frozen=True)
class SegmentationSplit(DetectionSplit):
    """The images of one split that can be read, and their labels, all with outlines.

    Attributes:
        boxes: number of labels that are boxes; their outlines are rectangles
    """

    boxes: int = 0

    def identity(self) -> dict[str, str]:
        """Return hashes of the files' names, and of the boxes and outlines of each image."""
        labels, polygons = self.labels, self.labels.polygons
        assert polygons is not None  # `SegmentationData.row_rules`
        arrays = (labels.rows, labels.counts, polygons.points, polygons.offsets)
        return split_identity(self.images, b"".join(array.tobytes() for array in arrays))

    def report(self, title: str) -> list[str]:
        """Return lines for the console: counts, how many labels are boxes, and the first few problems."""
        summary, *problems = super().report(title)
        if self.boxes:
            count = f"{self.boxes} of {len(self.labels.rows)} labels"
            boxes = f"warning: {title}: {count} are boxes without an outline; their masks are rectangles"
            return [summary, boxes, *problems]
        return [summary, *problems]


@dataclass
class SegmentationData(DetectionData):
    """A segmentation data set at one image size: its splits, checked, and loaders over them."""

    training_items: ClassVar[type[TrainingItems]] = MaskedTrainingItems
    evaluation_items: ClassVar[type[EvaluationItems]] = MaskedEvaluationItems
    collate = staticmethod(collate)

    @staticmethod
    def row_rules(hyp: Recipe | None) -> RowRules:
        """Return how the rows of label files are read: outlines, whatever the hyperparameters."""
        return OUTLINES

    def split(self, name: str, hyp: Recipe | None = None) -> SegmentationSplit:
        """Read and check a split: see `DetectionData`."""
        split = super().split(name, hyp)
        assert split.labels.polygons is not None  # `row_rules`
        boxes = int((split.labels.polygons.counts == 0).sum())
        return SegmentationSplit(split.images, outlined(split.labels), split.problems, boxes)

    @staticmethod
    def item(image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        """Return an image fitted into `sides`, without masks: see `DetectionData`."""
        pixels, targets, info = DetectionData.item(image, name, sides, stride, full)
        return pixels, targets, MaskedInfo(info, NO_MASKS)


def outlined(labels: Labels) -> Labels:
    """Return labels with an outline for each row, clipped to the image; a box's outline is its rectangle."""
    polygons = labels.polygons
    assert polygons is not None
    is_box = polygons.counts == 0
    counts = np.where(is_box, len(CORNERS), polygons.counts)
    points, of_box = np.empty((counts.sum(), 2), np.float32), np.repeat(is_box, counts)
    points[~of_box] = polygons.points
    rows = labels.rows[is_box]
    points[of_box] = (rows[:, None, 1:3] + rows[:, None, 3:] * CORNERS).reshape(-1, 2)
    return replace(labels, polygons=Polygons(points.clip(0, 1), offsets_of(counts)))
