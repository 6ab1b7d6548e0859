"""The detection loss, as sums and counts, so that its means can be taken over the batch of the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from utils.boxes import complete_iou

# Weight of each level's objectness, finest level first (YOLOv5's for 3 levels and for more).
BALANCE = {3: (4.0, 1.0, 0.4)}
BALANCE_DEEP = (4.0, 1.0, 0.25, 0.06, 0.02)
FOCAL_ALPHA = 0.25
# Cells that a target is given to beside its own: left, up, right, down, as (x, y).
NEIGHBOURS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1))
NEAR = 0.5  # how close, in cells, a target's centre must be to a neighbour


@dataclass(frozen=True)
class LossSettings:
    """Gains and shape of the loss, named as in the hyperparameter file."""

    box: float = 0.05
    obj: float = 1.0
    cls: float = 0.5
    obj_pw: float = 1.0
    cls_pw: float = 1.0
    anchor_t: float = 4.0
    fl_gamma: float = 0.0
    label_smoothing: float = 0.0

    def scaled(self, levels: int, classes: int, imgsz: int) -> LossSettings:
        """The gains for a model of so many levels and classes at this image size; the file's are for 3, 80 and 640."""
        share = 3 / levels
        return LossSettings(
            **{
                **vars(self),
                "box": self.box * share,
                "obj": self.obj * share * (imgsz / 640) ** 2,
                "cls": self.cls * share * classes / 80,
            }
        )


@dataclass(frozen=True)
class LossTerms:
    """A loss before its means are taken: every term is a weighted sum of parts, every part a sum over a count.

    sums: (terms, parts), differentiable; counts: (terms, parts), what each sum is a mean over; weights: (terms, parts).
    """

    sums: Tensor
    counts: Tensor
    weights: Tensor

    def means(self, counts: Tensor) -> Tensor:
        """This process's share of each term, (terms,), where `counts` are those of all processes: shares add up."""
        return (self.weights * self.sums / counts.clamp(min=1)).sum(1)


class Match(NamedTuple):
    """The cells of one level that a target was given to, one row each (m of them)."""

    cell: tuple[Tensor, Tensor, Tensor, Tensor]  # image, anchor, row, column
    box: Tensor  # (m, 4): the target's centre relative to the cell's corner, and its size, in cells
    anchor: Tensor  # (m, 2): the anchor's size in cells
    label: Tensor  # (m,): class


class DetectionLoss:
    """Box (CIoU), objectness and class terms over the cells that targets are matched to.

    The formulas are YOLOv5's; its gains and balance too.
    """

    def __init__(self, settings: LossSettings, classes: int) -> None:
        self.settings, self.classes = settings, classes

    def __call__(self, outputs: list[Tensor], targets: Tensor, anchors: Tensor) -> LossTerms:
        """outputs: raw maps (b, anchors, h, w, 5 + classes) by level; targets: (n, 6), image, class, normalised xywh;
        anchors: (levels, anchors, 2) in cells. The terms' parts are the levels."""
        parts = [
            self._level(
                raw.to(torch.promote_types(raw.dtype, torch.float32)),
                match_targets(raw.shape, targets, level_anchors, self.settings.anchor_t),
            )
            for raw, level_anchors in zip(outputs, anchors, strict=True)
        ]
        sums = torch.stack([torch.stack(sums) for sums, _ in parts], 1)
        counts = torch.tensor([counts for _, counts in parts], dtype=sums.dtype, device=sums.device).T
        balance = torch.tensor(BALANCE.get(len(parts), BALANCE_DEEP[: len(parts)]), dtype=sums.dtype)
        flat = torch.ones_like(balance)
        settings = self.settings
        weights = torch.stack([settings.box * flat, settings.obj * balance, settings.cls * flat])
        return LossTerms(sums, counts, weights.to(sums.device))

    def _level(self, raw: Tensor, match: Match) -> tuple[list[Tensor], list[int]]:
        """Sums and counts of the box, objectness and class term on one level."""
        predicted = raw[match.cell]
        centre = predicted[:, :2].sigmoid() * 2 - 0.5
        size = (predicted[:, 2:4].sigmoid() * 2) ** 2 * match.anchor
        iou = complete_iou(torch.cat((centre, size), 1), match.box)
        objectness = _overlap_map(raw.shape[:4], match.cell, iou.detach().clamp(min=0))
        obj = self._cross_entropy(raw[..., 4], objectness, self.settings.obj_pw)
        cls = self._class_sum(predicted[:, 5:], match.label)
        matched = len(match.label)
        return [(1 - iou).sum(), obj, cls], [matched, objectness.numel(), matched * self.classes]

    def _class_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.classes == 1:
            return logits.sum() * 0  # one class needs no telling apart
        smoothing = self.settings.label_smoothing / 2
        wanted = torch.full_like(logits, smoothing)
        wanted[torch.arange(len(labels), device=labels.device), labels] = 1 - smoothing
        return self._cross_entropy(logits, wanted, self.settings.cls_pw)

    def _cross_entropy(self, logits: Tensor, wanted: Tensor, positive_weight: float) -> Tensor:
        """Summed binary cross-entropy, as focal loss where fl_gamma is set (Lin et al. 2017)."""
        gamma = self.settings.fl_gamma
        weight = None if positive_weight == 1 else logits.new_tensor(positive_weight)
        if not gamma:
            return functional.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="sum")
        loss = functional.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
        probability = logits.sigmoid()
        missing = wanted * (1 - probability) + (1 - wanted) * probability
        return (loss * (wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)) * missing**gamma).sum()


