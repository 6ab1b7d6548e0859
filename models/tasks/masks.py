"""The instances in one image: `SegmentationPrediction`, made by `SegmentationPostprocess`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import cv2
import numpy as np
import torch
from torch import Tensor

from models.heads.contract import BoxView
from models.tasks.contract import Image
from models.tasks.detect import SuppressedView
from models.tasks.predictions import DetectionPrediction
from utils.batch import MASK_STRIDE, CocoImage, Placement
from utils.errors import UserError
from utils.plots.drawing import Style, tint

Rows: TypeAlias = slice | Sequence[int]  # rows of an image's detections


class PrototypeView(NamedTuple):
    """Boxes with mask coefficients, and the prototypes that the coefficients weight."""

    boxes: BoxView  # `more` is the number of coefficients
    prototypes: Tensor  # (b, masks, h, w)

    @property
    def outputs(self) -> tuple[list[Tensor], Tensor] | None:
        """The input of the criterion; None for an exported file, which returns no raw maps."""
        return None if self.boxes.outputs is None else (self.boxes.outputs, self.prototypes)


class SuppressedMaskView(NamedTuple):
    """The detections of an exported file with suppression in its graph, and their masks."""

    boxes: SuppressedView
    masks: Tensor  # (b, m, h, w): 0 or 1, cropped to the boxes
    outputs: None = None


SegmentationView: TypeAlias = PrototypeView | SuppressedMaskView


class MaskMaps(ABC):
    """The masks of an image's detections at the size of the prototypes, on the model's device."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Height and width."""

    @abstractmethod
    def probabilities(self, rows: Rows) -> Tensor:
        """Return the probabilities of some detections, float32 (r, h, w), inside and outside of their boxes."""

    @abstractmethod
    def inside(self, rows: Rows) -> Tensor:
        """Return the masks of some detections, bool (r, h, w): the probability of a pixel exceeds 1/2."""


@dataclass(frozen=True, eq=False)
class PrototypeMaps(MaskMaps):
    """The sigmoids of prototypes weighted by coefficients. Every detection has its own view's prototypes."""

    coefficients: Tensor  # (k, masks)
    view: Tensor  # int64 (k,): number of each detection's view
    prototypes: Sequence[Tensor]  # prototypes (masks, h, w) of each view

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.prototypes[0].shape[1], self.prototypes[0].shape[2]

    def probabilities(self, rows: Rows) -> Tensor:
        """Return the sigmoids."""
        return self._logits(rows).sigmoid_()

    def inside(self, rows: Rows) -> Tensor:
        """Return the masks: the logit of a pixel is above 0."""
        return self._logits(rows) > 0

    def _logits(self, rows: Rows) -> Tensor:
        coefficients = self.coefficients[rows]
        logits = _weighted(coefficients, self.prototypes[0])
        for number, prototypes in enumerate(self.prototypes[1:], 1):
            of_view = (self.view[rows] == number)[:, None, None]
            logits = torch.where(of_view, _weighted(coefficients, prototypes), logits)
        return logits


def _weighted(coefficients: Tensor, prototypes: Tensor) -> Tensor:
    """Return the sums (k, h, w) of prototypes (masks, h, w) with weights (k, masks or more); extra ones are unused."""
    flat = prototypes.detach().float().flatten(1)
    return (coefficients[:, : len(flat)].float() @ flat).view(-1, *prototypes.shape[1:])


@dataclass(frozen=True, eq=False)
class GivenMaps(MaskMaps):
    """Masks of 0 and 1 that an exported file computed."""

    masks: Tensor  # (k, h, w)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.masks.shape[1], self.masks.shape[2]

    def probabilities(self, rows: Rows) -> Tensor:
        """Return the masks as numbers."""
        return self.masks[rows].float()

    def inside(self, rows: Rows) -> Tensor:
        """Return the masks."""
        return self.masks[rows] > 0.5


def cut_by_boxes(masks: Tensor, boxes: Tensor) -> Tensor:
    """Crop masks, bool (r, h, w), to their boxes (r, 4), xyxy in pixels of the masks.

    A pixel at column c is inside if x1 <= c < x2, as in YOLOv5.
    """
    x1, y1, x2, y2 = boxes[:, :4].unsqueeze(-1).unbind(1)
    columns, rows = (torch.arange(side, device=masks.device) for side in (masks.shape[2], masks.shape[1]))
    in_columns = torch.logical_and(columns >= x1, columns < x2)
    in_rows = torch.logical_and(rows >= y1, rows < y2)
    return masks.logical_and(in_rows[:, :, None]).logical_and(in_columns[:, None])


