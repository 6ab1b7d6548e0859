"""The detections of one image: `DetectionPrediction`, made by `DetectionPostprocess`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.heads.contract import xywh_to_xyxy, xyxy_to_xywh
from models.tasks.contract import Image, Prediction
from models.tasks.matching import box_overlaps, match_by_overlap
from utils.batch import CocoImage
from utils.errors import plural
from utils.plots.drawing import Style, draw_boxes


@dataclass(frozen=True, eq=False, repr=False)
class DetectionPrediction(Prediction):
    """The detections of one image, in falling confidence."""

    size: tuple[int, int]  # width and height of the file's image, pixels
    rows: Tensor  # float64 (k, 6): xyxy in pixels of the file, confidence, class
    labels: np.ndarray  # float32 (m, 5): class, normalised xywh
    iou_thres: float  # overlap with a label above which `with_labels` drops a detection

    @property
    def array(self) -> np.ndarray:
        """The detections, float32 (k, 6): xyxy in pixels of the file, confidence, class."""
        return np.array(self.rows.numpy(), np.float32)

    xyxy = array  # YOLOv5's name

    @property
    def xywh(self) -> np.ndarray:
        """The detections, float32 (k, 6): centre and size in pixels of the file, confidence, class."""
        return self._with_boxes(xyxy_to_xywh(self.rows[:, :4]))

    @property
    def xyxyn(self) -> np.ndarray:
        """`xyxy` with boxes as shares of the file's width and height."""
        return self._with_boxes(self.rows[:, :4] / torch.tensor(self.size * 2))

    @property
    def xywhn(self) -> np.ndarray:
        """`xywh` with boxes as shares of the file's width and height."""
        return self._with_boxes(xyxy_to_xywh(self.rows[:, :4]) / torch.tensor(self.size * 2))

    def _with_boxes(self, boxes: Tensor) -> np.ndarray:
        """Return `array` with its boxes replaced by `boxes` (k, 4)."""
        return np.array(torch.cat((boxes, self.rows[:, 4:]), 1).numpy(), np.float32)

    @property
    def boxes(self) -> np.ndarray:
        """The boxes, float32 (k, 4): xyxy in pixels of the file."""
        return self.array[:, :4]

    @property
    def scores(self) -> np.ndarray:
        """The confidences, float32 (k,)."""
        return self.array[:, 4]

    @property
    def classes(self) -> np.ndarray:
        """The class numbers, int64 (k,)."""
        return np.asarray(self.rows[:, 5].long().numpy())

    def columns(self) -> dict[str, Any]:
        """Return YOLOv5's columns: the corners of the boxes, confidences, class numbers and names."""
        return {**dict(zip(("xmin", "ymin", "xmax", "ymax"), self.boxes.T, strict=True)), **super().columns()}

    def describe(self) -> str:
        """Format the number of detections of each class: `2 persons, 1 dog`, or `nothing`."""
        counts = sorted(Counter(self.classes.tolist()).items())
        return ", ".join(plural(count, self.names[label]) for label, count in counts) or "nothing"

    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the boxes drawn on it, the most confident on top."""
        rows = self.rows.flip(0)
        classes = [int(label) for label in rows[:, 5].tolist()]
        texts = [style.text(self.names[k], value) for k, value in zip(classes, rows[:, 4].tolist(), strict=True)]
        drawn: Image = image.copy()
        draw_boxes(drawn, rows[:, :4].numpy(), classes, texts, style.thickness)
        return drawn

    def crops(self, image: Image) -> list[tuple[str, Image]]:
        """Return the part of `image` that each box covers, with the class name; no part is empty."""
        parts = []
        for left, top, right, bottom, _, label in self.rows.tolist():
            part = image[math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)]
            if part.size:
                parts.append((self.names[int(label)], part))
        return parts

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file: class, box and, if `with_confidence`, the confidence.

        Boxes are normalised xywh or, if `corners`, xyxy in pixels of the file.
        """
        boxes = self.rows[:, :4] if corners else xyxy_to_xywh(self.rows[:, :4]) / torch.tensor(self.size * 2)
        rows = torch.cat((boxes, self.rows[:, 4:5]) if with_confidence else (boxes,), 1)
        return [
            f"{int(label)} {' '.join(f'{value:.6g}' for value in row)}"
            for label, row in zip(self.rows[:, 5], rows.tolist(), strict=True)
        ]

    def with_labels(self) -> DetectionPrediction:
        """Return the labels, with a confidence of 1, then the detections that overlap no label of their class by more
        than `iou_thres`."""
        return replace(self, rows=torch.cat((self.label_boxes(), self.rows[self.unlabelled()])))

    def label_boxes(self) -> Tensor:
        """Return the labels in the form of `rows`, with a confidence of 1."""
        label = torch.from_numpy(self.labels).double()
        truth = xywh_to_xyxy(label[:, 1:5]) * torch.tensor(self.size * 2)
        return torch.cat((truth, torch.ones(len(label), 1), label[:, :1]), 1)

    def unlabelled(self) -> Tensor:
        """Return the rows of the detections that match no label, int64 (u,); see `with_labels`."""
        both = (self.rows, self.label_boxes())
        overlaps = box_overlaps(*(rows[:, :4].numpy() for rows in both))
        matches = match_by_overlap(overlaps, *(rows[:, 5].long().numpy() for rows in both))
        (rows,) = np.nonzero(matches.overlap <= self.iou_thres)
        return torch.from_numpy(rows)

    def coco_rows(self) -> CocoImage:
        """Return the detections in COCO's results format."""
        return CocoImage(self.image, self.path, self.rows.numpy())
