"""Match targets to the cells and anchors of a detector's maps.

Called by `DetectionCriterion`; `Detect` returns `Level`s. The shapes of all tensors here depend only on the number of
targets, so nothing waits for the device to count matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.tasks.shared.losses import device_constant

# Offsets (x, y) of the cells that a target may be assigned to: its centre's cell, then left, above, right and below.
NEIGHBOURS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))
NEIGHBOUR_DISTANCE_CELLS = 0.5  # largest distance from a target's centre to a neighbouring cell
MapSizes = tuple[tuple[int, int], ...]  # height and width of the map of each level


class Cells(NamedTuple):
    """The 5 cells near each of n targets on every level, k = 5 n: the first cell of all targets, then the second, ...

    Every cell lies on its map: cells outside of the map are moved to its edge.
    """

    indices: Tensor  # int64 (levels, 3, k): image, row, column
    near: Tensor  # bool (levels, k): the target's centre lies in the cell or within half a cell of it
    box: Tensor  # (levels, k, 4): the target's centre relative to the cell's corner, and its size, in cells


class Level(NamedTuple):
    """The logits of one level that a loss needs."""

    objectness: Tensor  # (b, anchors, h, w)
    rows: Tensor  # (k, anchors, 5 + classes): all logits of the cells near the targets


def near_cells(sizes: MapSizes, targets: Tensor) -> Cells:
    """Return the cells near targets (n, 6): image, class, normalised xywh."""
    grid = device_constant(tuple((float(width), float(height)) for height, width in sizes), targets.device).to(targets)
    centres = targets[:, 2:4] * grid[:, None]  # (levels, n, 2)
    from_end = grid[:, None] - centres
    low = (centres % 1 < NEIGHBOUR_DISTANCE_CELLS) & (centres > 1)
    high = (from_end % 1 < NEIGHBOUR_DISTANCE_CELLS) & (from_end > 1)
    near = torch.cat((torch.ones_like(low[..., :1]), low, high), 2).transpose(1, 2).flatten(1)
    shift = NEIGHBOUR_DISTANCE_CELLS * device_constant(NEIGHBOURS, targets.device).to(targets)
    corner = (centres[:, None] - shift[:, None]).flatten(1, 2).floor()
    # A centre on the far edge belongs to the last cell.
    corner = torch.minimum(corner.clamp(min=0), grid[:, None] - 1)
    image = targets[:, 0].repeat(len(NEIGHBOURS)).expand(len(sizes), -1)
    column, row = corner.unbind(2)
    target = torch.cat((centres, targets[:, 4:6] * grid[:, None]), 2).repeat(1, len(NEIGHBOURS), 1)
    box = torch.cat((target[..., :2] - corner, target[..., 2:]), 2)
    return Cells(torch.stack((image, row, column), 1).long(), near, box)


def match(cells: Cells, anchors: Tensor, threshold: float) -> Tensor:
    """Return which of the anchors (levels, a, 2), in cells, match the target at each cell: bool (levels, k, a).

    A target matches an anchor, in the cell of its centre and in near cells, if width and height differ by less than the
    factor `threshold`.
    """
    ratio = cells.box[:, :, None, 2:] / anchors[:, None]
    return (torch.maximum(ratio, 1 / ratio).amax(3) < threshold) & cells.near[..., None]


def read_level(raw: Tensor, index: Tensor) -> Level:
    """Return the `Level` of a raw map (b, anchors, h, w, 5 + classes) at cells `index` (3, k)."""
    image, row, column = index
    return Level(raw[..., 4], raw[image, :, row, column])


def map_sizes(outputs: Sequence[Tensor | Level]) -> MapSizes:
    """Return the height and width of each level's map."""
    maps = [output.objectness if isinstance(output, Level) else output for output in outputs]
    return tuple((one.shape[2], one.shape[3]) for one in maps)
