"""The building blocks that the model YAMLs name.

Their attributes are named as in YOLOv5's state dicts, so that its weights load by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.matching import Level

# A kernel, stride or padding: one number, or (height, width).
Size = int | Sequence[int]
CLASSIFY_CHANNELS = 1280  # that a classifier's last layer sees, at every width (EfficientNet-B0's number)


def same_padding(kernel: Size, dilation: int = 1) -> int | tuple[int, ...]:
    """The padding that keeps height and width at stride 1, for odd kernels."""
    if isinstance(kernel, int):
        return (dilation * (kernel - 1) + 1) // 2
    return tuple((dilation * (k - 1) + 1) // 2 for k in kernel)


def _pair(size: Size) -> tuple[int, int]:
    """`size` as (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, activation: (b, c1, h, w) to (b, c2, h / stride, w / stride).

    `padding` None keeps the size at stride 1; `activate` False leaves the activation out.
    """

    def __init__(
        self,
        c1: int,
        c2: int,
        kernel: Size = 1,
        stride: Size = 1,
        padding: Size | None = None,
        groups: int = 1,
        dilation: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        around = same_padding(kernel, dilation) if padding is None else padding
        self.conv = nn.Conv2d(
            c1, c2, _pair(kernel), _pair(stride), _pair(around), groups=groups, dilation=dilation, bias=False
        )
        # Both values differ from torch's defaults; the official weights were trained with these.
        self.bn = nn.BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act: nn.Module = nn.SiLU() if activate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) to (b, c2, h / stride, w / stride)."""
        return self.act(self.bn(self.conv(x)))

    def set_activation(self, make: Callable[[], nn.Module]) -> None:
        """Replace the activation by what `make` returns, unless this convolution has none."""
        if not isinstance(self.act, nn.Identity):
            self.act = make()


class DWConv(Conv):
    """A `Conv` in as many groups as both channel counts allow: depth-wise where they are equal."""

    def __init__(
        self, c1: int, c2: int, kernel: Size = 1, stride: Size = 1, dilation: int = 1, activate: bool = True
    ) -> None:
        super().__init__(c1, c2, kernel, stride, None, math.gcd(c1, c2), dilation, activate)


class Bottleneck(nn.Module):
    """1x1 then 3x3 convolution, through `expansion` * c2 channels; the input is added where `shortcut` and c1 == c2."""

    def __init__(self, c1: int, c2: int, shortcut: bool = True, groups: int = 1, expansion: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * expansion)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(hidden, c2, 3, groups=groups)
        self.add = shortcut and c1 == c2

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) to (b, c2, h, w)."""
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    """Three 1x1 convolutions around `repeats` bottlenecks: one half goes through them, the other passes beside."""

    def __init__(
        self, c1: int, c2: int, repeats: int = 1, shortcut: bool = True, groups: int = 1, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(c2 * expansion)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(c1, hidden)
        self.cv3 = Conv(2 * hidden, c2)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, groups, 1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) to (b, c2, h, w)."""
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPP(nn.Module):
    """Spatial pyramid pooling (He et al., 2014): max pools of several odd sizes, side by side."""

    def __init__(self, c1: int, c2: int, kernels: Sequence[int] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = c1 // 2
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(hidden * (len(kernels) + 1), c2)
        self.m = nn.ModuleList(nn.MaxPool2d(k, 1, k // 2) for k in kernels)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) to (b, c2, h, w)."""
        x = self.cv1(x)
        return self.cv2(torch.cat((x, *(pool(x) for pool in self.m)), 1))


class SPPF(nn.Module):
    """`SPP` at a third of the pooling: three chained pools of `kernel` 5 see what 5, 9 and 13 see."""

    def __init__(self, c1: int, c2: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = c1 // 2
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(hidden * 4, c2)
        self.m = nn.MaxPool2d(kernel, 1, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) to (b, c2, h, w)."""
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        return self.cv2(torch.cat(maps, 1))


class Concat(nn.Module):
    """Joins its inputs along one dimension, by default the channels."""

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self.dimension = dimension

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps that agree in every other dimension, to one."""
        return torch.cat(maps, self.dimension)


class DetectConv(nn.Conv2d):
    """The 1x1 convolution of one level of a detector: `outputs` numbers for each of `anchors`, objectness the fifth."""

    def __init__(self, channels: int, anchors: int, outputs: int) -> None:
        super().__init__(channels, anchors * outputs, 1)
        self.anchors, self.outputs = anchors, outputs

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor | Level:  # type: ignore[override]
        """(b, channels, h, w) to the raw map (b, anchors, h, w, outputs), or the `Level` at cells `index` (3, k)."""
        if index is None:
            raw = super().forward(x)
            return raw.unflatten(1, (self.anchors, self.outputs)).permute(0, 1, 3, 4, 2).contiguous()
        assert self.bias is not None
        x, features = _Look.apply(x, *index)
        # Flattened so that the gradient comes back with the strides of the weight, which DDP asks for.
        last = self.weight.stride(2) > 1
        weight = (self.weight.permute(0, 2, 3, 1) if last else self.weight).flatten(1)
        rows = functional.linear(features, weight, self.bias).unflatten(1, (self.anchors, -1))
        of_objectness = weight[4 :: self.outputs, :, None, None]
        return Level(functional.conv2d(x, of_objectness, self.bias[4 :: self.outputs]), rows)


class _Look(torch.autograd.Function):
    """A map (b, c, h, w), and what stands at k of its cells, (k, c).

    Their gradient goes into that of the map where it stands: indexing would fill a second map with zeros for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, image: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(image, row, column)
        return x.view_as(x), x[image, :, row, column]

    @staticmethod
    def backward(ctx: Any, for_map: Tensor, for_cells: Tensor) -> tuple[Tensor | None, ...]:
        image, row, column = ctx.saved_tensors
        _, channels, height, width = for_map.shape
        # Written into although it was handed in: it comes from the one convolution that reads the map, and is its own.
        # By index_add_, which adds in order; index_put_ in whatever order its threads come.
        by_cell = for_map.permute(0, 2, 3, 1).reshape(-1, channels)
        by_cell.index_add_(0, (image * height + row) * width + column, for_cells)
        return by_cell.view(-1, height, width, channels).permute(0, 3, 1, 2), None, None, None


class Detect(nn.Module):
    """The detection head: one 1x1 convolution per level.

    Raw maps come out, in training as in evaluation; decoding is elsewhere.

    `nc` classes; `anchors` per level as (w, h) pairs in pixels, flat: [w, h, w, h, ...], or the number of anchors per
    level where they are yet to be found; `channels` of the input maps.
    The buffer `anchors` (levels, anchors, 2) is in stride units once `set_strides` was called.
    """

    anchors: Tensor
    stride: Tensor

    def __init__(self, nc: int, anchors: Sequence[Sequence[float]] | int, channels: Sequence[int]) -> None:
        super().__init__()
        if isinstance(anchors, int):
            anchors = [list(range(1, 2 * anchors + 1))] * len(channels)
        _check_anchors(anchors, len(channels))
        self.nc = nc
        self.nl = len(channels)
        self.na = len(anchors[0]) // 2
        self.no = nc + 5
        self._pixels = [[float(side) for side in level] for level in anchors]
        self.register_buffer("anchors", torch.tensor(self._pixels).view(self.nl, self.na, 2))
        # Not saved: it follows from the layers, and YOLOv5's files do not have it.
        self.register_buffer("stride", torch.ones(self.nl), persistent=False)
        self.m = nn.ModuleList(DetectConv(c, self.na, self.no) for c in channels)

    def forward(self, maps: Sequence[Tensor], cells: Tensor | None = None) -> list[Tensor] | list[Level]:
        """A map (batch, channels, height, width) per level to logits (batch, anchors, height, width, 5 + nc) each.

        With `cells` (levels, 3, k), image, row, column of what is to be read, to a `Level` each: the rest of the
        logits, nearly all of them, is never computed.
        """
        if cells is None:
            return [convolve(x) for convolve, x in zip(self.m, maps, strict=True)]
        return [convolve(x, index) for convolve, x, index in zip(self.m, maps, cells, strict=True)]

    def set_strides(self, strides: Sequence[float]) -> None:
        """Fix the pixels per cell of each level. The anchors go into these units, small ones to the small strides."""
        pixels = self._pixels
        growth = _mean_area(pixels[-1]) - _mean_area(pixels[0])
        if growth * (strides[-1] - strides[0]) < 0:
            pixels = pixels[::-1]
        self.stride.copy_(torch.tensor(strides))
        self.anchors.copy_(torch.tensor(pixels).view(self.nl, self.na, 2) / torch.tensor(strides).view(-1, 1, 1))

    @torch.no_grad()
    def initialise_biases(self) -> None:
        """Start from likely scores: 8 objects per image of 640 px, and 0.6 / nc per class.

        The idea is from RetinaNet (arXiv 1708.02002, section 3.3), the numbers from YOLOv5.
        """
        for convolve, stride in zip(self.m, self.stride, strict=True):
            bias = convolve.get_parameter("bias").view(self.na, self.no)
            bias[:, 4] += torch.log(8 / (640 / stride) ** 2)
            bias[:, 5:] += math.log(0.6 / (self.nc - 0.99999))


class Classify(nn.Module):
    """The classification head: a 1x1 convolution to 1280 channels, their mean over the map, dropout, linear.

    (b, c1, h, w) to logits (b, classes).
    """

    def __init__(self, c1: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = Conv(c1, CLASSIFY_CHANNELS)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(CLASSIFY_CHANNELS, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) to (b, classes)."""
        return self.linear(self.drop(self.pool(self.conv(x)).flatten(1)))


def _mean_area(level: Sequence[float]) -> float:
    """Mean w * h of a flat list of pairs."""
    return sum(w * h for w, h in zip(level[::2], level[1::2], strict=True)) / (len(level) // 2)


def _check_anchors(anchors: Sequence[Sequence[float]], levels: int) -> None:
    """ValueError unless there is one list of whole pairs per level, all of one length."""
    if len(anchors) != levels:
        raise ValueError(f"Detect has {levels} input maps, but `anchors` has {len(anchors)} rows: give one row per map")
    lengths = {len(level) for level in anchors}
    if len(lengths) != 1 or 0 in lengths or lengths.pop() % 2:
        raise ValueError("every row of `anchors` needs the same number of width, height pairs")
