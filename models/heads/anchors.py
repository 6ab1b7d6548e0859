"""`Detect` and `Segment`, the heads of YOLOv5's detectors and segmenters: layer, assignment, loss and decoding.

Registered in models/yolo.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads.contract import (
    BoxCriterion,
    Candidates,
    DetectionHead,
    HeadView,
    complete_iou,
    image_groups,
    least_logit,
    row_sigmoids,
)
from models.layers import Proto
from models.tasks.contract import Criterion, LossTerms, Model, Term, device_constant, upcast_half
from utils.batch import Batch, BoxSplit
from utils.config.hyperparameters import AnchorKeys, keys_of

# Offsets (x, y) of the cells that a target may be assigned to: its centre's cell, then left, above, right and below.
NEIGHBOURS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))
NEIGHBOUR_DISTANCE_CELLS = 0.5  # largest distance from a target's centre to a neighbouring cell
# Weight of each level's objectness, finest level first, as in YOLOv5: for 3 levels, and for any other number.
LEVEL_WEIGHTS = {3: (4.0, 1.0, 0.4)}
LEVEL_WEIGHTS_DEEP = (4.0, 1.0, 0.25, 0.06, 0.02)
FOCAL_ALPHA = 0.25
FIT_PENALTY, FIT_ITERATIONS, MAX_FITTED_CELLS = 0.01, 30, 2**14  # of `logistic_regression`; the last for each level
LEAST_SHARE, LEAST_DEVIATION = 1e-4, 1e-6  # of a class among the samples, and of their features
ANCHOR_TOLERANCE = 0.01  # relative difference of equal anchors: official files hold half precision
MapSizes = tuple[tuple[int, int], ...]  # height and width of the map of each level


# Assignment of targets to cells and anchors


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


def map_sizes(outputs: Sequence[Tensor | Level]) -> MapSizes:
    """Return the height and width of each level's map."""
    maps = [output.objectness if isinstance(output, Level) else output for output in outputs]
    return tuple((level.shape[2], level.shape[3]) for level in maps)


# The loss


def scale_gains(hyp: AnchorKeys, head: Detect, imgsz: int) -> AnchorKeys:
    """Return hyperparameters with gains scaled to a model; a file's are for 3 levels, 80 classes and 640 px."""
    share = 3 / head.nl
    obj, cls = hyp.obj * share * (imgsz / 640) ** 2, hyp.cls * share * head.nc / 80
    return replace(hyp, box=hyp.box * share, obj=obj, cls=cls)


