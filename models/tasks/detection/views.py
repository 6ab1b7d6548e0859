"""A detector's outputs for a batch, in the three forms that models return, and the decoding of raw maps.

Made by `DetectionPostprocess.views`, suppressed by suppression.py; exported modules decode with `decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class RawView(NamedTuple):
    """The raw maps of a network for images that may be scaled and mirrored."""

    outputs: list[Tensor]  # by level, (b, anchors, h, w, 5 + classes + more)
    anchors: Tensor  # (levels, anchors, 2) in cells
    strides: Tensor  # (levels,) pixels per cell
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of the model's images, as shares of the batch's
    mirrored_width: int = 0  # width of the batch in pixels if the images are mirrored, else 0
    skipped_level: int | None = None  # a level whose boxes are left out
    more: int = 0  # outputs of an anchor after its class scores, which are not decoded

    def levels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the raw map and the cell geometry of each level that is not skipped."""
        for number, level in enumerate(zip(self.outputs, self.anchors, self.strides, strict=True)):
            if number != self.skipped_level:
                yield level[0], cell_geometry(*level, self.scale, self.mirrored_width)


class DecodedView(NamedTuple):
    """The boxes of an exported file."""

    boxes: Tensor  # (b, n, 5 + classes + more): xywh in pixels of the batch, objectness, class scores, other outputs
    outputs: None = None  # no raw maps for a loss
    more: int = 0


class SuppressedView(NamedTuple):
    """The detections of an exported file with suppression in its graph."""

    detections: Tensor  # (b, m, 6): xyxy in pixels of the batch, confidence, class; padded with zeros
    counts: Tensor  # (b,) rows that are detections
    outputs: None = None


DetectionView: TypeAlias = RawView | DecodedView | SuppressedView


def decode(view: RawView) -> Tensor:
    """Return all boxes of a view, (b, n, 5 + classes + more), as in `DecodedView`: by level, anchor, row, column."""
    parts = []
    for raw, cells in view.levels():
        outputs = raw.flatten(1, 3).float()
        scores = outputs[..., : -view.more].sigmoid() if view.more else outputs.sigmoid()
        others = (outputs[..., -view.more :],) if view.more else ()
        parts.append(torch.cat((decode_xywh(scores, cells), scores[..., 4:], *others), 2))
    return torch.cat(parts, 1)


def cell_geometry(
    raw: Tensor, anchors: Tensor, stride: Tensor, scale: tuple[float, float] = (1.0, 1.0), mirrored_width: int = 0
) -> Tensor:
    """Return the geometry that a level's boxes are relative to, (anchors x h x w, 6), in pixels of the batch.

    Column and row, pixels per column and row, width and height of the anchor. The columns of a mirrored view count from
    the right, by a negative stride.
    """
    _, count, height, width, _ = raw.shape
    pixels = torch.stack([stride / share for share in scale]).float()
    columns = torch.arange(width, device=raw.device, dtype=torch.float32)
    rows = torch.arange(height, device=raw.device, dtype=torch.float32)
    sides = (anchors * pixels).float()[:, None, None]
    if mirrored_width:
        columns = columns - mirrored_width / pixels[0]
        pixels = pixels * torch.tensor([-1.0, 1.0], device=pixels.device)
    # Concatenated, not written in place, which is slow in other runtimes: exported files compute this too.
    parts = (columns[:, None], rows[:, None, None], pixels, sides)
    return torch.cat([part.expand(count, height, width, part.shape[-1]) for part in parts], -1).view(-1, 6)


def decode_xywh(scores: Tensor, cells: Tensor) -> Tensor:
    """Return boxes (..., 4) in pixels: xy = (2 sigmoid - 0.5 + cell) stride, wh = (2 sigmoid)^2 anchor (YOLOv5's).

    scores: (..., 4 or more), sigmoids. cells: (n, 6), see `cell_geometry`.
    """
    centre = (scores[..., :2] * 2 - 0.5 + cells[:, :2]) * cells[:, 2:4]
    return torch.cat((centre, (scores[..., 2:4] * 2) ** 2 * cells[:, 4:]), -1)
