"""`Detect` and `Segment`, the heads of YOLOv5's detectors and segmenters. Registered in models/layer_registry.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads.contract import Candidates, DetectionHead, complete_iou, image_groups, least_logit, row_sigmoids
from models.layers import Proto
from models.tasks.contract import Criterion, Function, LossTerms, Model
from models.tasks.losses import PaddedCriterion, at_least_float32, device_constant
from models.weights import same_names
from utils.batch import Batch, BoxSplit
from utils.config.hyperparameters import AnchorKeys, keys_of
from utils.config.values import select
from utils.errors import plural

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


BOX_ROWS = 5  # number of an anchor's first rows, for box and objectness
ANCHOR_TOLERANCE = 0.01  # relative difference of equal anchors: official files hold half precision


@torch.no_grad()
def keep_head(
    head: Detect, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]
) -> str:
    """Copy rows of a file's head into the model's, and return in words which were copied, or why none were.

    Box and objectness are copied from the same anchor, a class from the class of the same name, whatever its number;
    other classes are left unchanged. A segmenter's mask rows are copied if the file has them.

    Args:
        prefix: prefix of the head's tensors in `state`
        state: the file's tensors, by name
        names: the file's class names, by number
        new: the model's class names, by number
    """
    anchors = state.get(f"{prefix}.anchors")
    if anchors is None or anchors.shape != head.anchors.shape or not _close(anchors, head.anchors):
        return "not its head: it has other anchors"
    same = same_names(names, new)
    taken = 0
    for number, convolve in enumerate(head.m):
        sources = {part: state.get(f"{prefix}.m.{number}.{part}") for part, _ in convolve.named_parameters()}
        fitting = {
            part: _rows_by_anchor(source, head.na)
            for part, source in sources.items()
            if _fits(source, convolve.get_parameter(part), head.na, BOX_ROWS + len(names))
        }
        if len(fitting) < len(sources):
            continue
        taken += 1
        for part, source in fitting.items():
            _copy_rows(_rows_by_anchor(convolve.get_parameter(part), head.na), source, head.nc, len(names), same)
    if not taken:
        return "not its head: its layers differ"
    return f"from its head the boxes and {len(same) or 'none'} of {plural(len(new), 'class')}"


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.to(second), second, rtol=ANCHOR_TOLERANCE)


def _fits(source: Tensor | None, tensor: Tensor, anchors: int, least: int) -> TypeGuard[Tensor]:
    """Return whether `source` has at least `least` rows for each of `anchors` anchors, as wide as `tensor`'s rows."""
    if source is None or source.dim() != tensor.dim() or source.shape[1:] != tensor.shape[1:]:
        return False
    return source.shape[0] % anchors == 0 and source.shape[0] // anchors >= least


def _rows_by_anchor(tensor: Tensor, anchors: int) -> Tensor:
    """Return (anchors * rows, ...) as (anchors, rows, ...)."""
    return tensor.reshape(anchors, -1, *tensor.shape[1:])


def _copy_rows(target: Tensor, source: Tensor, new: int, old: int, same: Mapping[int, int]) -> None:
    """Copy rows of a file's weight or bias, (anchors, rows, ...), into the model's.

    Args:
        new: number of the model's classes
        old: number of the file's classes
        same: number of a class in the file, by its number in the model
    """
    target[:, :BOX_ROWS] = source[:, :BOX_ROWS]
    for number, of_file in same.items():
        target[:, BOX_ROWS + number] = source[:, BOX_ROWS + of_file]
    masks = target[:, BOX_ROWS + new :]
    if old and masks.shape == source[:, BOX_ROWS + old :].shape:
        masks.copy_(source[:, BOX_ROWS + old :])