class DetectionCriterion(BoxCriterion):
    """Box (CIoU), objectness and class terms over the cells that targets are matched to.

    Formulas, gains and level weights are YOLOv5's; the gains in `hyp` are scaled to the model. The head's anchors are
    read at each call, because the model is moved to its device later. With `class_weights`, by class number, an object
    of weight 2 counts as two equal objects in the box and class terms.
    """

    def __init__(
        self, hyp: AnchorKeys, head: Detect, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()
    ) -> None:
        self.hyp, self.classes, self._head, self.label_smoothing = hyp, head.nc, head, label_smoothing
        self.class_weights, self.min_divisor = tuple(class_weights), min((1.0, *class_weights))
        self._strides = head.stride.tolist()

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the cells near the targets, int64 (levels, 3, k): box and class are computed only there."""
        height, width = batch.images.shape[2:]
        sizes = tuple((round(height / stride), round(width / stride)) for stride in self._strides)
        return (near_cells(sizes, batch.targets).indices,)

    def __call__(self, outputs: Sequence[Tensor | Level], batch: Batch) -> LossTerms:
        """Return the loss terms, whose parts are the levels, from raw maps (b, anchors, h, w, 5 + classes), or each
        level's `Level` at the cells of `hints`."""
        return LossTerms.stacked(self.box_terms(outputs, batch.targets)[0], self._head.loss_names, self.min_divisor)

    def box_terms(self, outputs: Sequence[Tensor | Level], targets: Tensor) -> tuple[dict[str, Term], Tensor]:
        """Return box, objectness and class terms, and all logits near the targets, (levels, k, anchors, outputs)."""
        hyp, anchors = self.hyp, self._head.anchors.to(targets.device)
        cells = near_cells(map_sizes(outputs), targets)
        matched = match(cells, anchors, hyp.anchor_t)
        levels = [
            output if isinstance(output, Level) else Level(output[..., 4], output[image, :, row, column])
            for output, (image, row, column) in zip(outputs, cells.indices, strict=True)
        ]
        rows = upcast_half(torch.stack([level.rows for level in levels]))
        centre = rows[..., :2].sigmoid() * 2 - 0.5
        size = (rows[..., 2:4].sigmoid() * 2) ** 2 * anchors[:, None]
        iou = complete_iou(torch.cat((centre, size), 3), cells.box[:, :, None])
        weights = None  # of each cell's target, (k, 1); None if all are 1
        if self.class_weights:
            target_weights = device_constant(self.class_weights, rows.device).to(rows)[targets[:, 1].long()]
            weights = target_weights.repeat(len(NEIGHBOURS))[:, None]
        box = _match_sums(1 - iou, matched, weights)
        overlaps = iou.detach().clamp(min=0).to(rows.dtype)
        obj = []
        for level, *matches in zip(levels, cells.indices, matched, overlaps, strict=True):
            logits = upcast_half(level.objectness)
            obj.append(self._cross_entropy(logits, _overlap_map(logits.shape, *matches), hyp.obj_pw).sum())
        cls = self._class_sums(rows[..., 5 : 5 + self.classes], targets[:, 1].long(), matched, weights)
        match_counts = _match_sums(matched, matched, weights).to(box)
        cell_counts = device_constant(tuple(level.objectness.numel() for level in levels), box.device).to(box)
        level_weights = LEVEL_WEIGHTS.get(len(levels), LEVEL_WEIGHTS_DEEP[: len(levels)])
        gains = zip(*((hyp.box, hyp.obj * weight, hyp.cls) for weight in level_weights), strict=True)
        box_gains, obj_gains, cls_gains = device_constant(tuple(gains), box.device).to(box)
        terms = {
            "box_loss": (box, match_counts, box_gains),
            "obj_loss": (torch.stack(obj), cell_counts, obj_gains),
            "cls_loss": (cls, match_counts * self.classes, cls_gains),
        }
        return terms, rows

    def _class_sums(self, logits: Tensor, labels: Tensor, matched: Tensor, weights: Tensor | None) -> Tensor:
        """Return the class sums (levels,) over the matched ones of logits (levels, k, anchors, classes), from the class
        numbers (n,) of the targets and the weights (k, 1) of the cells."""
        if self.classes == 1:
            return logits.new_zeros(len(logits))  # a single class is always the right one
        smoothing = self.label_smoothing / 2
        target = logits.new_full((len(labels), self.classes), smoothing).scatter_(1, labels[:, None], 1 - smoothing)
        target = target.repeat(len(NEIGHBOURS), 1)[:, None].expand_as(logits)
        return _match_sums(self._cross_entropy(logits, target, self.hyp.cls_pw).sum(3), matched, weights)

    def _cross_entropy(self, logits: Tensor, target: Tensor, positive_weight: float) -> Tensor:
        """Return the binary cross-entropy of each logit, or the focal loss if fl_gamma is set (Lin et al. 2017)."""
        gamma = self.hyp.fl_gamma
        weight = None if positive_weight == 1 else logits.new_full((), positive_weight)
        loss = functional.binary_cross_entropy_with_logits(logits, target, pos_weight=weight, reduction="none")
        if not gamma:
            return loss
        probability = logits.sigmoid()
        error = target * (1 - probability) + (1 - target) * probability
        return loss * (target * FOCAL_ALPHA + (1 - target) * (1 - FOCAL_ALPHA)) * error**gamma


