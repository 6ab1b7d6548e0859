"""The loss of oriented boxes: ProbIoU, class scores that shall equal it, and a term for the angles of squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from models.tasks.contract import Criterion, LossTerms, device_constant
from utils.batch import Batch

from .geometry import prob_iou, spun, turn, turned
from .head import BOX_OUTPUTS, TYPICAL_STRIDES, OrientedDetect, decode

LOSS_NAMES = ("box_loss", "cls_loss", "angle_loss")
NEAR = tuple((x, y) for x in (-1, 0, 1) for y in (-1, 0, 1))  # the cells around a target's centre


class Assigned(NamedTuple):
    """The cells that m targets are assigned to, at most 9 each."""

    cell: Tensor  # int64 (m, 9): image x n + cell of the image; 0 if the place is not used
    used: Tensor  # bool (m, 9)


class OrientedCriterion(Criterion):
    """Three terms, each a sum divided by the number of assigned cells of the global batch.

    gains: of the terms. head: its strides are read at each call, because the model is moved to its device later.
    """

    def __init__(self, gains: tuple[float, float, float], head: OrientedDetect) -> None:
        self.gains, self._head = gains, head

    def __call__(self, outputs: Sequence[Tensor], batch: Batch) -> LossTerms:
        """Return the loss terms of raw outputs (b, 6 + classes, h, w) of each level."""
        raw, places = self._head.cells(outputs)
        sizes = [(level.shape[2], level.shape[3]) for level in outputs]
        assigned = assign(batch.targets, len(raw), sizes, self._head.stride.to(raw.device))
        cell, used = assigned.cell.flatten(), assigned.used.flatten()
        label = batch.targets[:, 1:2].long().expand_as(assigned.cell).flatten()
        boxes = decode(raw.flatten(0, 1).index_select(0, cell), places[cell % len(places)])
        truth = spun(batch.targets[:, 2:]).repeat_interleave(len(NEAR), 0)
        overlap = prob_iou(boxes, truth)
        # Cross-entropy with targets t: softplus(x) - t x, and t, the overlap, is 0 but at the assigned cells.
        scores = raw[..., BOX_OUTPUTS:]
        positive = scores.reshape(-1).index_select(0, cell * scores.shape[2] + label)
        cls = softplus(scores).sum() - torch.where(used, positive * overlap.detach(), 0).sum()
        box, angle = (torch.where(used, term, 0).sum() for term in (1 - overlap, turn(boxes, truth)))
        sums = torch.stack((box, cls, angle))[:, None]
        counts = used.sum().to(sums).expand(3, 1)
        return LossTerms(sums, counts, device_constant(tuple((gain,) for gain in self.gains), sums.device))

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the sum of the terms, which are means over the cells of a step."""
        return means.sum()

    def weight(self, batch: Batch) -> float:
        """Return 1: all batches of a validation count equally."""
        return 1.0


@torch.no_grad()
def assign(targets: Tensor, images: int, sizes: Sequence[tuple[int, int]], strides: Tensor) -> Assigned:
    """Assign targets to the cells around their centres, on the level whose typical box is nearest to their size.

    Of the 3 x 3 cells, a target takes that of its centre and those whose centres it covers. A cell that several targets
    would take is the smallest one's. No shape depends on values.

    targets: (m, 7), image, class, box. images: of the batch. sizes: height and width of the levels, in cells. strides:
    (levels,), pixels per cell.
    """
    box, device = targets[:, 2:], targets.device
    side = (box[:, 2] * box[:, 3]).clamp(min=1).sqrt()
    level = (side[:, None] / (strides * TYPICAL_STRIDES)).log().abs().argmin(1)
    table = device_constant(tuple(sizes), device).long()
    (height, width), first = table[level].T, (table.prod(1).cumsum(0) - table.prod(1))[level]
    stride, shift = strides[level][:, None, None], device_constant(NEAR, device)
    column_row = (box[:, None, :2] / stride).floor() + shift  # (m, 9, 2)
    column, row = column_row.long().unbind(2)
    away = turned((column_row + 0.5) * stride - box[:, None, :2], -box[:, None, 4])  # in the box's own directions
    covered = (away.abs() <= box[:, None, 2:4] / 2).all(2) | (shift == 0).all(1)
    used = covered & (row >= 0) & (column >= 0) & (row < height[:, None]) & (column < width[:, None])
    per_image = sum(rows * columns for rows, columns in sizes)
    cell = targets[:, :1].long() * per_image + first[:, None] + row * width[:, None] + column
    rank = side.argsort(stable=True).argsort()[:, None].expand_as(cell)  # 0: the smallest
    place = torch.where(used, cell, images * per_image).flatten()  # one more for places that are not used
    winner = rank.new_full((images * per_image + 1,), len(targets)).scatter_reduce_(0, place, rank.flatten(), "amin")
    used = used & (winner[place].view_as(rank) == rank)
    return Assigned(torch.where(used, cell, 0), used)
