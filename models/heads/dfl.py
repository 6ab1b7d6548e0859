"""`DetectDFL`, the anchor-free head of YOLOv9's detectors: layer, assignment, loss and decoding.

Registered in models/yolo.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads.contract import (
    EPSILON,
    BoxCriterion,
    Candidates,
    DetectionHead,
    HeadView,
    complete_iou,
    image_groups,
    least_logit,
    row_sigmoids,
)
from models.layers import Conv
from models.tasks.contract import Criterion, LossTerms, device_constant, upcast_half
from utils.batch import Batch
from utils.config.hyperparameters import AlignmentKeys, keys_of

SIDES = 4  # left, top, right, bottom
BINS = 16  # bins of a distance's distribution: 0 to 15 strides
MAX_DISTANCE = BINS - 1.01  # largest distance from a cell's centre to a side of its box, in strides: below the last bin
CELLS_PER_TARGET = 10
ALIGNMENT_EPSILON = 1e-9
MAX_PAIRS = 2**21  # pairs of target and cell that are compared at a time, to limit memory
LOW_BITS = 32  # bits of a key that hold a rank; a float32's bits are above them
MAX_SCORE_CHANNELS = 128  # largest number of hidden channels that the number of classes may give a class branch
BIN_STEP = 0.5  # how much the initial logits of the distances decrease from bin to bin
EXPECTED_OBJECTS = 5  # objects per level that an untrained head's class scores predict in an image of 640 px


class DFLLevel(NamedTuple):
    """The raw outputs of one level."""

    sides: Tensor  # (b, 4 x 16, h, w): logits of the distances from a cell's centre to left, top, right and bottom
    scores: Tensor  # (b, classes, h, w): logits


class Cells(NamedTuple):
    """The outputs of a head for all n cells of its levels."""

    sides: Tensor  # (b, n, 4 x 16): logits of distances
    scores: Tensor  # (b, n, classes): logits
    geometry: Tensor  # (n, 4), see `cell_geometry`


class Assignment(NamedTuple):
    """The cells that m targets are assigned to, k each."""

    cell: Tensor  # int64 (m, k): image x n + cell; 0 if the slot is not used
    weight: Tensor  # (m, k): the class target of the cell, above 0; 0 if the slot is not used


# Decoding


def join_cells(
    levels: Sequence[DFLLevel], strides: Tensor, scale: tuple[float, float] = (1.0, 1.0), skipped: int | None = None
) -> Cells:
    """Return the outputs of all cells, level by level, row by row, without those of the level `skipped`.

    `strides` (levels,) are pixels per cell; `scale` is as in `HeadView`.
    """
    rows = [
        (level.sides.flatten(2).transpose(1, 2), level.scores.flatten(2).transpose(1, 2), cells)
        for number, level in enumerate(levels)
        for cells in [cell_geometry(level.sides, strides[number], scale)]
        if number != skipped
    ]
    sides, scores, geometry = zip(*rows, strict=True)
    return Cells(torch.cat(sides, 1), torch.cat(scores, 1), torch.cat(geometry))


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
    """Return boxes (..., n, 4), xywh in pixels, from logits (..., n, 4 x 16) of distances and the geometry (n, 4) of
    cells. `mirrored_width` is as in `HeadView`."""
    low, high = distances(sides).split(2, -1)
    centre = cells[:, :2] + (high - low) / 2 * cells[:, 2:]
    size = (low + high) * cells[:, 2:]
    if mirrored_width:
        x, y = centre.split(1, -1)
        centre = torch.cat((mirrored_width - x, y), -1)
    return torch.cat((centre, size), -1)


# Assignment of targets to cells


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
        targets: image, class and normalised xywh (m, 6)
        corners: xyxy (m, 4) of the targets, in pixels
    """
    count = cells.shape[0]
    at_a_time = max(MAX_PAIRS // count, 1)
    low, size = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., 2:]
    predicted = (*low.unbind(2), *(low + size).unbind(2), size.prod(2), _diagonal_angle(*size.unbind(2)))
    parts = [
        _best_cells(predicted, scores, cells, *chunk)
        for chunk in zip(targets.split(at_a_time), corners.split(at_a_time), strict=True)
    ]
    best_cell, alignment, overlap = (torch.cat(chunks) for chunks in zip(*parts, strict=True))
    used, cell = alignment > 0, targets[:, :1].long() * count + best_cell
    # The first target has the highest rank, so that it wins among equal overlaps.
    rank = torch.arange(len(targets) - 1, -1, -1, device=cell.device)[:, None]
    key = _keys(overlap, rank)
    sentinel = len(boxes) * count  # the cell of slots that are not used
    index = torch.where(used, cell, sentinel).flatten()
    winner = key.new_full((sentinel + 1,), -1).scatter_reduce_(0, index, key.flatten(), "amax")
    used = used & (winner[index].view_as(key) == key)
    alignment, overlap = torch.where(used, alignment, 0), torch.where(used, overlap, 0)
    most = alignment.amax(1, keepdim=True) + ALIGNMENT_EPSILON
    return Assignment(torch.where(used, cell, 0), alignment / most * overlap.amax(1, keepdim=True))


