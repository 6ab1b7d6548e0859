"""A detector's outputs for a batch in the forms that exported files return. Made by `DetectionPostprocess.views`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from torch import Tensor

from models.heads.contract import BoxView, Candidates, image_groups


class DecodedView(NamedTuple):
    """The boxes of an exported file."""

    boxes: Tensor  # (b, n, 5 + classes + more): xywh in pixels of the batch, objectness, class scores, other outputs
    outputs: None = None  # exported files return no raw maps for a loss
    more: int = 0

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of groups of images whose objectness exceeds the threshold."""
        end = self.boxes.shape[2] - self.more
        for (group,) in image_groups([self.boxes]):
            image, box = (group[..., 4] > conf_thres).nonzero(as_tuple=True)
            rows = group[image, box].float()
            yield Candidates(len(group), image, rows[:, :end], rows[:, end:])


class SuppressedView(NamedTuple):
    """The detections of an exported file with suppression in its graph."""

    detections: Tensor  # (b, m, 6): xyxy in pixels of the batch, confidence, class; padded with zeros
    counts: Tensor  # (b,) number of rows that are detections
    outputs: None = None


DetectionView: TypeAlias = BoxView | SuppressedView
