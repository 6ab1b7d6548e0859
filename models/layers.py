"""The layers that model YAMLs name. models/yolo.py lists them and the detection heads in models/heads/.

Attributes are named as in YOLOv5's state dicts, so that its weights load by name. Every docstring says how a layer maps
the shape of its input.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH_NORM = (1e-3, 0.03)  # eps and momentum that the official weights were trained with
CLASSIFY_CHANNELS = 1280  # inputs of a classifier's last layer at every width, as in EfficientNet-B0


def norm_and_activate(x: Tensor, norm: nn.Module, activation: nn.Module) -> Tensor:
    """Return activation(norm(x)); in training on a GPU by the fused kernels, if they do the same."""
    is_traced = type(x) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if x.is_cuda and norm.training and not is_traced:
        fused = _fused_kernels(x.device)
        if fused and fused.can_fuse(x, norm, activation):
            return fused.FusedNormSiLU.apply(x, norm.weight, norm.bias, norm)
    return activation(norm(x))


@cache
def _fused_kernels(device: torch.device) -> ModuleType | None:
    """Return models/triton_kernels.py if Triton works on the device: it needs a C compiler and Python's headers."""
    try:
        from models import triton_kernels as kernels  # only on a GPU: most other machines have no Triton

        x = torch.ones(1, kernels.LEAST_CHANNELS, 2, 1, device=device).contiguous(memory_format=torch.channels_last)
        norm = nn.BatchNorm2d(kernels.LEAST_CHANNELS, device=device)
        kernels.FusedNormSiLU.apply(x, norm.weight, norm.bias, norm)
    except Exception as error:  # Triton's, of its compilers, or because there is no Triton
        warnings.warn(f"BatchNorm and SiLU are not fused, which is slower; Triton does not work: {error}", stacklevel=1)
        return None
    return kernels


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, activation: (b, c1, h, w) to (b, c2, h / stride, w / stride).

    The default padding keeps height and width at stride 1 for odd kernels.
    """

    def __init__(
        self,
        c1: int,
        c2: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        dilation: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        padding = (dilation * (kernel - 1) + 1) // 2 if padding is None else padding
        self.conv = nn.Conv2d(c1, c2, kernel, stride, padding, dilation, groups, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(c2, *BATCH_NORM)
        self.act: nn.Module = nn.SiLU() if activate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return norm_and_activate(self.conv(x), self.bn, self.act)


def without_batchnorm(module: nn.Module) -> nn.Module:
    """Return the module, whose `Conv`s now skip BatchNorm: on the "meta" device its kernel takes a millisecond."""
    for layer in module.modules():
        if isinstance(layer, Conv) and isinstance(layer.bn, nn.BatchNorm2d):
            layer.bn.forward = nn.Identity().forward  # type: ignore[method-assign]
    return module


class DWConv(Conv):
    """A `Conv` in gcd(c1, c2) groups: depth-wise if c1 == c2."""

    def __init__(
        self, c1: int, c2: int, kernel: int = 1, stride: int = 1, dilation: int = 1, activate: bool = True
    ) -> None:
        super().__init__(c1, c2, kernel, stride, None, math.gcd(c1, c2), dilation, activate)


class Focus(nn.Module):
    """Turn blocks of 2 x 2 pixels into channels, then a `Conv`: (b, c1, h, w) to (b, c2, h / 2, w / 2), h and w even.

    The convolution's input is the channels of pixel (row 0, column 0), then of (1, 0), (0, 1) and (1, 1). YOLOv5 6.0
    replaced this layer by a `Conv` with kernel 6, stride 2, padding 2.
    """

    def __init__(self, c1: int, c2: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = Conv(4 * c1, c2, kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.cat([x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)], 1))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution through `expansion` * c2 channels: (b, c1, h, w) to (b, c2, h, w).

    The input is added if `shortcut` and c1 == c2.
    """

    def __init__(self, c1: int, c2: int, shortcut: bool = True, groups: int = 1, expansion: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * expansion)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(hidden, c2, 3, groups=groups)
        self.add = shortcut and c1 == c2

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class GhostConv(nn.Module):
    """A `Conv` for half of the channels, and a depth-wise 5x5 one of these for the rest (GhostNet, arXiv 1911.11907).

    (b, c1, h, w) to (b, c2, h / stride, w / stride), for an even c2.
    """

    def __init__(
        self, c1: int, c2: int, kernel: int = 1, stride: int = 1, groups: int = 1, activate: bool = True
    ) -> None:
        super().__init__()
        half = c2 // 2
        self.cv1 = Conv(c1, half, kernel, stride, groups=groups, activate=activate)
        self.cv2 = Conv(half, half, 5, groups=half, activate=activate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv1(x)
        return torch.cat((y, self.cv2(y)), 1)


class GhostBottleneck(nn.Module):
    """Two `GhostConv`s through channels / 2 channels, and their input: (b, channels, h, w) to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.conv = nn.Sequential(
            GhostConv(channels, half),
            nn.Identity(),  # where YOLOv5's layer has its stride
            GhostConv(half, channels, activate=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x


class BottleneckCSP(nn.Module):
    """Cross stage partial bottlenecks (CSPNet, arXiv 1911.11929): (b, c1, h, w) to (b, c2, h, w).

    `C3` replaced this layer in YOLOv5 4.0.
    """

    def __init__(
        self, c1: int, c2: int, repeats: int = 1, shortcut: bool = True, groups: int = 1, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(c2 * expansion)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = nn.Conv2d(c1, hidden, 1, bias=False)
        self.cv3 = nn.Conv2d(hidden, hidden, 1, bias=False)
        self.cv4 = Conv(2 * hidden, c2)
        self.bn = nn.BatchNorm2d(2 * hidden, *BATCH_NORM)
        self.act: nn.Module = nn.SiLU()
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, groups, 1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        deep, bypass = self.cv3(self.m(self.cv1(x))), self.cv2(x)
        return self.cv4(norm_and_activate(torch.cat((deep, bypass), 1), self.bn, self.act))


class C3(nn.Module):
    """Three 1x1 convolutions around `repeats` bottlenecks: one half goes through them, the other bypasses them.

    (b, c1, h, w) to (b, c2, h, w). Subclasses override `inner`.
    """

    def __init__(
        self, c1: int, c2: int, repeats: int = 1, shortcut: bool = True, groups: int = 1, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(c2 * expansion)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(c1, hidden)
        self.cv3 = Conv(2 * hidden, c2)
        self.m = self.inner(hidden, repeats, shortcut, groups)

    def inner(self, hidden: int, repeats: int, shortcut: bool, groups: int) -> nn.Module:
        """Return the layers that the first half goes through: (b, hidden, h, w) to the same shape."""
        return nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, groups, 1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C3Ghost(C3):
    """`C3` around `GhostBottleneck`s."""

    def inner(self, hidden: int, repeats: int, shortcut: bool, groups: int) -> nn.Module:
        return nn.Sequential(*(GhostBottleneck(hidden) for _ in range(repeats)))


class C3TR(C3):
    """`C3` around a transformer of `repeats` layers with 4 heads; the hidden channels must be a multiple of 4."""

    def inner(self, hidden: int, repeats: int, shortcut: bool, groups: int) -> nn.Module:
        return Transformer(hidden, 4, repeats)


class TransformerLayer(nn.Module):
    """Self-attention and two linear layers, each with a residual connection: (cells, b, channels) to the same shape.

    It lacks the original's LayerNorm, dropout and activation (arXiv 1706.03762).
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.ma = nn.MultiheadAttention(channels, heads)
        self.fc1, self.fc2 = (nn.Linear(channels, channels, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        # The attention weights are not used; without them torch picks kernels that are not deterministic on CUDA.
        x = x + self.ma(self.q(x), self.k(x), self.v(x), need_weights=True)[0]
        return x + self.fc2(self.fc1(x))


class Transformer(nn.Module):
    """Vision transformer (arXiv 2010.11929) over the cells of a map: (b, channels, h, w) to the same shape.

    A linear layer on the cells replaces the position embedding, so that h and w may vary.
    """

    def __init__(self, channels: int, heads: int, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.tr = nn.Sequential(*(TransformerLayer(channels, heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        cells = x.flatten(2).permute(2, 0, 1)  # (h * w, b, channels)
        return self.tr(cells + self.linear(cells)).permute(1, 2, 0).unflatten(2, x.shape[2:])


class SPP(nn.Module):
    """Spatial pyramid pooling (He et al., 2014), parallel max pools of odd sizes: (b, c1, h, w) to (b, c2, h, w)."""

    def __init__(self, c1: int, c2: int, kernels: Sequence[int] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = c1 // 2
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(hidden * (len(kernels) + 1), c2)
        self.m = nn.ModuleList(nn.MaxPool2d(k, 1, k // 2) for k in kernels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat((x, *(pool(x) for pool in self.m)), 1))


class SPPF(nn.Module):
    """`SPP` at a third of the cost: three chained 5x5 pools equal parallel pools of 5x5, 9x9 and 13x13."""

    def __init__(self, c1: int, c2: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = c1 // 2
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(hidden * 4, c2)
        self.m = nn.MaxPool2d(kernel, 1, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        return self.cv2(torch.cat(maps, 1))


class RepConv(nn.Module):
    """The SiLU of the sum of a convolution and a 1x1 convolution (RepVGG, arXiv 2101.03697).

    (b, c1, h, w) to (b, c2, h / stride, w / stride), for an odd kernel. models/ensemble.py merges both into one.
    """

    def __init__(self, c1: int, c2: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1: nn.Module = Conv(c1, c2, kernel, stride, groups=groups, activate=False)
        self.conv2: Conv | None = Conv(c1, c2, 1, stride, groups=groups, activate=False)
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)
        return self.act(y if self.conv2 is None else y + self.conv2(x))


class RepBottleneck(nn.Module):
    """A `RepConv` and a 3x3 convolution with a residual connection: (b, channels, h, w) to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = RepConv(channels, channels)
        self.conv2 = Conv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


class RepNCSP(nn.Module):
    """`C3` around `repeats` `RepBottleneck`s, with the attribute names of the MIT implementation of YOLOv9.

    (b, c1, h, w) to (b, c2, h, w), for an even c2.
    """

    def __init__(self, c1: int, c2: int, repeats: int = 1) -> None:
        super().__init__()
        hidden = c2 // 2
        self.conv1 = Conv(c1, hidden)
        self.conv2 = Conv(c1, hidden)
        self.conv3 = Conv(2 * hidden, c2)
        self.bottleneck = nn.Sequential(*(RepBottleneck(hidden) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat((self.bottleneck(self.conv1(x)), self.conv2(x)), 1))


class ELAN(nn.Module):
    """Efficient layer aggregation (arXiv 2211.04800): (b, c1, h, w) to (b, c2, h, w).

    A 1x1 convolution gives `part` channels; two chained blocks, of `process` channels each, run on their second half;
    a 1x1 convolution joins both halves and both blocks' outputs. Subclasses override `block`.
    """

    def __init__(self, c1: int, c2: int, repeats: int, part: int, process: int | None = None) -> None:
        super().__init__()
        process = part // 2 if process is None else process
        self.conv1 = Conv(c1, part)
        self.conv2 = self.block(part // 2, process, repeats)
        self.conv3 = self.block(process, process, repeats)
        self.conv4 = Conv(part + 2 * process, c2)

    def block(self, c1: int, c2: int, repeats: int) -> nn.Module:
        """Return one of the two chained blocks: a 3x3 convolution, whatever `repeats`."""
        return Conv(c1, c2, 3)

    def forward(self, x: Tensor) -> Tensor:
        bypass, first = self.conv1(x).chunk(2, 1)
        second = self.conv2(first)
        return self.conv4(torch.cat((bypass, first, second, self.conv3(second)), 1))


class RepNCSPELAN(ELAN):
    """`ELAN` whose blocks are a `RepNCSP` of `repeats` bottlenecks and a 3x3 convolution (YOLOv9, arXiv 2402.13616)."""

    def block(self, c1: int, c2: int, repeats: int) -> nn.Module:
        return nn.Sequential(RepNCSP(c1, c2, repeats), Conv(c2, c2, 3))


class AConv(nn.Module):
    """A 2x2 mean at stride 1, then a 3x3 convolution at stride 2: (b, c1, h, w) to (b, c2, h / 2, w / 2)."""

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.conv = Conv(c1, c2, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.avg_pool2d(x, 2, 1))


class ADown(nn.Module):
    """`AConv` for half of the channels; a max pool and a 1x1 convolution for the other half.

    (b, c1, h, w) to (b, c2, h / 2, w / 2), for even c1 and c2.
    """

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.conv1 = Conv(c1 // 2, c2 // 2, 3, 2)
        self.conv2 = Conv(c1 // 2, c2 // 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = functional.avg_pool2d(x, 2, 1).chunk(2, 1)
        return torch.cat((self.conv1(first), self.conv2(functional.max_pool2d(second, 3, 2, 1))), 1)


class SPPELAN(nn.Module):
    """`SPPF` with the attribute names of the MIT implementation of YOLOv9: (b, c1, h, w) to (b, c2, h, w).

    The pools have `neck` channels, by default c2 / 2.
    """

    def __init__(self, c1: int, c2: int, neck: int | None = None) -> None:
        super().__init__()
        neck = c2 // 2 if neck is None else neck
        self.conv1 = Conv(c1, neck)
        self.conv5 = Conv(4 * neck, c2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.conv1(x)]
        for _ in range(3):
            maps.append(functional.max_pool2d(maps[-1], 5, 1, 2))
        return self.conv5(torch.cat(maps, 1))


class CBLinear(nn.Module):
    """A 1x1 convolution with bias, split into maps of `widths` channels: (b, c1, h, w) to a tuple of (b, width, h, w).

    From CBNet (arXiv 1909.03625). `CBFuse` adds one of the maps to another backbone's map.
    """

    def __init__(self, c1: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = list(widths)
        self.conv = nn.Conv2d(c1, sum(widths), 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.conv(x).split(self.widths, 1)


class CBFuse(nn.Module):
    """The sum of the last input and one map of each `CBLinear` before it, resized by nearest neighbours.

    The last input is a map (b, c, h, w), as is the output; the maps that `index` chooses must have c channels too.
    """

    def __init__(self, index: Sequence[int]) -> None:
        super().__init__()
        self.index = list(index)

    def forward(self, inputs: Sequence[Any]) -> Tensor:
        *sources, last = inputs
        for number, maps in zip(self.index, sources, strict=True):
            last = last + functional.interpolate(maps[number], size=last.shape[2:], mode="nearest")
        return last


class Concat(nn.Module):
    """Concatenation of maps along one dimension, the channels by default."""

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self.dimension = dimension

    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.cat(maps, self.dimension)


class Head(nn.Module):
    """The last layer of a network, whose class decides the task. A subclass that inherits its parent's `description` is
    accepted in place of the parent."""

    description: ClassVar[str]  # name in messages, such as "detection head"
    example: ClassVar[str]  # row of a model YAML that names it
    any_size: ClassVar[bool] = False  # whether image sides need not be multiples of the largest stride

    def set_strides(self, strides: Sequence[float]) -> None:
        """Set values that depend on the strides of the input maps in pixels, such as initial biases; none by default.

        Called once, when the model is built. The stride of an input that is not a map is 1.
        """


class Proto(nn.Module):
    """Mask prototypes (YOLACT, arXiv 1904.02689): (b, c1, h, w) to (b, masks, 2 h, 2 w)."""

    def __init__(self, c1: int, hidden: int = 256, masks: int = 32) -> None:
        super().__init__()
        self.cv1 = Conv(c1, hidden, 3)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.cv2 = Conv(hidden, hidden, 3)
        self.cv3 = Conv(hidden, masks)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(self.cv2(self.upsample(self.cv1(x))))


class Classify(Head):
    """The classification head: a 1x1 convolution to 1280 channels, their mean over the map, dropout, a linear layer.

    (b, c1, h, w) to logits (b, classes).
    """

    description = "classification head"
    example = "[-1, 1, Classify, [nc]]"
    any_size = True

    def __init__(self, c1: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = Conv(c1, CLASSIFY_CHANNELS)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(CLASSIFY_CHANNELS, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(self.pool(self.conv(x)).flatten(1)))