def _best_cells(
    predicted: tuple[Tensor, ...], scores: Tensor, cells: Tensor, targets: Tensor, box: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best aligned cells of each of m targets, regardless of the other targets, (m, k) each.

    The number of the cell in its image, int64; the alignment, 0 if the slot is not used; and the CIoU, at least 0.
    `predicted` is as in `_overlaps`, (b, n) each; `box` has the corners (m, 4) of the targets, xyxy in pixels.
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
    cell = (count - 1 - (best & (2**LOW_BITS - 1))).clamp(0, count - 1)
    return cell, _number(best), overlap.gather(1, cell)


def _keys(numbers: Tensor, rank: Tensor) -> Tensor:
    """Return int64 keys that are ordered like `numbers`, float32 of at least 0, and among equal numbers by rank."""
    return (numbers.float().view(torch.int32).long() << LOW_BITS) + rank


def _number(keys: Tensor) -> Tensor:
    """Return the float32 numbers in keys."""
    return (keys >> LOW_BITS).int().view(torch.float32)


def _diagonal_angle(width: Tensor, height: Tensor) -> Tensor:
    """Return the angle of a box's diagonal, by which CIoU compares shapes."""
    return torch.atan(width / (height + EPSILON))


def _overlaps(target: tuple[Tensor, ...], predicted: list[Tensor]) -> Tensor:
    """Return the CIoU of targets and predictions, at least 0: (m, n). See `complete_iou`.

    From left, top, right and bottom of the targets, (m, 1) each; of the predictions, (m, n) each, also area and
    `_diagonal_angle`.
    """
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2, area, angle) = target, predicted
    width, height = ax2 - ax1, ay2 - ay1
    shared = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp_(min=0)
    shared *= (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp_(min=0)
    iou = shared / (width * height + area - shared + EPSILON)
    hull = (torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)).square_()
    hull += (torch.maximum(ay2, by2) - torch.minimum(ay1, by1)).square_()
    distance = (bx1 + bx2 - (ax1 + ax2)).square_() + (by1 + by2 - (ay1 + ay2)).square_()
    shape = (_diagonal_angle(width, height) - angle).square_() * (4 / math.pi**2)
    return (iou - distance / 4 / (hull + EPSILON) - shape * shape / (shape - iou + 1 + EPSILON)).clamp_(0, 1)


# The loss


