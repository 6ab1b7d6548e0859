"""A segmenter's outputs for a batch, in the three forms that models return, and the maps that masks are made from.

Made by `SegmentationPostprocess`; masks.py and the metrics read the mask maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from models.heads.contract import BoxView
from models.tasks.detection.views import SuppressedView

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
