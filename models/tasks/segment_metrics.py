"""The masks of a segmenter's detections: on the network's maps for the metrics, in pixels of the files for people.

`SegmentationPrediction` is made by `SegmentationPostprocess` (segment.py). A mask is computed when it is asked for.
`SegmentationMetrics` scores boxes and masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import cv2
import numpy as np
import torch
from torch import Tensor

from models.heads.contract import EPSILON
from models.tasks.contract import Image, Prediction
from models.tasks.metrics import DETECTION_METRICS, DetectionMetrics, ImageRecord, as_columns, image_records, matched_by
from models.tasks.predictions import DetectionPrediction, Pairs, meeting_pairs
from utils.batch import MASK_STRIDE, Batch, CocoImage, Placement, SegmentationBatch
from utils.errors import UserError
from utils.plots.drawing import Style, tint

MAPS_AT_ONCE = 64  # maps that are in memory on the host at a time
MIN_POLYGON_POINTS = 3
CERTAIN_LOGIT = 1000.0  # its sigmoid is 1, that of its negative 0
MAX_MASK_VALUES = 2**22  # pixels of the masks that are compared at a time, about 40 MB
# Overlaps are fractions of small numbers of pixels and often equal a threshold. With this factor they then reach it, as
# in YOLOv5's fp32 arithmetic, where `EPSILON` has no effect.
TIE = 1 + 1e-7
SETS = {"(B)": "", "(M)": "mask_"}  # YOLOv5's suffixes for boxes and masks, and the prefixes of their files
SEGMENTATION_METRICS = tuple(f"{name}{suffix}" for suffix in SETS for name in DETECTION_METRICS)

Rows: TypeAlias = Sequence[int] | np.ndarray  # rows of an image's detections
Logits: TypeAlias = Callable[[Rows], Tensor]  # returns the maps of some detections before the sigmoid, (r, h, w)


def weighted_prototypes(coefficients: Tensor, view: Tensor, prototypes: Sequence[Tensor]) -> Logits:
    """Return the function that computes an image's maps: sums of the prototypes (masks, h, w) of each detection's view,
    whose number is in `view` (k,), weighted by coefficients (k, masks or more); it may have fewer prototypes."""

    def logits(rows: Rows) -> Tensor:
        weights, (first, *others) = coefficients[rows].float(), prototypes
        maps = _weighted(weights, first)
        for number, view_prototypes in enumerate(others, 1):
            maps = torch.where((view[rows] == number)[:, None, None], _weighted(weights, view_prototypes), maps)
        return maps

    return logits


def _weighted(weights: Tensor, prototypes: Tensor) -> Tensor:
    flat = prototypes.detach().float().flatten(1)
    return (weights[:, : len(flat)] @ flat).view(-1, *prototypes.shape[1:])


def known_masks(masks: Tensor) -> Logits:
    """Return the function that looks up an image's maps in masks (k, h, w) of 0 and 1, which an exported file made."""
    return lambda rows: (masks[rows].float() * 2 - 1) * CERTAIN_LOGIT


def cut_by_boxes(masks: Tensor, boxes: Tensor) -> Tensor:
    """Crop masks, bool (r, h, w), to their boxes (r, 4), xyxy in pixels of the masks.

    A pixel at column c is inside if x1 <= c < x2, as in YOLOv5.
    """
    x1, y1, x2, y2 = boxes[:, :4].unsqueeze(-1).unbind(1)
    columns, rows = (torch.arange(side, device=masks.device) for side in (masks.shape[2], masks.shape[1]))
    in_columns = torch.logical_and(columns >= x1, columns < x2)
    in_rows = torch.logical_and(rows >= y1, rows < y2)
    return masks.logical_and(in_rows[:, :, None]).logical_and(in_columns[:, None])


def target_pixels(batch: SegmentationBatch, targets: np.ndarray) -> Iterator[Tensor]:
    """Iterate over the pixels of some of a batch's targets in their windows, bool (h, w)."""
    sides = (batch.windows[:, 2:] - batch.windows[:, :2]).clip(min=0).astype(np.int64)
    ends = sides.prod(1).cumsum()
    for (width, height), end in zip(sides[targets].tolist(), ends[targets].tolist(), strict=True):
        yield batch.mask_pixels[end - width * height : end].view(height, width) > 0