def _match_sums(values: Tensor, matched: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums (levels,) of the `matched` ones of values (levels, k, anchors), with weights (k, 1) or None."""
    values = torch.where(matched, values, 0)
    return (values if weights is None else values * weights).sum((1, 2))


def _overlap_map(shape: torch.Size, index: Tensor, matched: Tensor, overlaps: Tensor) -> Tensor:
    """Return the objectness target, `shape` (b, anchors, h, w): the overlap of each matched cell, 0 elsewhere.

    From image, row and column of the cells (3, k), and which of them are matched and how much they overlap, (k,
    anchors). If several targets share a cell, the last one counts. YOLOv5 leaves the order undefined; here it is
    (neighbour, anchor, target) on every device and, as an image's targets are ordered like its labels, on any number of
    processes.
    """
    _, anchors, rows, columns = shape
    image, row, column = (part.view(len(NEIGHBOURS), 1, -1) for part in index)
    matched, overlaps = (x.view(len(NEIGHBOURS), -1, anchors).transpose(1, 2) for x in (matched, overlaps))
    anchor = torch.arange(anchors, device=index.device)[:, None]
    unmatched = shape.numel()  # an extra element for unmatched cells
    flat = ((image * anchors + anchor) * rows + row) * columns + column  # (neighbours, anchors, n)
    flat = torch.where(matched, flat, unmatched).flatten()
    order = torch.arange(len(flat), device=flat.device)
    last = order.new_zeros(unmatched + 1).scatter_reduce_(0, flat, order, "amax")[flat]
    target = overlaps.new_zeros(unmatched + 1)
    target.scatter_(0, flat, overlaps.flatten()[last])  # all values for one element are equal
    return target[:unmatched].view(shape)


# Decoding


def cell_geometry(
    raw: Tensor, anchors: Tensor, stride: Tensor, scale: tuple[float, float] = (1.0, 1.0), mirrored_width: int = 0
) -> Tensor:
    """Return the geometry that a level's boxes are relative to, (anchors x h x w, 6), in pixels of the batch.

    The values are column and row, pixels per column and row, width and height of the anchor. In a mirrored view columns
    count from the right, with a negative stride.
    """
    _, count, height, width, _ = raw.shape
    pixels = torch.stack([stride / share for share in scale]).float()
    columns = torch.arange(width, device=raw.device, dtype=torch.float32)
    rows = torch.arange(height, device=raw.device, dtype=torch.float32)
    sides = (anchors * pixels).float()[:, None, None]
    if mirrored_width:
        columns = columns - mirrored_width / pixels[0]
        pixels = pixels * torch.tensor([-1.0, 1.0], device=pixels.device)
    # Concatenated, not written in place, which is slow in other runtimes: exported files compute this too.
    parts = (columns[:, None], rows[:, None, None], pixels, sides)
    return torch.cat([part.expand(count, height, width, part.shape[-1]) for part in parts], -1).view(-1, 6)


def decode_xywh(scores: Tensor, cells: Tensor) -> Tensor:
    """Return boxes (..., 4) in pixels by YOLOv5's formula: xy = (2 s - 0.5 + cell) stride, wh = (2 s)^2 anchor.

    `scores` are the sigmoids s (..., 4 or more), `cells` the geometry (n, 6) of `cell_geometry`.
    """
    centre = (scores[..., :2] * 2 - 0.5 + cells[:, :2]) * cells[:, 2:4]
    return torch.cat((centre, (scores[..., 2:4] * 2) ** 2 * cells[:, 4:]), -1)


# The layers


class DetectConv(nn.Conv2d):
    """The 1x1 convolution of one level of a detector: `outputs` logits per anchor, the fifth of them objectness."""

    def __init__(self, channels: int, anchors: int, outputs: int) -> None:
        super().__init__(channels, anchors * outputs, 1)
        self.anchors, self.outputs = anchors, outputs

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor | Level:  # type: ignore[override]
        """Map (b, channels, h, w) to the raw map (b, anchors, h, w, outputs), or a `Level` at cells `index` (3, k)."""
        if index is None:
            raw = super().forward(x)
            maps = raw.view(raw.shape[0], self.anchors, self.outputs, *raw.shape[2:])  # not unflatten: ONNX opset 13
            return maps.permute(0, 1, 3, 4, 2).contiguous()
        assert self.bias is not None
        x, features = _GatherCells.apply(x, *index)
        # Flattened so that the gradient has the strides of the weight, as DDP expects.
        channels_last = self.weight.stride(2) > 1
        weight = (self.weight.permute(0, 2, 3, 1) if channels_last else self.weight).flatten(1)
        rows = functional.linear(features, weight, self.bias).unflatten(1, (self.anchors, -1))
        objectness_weight = weight[4 :: self.outputs, :, None, None]
        return Level(functional.conv2d(x, objectness_weight, self.bias[4 :: self.outputs]), rows)


class _GatherCells(torch.autograd.Function):
    """Return a map (b, c, h, w) and its values at k cells, (k, c).

    Backward adds the cells' gradient to the map's in place; plain indexing would make a second map, of zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, image: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(image, row, column)
        return x.view_as(x), x[image, :, row, column]

    @staticmethod
    def backward(ctx: Any, map_gradient: Tensor, cell_gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, row, column = ctx.saved_tensors
        _, channels, height, width = map_gradient.shape
        # In place is safe: only one convolution reads the map, and it no longer needs this gradient. index_add_ adds in
        # a fixed order, unlike index_put_.
        by_cell = map_gradient.permute(0, 2, 3, 1).reshape(-1, channels)
        by_cell.index_add_(0, (image * height + row) * width + column, cell_gradient)
        return by_cell.view(-1, height, width, channels).permute(0, 3, 1, 2), None, None, None


class Detect(DetectionHead):
    """The detection head: one 1x1 convolution per level, which returns raw maps in training and in evaluation.

    `anchors` are a flat list [w, h, w, h, ...] in pixels for each level, or their number, and AutoAnchor computes them;
    the buffer (levels, anchors, 2) is in stride units after `set_strides`. `num_extra` is the number of outputs per
    anchor after the class scores.
    """

    description = "detection head"
    example = "[[17, 20, 23], 1, Detect, [nc, anchors]]"
    loss_names: ClassVar[tuple[str, ...]] = ("box_loss", "obj_loss", "cls_loss")
    hyperparameters = keys_of(AnchorKeys)
    features = frozenset({"anchors", "label smoothing"})
    takes_anchors = True
    last_layers = "m.{level}"
    box_outputs = 5  # box and objectness
    anchors: Tensor

    def __init__(
        self, nc: int, anchors: Sequence[Sequence[float]] | int, channels: Sequence[int], num_extra: int = 0
    ) -> None:
        super().__init__()
        if isinstance(anchors, int):
            anchors = [list(range(1, 2 * anchors + 1))] * len(channels)
        lengths = {len(level) for level in anchors}
        if len(anchors) != len(channels) or len(lengths) > 1 or lengths.pop() % 2:
            raise ValueError(f"`anchors` needs {len(channels)} rows, one per input map, of equally many pairs of sides")
        self.nc, self.nl, self.na, self.no = nc, len(channels), len(anchors[0]) // 2, nc + 5 + num_extra
        self._sides = [[float(side) for side in level] for level in anchors]  # width, height, width ... in pixels
        self.register_buffer("anchors", torch.tensor(self._sides).view(self.nl, self.na, 2))
        # Not saved: the layers determine it, and YOLOv5's files do not have it.
        self.register_buffer("stride", torch.ones(self.nl), persistent=False)
        self.m = nn.ModuleList(DetectConv(c, self.na, self.no) for c in channels)

    def forward(self, maps: Sequence[Tensor], cells: Tensor | None = None) -> list[Tensor] | list[Level]:
        """Map (batch, channels, height, width) of each level to logits (batch, anchors, height, width, 5 + nc).

        With `cells`, (levels, 3, k): image, row and column, to a `Level`, with all logits of these cells only.
        """
        if cells is None:
            return [convolve(x) for convolve, x in zip(self.m, maps, strict=True)]
        return [convolve(x, index) for convolve, x, index in zip(self.m, maps, cells, strict=True)]

    @torch.no_grad()
    def set_strides(self, strides: Sequence[float]) -> None:
        """Set the strides in pixels, the anchors in stride units (small ones at small strides), and the biases.

        The biases make initial scores mean 8 objects per image of 640 px, and 0.6 / nc per class: prior probabilities
        as in RetinaNet (arXiv 1708.02002, section 3.3), with YOLOv5's numbers.
        """
        areas = [sum(w * h for w, h in zip(level[::2], level[1::2], strict=True)) for level in self._sides]
        if (areas[-1] - areas[0]) * (strides[-1] - strides[0]) < 0:
            self._sides.reverse()
        self.stride.copy_(torch.tensor(strides))
        pixels = torch.tensor(self._sides).view(self.nl, self.na, 2)
        self.anchors.copy_(pixels / torch.tensor(strides).view(-1, 1, 1))
        for convolve, stride in zip(self.m, self.stride, strict=True):
            bias = convolve.get_parameter("bias").view(self.na, self.no)
            bias[:, 4] += torch.log(8 / (640 / stride) ** 2)
            bias[:, 5 : 5 + self.nc] += math.log(0.6 / (self.nc - 0.99999))

    def criterion(
        self, hyp: AnchorKeys, label_smoothing: float, imgsz: int, class_weights: Sequence[float] = ()
    ) -> Criterion:
        """Return YOLOv5's loss, with gains scaled to the head and the image size."""
        return DetectionCriterion(scale_gains(hyp, self, imgsz), self, label_smoothing, class_weights)

    def candidates(self, view: HeadView, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of groups of images whose objectness exceeds the threshold; only these are decoded."""
        outputs, geometries = zip(*self._levels(view), strict=True)
        for levels in image_groups([raw.flatten(1, 3) for raw in outputs]):  # (b, n, 5 + classes + extra)
            indices = [(level[..., 4].float() > least_logit(conf_thres)).nonzero(as_tuple=True) for level in levels]
            rows = [level[index] for level, index in zip(levels, indices, strict=True)]
            scores = row_sigmoids([row[:, : row.shape[1] - view.num_extra] for row in rows])
            cells = [cells[box] for cells, (_, box) in zip(geometries, indices, strict=True)]
            boxes = torch.cat((decode_xywh(scores, torch.cat(cells)), scores[:, 4:]), 1)
            extra = torch.cat([row[:, row.shape[1] - view.num_extra :].float() for row in rows])
            yield Candidates(len(levels[0]), torch.cat([image for image, _ in indices]), boxes, extra)

    def decode(self, outputs: list[Tensor], num_extra: int = 0) -> Tensor:
        """Return all boxes, (b, n, 5 + classes + extra): by level, anchor, row, column."""
        parts = []
        for raw, cells in self._levels(HeadView(self, outputs)):
            rows = raw.flatten(1, 3).float()
            scores = rows[..., :-num_extra].sigmoid() if num_extra else rows.sigmoid()
            extra = (rows[..., -num_extra:],) if num_extra else ()
            parts.append(torch.cat((decode_xywh(scores, cells), scores[..., 4:], *extra), 2))
        return torch.cat(parts, 1)

    def _levels(self, view: HeadView) -> list[tuple[Tensor, Tensor]]:
        """Return the raw map and the cell geometry of each level that a view does not skip."""
        return [
            (level[0], cell_geometry(*level, view.scale, view.mirrored_width))
            for number, level in enumerate(zip(view.outputs, self.anchors.float(), self.stride.float(), strict=True))
            if number != view.skipped_level
        ]

    def keep(self, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]) -> str:
        """Copy the outputs that fit, as every head does, if the file has the same anchors."""
        anchors = state.get(f"{prefix}.anchors", torch.zeros(0)).to(self.anchors)
        if anchors.shape != self.anchors.shape or not torch.allclose(anchors, self.anchors, rtol=ANCHOR_TOLERANCE):
            return "head: new, because the file's has other anchors"
        return super().keep(prefix, state, names, new)

    @torch.no_grad()
    def fit_classes(self, batches: Iterable[tuple[Any, Tensor]], classes: Sequence[int], threshold: float) -> int:
        """Fit the outputs of `classes` by `logistic_regression` to the cells that the targets are matched to.

        A batch has the input maps and the targets. All anchors of a level get the same outputs. Returns how many cells.
        """
        samples: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.m]
        for maps, targets in batches:
            cells = near_cells(map_sizes(maps), targets)
            matched = match(cells, self.anchors, threshold).any(2)
            labels = targets[:, 1].long().repeat(len(NEIGHBOURS))
            for level, x, near, (image, row, column) in zip(samples, maps, matched, cells.indices, strict=True):
                level.append((x[image[near], :, row[near], column[near]].cpu(), labels[near].cpu()))
        rows = [5 + number for number in classes]
        for convolve, level in zip(self.m, samples, strict=True):
            features, labels = (torch.cat(values) for values in zip(*level, strict=True))
            if len(labels) and features.isfinite().all():
                every = len(labels) // MAX_FITTED_CELLS + 1
                weight, bias = logistic_regression(features[::every], labels[::every], self.nc)
                for name, fitted in (("weight", weight), ("bias", bias[:, None])):
                    parameter = convolve.get_parameter(name)
                    parameter.view(self.na, self.no, -1)[:, rows] = fitted[classes].to(parameter)
        return sum(len(labels) for level in samples for _, labels in level)

    def adapt(self, model: Model, split: BoxSplit, hyp: AnchorKeys) -> None:
        from models.heads.auto_anchor import adapt_anchors  # only here, because most runs keep their anchors

        adapt_anchors(self, model.yaml, split.side_lengths(model.imgsz), hyp.anchor_t, hyp.anchor_recall)


@torch.enable_grad()
def logistic_regression(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return weights (classes, channels) and biases (classes,), float64, with the least mean binary cross-entropy.

    `features` are (n, channels), `labels` class numbers (n,). An L2 penalty on the weights of the centred features, in
    units of their common deviation, keeps the logits of a class with few samples small.
    """
    x, truth = features.double(), functional.one_hot(labels, classes).double()
    mean, deviation = x.mean(0), x.std(correction=0).clamp(min=LEAST_DEVIATION)
    x, share = (x - mean) / deviation, truth.mean(0).clamp(LEAST_SHARE, 1 - LEAST_SHARE)
    weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, requires_grad=True)
    bias = (share / (1 - share)).log().requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=FIT_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        entropy = functional.binary_cross_entropy_with_logits(x @ weight.T + bias, truth, reduction="sum") / len(x)
        total: Tensor = entropy + FIT_PENALTY * weight.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    weight = weight.detach() / deviation
    return weight, bias.detach() - weight @ mean


class Segment(Detect):
    """The segmentation head: `Detect` with `masks` coefficients per anchor, and the mask prototypes that they weight:
    a `Proto` with `prototypes` hidden channels on the first map."""

    description = "segmentation head"
    example = "[[17, 20, 23], 1, Segment, [nc, anchors, 32, 256]]"
    loss_names = ("box_loss", "seg_loss", "obj_loss", "cls_loss")

    def __init__(
        self, nc: int, anchors: Sequence[Sequence[float]] | int, masks: int, prototypes: int, channels: Sequence[int]
    ) -> None:
        super().__init__(nc, anchors, channels, masks)
        self.proto = Proto(channels[0], prototypes, masks)

    def forward(  # type: ignore[override]
        self, maps: Sequence[Tensor], cells: Tensor | None = None
    ) -> tuple[list[Tensor] | list[Level], Tensor]:
        """Return the output of `Detect`, with 5 + nc + masks logits, and prototypes (b, masks, 2 h, 2 w)."""
        return super().forward(maps, cells), self.proto(maps[0])
