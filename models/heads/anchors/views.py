"""The raw maps of an anchor head for a batch, their decoding, and the candidate boxes for suppression.

Made by `Detect.view`; exported modules decode with `decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from models.heads.contract import Candidates, image_groups
from models.heads.logits import least_logit, row_sigmoids


class RawView(NamedTuple):
    """The raw maps of a network for images that may be scaled and mirrored."""

    outputs: list[Tensor]  # a map (b, anchors, h, w, 5 + classes + more) per level
    anchors: Tensor  # (levels, anchors, 2) in cells
    strides: Tensor  # (levels,) pixels per cell
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of the model's images, each as a share of the batch's
    mirrored_width: int = 0  # width of the batch in pixels if the images are mirrored, else 0
    skipped_level: int | None = None  # number of a level whose boxes are left out
    more: int = 0  # number of an anchor's outputs after its class scores, which are not decoded

    def levels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the raw map and the cell geometry of each level that is not skipped."""
        for number, level in enumerate(zip(self.outputs, self.anchors, self.strides, strict=True)):
            if number != self.skipped_level:
                yield level[0], cell_geometry(*level, self.scale, self.mirrored_width)

    def augmented(self, scale: tuple[float, float], mirrored_width: int) -> RawView:
        """Return the view of scaled or mirrored images."""
        return self._replace(scale=scale, mirrored_width=mirrored_width)

    def without_level(self, level: int) -> RawView:
        """Return the view without the boxes of a level."""
        return self._replace(skipped_level=level)

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of groups of images whose objectness exceeds the threshold; only these are decoded."""
        outputs, geometries = zip(*self.levels(), strict=True)
        for levels in image_groups([raw.flatten(1, 3) for raw in outputs]):  # (b, n, 5 + classes + more)
            places = [(level[..., 4].float() > least_logit(conf_thres)).nonzero(as_tuple=True) for level in levels]
            rows = [level[place] for level, place in zip(levels, places, strict=True)]
            scores = row_sigmoids([row[:, : row.shape[1] - self.more] for row in rows])
            cells = [cells[box] for cells, (_, box) in zip(geometries, places, strict=True)]
            boxes = torch.cat((decode_xywh(scores, torch.cat(cells)), scores[:, 4:]), 1)
            more = torch.cat([row[:, row.shape[1] - self.more :].float() for row in rows])
            yield Candidates(len(levels[0]), torch.cat([image for image, _ in places]), boxes, more)


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

    The values are column and row, pixels per column and row, width and height of the anchor. In a mirrored view columns
    count from the right, with a negative stride.
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
    """Return boxes (..., 4) in pixels by YOLOv5's formula: xy = (2 s - 0.5 + cell) stride, wh = (2 s)^2 anchor.

    Args:
        scores: sigmoids s (..., 4 or more) of the outputs
        cells: geometry (n, 6) of the cells, see `cell_geometry`
    """
    centre = (scores[..., :2] * 2 - 0.5 + cells[:, :2]) * cells[:, 2:4]
    return torch.cat((centre, (scores[..., 2:4] * 2) ** 2 * cells[:, 4:]), -1)
