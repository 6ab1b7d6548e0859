"""`Detect` and `Segment`, the heads of YOLOv5's detectors and segmenters. Registered in models/yolo.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads.anchors.head_transfer import keep_head
from models.heads.anchors.loss import LOSS_NAMES, DetectionCriterion, loss_settings
from models.heads.anchors.target_assignment import Level
from models.heads.anchors.views import RawView, decode
from models.heads.contract import DetectionHead
from models.layers import Proto
from models.tasks.contract import Criterion, Model
from utils.batch import BoxSplit
from utils.config.hyperparameters import AnchorKeys, keys_of


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
        from models.heads.anchors.auto_anchor import adapt_anchors  # only here: a resumed run does not need it

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