class RawView(NamedTuple):
    """The raw maps of a network for images that may be scaled and mirrored."""

    outputs: list[Tensor]  # a map (b, anchors, h, w, 5 + classes + more) per level
    anchors: Tensor  # (levels, anchors, 2) in cells
    strides: Tensor  # (levels,) pixels per cell
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of the model's images, each as a share of the batch's
    mirrored_width: int = 0  # width of the batch in pixels if the images are mirrored, else 0
    skipped_level: int | None = None  # number of a level whose boxes are left out
    more: int = 0  # number of an anchor's outputs after its class scores, which are not decoded

    def levels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the raw map and the cell geometry of each level that is not skipped."""
        for number, level in enumerate(zip(self.outputs, self.anchors, self.strides, strict=True)):
            if number != self.skipped_level:
                yield level[0], cell_geometry(*level, self.scale, self.mirrored_width)

    def augmented(self, scale: tuple[float, float], mirrored_width: int) -> RawView:
        """Return the view of scaled or mirrored images."""
        return self._replace(scale=scale, mirrored_width=mirrored_width)

    def without_level(self, level: int) -> RawView:
        """Return the view without the boxes of a level."""
        return self._replace(skipped_level=level)

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of groups of images whose objectness exceeds the threshold; only these are decoded."""
        outputs, geometries = zip(*self.levels(), strict=True)
        for levels in image_groups([raw.flatten(1, 3) for raw in outputs]):  # (b, n, 5 + classes + more)
            places = [(level[..., 4].float() > least_logit(conf_thres)).nonzero(as_tuple=True) for level in levels]
            rows = [level[place] for level, place in zip(levels, places, strict=True)]
            scores = row_sigmoids([row[:, : row.shape[1] - self.more] for row in rows])
            cells = [cells[box] for cells, (_, box) in zip(geometries, places, strict=True)]
            boxes = torch.cat((decode_xywh(scores, torch.cat(cells)), scores[:, 4:]), 1)
            more = torch.cat([row[:, row.shape[1] - self.more :].float() for row in rows])
            yield Candidates(len(levels[0]), torch.cat([image for image, _ in places]), boxes, more)


def decode(view: RawView) -> Tensor:
    """Return all boxes of a view, (b, n, 5 + classes + more), as in `DecodedView`: by level, anchor, row, column."""
    parts = []
    for raw, cells in view.levels():
        outputs = raw.flatten(1, 3).float()
        scores = outputs[..., : -view.more].sigmoid() if view.more else outputs.sigmoid()
        others = (outputs[..., -view.more :],) if view.more else ()
        parts.append(torch.cat((decode_xywh(scores, cells), scores[..., 4:], *others), 2))
    return torch.cat(parts, 1)


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

    Args:
        scores: sigmoids s (..., 4 or more) of the outputs
        cells: geometry (n, 6) of the cells, see `cell_geometry`
    """
    centre = (scores[..., :2] * 2 - 0.5 + cells[:, :2]) * cells[:, 2:4]
    return torch.cat((centre, (scores[..., 2:4] * 2) ** 2 * cells[:, 4:]), -1)


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

    The buffer `anchors` (levels, anchors, 2) is in stride units after `placed`.

    Args:
        nc: number of classes
        anchors: for each level a flat list [w, h, w, h, ...] in pixels, or the number of anchors per level, which
            AutoAnchor then computes
        channels: number of channels of each input map
        more: number of outputs per anchor after the class scores
    """

    description = "detection head"
    example = "[[17, 20, 23], 1, Detect, [nc, anchors]]"
    loss_names = LOSS_NAMES
    hyperparameters = keys_of(AnchorKeys)
    features = frozenset({"anchors", "label smoothing"})
    takes_anchors = True
    anchors: Tensor

    def __init__(
        self, nc: int, anchors: Sequence[Sequence[float]] | int, channels: Sequence[int], more: int = 0
    ) -> None:
        super().__init__()
        if isinstance(anchors, int):
            anchors = [list(range(1, 2 * anchors + 1))] * len(channels)
        _check_anchors(anchors, len(channels))
        self.nc = nc
        self.nl = len(channels)
        self.na = len(anchors[0]) // 2
        self.no = nc + 5 + more
        self._pixels = [[float(side) for side in level] for level in anchors]
        self.register_buffer("anchors", torch.tensor(self._pixels).view(self.nl, self.na, 2))
        # Not saved: the layers determine it, and YOLOv5's files do not have it.
        self.register_buffer("stride", torch.ones(self.nl), persistent=False)
        self.m = nn.ModuleList(DetectConv(c, self.na, self.no) for c in channels)

    def forward(self, maps: Sequence[Tensor], cells: Tensor | None = None) -> list[Tensor] | list[Level]:
        """Map (batch, channels, height, width) of each level to logits (batch, anchors, height, width, 5 + nc).

        Args:
            cells: image, row and column of cells, (levels, 3, k); if given, the result is a `Level` per map, with the
                objectness of all cells and the other logits of these cells only
        """
        if cells is None:
            return [convolve(x) for convolve, x in zip(self.m, maps, strict=True)]
        return [convolve(x, index) for convolve, x, index in zip(self.m, maps, cells, strict=True)]

    def placed(self, strides: Sequence[float]) -> None:
        """Set the strides in pixels, the anchors in stride units (small ones at small strides), and the biases."""
        pixels = self._pixels
        growth = _mean_area(pixels[-1]) - _mean_area(pixels[0])
        if growth * (strides[-1] - strides[0]) < 0:
            pixels = pixels[::-1]
        self.stride.copy_(torch.tensor(strides))
        self.anchors.copy_(torch.tensor(pixels).view(self.nl, self.na, 2) / torch.tensor(strides).view(-1, 1, 1))
        self._initialise_biases()

    def criterion(
        self, hyp: AnchorKeys, label_smoothing: float, imgsz: int, class_weights: Sequence[float] = ()
    ) -> Criterion:
        """Return YOLOv5's loss, with gains scaled to the head and the image size."""
        settings = loss_settings(hyp, label_smoothing).scaled(self.nl, self.nc, imgsz)
        return DetectionCriterion(settings, self, class_weights)

    def view(self, outputs: list[Tensor], more: int = 0) -> RawView:
        """Return the plain view of raw maps."""
        device = outputs[0].device
        return RawView(outputs, self.anchors.to(device), self.stride.to(device), more=more)

    def decode(self, outputs: list[Tensor], more: int = 0) -> Tensor:
        """Return all boxes, (b, n, 5 + classes + more): by level, anchor, row, column."""
        return decode(RawView(outputs, self.anchors.float(), self.stride.float(), more=more))

    def keep(self, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]) -> str:
        """Copy boxes, objectness and classes of equal names if the anchors are the same; return in words which."""
        return keep_head(self, prefix, state, names, new)

    def adapt(self, model: Model, split: BoxSplit, hyp: AnchorKeys) -> list[str]:
        """Run AutoAnchor; return a message."""
        from models.heads.auto_anchor import adapt_anchors  # only here: a resumed run does not need it

        return [adapt_anchors(self, model.yaml, split.side_lengths(model.imgsz), hyp.anchor_t, hyp.anchor_recall)]

    @torch.no_grad()
    def _initialise_biases(self) -> None:
        """Add to the biases so that initial scores mean 8 objects per image of 640 px, and 0.6 / nc per class.

        Prior probabilities as in RetinaNet (arXiv 1708.02002, section 3.3), with YOLOv5's numbers.
        """
        for convolve, stride in zip(self.m, self.stride, strict=True):
            bias = convolve.get_parameter("bias").view(self.na, self.no)
            bias[:, 4] += torch.log(8 / (640 / stride) ** 2)
            bias[:, 5 : 5 + self.nc] += math.log(0.6 / (self.nc - 0.99999))