MAPS_AT_ONCE = 64  # masks of the network's size that are in memory at a time
MIN_POLYGON_POINTS = 3


class MaskPart(NamedTuple):
    """The part of a file that contains a mask."""

    left: int  # column of the part's first pixel
    top: int  # row of the part's first pixel
    pixels: np.ndarray  # bool (rows, columns)

    def contour(self) -> np.ndarray:
        """Return the pixels of the largest contour, int (p, 2): x and y in the file; (0, 2) for an empty mask."""
        contours, _ = cv2.findContours(
            self.pixels.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(self.left, self.top)
        )
        if not contours:
            return np.zeros((0, 2), np.int32)
        largest = max(contours, key=lambda contour: (cv2.contourArea(contour), len(contour)))
        return np.asarray(largest.reshape(-1, 2))

    def run_lengths(self, size: tuple[int, int]) -> dict[str, Any]:
        """Return the mask as COCO's compressed run lengths. Raises `UserError` if faster-coco-eval is not installed.

        Args:
            size: width and height of the file in pixels
        """
        try:
            from faster_coco_eval import mask as encoder
        except ImportError:
            raise UserError("COCO results with masks need faster-coco-eval; pip install faster-coco-eval") from None
        width, height = size
        columns, rows = np.nonzero(self.pixels.T)  # COCO counts down the columns
        inside = (columns + self.left) * height + rows + self.top
        edges = np.flatnonzero(np.diff(inside) != 1)
        starts, ends = inside[np.append(0, edges + 1)[: len(inside)]], inside[np.append(edges, -1)[: len(inside)]] + 1
        bounds = np.concatenate(([0], np.stack((starts, ends), 1).ravel(), [width * height]))
        coded = encoder.frPyObjects({"size": [height, width], "counts": np.diff(bounds).tolist()}, height, width)
        return {"size": [height, width], "counts": _text(coded["counts"])}


def _text(counts: bytes | str) -> str:
    return counts.decode("ascii") if isinstance(counts, bytes) else counts


class MaskSource(ABC):
    """The masks of a prediction, computed on demand."""

    size: tuple[int, int]  # width and height of the file, pixels

    @abstractmethod
    def parts(self, rows: Sequence[int]) -> Iterator[MaskPart]:
        """Iterate over the masks of some of the objects."""

    def outlines(self, rows: Sequence[int]) -> Iterator[np.ndarray]:
        """Iterate over the largest contour of each mask, float32 (p, 2): the centres of its pixels as shares of width
        and height; no points for an empty mask."""
        for part in self.parts(rows):
            yield ((part.contour() + 0.5) / self.size).astype(np.float32)


@dataclass(frozen=True, eq=False)
class DetectedMasks(MaskSource):
    """The masks of a network's detections.

    A mask is the pixels whose probability, interpolated bilinearly, exceeds 1/2. With `retina` the map's probabilities
    are interpolated at the pixels of the file, without the letterbox's padding, and the mask is cropped to the box
    there. Otherwise they are cropped to the box on the map and interpolated at the pixels of the network's image, and a
    pixel of the file takes the value of the network's pixel that contains its centre. YOLOv5 does the same with and
    without --retina-masks, except that it multiplies the coefficients by the objectness first, which only moves edges
    between pixels.
    """

    maps: MaskMaps
    boxes: Tensor  # (k, 4 or more): xyxy in pixels of the network's image, on the device of the maps
    file_boxes: np.ndarray  # (k, 4): xyxy in pixels of the file
    size: tuple[int, int]  # width and height of the file, pixels
    placement: Placement
    retina: bool

    @property
    def map_boxes(self) -> Tensor:
        """The boxes in pixels of the maps, (k, 4)."""
        return self.boxes[:, :4] / MASK_STRIDE

    def parts(self, rows: Sequence[int]) -> Iterator[MaskPart]:
        """Iterate over the masks of some detections."""
        (width, height), (map_height, map_width) = self.size, self.maps.size
        axes = [
            _sample(length, scale, offset, cells, self.retina)
            for length, scale, offset, cells in zip(
                (width, height), self.placement.scale, self.placement.offset, (map_width, map_height), strict=True
            )
        ]
        for start in range(0, len(rows), MAPS_AT_ONCE):
            chunk = rows[start : start + MAPS_AT_ONCE]
            maps = self.maps.probabilities(chunk).cpu().numpy()
            boxes = self.file_boxes[chunk] if self.retina else self.map_boxes[chunk].cpu().numpy()
            for values, box in zip(maps, boxes, strict=True):
                yield self._part(values, box, axes)

    def _part(self, values: np.ndarray, box: np.ndarray, axes: Sequence[_Samples]) -> MaskPart:
        """Return the mask of one detection.

        Args:
            values: probabilities (h, w) on the map
            box: xyxy of the detection, in pixels of the file with `retina`, else of the map
            axes: positions of the file's columns and rows on the map
        """
        sides = self.size if self.retina else values.shape[::-1]
        corners = [(math.ceil(box[k]), math.ceil(box[k + 2])) for k in range(2)]
        bounds = [
            (min(max(low, 0), side), min(max(high, 0), side)) for (low, high), side in zip(corners, sides, strict=True)
        ]
        if self.retina:
            spans = [slice(*bound) for bound in bounds]
        else:
            cut = np.zeros_like(values)
            inside = slice(*bounds[1]), slice(*bounds[0])
            cut[inside] = values[inside]
            values = cut
            spans = [axis.span(*bound) for axis, bound in zip(axes, bounds, strict=True)]
        columns, rows = (axis.part(span) for axis, span in zip(axes, spans, strict=True))
        across = columns.interpolate(values[rows.low], 1), columns.interpolate(values[rows.high], 1)
        pixels = across[0] * (1 - rows.fraction[:, None]) + across[1] * rows.fraction[:, None] > 0.5
        return MaskPart(spans[0].start, spans[1].start, pixels)