def target_masks(batch: SegmentationBatch, targets: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Return the masks of some of a batch's targets on maps of `size` (h, w), bool (n, h, w)."""
    masks = torch.zeros(len(targets), *size, dtype=torch.bool, device=batch.mask_pixels.device)
    windows = batch.windows[targets].tolist()
    for mask, (left, top, right, bottom), pixels in zip(masks, windows, target_pixels(batch, targets), strict=True):
        mask[top:bottom, left:right] = pixels
    return masks


class MaskPart(NamedTuple):
    """The part of a file that contains a mask."""

    left: int  # column of the part's first pixel
    top: int  # row of the part's first pixel
    pixels: np.ndarray  # bool (rows, columns)

    def window(self, image: np.ndarray) -> np.ndarray:
        """Return a view of the pixels of `image`, (h, w) or (h, w, 3), that the part covers."""
        rows, columns = self.pixels.shape
        return image[self.top : self.top + rows, self.left : self.left + columns]

    def contour(self) -> np.ndarray:
        """Return the pixels of the largest contour, int (p, 2): x and y in the file; (0, 2) for an empty mask."""
        contours, _ = cv2.findContours(
            self.pixels.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(self.left, self.top)
        )
        largest = max(contours, key=lambda line: (cv2.contourArea(line), len(line)), default=np.zeros((0, 2), np.int32))
        return np.asarray(largest.reshape(-1, 2))

    def run_lengths(self, size: tuple[int, int]) -> dict[str, Any]:
        """Return the mask as COCO's compressed run lengths, by width and height of the file. Raises `UserError`."""
        try:
            from faster_coco_eval import mask as encoder
        except ImportError:
            raise UserError("COCO results with masks need faster-coco-eval; pip install faster-coco-eval") from None
        mask = np.zeros(size, np.uint8).T  # COCO counts down the columns
        self.window(mask)[:] = self.pixels
        coded = encoder.encode(mask)
        counts = coded["counts"]
        return {"size": list(mask.shape), "counts": counts.decode() if isinstance(counts, bytes) else counts}


@dataclass(frozen=True, eq=False)
class DetectedMasks:
    """The masks of an image's detections.

    In a file, a mask is the pixels whose probability, interpolated bilinearly, exceeds 1/2. With `retina` the map's
    probabilities are interpolated at the pixels of the file, without the letterbox's padding, and the mask is cropped
    to the box there. Otherwise they are cropped to the box on the map and interpolated at the pixels of the network's
    image, and a pixel of the file takes the value of the network's pixel that contains its centre. YOLOv5 does the same
    with and without --retina-masks, except that it multiplies the coefficients by the objectness first, which only
    moves edges between pixels.
    """

    logits: Logits
    map_size: tuple[int, int]  # height and width of the maps
    boxes: Tensor  # (k, 4 or more): xyxy in pixels of the network's image, on the device of the maps
    file_boxes: np.ndarray  # (k, 4): xyxy in pixels of the file
    size: tuple[int, int]  # width and height of the file, pixels
    placement: Placement
    retina: bool = False

    @property
    def map_boxes(self) -> Tensor:
        """The boxes in pixels of the maps, (k, 4)."""
        return self.boxes[:, :4] / MASK_STRIDE

    def on_map(self, rows: Rows) -> Tensor:
        """Return the masks of some detections on the map, cropped to their boxes, bool (r, h, w)."""
        return cut_by_boxes(self.logits(rows) > 0, self.map_boxes[rows])

    def parts(self, rows: Sequence[int]) -> Iterator[MaskPart]:
        """Iterate over the masks of some detections in the file."""
        across, down = (self._weights(axis, cells) for axis, cells in enumerate((self.map_size[1], self.map_size[0])))
        sides = self.size if self.retina else self.map_size[::-1]
        for start in range(0, len(rows), MAPS_AT_ONCE):
            chunk = rows[start : start + MAPS_AT_ONCE]
            maps = self.logits(chunk).sigmoid_().cpu().numpy()
            boxes = self.file_boxes[chunk] if self.retina else self.map_boxes[chunk].cpu().numpy()
            corners = np.ceil(boxes).clip(0, sides * 2).astype(int).tolist()
            for values, (left, top, right, bottom) in zip(maps, corners, strict=True):
                columns, map_columns = self._spans(across, left, right)
                lines, map_lines = self._spans(down, top, bottom)
                cut = values[map_lines, map_columns]
                pixels = down[lines, map_lines] @ cut @ across[columns, map_columns].T > 0.5
                yield MaskPart(columns.start, lines.start, pixels)

    def _weights(self, axis: int, cells: int) -> np.ndarray:
        """Return the weight of each cell of a map in each pixel of the file along an axis, float32 (pixels, cells)."""
        length, scale, offset = self.size[axis], self.placement.scale[axis], self.placement.offset[axis]
        position = (np.arange(length) + 0.5) * scale + offset  # each pixel's centre on the network's image
        first, last = 0.0, cells - 1.0
        if self.retina:  # the cells that contain the image
            first, last = offset // MASK_STRIDE, min(last, np.ceil((offset + length * scale) / MASK_STRIDE) - 1)
        else:
            position = np.floor(position).clip(0, cells * MASK_STRIDE - 1) + 0.5
        cell = (position / MASK_STRIDE - 0.5).clip(first, last)
        return np.asarray((1 - abs(cell[:, None] - np.arange(cells))).clip(min=0), np.float32)

    def _spans(self, weights: np.ndarray, low: int, high: int) -> tuple[slice, slice]:
        """Return the pixels of a mask along an axis, and the cells that they are computed from.

        The box goes from `low` to before `high`: pixels of the file with `retina`, else cells of the map.
        """
        if self.retina:
            return slice(low, high), slice(None)
        reached = np.flatnonzero(weights[:, low:high].any(1)).tolist() or [0, -1]
        return slice(reached[0], reached[-1] + 1), slice(low, high)


@dataclass(frozen=True, eq=False, repr=False)
class SegmentationPrediction(DetectionPrediction):
    """The instances in one image, in falling confidence. Masks are computed anew on each access."""

    source: DetectedMasks
    label_outlines: Sequence[np.ndarray]  # (p, 2) per label: x, y as shares of width and height; () if unknown
    known_outlines: Sequence[np.ndarray] | None = None  # see `with_labels`
    joined: Any = Prediction.joined  # left out: masks of windows are not joined

    @property
    def masks(self) -> np.ndarray:
        """The masks, bool (k, height, width), in pixels of the file."""
        width, height = self.size
        masks = np.zeros((len(self.rows), height, width), bool)
        for mask, part in zip(masks, self.source.parts(range(len(masks))), strict=True):
            part.window(mask)[:] = part.pixels
        return masks

    @property
    def outlines(self) -> list[np.ndarray]:
        """The largest contour of each mask, float32 (p, 2): the centres of its pixels as shares of width and height.

        An empty mask has no points.
        """
        return list(self.known_outlines) if self.known_outlines is not None else self.outlines_of(range(len(self.rows)))

    def outlines_of(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Return the `outlines` of some instances."""
        return [((part.contour() + 0.5) / self.size).astype(np.float32) for part in self.source.parts(rows)]

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with masks in the colours of their classes, and boxes; the most confident on top."""
        drawn: Image = image.copy()
        rows = range(len(self.rows))[::-1]
        for label, part in zip(self.classes[::-1].tolist(), self.source.parts(rows), strict=True):
            tint(part.window(drawn), part.pixels, label)
        return super().draw(drawn, style)

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file: class, outline as normalised x y x y ..., confidence if asked for, and track.

        The outline of a mask with too few pixels for a polygon is its box. With `corners`: the lines of a detector.
        """
        if corners:
            return super().label_rows(with_confidence, corners)
        lines = []
        for (*xyxy, confidence, label), outline in zip(self.rows.tolist(), self.outlines, strict=True):
            points = outline if len(outline) >= MIN_POLYGON_POINTS else _rectangle(xyxy) / self.size
            numbers = [*points.ravel().tolist(), *([confidence] if with_confidence else [])]
            lines.append(f"{int(label)} {' '.join(f'{number:.6g}' for number in numbers)}")
        return self.with_tracks(lines)

    def with_labels(self) -> SegmentationPrediction:
        """Return the labels, with a confidence of 1, then the detections whose boxes overlap no label's box of the same
        class by more than `iou_thres`: rows and outlines, for `label_rows`, but no masks."""
        labels, unlabelled = self.label_boxes(), self.unlabelled().tolist()
        outlines = self.label_outlines or [_rectangle(xyxy) / self.size for *xyxy, _, _ in labels.tolist()]
        rows = torch.cat((labels, self.rows[unlabelled]))
        return replace(self, rows=rows, known_outlines=[*outlines, *self.outlines_of(unlabelled)])

    def coco_rows(self) -> CocoImage:
        masks = [part.run_lengths(self.size) for part in self.source.parts(range(len(self.rows)))]
        return super().coco_rows()._replace(masks=masks)


def _rectangle(xyxy: Sequence[float]) -> np.ndarray:
    """Return the corners of a box, (4, 2)."""
    left, top, right, bottom = xyxy
    return np.array(((left, top), (right, top), (right, bottom), (left, bottom)))


# Scores


def mask_pairs(
    predictions: Sequence[SegmentationPrediction], batch: SegmentationBatch, records: Sequence[ImageRecord]
) -> Pairs:
    """Return the pairs of a detection and a label of one image and class, with the IoU of their masks.

    The masks are compared at the maps' size, a detection's within its box. Only those are computed whose box meets the
    window of such a label.
    """
    joined, image, true_image = as_columns(records)
    sources = [prediction.source for prediction in predictions]
    boxes, windows = torch.cat([source.map_boxes for source in sources]).cpu().numpy(), batch.windows.astype(np.int64)
    detection, label = meeting_pairs(boxes, windows, image, true_image)
    meets = np.minimum(boxes[detection, 2:], windows[label, 2:]) > np.maximum(boxes[detection, :2], windows[label, :2])
    chosen = meets.all(1) & (joined.label[detection] == joined.true_label[label])
    detection, label = detection[chosen], label[chosen]
    counts = [torch.zeros(2, 0, device=batch.mask_pixels.device)]
    for number in np.unique(image[detection]).tolist():
        (here,) = np.nonzero(image[detection] == number)
        rows = detection[here] - np.searchsorted(image, number)
        counts.append(_count_pixels(sources[number], rows, batch, label[here]))
    # One copy for all images, as every copy waits for the device.
    intersection, union = torch.cat(counts, 1).cpu().numpy().astype(np.float64)
    return Pairs(detection, label, np.minimum(intersection / (union + EPSILON) * TIE, 1))


def _count_pixels(source: DetectedMasks, row: np.ndarray, batch: SegmentationBatch, label: np.ndarray) -> Tensor:
    """Return the pixels of intersection and union of pairs of a detection and a label of an image, (2, p)."""
    rows, mask = np.unique(row, return_inverse=True)
    chunks = np.array_split(rows, math.ceil(len(rows) * math.prod(source.map_size) / MAX_MASK_VALUES))
    masks = torch.cat([source.on_map(chunk) for chunk in chunks])
    areas, counts, order = _sizes(masks), [], np.argsort(label, kind="stable")
    labels, pairs = np.unique(label, return_counts=True)
    chosen = torch.split(torch.from_numpy(mask[order]).to(masks.device), pairs.tolist())
    windows, truths = batch.windows[labels].tolist(), target_pixels(batch, labels)
    for (left, top, right, bottom), truth, numbers in zip(windows, truths, chosen, strict=True):
        intersection = _sizes(masks[numbers, top:bottom, left:right].logical_and(truth))
        counts.append(torch.stack((intersection, areas[numbers] + _sizes(truth[None]) - intersection)))
    return torch.cat(counts, 1)[:, np.argsort(order)]


def _sizes(masks: Tensor) -> Tensor:
    """Return the number of pixels of masks, bool (n, h, w): int32 (n,)."""
    return masks.view(torch.uint8).sum((1, 2), dtype=torch.int32)  # a sum of bools takes 17 times as long


class SegmentationMetrics(DetectionMetrics):
    """The detector's metrics, for boxes and for masks. A record is a pair, whose items differ in their matches only."""

    sets = SETS
    titles = ("Class", "Images", "Labels", "box P", "R", "mAP50", "50-95", "mask P", "R", "mAP50", "50-95")
    headline: ClassVar[Mapping[str, str]] = {"mAP box": "mAP_0.5:0.95(B)", "mask": "mAP_0.5:0.95(M)"}
    has_masks = True

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[tuple[ImageRecord, ImageRecord]]:
        """Return the records of boxes and masks of each image; what is drawn of an image has the masks' outlines."""
        instances = cast("Sequence[SegmentationPrediction]", predictions)
        box_records = image_records([prediction.rows for prediction in instances], batch.infos, self.drawn)
        pairs = mask_pairs(instances, cast("SegmentationBatch", batch), box_records)
        mask_records = matched_by(pairs, [record._replace(drawn=None) for record in box_records])
        for record, prediction in zip(box_records, instances, strict=True):
            objects = record.drawn["objects"] if record.drawn else []
            confident = range([kind for kind, *_ in objects].count("prediction"))
            outlines = [*prediction.label_outlines, *prediction.outlines_of(confident)] if objects else []
            for row, points in zip(objects, outlines, strict=True):
                row[-1] = (points * np.array(prediction.size, np.float32)).astype(np.int32).ravel().tolist()
        return list(zip(box_records, mask_records, strict=True))
