"""YOLOv9's detection loss, as sums and counts, so that means can be taken over the global batch.

Made by `DetectDFL.criterion`; called by the training loop and the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.heads.boxes import complete_iou
from models.heads.dfl.assignment import MAX_DISTANCE, Assignment, assign
from models.heads.dfl.views import BINS, SIDES, by_cell, cell_geometry, decode_xywh, distances
from models.tasks.contract import Criterion, Function, LossTerms
from models.tasks.shared.losses import PaddedCriterion, at_least_float32, device_constant
from utils.batch import Batch
from utils.config.hyperparameters import AlignmentKeys

if TYPE_CHECKING:
    from models.heads.dfl.head import DetectDFL, DFLLevel

LOSS_NAMES = ("box_loss", "cls_loss", "dfl_loss")  # names of the terms, in the order of `LossTerms`


class Cells(NamedTuple):
    """The outputs of a head for all n cells of its levels, at least float32."""

    sides: Tensor  # (b, n, 4 x 16): logits of distances
    scores: Tensor  # (b, n, classes): logits
    geometry: Tensor  # (n, 4), see `cell_geometry`


class DFLCriterion(Criterion):
    """Box (CIoU), class and distribution focal terms over the cells that targets are assigned to.

    Every term of a head is divided by the sum of its class targets over the global batch, at least 1; the auxiliary
    head's terms are weighted by `settings.tal_aux`.

    Args:
        settings: gains of the terms, and the weight of the auxiliary head
        head: the model's head, whose strides are read at each call because the model is moved to its device later
        class_weights: weight of an object, by class number: a cell that is assigned to an object of weight 2 counts
            twice in every term; empty if all objects count the same
    """

    def __init__(self, settings: AlignmentKeys, head: DetectDFL, class_weights: Sequence[float] = ()) -> None:
        self.settings, self._head, self.class_weights = settings, head, tuple(class_weights)

    def __call__(self, outputs: Sequence[DFLLevel] | tuple[Sequence[DFLLevel], ...], batch: Batch) -> LossTerms:
        """Return the loss terms, whose parts are the heads.

        Args:
            outputs: levels of the head; in training with an auxiliary branch a pair, the main head's levels and the
                auxiliary head's
        """
        heads = outputs if isinstance(outputs, tuple) else (outputs,)
        parts = [self.head_sums(levels, batch) for levels in heads]
        sums, counts = (torch.stack(each, 1) for each in zip(*parts, strict=True))
        gains = (self.settings.tal_box, self.settings.tal_cls, self.settings.tal_dfl)
        shares = (1.0, self.settings.tal_aux)[: len(heads)]
        weights = device_constant(tuple(tuple(gain * share for share in shares) for gain in gains), sums.device)
        return LossTerms(sums, counts, weights.to(sums))

    def head_sums(self, levels: Sequence[DFLLevel], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the box, class and distribution sums, (3,), and their counts, (3,): the sum of the class targets."""
        cells = self._cells(levels)
        height, width = batch.images.shape[2:]
        corners = _corners(batch.targets, width, height)
        with torch.no_grad():
            boxes = decode_xywh(cells.sides, cells.geometry)
            assigned = assign(boxes, cells.scores, cells.geometry, batch.targets, corners)
        label = batch.targets[:, 1:2].long().expand_as(assigned.cell).flatten()
        used = assigned.weight.flatten() > 0
        if self.class_weights:
            repeats = device_constant(self.class_weights, label.device).to(assigned.weight)[label]
            assigned = Assignment(assigned.cell, assigned.weight * repeats.view_as(assigned.weight))
        box, dfl = _box_sums(cells, corners, assigned)
        weights = assigned.weight.flatten()
        classes = cells.scores.shape[2]
        positive = cells.scores.reshape(-1).index_select(0, assigned.cell.flatten() * classes + label)
        # Cross-entropy with soft targets t is softplus(x) - t x, and t is 0 except at the assigned cells.
        cls = functional.softplus(cells.scores).sum() - (positive * weights).sum()
        if self.class_weights:  # softplus(x) of an assigned cell counts as often as the cell
            rows = functional.softplus(cells.scores.reshape(-1, classes).index_select(0, assigned.cell.flatten()))
            cls = cls + torch.where(used, (repeats - 1) * rows.sum(1), 0).sum()
        return torch.stack((box, cls, dfl)), weights.sum().expand(3)

    def for_gpu(self, recorded: Callable[[Function], Function]) -> Criterion:
        """Return the criterion with padded targets; a subclass may read what a recording does not repeat."""
        return PaddedCriterion(self, recorded) if type(self) is DFLCriterion else self

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the sum of the terms, times the images of a step."""
        return means.sum() * images

    def weight(self, batch: Batch) -> float:
        """Return 1: all batches of a validation count equally."""
        return 1.0

    def _cells(self, levels: Sequence[DFLLevel]) -> Cells:
        strides = self._head.stride.to(levels[0].sides.device)
        sides = torch.cat([by_cell(level.sides) for level in levels], 1)
        scores = torch.cat([by_cell(level.scores) for level in levels], 1)
        geometry = [cell_geometry(level.sides, stride) for level, stride in zip(levels, strides, strict=True)]
        return Cells(at_least_float32(sides), at_least_float32(scores), torch.cat(geometry))


def _corners(targets: Tensor, width: int, height: int) -> Tensor:
    """Return the corners (m, 4) in pixels of targets (m, 6)."""
    x, y, w, h = targets[:, 2:].unbind(1)
    half_w, half_h = w / 2, h / 2
    return torch.stack(((x - half_w) * width, (y - half_h) * height, (x + half_w) * width, (y + half_h) * height), 1)


def _box_sums(cells: Cells, corners: Tensor, assigned: Assignment) -> tuple[Tensor, Tensor]:
    """Return the sums of the box and distribution terms over the assigned pairs of target and cell."""
    weights = assigned.weight.flatten()
    cell = assigned.cell.flatten()
    sides = cells.sides.reshape(-1, cells.sides.shape[2]).index_select(0, cell)
    x, y, pixels, _ = cells.geometry[cell % len(cells.geometry)].unbind(1)
    centre, pixels = torch.stack((x, y), 1), pixels[:, None]
    target = corners.repeat_interleave(assigned.cell.shape[1], 0)
    low, high = (centre - target[:, :2]) / pixels, (target[:, 2:] - centre) / pixels  # in strides
    iou = complete_iou(_relative_box(*distances(sides).split(2, 1)), _relative_box(low, high))
    distance = torch.cat((low, high), 1).clamp(0, MAX_DISTANCE)
    is_assigned = weights > 0
    box = (torch.where(is_assigned, 1 - iou, 0) * weights).sum()
    dfl = (torch.where(is_assigned, _focal(sides, distance), 0) * weights).sum()
    return box, dfl


def _relative_box(low: Tensor, high: Tensor) -> Tensor:
    """Return xywh boxes (n, 4) relative to a point, from distances (n, 2) to left and top, and to right and bottom."""
    return torch.cat(((high - low) / 2, high + low), 1)


def _focal(sides: Tensor, distance: Tensor) -> Tensor:
    """Return the distribution focal loss (n,), arXiv 2006.04388, equation 6, as a mean over the four sides.

    Args:
        sides: logits (n, 4 x 16) of the distances
        distance: target distances (n, 4) in strides; each is shared by the two bins around it
    """
    logits = sides.view(len(sides), SIDES, BINS).log_softmax(2)
    below = distance.floor()
    at_below, at_above = (logits.gather(2, (below + step).long()[..., None])[..., 0] for step in (0, 1))
    return -(at_below * (below + 1 - distance) + at_above * (distance - below)).mean(1)
