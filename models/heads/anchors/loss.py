"""The detection loss, as sums and counts, so that means can be taken over the global batch.

Made by `Detect.criterion`; called by the training loop and the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.heads.anchors.target_assignment import (
    NEIGHBOURS,
    Cells,
    Level,
    map_sizes,
    match,
    near_cells,
    read_level,
)
from models.heads.boxes import complete_iou
from models.tasks.contract import Criterion, Function, LossTerms
from models.tasks.shared.losses import PaddedCriterion, at_least_float32, device_constant
from utils.batch import Batch
from utils.config.hyperparameters import AnchorKeys
from utils.config.values import select

if TYPE_CHECKING:
    from models.heads.anchors.head import Detect

LOSS_NAMES = ("box_loss", "obj_loss", "cls_loss")  # names of the terms, in the order of `LossTerms`
# Weight of each level's objectness, finest level first, as in YOLOv5: for 3 levels, and for any other number.
LEVEL_WEIGHTS = {3: (4.0, 1.0, 0.4)}
LEVEL_WEIGHTS_DEEP = (4.0, 1.0, 0.25, 0.06, 0.02)
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
        """Return the settings scaled to a model; a hyperparameter file's are for 3 levels, 80 classes and 640 px."""
        share = 3 / levels
        obj, cls = self.obj * share * (imgsz / 640) ** 2, self.cls * share * classes / 80
        return replace(self, box=self.box * share, obj=obj, cls=cls)


def loss_settings(hyp: AnchorKeys, label_smoothing: float) -> LossSettings:
    """Return the settings in a hyperparameter file, not scaled to a model."""
    return select(LossSettings, hyp, label_smoothing=label_smoothing)


class MatchedOutputs(NamedTuple):
    """A head's outputs, and which of them are matched to targets; there are k cells near the targets, see `Cells`."""

    levels: list[Level]
    cells: Cells
    anchors: Tensor  # (levels, anchors, 2), in cells
    matched: Tensor  # bool (levels, k, anchors)
    rows: Tensor  # at least float32 (levels, k, anchors, outputs): the logits of all levels' `rows`