class _Samples(NamedTuple):
    """The positions of a file's pixels on a map along one axis, each between two cells, `low` and `high`."""

    low: np.ndarray  # int (n,)
    high: np.ndarray
    fraction: np.ndarray  # float32 (n,): weight of `high`

    def part(self, span: slice) -> _Samples:
        """Return the positions of some of the pixels."""
        return _Samples(*(values[span] for values in self))

    def span(self, first: int, last: int) -> slice:
        """Return the pixels that depend on the cells from `first` to `last`, exclusive."""
        if first >= last:
            return slice(0, 0)
        return slice(int(np.searchsorted(self.high, first)), int(np.searchsorted(self.low, last)))

    def interpolate(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Interpolate an array along `axis`."""
        low, high = values.take(self.low, axis), values.take(self.high, axis)
        return np.asarray(low * (1 - self.fraction) + high * self.fraction)


def _sample(length: int, scale: float, offset: int, cells: int, retina: bool) -> _Samples:
    """Map pixel coordinates of the file to a map of `cells` cells (batch = file * scale + offset), along one axis."""
    position = (np.arange(length) + 0.5) * scale + offset  # each pixel's centre on the network's image
    first, last = 0, cells - 1
    if retina:  # the cells that contain the image
        first, last = offset // MASK_STRIDE, min(last, math.ceil((offset + length * scale) / MASK_STRIDE) - 1)
    else:
        position = np.floor(position).clip(0, cells * MASK_STRIDE - 1) + 0.5
    source = (position / MASK_STRIDE - 0.5).clip(first, last)
    low = source.astype(np.int64)
    return _Samples(low, np.minimum(low + 1, last), (source - low).astype(np.float32))


@dataclass(frozen=True, eq=False)
class OutlineMasks(MaskSource):
    """Masks that are filled outlines."""

    shapes: Sequence[np.ndarray]  # outlines (p, 2): x and y as shares of width and height
    size: tuple[int, int]  # width and height of the file, pixels

    def parts(self, rows: Sequence[int]) -> Iterator[MaskPart]:
        """Iterate over the masks of some outlines."""
        beyond = max(self.size)
        for row in rows:
            # In fp32 the product with a rounded share is the whole number of pixels that the share was made from.
            corners = (self.shapes[row].astype(np.float32) * np.array(self.size, np.float32)).astype(np.int32)
            left, top = corners.min(0, initial=beyond).clip(0, self.size)
            right, bottom = (corners.max(0, initial=-1) + 1).clip((left, top), self.size)
            filled = np.zeros((bottom - top, right - left), np.uint8)
            if filled.size:
                cv2.fillPoly(filled, [corners - np.array((left, top), np.int32)], 1)
            yield MaskPart(int(left), int(top), filled.astype(bool))

    def outlines(self, rows: Sequence[int]) -> Iterator[np.ndarray]:
        """Iterate over the given outlines, unchanged."""
        return (self.shapes[row] for row in rows)


@dataclass(frozen=True, eq=False)
class JoinedMasks(MaskSource):
    """The masks of objects from several sources."""

    members: Sequence[tuple[MaskSource, int]]  # the source of each object, and the object's row in it
    size: tuple[int, int]

    def parts(self, rows: Sequence[int]) -> Iterator[MaskPart]:
        """Iterate over the masks of some objects."""
        for source, members in self._by_source(rows):
            yield from source.parts(members)

    def outlines(self, rows: Sequence[int]) -> Iterator[np.ndarray]:
        """Iterate over the outlines of some objects."""
        for source, members in self._by_source(rows):
            yield from source.outlines(members)

    def _by_source(self, rows: Sequence[int]) -> Iterator[tuple[MaskSource, list[int]]]:
        """Iterate over runs of successive objects from the same source: the source, and the objects' rows in it."""
        for _, group in groupby((self.members[row] for row in rows), lambda member: id(member[0])):
            members = list(group)
            yield members[0][0], [row for _, row in members]


@dataclass(frozen=True, eq=False, repr=False)
class SegmentationPrediction(DetectionPrediction):
    """The instances in one image, in falling confidence. Masks are computed anew on each access."""

    source: MaskSource
    label_outlines: Sequence[np.ndarray]  # (p, 2) per label: x, y as shares of width and height; () if unknown

    @property
    def masks(self) -> np.ndarray:
        """The masks, bool (k, height, width), in pixels of the file."""
        width, height = self.size
        masks = np.zeros((len(self.rows), height, width), bool)
        for mask, part in zip(masks, self.parts(), strict=True):
            _window(mask, part)[:] = part.pixels
        return masks

    @property
    def outlines(self) -> list[np.ndarray]:
        """The largest contour of each mask, float32 (p, 2): the centres of its pixels as shares of width and height.

        An empty mask has no points; a label has its own outline.
        """
        return list(self.source.outlines(range(len(self.rows))))

    def parts(self) -> list[MaskPart]:
        """Return the masks as the parts of the file that contain them."""
        return list(self.source.parts(range(len(self.rows))))

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with masks, in the colours of their classes, and boxes drawn on it.

        The most confident instances are on top.
        """
        drawn: Image = image.copy()
        parts = self.parts()
        for label, part in zip(self.classes[::-1].tolist(), parts[::-1], strict=True):
            tint(_window(drawn, part), part.pixels, label)
        return super().draw(drawn, style)

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file: class, outline as normalised x y x y ..., and the confidence if requested.

        The outline of a mask with too few pixels for a polygon is its box.

        Args:
            with_confidence: whether each line ends with the confidence
            corners: whether lines have boxes, xyxy in pixels of the file, instead of outlines
        """
        if corners:
            return super().label_rows(with_confidence, corners)
        lines = []
        for (*xyxy, confidence, label), outline in zip(self.rows.tolist(), self.outlines, strict=True):
            points = outline if len(outline) >= MIN_POLYGON_POINTS else _rectangle(xyxy) / self.size
            numbers = [*points.ravel().tolist(), *([confidence] if with_confidence else [])]
            lines.append(f"{int(label)} {' '.join(f'{number:.6g}' for number in numbers)}")
        return lines

    def with_labels(self) -> SegmentationPrediction:
        """Return the labels, with a confidence of 1, then the detections whose boxes overlap no label's box of the same
        class by more than `iou_thres`."""
        labels = self.label_boxes()
        shapes = self.label_outlines or [_rectangle(xyxy) / self.size for *xyxy, _, _ in labels.tolist()]
        outlined, unlabelled = OutlineMasks(shapes, self.size), self.unlabelled().tolist()
        members = [(outlined, row) for row in range(len(labels))] + [(self.source, row) for row in unlabelled]
        return replace(self, rows=torch.cat((labels, self.rows[unlabelled])), source=JoinedMasks(members, self.size))

    def coco_rows(self) -> CocoImage:
        """Return the detections in COCO's results format, with masks as run lengths."""
        masks = [part.run_lengths(self.size) for part in self.parts()]
        return super().coco_rows()._replace(masks=masks)


def _window(image: np.ndarray, part: MaskPart) -> np.ndarray:
    """Return a view of the pixels of `image`, (h, w) or (h, w, 3), that a part covers."""
    rows, columns = part.pixels.shape
    return image[part.top : part.top + rows, part.left : part.left + columns]


def _rectangle(xyxy: Sequence[float]) -> np.ndarray:
    """Return the corners of a box, (4, 2)."""
    left, top, right, bottom = xyxy
    return np.array(((left, top), (right, top), (right, bottom), (left, bottom)))
