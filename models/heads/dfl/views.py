"""The raw outputs of a `DetectDFL` head for a batch, their decoding, and the candidate boxes for suppression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from models.heads.contract import Candidates, image_groups
from models.heads.logits import least_logit, row_sigmoids

if TYPE_CHECKING:
    from models.heads.dfl.head import DFLLevel

SIDES = 4  # left, top, right, bottom
BINS = 16  # bins of a distance's distribution: 0 to 15 strides


class DFLView(NamedTuple):
    """The raw outputs of a network for images that may be scaled and mirrored."""

    outputs: list[DFLLevel]
    strides: Tensor  # (levels,) pixels per cell
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of the model's images, each as a share of the batch's
    mirrored_width: int = 0  # width of the batch in pixels if the images are mirrored, else 0
    skipped_level: int | None = None  # number of a level whose boxes are left out
    more: int = 0

    def augmented(self, scale: tuple[float, float], mirrored_width: int) -> DFLView:
        """Return the view of scaled or mirrored images."""
        return self._replace(scale=scale, mirrored_width=mirrored_width)

    def without_level(self, level: int) -> DFLView:
        """Return the view without the boxes of a level."""
        return self._replace(skipped_level=level)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of all cells, (b, n, 4 x 16) and (b, n, classes), and their geometry (n, 4)."""
        numbers = [number for number in range(len(self.outputs)) if number != self.skipped_level]
        sides = torch.cat([by_cell(self.outputs[number].sides) for number in numbers], 1)
        scores = torch.cat([by_cell(self.outputs[number].scores) for number in numbers], 1)
        cells = [cell_geometry(self.outputs[number].sides, self.strides[number], self.scale) for number in numbers]
        return sides, scores, torch.cat(cells)

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of groups of images whose best class score exceeds the threshold; others stay raw."""
        *outputs, cells = self.rows()
        for sides, scores in image_groups(outputs):
            image, box = (scores.amax(2).float() > least_logit(conf_thres)).nonzero(as_tuple=True)
            xywh = decode_xywh(sides[image, box].float(), cells[box], self.mirrored_width)
            rows = torch.cat((xywh, torch.ones_like(xywh[:, :1]), row_sigmoids([scores[image, box]])), 1)
            yield Candidates(len(scores), image, rows, rows[:, :0])


def decode(view: DFLView) -> Tensor:
    """Return all boxes of a view, (b, n, 4 + classes): xywh in pixels of the batch, class scores."""
    sides, scores, cells = view.rows()
    return torch.cat((decode_xywh(sides.float(), cells, view.mirrored_width), scores.float().sigmoid()), 2)


def by_cell(raw: Tensor) -> Tensor:
    """Return a map (b, c, h, w) as rows of its cells, (b, h x w, c)."""
    return raw.flatten(2).transpose(1, 2)


def cell_geometry(raw: Tensor, stride: Tensor, scale: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the centre (x, y) of each cell of a map, and pixels per column and row: (h x w, 4), in pixels."""
    height, width = raw.shape[2:]
    pixels = torch.stack([stride / share for share in scale]).float()
    columns = torch.arange(width, device=raw.device, dtype=torch.float32) + 0.5
    rows = torch.arange(height, device=raw.device, dtype=torch.float32) + 0.5
    parts = ((columns * pixels[0])[:, None], (rows * pixels[1])[:, None, None], pixels)
    return torch.cat([part.expand(height, width, part.shape[-1]) for part in parts], -1).view(-1, 4)


def distances(sides: Tensor) -> Tensor:
    """Return the expected distances (..., 4) in strides, from logits (..., 4 x 16)."""
    logits = sides.view(*sides.shape[:-1], SIDES, BINS)
    bins = torch.arange(BINS, device=sides.device, dtype=sides.dtype)
    return (logits.softmax(-1) * bins).sum(-1)


def decode_xywh(sides: Tensor, cells: Tensor, mirrored_width: int = 0) -> Tensor:
    """Return boxes (..., n, 4), xywh in pixels.

    Args:
        sides: logits (..., n, 4 x 16) of the distances
        cells: geometry (n, 4) of the cells, see `cell_geometry`
        mirrored_width: width of the batch in pixels if the images are mirrored, else 0
    """
    low, high = distances(sides).split(2, -1)
    centre = cells[:, :2] + (high - low) / 2 * cells[:, 2:]
    size = (low + high) * cells[:, 2:]
    if mirrored_width:
        x, y = centre.split(1, -1)
        centre = torch.cat((mirrored_width - x, y), -1)
    return torch.cat((centre, size), -1)
