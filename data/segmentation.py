"""Segmentation data: images with outlined objects, as batches with masks. Named by `TASKS`; see data/dataset.py.

Images, boxes and augmentation work as in data/detection.py; a label that is a box counts as a rectangle. Masks are
drawn as in YOLOv5: an outline in pixels is truncated to whole numbers and filled by OpenCV, edges included, then shrunk
bilinearly. Each is drawn around its object only, with the same pixels as in a whole image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from data.dataset import Item, empty_pixels
from data.detection import NO_PLACEMENT, DetectionData, DetectionSplit, EvaluationItems, TrainingItems, to_tensors
from data.detection import collate as collate_boxes
from data.labels import OUTLINES, Labels, RowRules
from data.polygons import Polygons, offsets_of
from data.sampler import SampleIndex
from utils.batch import MASK_STRIDE, SegmentationBatch, box_windows
from utils.config.hyperparameters import Recipe

# The corners of a box, from its centre, in units of its sides.
CORNERS = np.array(((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)), np.float32)
MIN_CENTRE_PIXELS = 2  # exclusive lower bound of the covered centre pixels, of 4, of a block in an evaluated mask


class TargetMasks(NamedTuple):
    """The masks of the k targets of an image inside their windows."""

    windows: np.ndarray  # int32 (k, 4), left, top, right, bottom (exclusive) in the mask map
    pixels: np.ndarray  # uint8 (s,), 0 or 1, window after window, each row by row


NO_MASKS = TargetMasks(np.zeros((0, 4), np.int32), np.zeros(0, np.uint8))


class _Drawing(NamedTuple):
    """The part of a whole mask around an object; all pixels outside of it are 0."""

    left: int
    top: int
    mask: np.ndarray  # uint8 (h, w)

    def inside(self, window: Sequence[int]) -> np.ndarray:
        """Return the pixels inside a window of the whole mask, left, top, right, bottom (exclusive), uint8."""
        left, top, right, bottom = window
        height, width = self.mask.shape
        pixels = np.zeros((max(bottom - top, 0), max(right - left, 0)), np.uint8)
        x1, y1 = max(left, self.left), max(top, self.top)
        x2, y2 = min(right, self.left + width), min(bottom, self.top + height)
        if x1 < x2 and y1 < y2:
            part = self.mask[y1 - self.top : y2 - self.top, x1 - self.left : x2 - self.left]
            pixels[y1 - top : y2 - top, x1 - left : x2 - left] = part
        return pixels


def _draw_all(polygons: Polygons, shape: tuple[int, int], ratio: int, value: int) -> list[_Drawing]:
    """Fill each polygon with `value` at the image's size, and shrink it bilinearly to 1 / `ratio`.

    If blocks of ratio x ratio pixels fill the image, a pixel of the result is made of one block, and only the blocks
    around an object are drawn; otherwise whole images are drawn and shrunk. `shape` is the image's height and width.
    """
    whole = polygons.at(polygons.points.astype(np.int32))
    extents = whole.extents()
    height, width = shape
    if height % ratio or width % ratio:
        first, last = np.zeros((len(extents), 2), int), np.tile((width, height), (len(extents), 1))
    else:
        first = extents[:, :2] // ratio * ratio
        last = ((extents[:, 2:] // ratio + 1) * ratio).clip(first, (width, height))
    drawings = []
    for outline, (left, top), (right, bottom) in zip(whole.outlines(), first.tolist(), last.tolist(), strict=True):
        mask = np.zeros((bottom - top, right - left), np.uint8)
        if mask.size:
            cv2.fillPoly(mask, [outline - (left, top)], value)
            if ratio > 1:
                size = (right - left) // ratio, (bottom - top) // ratio
                mask = cv2.resize(mask, size, interpolation=cv2.INTER_LINEAR)
        drawings.append(_Drawing(left // ratio, top // ratio, mask))
    return drawings


def training_masks(
    polygons: Polygons, targets: np.ndarray, shape: tuple[int, int], ratio: int, overlap: bool
) -> tuple[np.ndarray, TargetMasks]:
    """Return the order of the targets of an image, (k,), and their masks in this order.

    Masks are drawn at 1 / `ratio` of the image and brought to the mask map's size by nearest pixels.

    Args:
        polygons: outlines of the targets in pixels of the image
        targets: float32 (k, 5), class and normalised xywh
        shape: height and width of the image
        ratio: pixels of the image per pixel of the drawn masks, along a side
        overlap: whether targets are sorted by their number of pixels, largest first, and a pixel belongs to the last
            one that covers it; otherwise the order does not change, and each target has all its pixels
    """
    drawings = _draw_all(polygons, shape, ratio, 1)
    drawn_shape = (shape[0] // ratio, shape[1] // ratio)
    map_shape = (shape[0] // MASK_STRIDE, shape[1] // MASK_STRIDE)
    rows, columns = (np.arange(new) * old // new for old, new in zip(drawn_shape, map_shape, strict=True))
    if not overlap:
        if drawn_shape != map_shape:
            whole = (0, 0, *drawn_shape[::-1])
            drawings = [_Drawing(0, 0, drawing.inside(whole)[np.ix_(rows, columns)]) for drawing in drawings]
        windows = box_windows(targets[:, 1:], *map_shape)
        masks = [drawing.inside(window) for drawing, window in zip(drawings, windows.tolist(), strict=True)]
        return np.arange(len(drawings)), TargetMasks(windows, _flat(masks))
    areas = np.array([np.count_nonzero(drawing.mask) for drawing in drawings], int)
    order = np.argsort(-areas, kind="stable")
    owners = np.zeros(drawn_shape, np.int32)  # the number of the target in this order, from 1; 0 for none
    for number, (left, top, mask) in enumerate((drawings[k] for k in order.tolist()), 1):
        if mask.size:
            part = owners[top : top + mask.shape[0], left : left + mask.shape[1]]
            np.copyto(part, number, where=mask.view(bool))
    if drawn_shape != map_shape:
        owners = owners[np.ix_(rows, columns)]
    windows = box_windows(targets[order, 1:], *map_shape)
    parts = [owners[top:bottom, left:right] for left, top, right, bottom in windows.tolist()]
    return order, TargetMasks(windows, _flat([part == number for number, part in enumerate(parts, 1)]))


def evaluation_masks(polygons: Polygons, targets: np.ndarray, shape: tuple[int, int]) -> TargetMasks:
    """Return the masks of targets, as `training_masks` takes them, each in a window that holds all its pixels.

    A pixel of the mask map is covered if the bilinear mean of the mask at the image's size is over 0.5, which is at
    least 3 of the 4 pixels in the middle of a block.
    """
    windows = box_windows(targets[:, 1:], shape[0] // MASK_STRIDE, shape[1] // MASK_STRIDE)
    masks = []
    for number, (left, top, mask) in enumerate(_draw_all(polygons, shape, MASK_STRIDE, 4)):
        drawing = _Drawing(left, top, (mask > MIN_CENTRE_PIXELS).view(np.uint8))  # a mean of 0 and 4 is a count
        x, y, width, height = cv2.boundingRect(drawing.mask) if mask.size else (0, 0, 0, 0)
        if width:
            first, last = windows[number, :2], windows[number, 2:]
            if (first >= last).any():
                first[:], last[:] = (left + x, top + y), (left + x, top + y)
            np.minimum(first, (left + x, top + y), out=first)
            np.maximum(last, (left + x + width, top + y + height), out=last)
        masks.append(drawing.inside(windows[number].tolist()))
    return TargetMasks(windows, _flat(masks))


def _flat(masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the pixels of masks, bool or uint8, one after the other, uint8 (s,)."""
    return np.concatenate([np.zeros(0, np.uint8), *(mask.ravel().view(np.uint8) for mask in masks)])


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
        return pixels, targets[torch.from_numpy(order)], (self.info(sample.image, NO_PLACEMENT), masks)


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
        return pixels, targets, (info, masks)