class DetectionCriterion(Criterion):
    """Box (CIoU), objectness and class terms over the cells that targets are matched to.

    Formulas, gains and level weights are YOLOv5's.

    Args:
        settings: gains and shape of the loss, scaled to the model
        head: the model's head, whose anchors are read at each call because the model is moved to its device later
        class_weights: weight of an object in the box and class terms, by class number: an object of weight 2 counts as
            two equal objects; empty if all objects count the same
    """

    def __init__(self, settings: LossSettings, head: Detect, class_weights: Sequence[float] = ()) -> None:
        self.settings, self.classes, self._head = settings, head.nc, head
        self.class_weights = tuple(class_weights)
        self.least_count = min(1.0, *self.class_weights) if class_weights else 1.0
        self._strides = head.stride.tolist()

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the cells near the targets, int64 (levels, 3, k): box and class are computed only there."""
        height, width = batch.images.shape[2:]
        sizes = tuple((round(height / stride), round(width / stride)) for stride in self._strides)
        return (near_cells(sizes, batch.targets).indices,)

    def __call__(self, outputs: Sequence[Tensor | Level], batch: Batch) -> LossTerms:
        """Return the loss terms, whose parts are the levels.

        Args:
            outputs: for each level a raw map (b, anchors, h, w, 5 + classes), or the `Level` at the cells of `hints`
        """
        return self.terms(self.match_outputs(outputs, batch.targets), batch.targets)

    def match_outputs(self, outputs: Sequence[Tensor | Level], targets: Tensor) -> MatchedOutputs:
        """Match the outputs of `__call__` to targets."""
        anchors = self._head.anchors.to(targets.device)
        cells = near_cells(map_sizes(outputs), targets)
        matched = match(cells, anchors, self.settings.anchor_t)
        levels = [
            output if isinstance(output, Level) else read_level(output, index)
            for output, index in zip(outputs, cells.indices, strict=True)
        ]
        rows = at_least_float32(torch.stack([level.rows for level in levels]))
        return MatchedOutputs(levels, cells, anchors, matched, rows)

    def terms(self, outputs: MatchedOutputs, targets: Tensor) -> LossTerms:
        """Return the terms box, objectness and class."""
        settings, (levels, cells, anchors, matched, rows) = self.settings, outputs
        centre = rows[..., :2].sigmoid() * 2 - 0.5
        size = (rows[..., 2:4].sigmoid() * 2) ** 2 * anchors[:, None]
        iou = complete_iou(torch.cat((centre, size), 3), cells.box[:, :, None])
        match_weights = self._match_weights(targets, rows)
        box = _match_sums(1 - iou, matched, match_weights)
        overlaps = iou.detach().clamp(min=0).to(rows.dtype)
        obj = [
            self._objectness(at_least_float32(level.objectness), *matches)
            for level, *matches in zip(levels, cells.indices, matched, overlaps, strict=True)
        ]
        cls = self._class_sums(rows[..., 5 : 5 + self.classes], targets[:, 1].long(), matched, match_weights)
        sums = torch.stack((box, torch.stack(obj), cls))
        match_counts = _match_sums(matched, matched, match_weights).to(sums)
        cell_counts = device_constant(tuple(level.objectness.numel() for level in levels), sums.device).to(sums)
        counts = torch.stack((match_counts, cell_counts, match_counts * self.classes))
        level_weights = LEVEL_WEIGHTS.get(len(levels), LEVEL_WEIGHTS_DEEP[: len(levels)])
        equal = (1.0,) * len(levels)
        gains = ((settings.box, equal), (settings.obj, level_weights), (settings.cls, equal))
        weights = device_constant(tuple(tuple(gain * share for share in shares) for gain, shares in gains), sums.device)
        return LossTerms(sums, counts, weights.to(sums), self.least_count)

    def for_gpu(self, recorded: Callable[[Function], Function]) -> Criterion:
        """Return the criterion with padded targets; a subclass may read what a recording does not repeat."""
        return PaddedCriterion(self, recorded) if type(self) is DetectionCriterion else self

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return YOLOv5's objective: the sum of the terms, times the images of a step."""
        return means.sum() * images

    def weight(self, batch: Batch) -> float:
        """Return 1: YOLOv5 weights all batches of a validation equally."""
        return 1.0

    def _objectness(self, logits: Tensor, index: Tensor, matched: Tensor, overlaps: Tensor) -> Tensor:
        """Return the objectness sum of logits (b, anchors, h, w); a cell's target is its overlap, or 0 if unmatched."""
        target = _overlap_map(logits.shape, index, matched, overlaps)
        return self._cross_entropy(logits, target, self.settings.obj_pw).sum()

    def _match_weights(self, targets: Tensor, like: Tensor) -> Tensor | None:
        """Return the weight of each cell's target, (k, 1) with the dtype of `like`; None if all are 1."""
        if not self.class_weights:
            return None
        weights = device_constant(self.class_weights, like.device).to(like)[targets[:, 1].long()]
        return weights.repeat(len(NEIGHBOURS))[:, None]

    def _class_sums(self, logits: Tensor, labels: Tensor, matched: Tensor, weights: Tensor | None) -> Tensor:
        """Return the class sums (levels,) over the matched logits.

        Args:
            logits: class logits (levels, k, anchors, classes)
            labels: class numbers (n,) of the targets
            matched: mask (levels, k, anchors) of the matched logits
            weights: result of `_match_weights`
        """
        if self.classes == 1:
            return logits.new_zeros(len(logits))  # a single class is always the right one
        smoothing = self.settings.label_smoothing / 2
        target = logits.new_full((len(labels), self.classes), smoothing).scatter_(1, labels[:, None], 1 - smoothing)
        target = target.repeat(len(NEIGHBOURS), 1)[:, None].expand_as(logits)
        return _match_sums(self._cross_entropy(logits, target, self.settings.cls_pw).sum(3), matched, weights)

    def _cross_entropy(self, logits: Tensor, target: Tensor, positive_weight: float) -> Tensor:
        """Return the binary cross-entropy of each logit, or the focal loss if fl_gamma is set (Lin et al. 2017)."""
        gamma = self.settings.fl_gamma
        weight = None if positive_weight == 1 else logits.new_full((), positive_weight)
        loss = functional.binary_cross_entropy_with_logits(logits, target, pos_weight=weight, reduction="none")
        if not gamma:
            return loss
        probability = logits.sigmoid()
        error = target * (1 - probability) + (1 - target) * probability
        return loss * (target * FOCAL_ALPHA + (1 - target) * (1 - FOCAL_ALPHA)) * error**gamma


def _match_sums(values: Tensor, matched: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums (levels,) of the `matched` values (levels, k, anchors).

    Args:
        weights: weights (k, 1) of the values; None if all are 1
    """
    values = torch.where(matched, values, 0)
    return (values if weights is None else values * weights).sum((1, 2))


def _overlap_map(shape: torch.Size, index: Tensor, matched: Tensor, overlaps: Tensor) -> Tensor:
    """Return the objectness target, `shape` (b, anchors, h, w): the overlap of each matched cell.

    If several targets share a cell, the last one counts. YOLOv5 leaves the order undefined; here it is (neighbour,
    anchor, target) on every device and, because an image's targets are ordered like its labels, on any number of
    processes.

    Args:
        index: image, row and column of the cells, (3, k)
        matched: mask (k, anchors) of the matched pairs of cell and anchor
        overlaps: overlaps (k, anchors) of predictions and targets
    """
    _, anchors, rows, columns = shape
    image, row, column = (part.view(len(NEIGHBOURS), 1, -1) for part in index)
    anchor = torch.arange(anchors, device=index.device)[:, None]
    unmatched = shape.numel()  # an extra element for unmatched cells
    flat = ((image * anchors + anchor) * rows + row) * columns + column  # (neighbours, anchors, n)
    flat = torch.where(_by_anchor(matched), flat, unmatched).flatten()
    order = torch.arange(len(flat), device=flat.device)
    last = order.new_zeros(unmatched + 1).scatter_reduce_(0, flat, order, "amax")[flat]
    target = overlaps.new_zeros(unmatched + 1)
    target.scatter_(0, flat, _by_anchor(overlaps).flatten()[last])  # all values for one element are equal
    return target[:unmatched].view(shape)


def _by_anchor(values: Tensor) -> Tensor:
    """Rearrange (k, anchors) as (neighbours, anchors, n)."""
    return values.view(len(NEIGHBOURS), -1, values.shape[1]).transpose(1, 2)