class DFLCriterion(BoxCriterion):
    """Box (CIoU), class and distribution focal terms over the cells that targets are assigned to.

    Every term of a head is divided by the sum of its class targets over the global batch, at least 1; the auxiliary
    head's terms are weighted by `settings.tal_aux`. The head's strides are read at each call, as the model is moved to
    its device later. With `class_weights`, by class number, a cell of an object of weight 2 counts twice.
    """

    def __init__(self, settings: AlignmentKeys, head: DetectDFL, class_weights: Sequence[float] = ()) -> None:
        self.settings, self._head, self.class_weights = settings, head, tuple(class_weights)

    def __call__(self, outputs: Sequence[DFLLevel] | tuple[Sequence[DFLLevel], ...], batch: Batch) -> LossTerms:
        """Return the loss terms, whose parts are the heads: two in training with an auxiliary branch, when `outputs` is
        the pair of their levels."""
        heads = outputs if isinstance(outputs, tuple) else (outputs,)
        parts = [self.head_sums(levels, batch) for levels in heads]
        sums, counts = (torch.stack(values, 1) for values in zip(*parts, strict=True))
        gains = (self.settings.tal_box, self.settings.tal_cls, self.settings.tal_dfl)  # as `DetectDFL.loss_names`
        shares = (1.0, self.settings.tal_aux)[: len(heads)]
        weights = device_constant(tuple(tuple(gain * share for share in shares) for gain in gains), sums.device)
        return LossTerms(sums, counts, weights.to(sums))

    def head_sums(self, levels: Sequence[DFLLevel], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the box, class and distribution sums, (3,), and their counts, (3,): the sum of the class targets."""
        sides, scores, geometry = join_cells(levels, self._head.stride.to(levels[0].sides.device))
        cells = Cells(upcast_half(sides), upcast_half(scores), geometry)
        height, width = batch.images.shape[2:]
        x, y, w, h = batch.targets[:, 2:].unbind(1)
        low, high = ((x - w / 2) * width, (y - h / 2) * height), ((x + w / 2) * width, (y + h / 2) * height)
        corners = torch.stack((*low, *high), 1)
        with torch.no_grad():
            boxes = decode_xywh(cells.sides, cells.geometry)
            assigned = assign(boxes, cells.scores, cells.geometry, batch.targets, corners)
        label = batch.targets[:, 1:2].long().expand_as(assigned.cell).flatten()
        used = assigned.weight.flatten() > 0
        if self.class_weights:
            repeats = device_constant(self.class_weights, label.device).to(assigned.weight)[label]
            assigned = assigned._replace(weight=assigned.weight * repeats.view_as(assigned.weight))
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


def _box_sums(cells: Cells, corners: Tensor, assigned: Assignment) -> tuple[Tensor, Tensor]:
    """Return the sums of the box and distribution terms over the assigned pairs of target and cell."""
    weights, cell = assigned.weight.flatten(), assigned.cell.flatten()
    sides = cells.sides.reshape(-1, cells.sides.shape[2]).index_select(0, cell)
    x, y, pixels, _ = cells.geometry[cell % len(cells.geometry)].unbind(1)
    centre, pixels = torch.stack((x, y), 1), pixels[:, None]
    target = corners.repeat_interleave(assigned.cell.shape[1], 0)
    low, high = (centre - target[:, :2]) / pixels, (target[:, 2:] - centre) / pixels  # in strides
    predicted_low, predicted_high = distances(sides).split(2, 1)
    iou = complete_iou(  # xywh relative to the cell's centre
        torch.cat(((predicted_high - predicted_low) / 2, predicted_high + predicted_low), 1),
        torch.cat(((high - low) / 2, high + low), 1),
    )
    distance = torch.cat((low, high), 1).clamp(0, MAX_DISTANCE)
    is_assigned = weights > 0
    box = (torch.where(is_assigned, 1 - iou, 0) * weights).sum()
    dfl = (torch.where(is_assigned, _focal(sides, distance), 0) * weights).sum()
    return box, dfl


def _focal(sides: Tensor, distance: Tensor) -> Tensor:
    """Return the distribution focal loss (n,), arXiv 2006.04388, equation 6, as a mean over the four sides.

    A target distance, (n, 4) in strides, is shared by the two bins around it.
    """
    logits = sides.view(len(sides), SIDES, BINS).log_softmax(2)
    below = distance.floor()
    at_below, at_above = (logits.gather(2, (below + step).long()[..., None])[..., 0] for step in (0, 1))
    return -(at_below * (below + 1 - distance) + at_above * (distance - below)).mean(1)


# The layers


class DFLBranches(nn.Module):
    """The convolutions of one level: (b, c1, h, w) to a `DFLLevel`, with `box` and `score` hidden channels."""

    def __init__(self, c1: int, box: int, score: int, nc: int) -> None:
        super().__init__()
        self.anchor_conv = nn.Sequential(
            Conv(c1, box, 3), Conv(box, box, 3, groups=SIDES), nn.Conv2d(box, SIDES * BINS, 1, groups=SIDES)
        )
        self.class_conv = nn.Sequential(Conv(c1, score, 3), Conv(score, score, 3), nn.Conv2d(score, nc, 1))

    def forward(self, x: Tensor) -> DFLLevel:
        return DFLLevel(self.anchor_conv(x), self.class_conv(x))


class DetectDFL(DetectionHead):
    """An anchor-free head: for each cell, distributions of the distances to the box's sides, and class scores.

    It is trained with the generalized focal loss (arXiv 2006.04388) and task-aligned assignment (arXiv 2108.07755), as
    in YOLOv9 (arXiv 2402.13616). The class branches have `score_channels` hidden channels, by default as many as the
    first map, or min(2 nc, 128) if that is more.
    """

    description = "detection head"
    example = "[[15, 18, 21], 1, DetectDFL, [nc]]"
    loss_names = ("box_loss", "cls_loss", "dfl_loss")
    hyperparameters = keys_of(AlignmentKeys)
    takes_anchors = False
    last_layers = "heads.{level}.class_conv.2"

    def __init__(self, nc: int, score_channels: int | None = None, *, channels: Sequence[int]) -> None:
        super().__init__()
        self.nc = nc
        box = max(math.ceil(channels[0] // 4 / SIDES) * SIDES, SIDES * BINS)
        score = score_channels or max(channels[0], min(2 * nc, MAX_SCORE_CHANNELS))
        self.register_buffer("stride", torch.ones(len(channels)), persistent=False)
        self.heads = nn.ModuleList(DFLBranches(c1, box, score, nc) for c1 in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[DFLLevel]:
        """Map (b, channels, h, w) of each level to its `DFLLevel`."""
        return [branches(x) for branches, x in zip(self.heads, maps, strict=True)]

    @torch.no_grad()
    def set_strides(self, strides: Sequence[float]) -> None:
        """Set the levels' strides in pixels, and the biases of the last convolutions.

        Class scores predict 5 objects per level, and boxes are 3 strides wide and high. Equal biases would make them 15
        strides wide: they overlap little with small objects, whose weight in the loss, the overlap, would be near 0.
        """
        self.stride.copy_(torch.tensor(strides))
        for branches, stride in zip(self.heads, self.stride, strict=True):
            branches.get_parameter("anchor_conv.2.bias").copy_(-BIN_STEP * torch.arange(BINS).repeat(SIDES))
            bias = branches.get_parameter("class_conv.2.bias")
            bias.copy_(torch.log(EXPECTED_OBJECTS / self.nc / (640 / stride) ** 2).expand_as(bias))

    def criterion(
        self, hyp: AlignmentKeys, label_smoothing: float, imgsz: int, class_weights: Sequence[float] = ()
    ) -> Criterion:
        """Return YOLOv9's loss; its class targets are soft already, so `label_smoothing` changes nothing."""
        return DFLCriterion(hyp, self, class_weights)

    def candidates(self, view: HeadView, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of groups of images whose best class score exceeds the threshold; others stay raw.

        Boxes have no outputs after the class scores: no task adds any to this head.
        """
        *outputs, cells = join_cells(view.outputs, self.stride.float(), view.scale, view.skipped_level)
        for sides, scores in image_groups(outputs):
            image, box = (scores.amax(2).float() > least_logit(conf_thres)).nonzero(as_tuple=True)
            xywh = decode_xywh(sides[image, box].float(), cells[box], view.mirrored_width)
            rows = torch.cat((xywh, torch.ones_like(xywh[:, :1]), row_sigmoids([scores[image, box]])), 1)
            yield Candidates(len(scores), image, rows, rows[:, :0])

    def decode(self, outputs: list[DFLLevel], num_extra: int = 0) -> Tensor:
        """Return all boxes, (b, n, 4 + classes): xywh in pixels, class scores; by level, row, column."""
        sides, scores, cells = join_cells(outputs, self.stride.float())
        return torch.cat((decode_xywh(sides.float(), cells), scores.float().sigmoid()), 2)

    @staticmethod
    def scored(decoded: Tensor) -> Tensor:
        return torch.cat((decoded[..., :4], torch.ones_like(decoded[..., :1]), decoded[..., 4:]), -1)
