"""Task-aligned assignment of targets to the cells of a `DetectDFL` head (arXiv 2108.07755). Called by `DFLCriterion`.

The shapes of all tensors here depend only on the number of targets and the size of the images, so nothing waits for the
device. Ties go to the first cell, and among targets to the first target, on every device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.heads.boxes import EPSILON
from models.heads.dfl.views import BINS

CELLS_PER_TARGET = 10
MAX_DISTANCE = BINS - 1.01  # largest distance from a cell's centre to a side of its box, in strides: below the last bin
ALIGNMENT_EPSILON = 1e-9
MAX_PAIRS = 2**21  # pairs of target and cell that are compared at a time, to limit memory
LOW_BITS = 32  # bits of a key that hold a rank; a float32's bits are above them


class Assignment(NamedTuple):
    """The cells that m targets are assigned to, k each."""

    cell: Tensor  # int64 (m, k): image x n + cell; 0 if the slot is not used
    weight: Tensor  # (m, k): the class target of the cell, above 0; 0 if the slot is not used


class Pairs(NamedTuple):
    """The best cells of m targets, before cells that several targets have chosen are given to one of them."""

    cell: Tensor  # int64 (m, k): number of the cell in its image
    alignment: Tensor  # (m, k); 0 if the slot is not used
    overlap: Tensor  # (m, k): CIoU, at least 0


@torch.no_grad()
def assign(boxes: Tensor, scores: Tensor, cells: Tensor, targets: Tensor, corners: Tensor) -> Assignment:
    """Assign targets to cells, and return the class targets.

    A target is assigned to its 10 best aligned cells, alignment = CIoU^6 x score^0.5, among the cells whose centres are
    inside of it and whose distances to its sides the bins can represent; without such cells, to the best of all cells.
    A cell with several targets keeps the one with the largest CIoU. A cell's class target is its alignment x the
    target's largest CIoU / the target's largest alignment.

    Args:
        boxes: predicted boxes (b, n, 4), xywh in pixels
        scores: class logits (b, n, classes)
        cells: geometry (n, 4) of the cells, see `cell_geometry`
        targets: image, class and normalised xywh of the targets, (m, 6)
        corners: xyxy (m, 4) of the targets, in pixels
    """
    count = cells.shape[0]
    at_a_time = max(MAX_PAIRS // count, 1)
    low, size = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., 2:]
    predicted = (*low.unbind(2), *(low + size).unbind(2), size.prod(2), _shape(*size.unbind(2)))
    parts = [
        _best_cells(predicted, scores, cells, *chunk)
        for chunk in zip(targets.split(at_a_time), corners.split(at_a_time), strict=True)
    ]
    pairs = Pairs(*(torch.cat(each) for each in zip(*parts, strict=True)))
    used, image = pairs.alignment > 0, targets[:, :1].long()
    cell = image * count + pairs.cell
    # The first target has the highest rank, so that it wins among equal overlaps.
    rank = torch.arange(len(targets) - 1, -1, -1, device=cell.device)[:, None]
    key = _keys(pairs.overlap, rank)
    everywhere = len(boxes) * count  # an extra element for slots that are not used
    place = torch.where(used, cell, everywhere).flatten()
    winner = key.new_full((everywhere + 1,), -1).scatter_reduce_(0, place, key.flatten(), "amax")
    used = used & (winner[place].view_as(key) == key)
    alignment, overlap = torch.where(used, pairs.alignment, 0), torch.where(used, pairs.overlap, 0)
    most = alignment.amax(1, keepdim=True) + ALIGNMENT_EPSILON
    return Assignment(torch.where(used, cell, 0), alignment / most * overlap.amax(1, keepdim=True))


def _best_cells(predicted: tuple[Tensor, ...], scores: Tensor, cells: Tensor, targets: Tensor, box: Tensor) -> Pairs:
    """Return the best aligned cells of each of m targets, regardless of the other targets.

    Args:
        predicted: left, top, right, bottom, area and `_shape` of the predictions, (b, n) each
        box: corners (m, 4) of the targets, xyxy in pixels
    """
    image, label = targets[:, 0].long(), targets[:, 1].long()
    x, y, pixels, _ = cells.unbind(1)
    left, top, right, bottom = box[:, :, None].unbind(1)
    near, far = torch.minimum(x - left, right - x), torch.maximum(x - left, right - x)
    near, far = torch.minimum(near, y - top).minimum(bottom - y), torch.maximum(far, y - top).maximum(bottom - y)
    inside = (near >= 0) & (far / pixels <= MAX_DISTANCE)
    overlap = _overlaps((left, top, right, bottom), [values[image] for values in predicted])
    square = overlap * overlap
    alignment = square * square * square * scores[image, :, label].sigmoid().sqrt()
    count = len(cells)
    keys = _keys(alignment, torch.arange(count - 1, -1, -1, device=cells.device))
    best = torch.where(inside, keys, 0).topk(min(CELLS_PER_TARGET, count), 1).values
    first = torch.where(_number(best[:, :1]) > 0, best[:, :1], keys.amax(1, keepdim=True))
    best = torch.cat((first, best[:, 1:]), 1)
    cell = count - 1 - (best & (2**LOW_BITS - 1))
    cell = cell.clamp(0, count - 1)
    return Pairs(cell, _number(best), overlap.gather(1, cell))


def _keys(numbers: Tensor, rank: Tensor) -> Tensor:
    """Return int64 keys that are ordered like `numbers`, float32 of at least 0, and among equal numbers by rank."""
    return (numbers.float().view(torch.int32).long() << LOW_BITS) + rank


def _number(keys: Tensor) -> Tensor:
    """Return the float32 numbers in keys."""
    return (keys >> LOW_BITS).int().view(torch.float32)


def _shape(width: Tensor, height: Tensor) -> Tensor:
    """Return the angle of a box's diagonal, by which CIoU compares shapes."""
    return torch.atan(width / (height + EPSILON))


def _overlaps(target: tuple[Tensor, ...], predicted: list[Tensor]) -> Tensor:
    """Return the CIoU of targets and predictions, at least 0: (m, n). See `complete_iou`.

    Args:
        target: left, top, right and bottom of the targets, (m, 1) each
        predicted: left, top, right, bottom, area and `_shape` of the predictions, (m, n) each
    """
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2, area, angle) = target, predicted
    width, height = ax2 - ax1, ay2 - ay1
    shared = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp_(min=0)
    shared *= (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp_(min=0)
    iou = shared / (width * height + area - shared + EPSILON)
    hull = (torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)).square_()
    hull += (torch.maximum(ay2, by2) - torch.minimum(ay1, by1)).square_()
    distance = (bx1 + bx2 - (ax1 + ax2)).square_() + (by1 + by2 - (ay1 + ay2)).square_()
    shape = (_shape(width, height) - angle).square_() * (4 / math.pi**2)
    return (iou - distance / 4 / (hull + EPSILON) - shape * shape / (shape - iou + 1 + EPSILON)).clamp_(0, 1)
