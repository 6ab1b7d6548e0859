"""The instances in one image: `SegmentationPrediction`, made by `SegmentationPostprocess`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.tasks.contract import Image
from models.tasks.detection.prediction import DetectionPrediction
from models.tasks.segmentation.masks import MIN_POLYGON_POINTS, JoinedMasks, MaskPart, MaskSource, OutlineMasks
from utils.batch import CocoImage
from utils.plots.drawing import Style, tint


@dataclass(frozen=True, eq=False, repr=False)
class SegmentationPrediction(DetectionPrediction):
    """The instances in one image, in falling confidence. Masks are computed anew on each access."""

    source: MaskSource
    label_outlines: Sequence[np.ndarray]  # (p, 2) per label: x, y as shares of width and height; () if unknown

    VALUES = (*DetectionPrediction.VALUES, "masks", "outlines")

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
