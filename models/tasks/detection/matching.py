"""Which cells of a detector's maps answer for which targets.

Every tensor here has a shape that follows from the number of targets alone: nothing waits for the device to say how
many cells were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Cells that a target may be given to: its own, and those to the left, above, right and below, as (x, y).
NEIGHBOURS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))
NEAR = 0.5  # how close, in cells, a target's centre must be to a neighbour
Sizes = tuple[tuple[int, int], ...]  # height and width of the map of each level


class Cells(NamedTuple):
    """On every level the 5 cells about each of n targets, k = 5 n: all targets with one neighbour, then with the next.

    A cell is always on its map, wherever the neighbour would be.
    """

    places: Tensor  # int64 (levels, 3, k): image, row, column
    near: Tensor  # bool (levels, k): is it the target's own, or nearer than half a cell?
    box: Tensor  # (levels, k, 4): the target's centre relative to the cell's corner, and its size, in cells


class Level(NamedTuple):
    """What a head says on one level, as far as a loss asks."""

    objectness: Tensor  # logits (b, anchors, h, w)
    rows: Tensor  # (k, anchors, 5 + classes): everything it says at the cells about the targets


def near_cells(sizes: Sizes, targets: Tensor) -> Cells:
    """The cells about targets (n, 6): image, class, normalised xywh."""
    grid = constant(tuple((float(width), float(height)) for height, width in sizes), targets.device).to(targets)
    centres = targets[:, 2:4] * grid[:, None]  # (levels, n, 2)
    back = grid[:, None] - centres
    low = (centres % 1 < NEAR) & (centres > 1)
    high = (back % 1 < NEAR) & (back > 1)
    near = torch.cat((torch.ones_like(low[..., :1]), low, high), 2).transpose(1, 2).flatten(1)
    shift = NEAR * constant(NEIGHBOURS, targets.device).to(targets)
    corner = (centres[:, None] - shift[:, None]).flatten(1, 2).floor()
    # A centre on the far edge belongs to the last cell.
    corner = torch.minimum(corner.clamp(min=0), grid[:, None] - 1)
    image = targets[:, 0].repeat(len(NEIGHBOURS)).expand(len(sizes), -1)
    column, row = corner.unbind(2)
    own = torch.cat((centres, targets[:, 4:6] * grid[:, None]), 2).repeat(1, len(NEIGHBOURS), 1)
    box = torch.cat((own[..., :2] - corner, own[..., 2:]), 2)
    return Cells(torch.stack((image, row, column), 1).long(), near, box)


def match(cells: Cells, anchors: Tensor, threshold: float) -> Tensor:
    """Which anchors (levels, a, 2), in cells, answer for the target at which of the cells: bool (levels, k, a).

    A target fits the anchors whose width and height are within a factor `threshold` of its own. They answer for it in
    its own cell and in the near ones.
    """
    ratio = cells.box[:, :, None, 2:] / anchors[:, None]
    return (torch.maximum(ratio, 1 / ratio).amax(3) < threshold) & cells.near[..., None]


def read(raw: Tensor, index: Tensor) -> Level:
    """A level from its raw map (b, anchors, h, w, 5 + classes), at cells `index` (3, k)."""
    image, row, column = index
    return Level(raw[..., 4], raw[image, :, row, column])


@cache
def constant(values: Any, device: torch.device) -> Tensor:
    """A tensor of plain values, float32, that goes to a device once: every copy waits for it."""
    with torch.inference_mode(False):  # made while validating, it must serve in training
        return torch.tensor(values, dtype=torch.float32, device=device)


def sizes_of(outputs: Sequence[Tensor | Level]) -> Sizes:
    """Height and width of each level's map."""
    maps = [output.objectness if isinstance(output, Level) else output for output in outputs]
    return tuple((one.shape[2], one.shape[3]) for one in maps)