def _overlap_map(shape: torch.Size, cell: tuple[Tensor, ...], iou: Tensor) -> Tensor:
    """The objectness target, `shape`: each matched cell's overlap. Where several targets share a cell, the last counts.

    YOLOv5 leaves that to whichever is written last; here it is the last in order on every device, and because the order
    within an image is that of its labels, on any number of processes.
    """
    _, anchors, rows, columns = shape
    image, anchor, row, column = cell
    flat = ((image * anchors + anchor) * rows + row) * columns + column
    order = torch.arange(len(flat), device=flat.device)
    last = order.new_zeros(shape.numel()).scatter_reduce_(0, flat, order, "amax")[flat]
    target = iou.new_zeros(shape.numel())
    target[flat] = iou[last]
    return target.view(shape)


def match_targets(shape: torch.Size, targets: Tensor, anchors: Tensor, threshold: float) -> Match:
    """Which cells of a level, raw map of `shape` (b, anchors, h, w, outputs), answer for which targets (n, 6).

    A target fits each of the `anchors` (a, 2), in cells, whose width and height are within a factor `threshold` of its
    own. It is given to the cell that holds its centre, and to the neighbours whose edge is nearer than half a cell.
    """
    height, width = shape[2:4]
    grid = targets.new_tensor([width, height])
    centres, sizes = targets[:, 2:4] * grid, targets[:, 4:6] * grid
    ratio = sizes[None] / anchors[:, None]
    fits = torch.maximum(ratio, 1 / ratio).amax(2) < threshold  # (anchors, n)
    near = _near_cells(centres, grid)  # (5, n)
    side, anchor, target = (fits[None] & near[:, None]).nonzero(as_tuple=True)
    corner = (centres[target] - NEAR * targets.new_tensor(NEIGHBOURS)[side]).floor()
    corner = corner.clamp(min=targets.new_zeros(2), max=grid - 1)  # a centre on the far edge belongs to the last cell
    column, row = corner.long().unbind(1)
    image, label = targets[target, :2].long().unbind(1)
    box = torch.cat((centres[target] - corner, sizes[target]), 1)
    return Match((image, anchor, row, column), box, anchors[anchor], label)


def _near_cells(centres: Tensor, grid: Tensor) -> Tensor:
    """For own cell, left, up, right and down, (5, n): is it on the map and nearer than half a cell?"""
    back = grid - centres
    low = (centres % 1 < NEAR) & (centres > 1)
    high = (back % 1 < NEAR) & (back > 1)
    own = torch.ones(1, len(centres), dtype=torch.bool, device=centres.device)
    return torch.cat((own, low.T, high.T))