def collate(items: Sequence[Item]) -> SegmentationBatch:
    """Join items of one shape; the last part of each is a pair, its `ImageInfo` and its `TargetMasks`."""
    infos, masks = zip(*(item[2] for item in items), strict=True)
    batch = collate_boxes([(*item[:2], info) for item, info in zip(items, infos, strict=True)])
    count = sum(len(each.pixels) for each in masks)
    mask_pixels = empty_pixels(count) if count else torch.zeros(0, dtype=torch.uint8)
    np.concatenate([each.pixels for each in masks], out=mask_pixels.numpy())
    windows = np.concatenate([each.windows for each in masks])
    # A copy: the tensor's memory may be moved into memory shared between processes.
    host_targets = batch.targets.numpy().copy()
    return SegmentationBatch(batch.images, batch.targets, batch.infos, mask_pixels, windows, host_targets)


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

    def split(self, name: str, hyp: Recipe | None = None) -> DetectionSplit:
        """Read and check a split, all labels with outlines: see `DetectionData`."""
        split = super().split(name, hyp)
        assert split.labels.polygons is not None  # `row_rules`
        problems, boxes = split.problems, int((split.labels.polygons.counts == 0).sum())
        if boxes:
            count = f"{name}: {boxes} of {len(split.labels.rows)} labels"
            problems = (f"{count} are boxes without an outline; their masks are rectangles", *problems)
        return replace(split, labels=outlined(split.labels), problems=problems)

    @classmethod
    def item(cls, image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        pixels, targets, info = super().item(image, name, sides, stride, full)
        return pixels, targets, (info, NO_MASKS)


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
