"""The detection loss, as sums and counts, so that its means can be taken over the batch of the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.tasks.detection.matching import NEIGHBOURS, Level, constant, match, near_cells, read, sizes_of
from utils.boxes import complete_iou

# Weight of each level's objectness, finest level first (YOLOv5's for 3 levels and for more).
BALANCE = {3: (4.0, 1.0, 0.4)}
BALANCE_DEEP = (4.0, 1.0, 0.25, 0.06, 0.02)
FOCAL_ALPHA = 0.25


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


class DetectionLoss:
    """Box (CIoU), objectness and class terms over the cells that targets are matched to.

    The formulas are YOLOv5's; its gains and balance too.
    """

    def __init__(self, settings: LossSettings, classes: int) -> None:
        self.settings, self.classes = settings, classes

    def __call__(self, outputs: Sequence[Tensor | Level], targets: Tensor, anchors: Tensor) -> LossTerms:
        """outputs: by level a raw map (b, anchors, h, w, 5 + classes), or of it what is asked at the cells about the
        targets; targets: (n, 6), image, class, normalised xywh; anchors: (levels, anchors, 2) in cells. The terms'
        parts are the levels."""
        settings = self.settings
        cells = near_cells(sizes_of(outputs), targets)
        matched = match(cells, anchors, settings.anchor_t)
        levels = [
            output if isinstance(output, Level) else read(output, index)
            for output, index in zip(outputs, cells.places, strict=True)
        ]
        rows = _precise(torch.stack([level.rows for level in levels]))  # (levels, k, anchors, 5 + classes)
        centre = rows[..., :2].sigmoid() * 2 - 0.5
        size = (rows[..., 2:4].sigmoid() * 2) ** 2 * anchors[:, None]
        iou = complete_iou(torch.cat((centre, size), 3), cells.box[:, :, None])
        box = torch.where(matched, 1 - iou, 0).sum((1, 2))
        overlaps = iou.detach().clamp(min=0).to(rows.dtype)
        obj = [
            self._objectness(_precise(level.objectness), *found)
            for level, *found in zip(levels, cells.places, matched, overlaps, strict=True)
        ]
        cls = self._class_sums(rows[..., 5:], targets[:, 1].long(), matched)
        sums = torch.stack((box, torch.stack(obj), cls))
        number = matched.sum((1, 2)).to(sums)
        cell_counts = constant(tuple(level.objectness.numel() for level in levels), sums.device)
        balance = BALANCE.get(len(levels), BALANCE_DEEP[: len(levels)])
        flat = (1.0,) * len(levels)
        gains = ((settings.box, flat), (settings.obj, balance), (settings.cls, flat))
        weights = constant(tuple(tuple(gain * share for share in shares) for gain, shares in gains), sums.device)
        return LossTerms(sums, torch.stack((number, cell_counts.to(sums), number * self.classes)), weights.to(sums))

    def _objectness(self, logits: Tensor, index: Tensor, matched: Tensor, overlaps: Tensor) -> Tensor:
        """The objectness sum of one level, (b, anchors, h, w): of every cell its overlap with what it answers for."""
        wanted = _overlap_map(logits.shape, index, matched, overlaps)
        return self._cross_entropy(logits, wanted, self.settings.obj_pw).sum()

    def _class_sums(self, logits: Tensor, labels: Tensor, matched: Tensor) -> Tensor:
        """(levels,): the class sums of logits (levels, k, anchors, classes) where `matched`; labels: (n,)."""
        if self.classes == 1:
            return logits.new_zeros(len(logits))  # one class needs no telling apart
        smoothing = self.settings.label_smoothing / 2
        wanted = logits.new_full((len(labels), self.classes), smoothing).scatter_(1, labels[:, None], 1 - smoothing)
        wanted = wanted.repeat(len(NEIGHBOURS), 1)[:, None].expand_as(logits)
        return torch.where(matched, self._cross_entropy(logits, wanted, self.settings.cls_pw).sum(3), 0).sum((1, 2))

    def _cross_entropy(self, logits: Tensor, wanted: Tensor, positive_weight: float) -> Tensor:
        """Binary cross-entropy of each logit, as focal loss where fl_gamma is set (Lin et al. 2017)."""
        gamma = self.settings.fl_gamma
        weight = None if positive_weight == 1 else logits.new_full((), positive_weight)
        loss = functional.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
        if not gamma:
            return loss
        probability = logits.sigmoid()
        missing = wanted * (1 - probability) + (1 - wanted) * probability
        return loss * (wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)) * missing**gamma


def _precise(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _overlap_map(shape: torch.Size, index: Tensor, matched: Tensor, overlaps: Tensor) -> Tensor:
    """The objectness target, `shape` (b, anchors, h, w): each matched cell's overlap.

    index: (3, k); matched and overlaps: (k, anchors). Where several targets share a cell, the last counts: YOLOv5
    leaves that to whichever is written last; here it is the last in order (neighbour, anchor, target) on every device,
    and because the order within an image is that of its labels, on any number of processes.
    """
    _, anchors, rows, columns = shape
    image, row, column = (part.view(len(NEIGHBOURS), 1, -1) for part in index)
    anchor = torch.arange(anchors, device=index.device)[:, None]
    nowhere = shape.numel()  # a place behind the map, for what is not matched
    flat = ((image * anchors + anchor) * rows + row) * columns + column  # (neighbours, anchors, n)
    flat = torch.where(_by_anchor(matched), flat, nowhere).flatten()
    order = torch.arange(len(flat), device=flat.device)
    last = order.new_zeros(nowhere + 1).scatter_reduce_(0, flat, order, "amax")[flat]
    target = overlaps.new_zeros(nowhere + 1)
    target.scatter_(0, flat, _by_anchor(overlaps).flatten()[last])  # what goes to one place is equal
    return target[:nowhere].view(shape)


def _by_anchor(values: Tensor) -> Tensor:
    """(k, anchors) to (neighbours, anchors, n)."""
    return values.view(len(NEIGHBOURS), -1, values.shape[1]).transpose(1, 2)