class Segment(Detect):
    """The segmentation head: `Detect` with `masks` coefficients per anchor, and the mask prototypes that they weight.

    Args:
        prototypes: number of hidden channels of `Proto`, which runs on the first map
    """

    description = "segmentation head"
    example = "[[17, 20, 23], 1, Segment, [nc, anchors, 32, 256]]"

    def __init__(
        self,
        nc: int,
        anchors: Sequence[Sequence[float]] | int,
        masks: int,
        prototypes: int,
        channels: Sequence[int],
    ) -> None:
        super().__init__(nc, anchors, channels, masks)
        self.proto = Proto(channels[0], prototypes, masks)

    def forward(  # type: ignore[override]
        self, maps: Sequence[Tensor], cells: Tensor | None = None
    ) -> tuple[list[Tensor] | list[Level], Tensor]:
        """Return the output of `Detect`, with 5 + nc + masks logits, and prototypes (b, masks, 2 h, 2 w)."""
        return super().forward(maps, cells), self.proto(maps[0])


def _mean_area(level: Sequence[float]) -> float:
    """Return the mean of w * h over a flat list [w, h, w, h, ...]."""
    return sum(w * h for w, h in zip(level[::2], level[1::2], strict=True)) / (len(level) // 2)


def _check_anchors(anchors: Sequence[Sequence[float]], levels: int) -> None:
    """Raise ValueError unless there is one list of pairs per level, all of the same length."""
    if len(anchors) != levels:
        raise ValueError(f"Detect has {levels} input maps, but `anchors` has {len(anchors)} rows: give one row per map")
    lengths = {len(level) for level in anchors}
    if len(lengths) != 1 or 0 in lengths or lengths.pop() % 2:
        raise ValueError("every row of `anchors` needs the same number of width, height pairs")
