"""Oriented boxes from raw outputs: the most confident cells, rotated suppression, and the result for an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cv2
import numpy as np
import torch
from torch import Tensor

from models.tasks.contract import Image, Model, Postprocess, Prediction, Thresholds, View
from utils.batch import Batch, ImageInfo
from utils.errors import plural
from utils.plots.drawing import COLOURS, draw_boxes

from .geometry import canonical, corners, rotated_iou, unspun
from .head import BOX_OUTPUTS, OrientedDetect, decode

if TYPE_CHECKING:
    from utils.plots.drawing import Style

CANDIDATES_PER_DETECTION = 4  # cells that suppression gets, per detection that an image may have
CORNER_NAMES = ("x1", "y1", "x2", "y2", "x3", "y3", "x4", "y4")


@dataclass(frozen=True, eq=False, repr=False)
class OrientedPrediction(Prediction):
    """The oriented boxes on one image, in falling confidence."""

    size: tuple[int, int]  # width and height of the file's image, pixels
    rows: Tensor  # float64 (k, 7): box in pixels of the file, see geometry.py; confidence, class
    label_outlines: Sequence[np.ndarray]  # of the labels, (4, 2) each, as shares of width and height

    @property
    def array(self) -> np.ndarray:
        """Return the detections, float32 (k, 7): box in pixels of the file, confidence, class."""
        return self.rows.float().numpy()

    @property
    def corners(self) -> np.ndarray:
        """The corners of the boxes in one turn, float32 (k, 4, 2), in pixels of the file; some may be outside."""
        return corners(self.rows[:, :5]).float().numpy()

    @property
    def scores(self) -> np.ndarray:
        """The confidences, float32 (k,)."""
        return self.array[:, 5]

    @property
    def classes(self) -> np.ndarray:
        """The class numbers, int64 (k,)."""
        return self.array[:, 6].astype(np.int64)

    def columns(self) -> dict[str, Any]:
        """Return the corners, confidences, class numbers and names."""
        return {**dict(zip(CORNER_NAMES, self.corners.reshape(-1, 8).T, strict=True)), **super().columns()}

    def describe(self) -> str:
        """Format the number of boxes of each class: `2 ships, 1 plane`, or `nothing`."""
        counts = sorted(Counter(self.classes.tolist()).items())
        return ", ".join(plural(count, self.names[label]) for label, count in counts) or "nothing"

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the boxes drawn on it, the most confident on top."""
        drawn: Image = image.copy()
        texts = [style.text(*item) for item in self.items]
        draw_oriented(drawn, self.corners[::-1], self.classes[::-1].tolist(), texts[::-1], style.thickness)
        return drawn

    def crops(self, image: Image) -> list[tuple[str, Image]]:
        """Return what each box covers, turned so that the box is upright, with its class name; none is empty."""
        return [(name, crop(image, box)) for (name, _), box in zip(self.items, self.corners, strict=True)]

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file: class, normalised corners and, `with_confidence`, the confidence."""
        points = self.corners / np.array(self.size, np.float32)
        numbers = np.concatenate((points.reshape(-1, 8), self.array[:, 5 : 5 + with_confidence]), 1)
        rows = zip(self.classes, numbers, strict=True)
        return [f"{label} {' '.join(f'{value:.6g}' for value in row)}" for label, row in rows]


def draw_oriented(
    image: Image, boxes: np.ndarray, classes: Sequence[int], texts: Sequence[str], thickness: int = 0
) -> None:
    """Draw the outlines of boxes, corners (k, 4, 2) in pixels, in the colours of their classes, then their texts."""
    for points, label in zip(np.round(boxes).astype(np.int32), classes, strict=True):
        cv2.polylines(image, [points], True, COLOURS[label % len(COLOURS)], thickness or 1, cv2.LINE_AA)
    low = boxes.min(1)
    draw_boxes(image, np.concatenate((low, low), 1), classes, texts, thickness)


def crop(image: Image, box: np.ndarray) -> Image:
    """Return the pixels inside of a box, corners (4, 2), turned upright."""
    first, second, _, fourth = box
    width, height = (max(round(float(np.hypot(*side))), 1) for side in (second - first, fourth - first))
    upright = np.array(((0, 0), (width, 0), (0, height)), np.float32)
    return cv2.warpAffine(image, cv2.getAffineTransform(np.stack((first, second, fourth)), upright), (width, height))


class OrientedView(NamedTuple):
    """The outputs of a network, or of an exported file."""

    outputs: list[Tensor] | None  # the raw maps; None of an exported file
    rows: Tensor  # (b, n, 6 + classes) raw, or of an exported file (b, n, 5 + classes): boxes and confidences
    places: Tensor | None  # of the raw rows, see `Cells`


class OrientedPostprocess(Postprocess):
    """Take the most confident cells of all views, and drop those that overlap a more confident one of their class."""

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[OrientedView]:
        """Run `model` on `inputs`."""
        outputs = model(inputs)
        if isinstance(model.head, OrientedDetect):
            return [OrientedView(outputs, *model.head.cells(outputs))]
        return [OrientedView(None, outputs, None)]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[OrientedPrediction]:
        """Return the boxes on each image. Those of several models suppress each other."""
        parts = [self._candidates(view) for view in cast("Sequence[OrientedView]", views)]
        boxes, confidence, label = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return [self._prediction(*of_image) for of_image in zip(boxes, confidence, label, batch.infos, strict=True)]

    def _candidates(self, view: OrientedView) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cells of each image with the highest class scores, of a fixed number k, in no order.

        Boxes (b, k, 5) in pixels of the batch, confidences (b, k), classes (b, k): the only copy from the device.
        """
        raw, first = view.places is not None, BOX_OUTPUTS if view.places is not None else 5
        scores = view.rows[..., first:].float()
        if self.thresholds.classes:
            scores = scores[..., list(self.thresholds.classes)]
        best, label = scores.max(2)
        best, cell = best.topk(min(CANDIDATES_PER_DETECTION * self.thresholds.max_det, best.shape[1]))
        parts = [view.rows[..., :first].gather(1, cell[..., None].expand(-1, -1, first)), best[..., None]]
        parts += [label.gather(1, cell)[..., None], *([view.places[cell]] if view.places is not None else ())]
        # float64: a function may round otherwise at the end of a tensor, so that a result depended on the other images.
        rows, best, label, places = torch.cat(parts, 2).cpu().double().tensor_split((first, first + 1, first + 2), 2)
        label = label[..., 0].long()
        if self.thresholds.classes:
            label = torch.tensor(self.thresholds.classes)[label]
        if not raw:
            return rows, best[..., 0], label
        return canonical(unspun(decode(rows, places))), best[..., 0].sigmoid(), label

    def _prediction(self, boxes: Tensor, confidence: Tensor, label: Tensor, info: ImageInfo) -> OrientedPrediction:
        """Return the prediction for an image, from its candidates."""
        order = confidence.argsort(descending=True, stable=True)
        order = order[confidence[order] > self.thresholds.conf_thres]
        boxes, confidence, label = boxes[order], confidence[order], label[order]
        group = torch.zeros_like(label) if self.thresholds.agnostic_nms else label
        remaining = not_suppressed(boxes, group, self.thresholds.iou_thres)[: self.thresholds.max_det]
        (scale, _), offset = info.placement
        in_file = torch.cat(((boxes[:, :2] - torch.tensor(offset)) / scale, boxes[:, 2:4] / scale, boxes[:, 4:]), 1)
        rows = torch.cat((in_file, confidence[:, None], label[:, None].double()), 1)[remaining]
        return OrientedPrediction(info.image, info.path, self.names, info.size, rows, info.outlines)


def not_suppressed(boxes: Tensor, group: Tensor, iou_thres: float) -> Tensor:
    """Return the indices of the boxes that no remaining, more confident box of their group overlaps by more than this.

    boxes: (k, 5), in falling confidence. group: (k,). The greedy rule is applied to all boxes at once until nothing
    changes: after round i it is known of the first i boxes which of them remain.
    """
    first, second = (group[:, None] == group).triu(1).nonzero(as_tuple=True)
    over = rotated_iou(boxes[first], boxes[second]) > iou_thres
    first, second = first[over], second[over]
    remains, before = torch.ones(len(boxes), dtype=torch.bool), None
    while before is None or not remains.equal(before):
        before, remains = remains, torch.ones_like(remains)
        remains[second[before[first]]] = False
    return remains.nonzero()[:, 0]
