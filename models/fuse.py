"""Fold BatchNorm into the convolution before it, for inference. Called by models/ensemble.py and the tasks."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.layers import Conv, RepConv

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def fuse(model: M) -> M:
    """Return a copy of the model in evaluation mode, with the BatchNorms of `Conv`s and of nn.Sequential chains folded,
    and each `RepConv` merged into one convolution.

    BatchNorm(w x) = (g w / d) x + (b - g mean / d), with d = sqrt(variance + eps), is one convolution. Outputs are
    equal up to rounding; state-dict keys differ.
    """
    fused = copy.deepcopy(model).eval()
    for module in list(fused.modules()):
        if isinstance(module, Conv):
            _fold(module, "conv", "bn")
        elif isinstance(module, nn.Sequential):
            for first, second in pairwise(list(module._modules)):
                _fold(module, first, second)
    for module in fused.modules():
        if isinstance(module, RepConv):
            _join(module)
    return fused


def _join(layer: RepConv) -> None:
    """Merge the two convolutions of a `RepConv` with folded BatchNorms into one, computed in float64.

    The 1x1 kernel is added to the middle of the larger kernel.
    """
    assert isinstance(layer.conv1, Conv)
    assert isinstance(layer.conv2, Conv)
    large, small = layer.conv1.conv, layer.conv2.conv
    if large.bias is None or small.bias is None:  # a BatchNorm without running statistics
        return
    border = large.kernel_size[0] // 2
    added = functional.pad(small.weight.double(), (border,) * 4)
    large.weight.copy_(large.weight.double() + added)
    large.bias.copy_(large.bias.double() + small.bias.double())
    layer.conv1, layer.conv2 = large, None


def _fold(parent: nn.Module, first: str, second: str) -> None:
    """Fold child `second` into `first` if they are a convolution and a BatchNorm with running statistics.

    The weights are computed in float64; they keep their dtype and memory format.
    """
    convolution, norm = getattr(parent, first), getattr(parent, second)
    if type(convolution) is not nn.Conv2d or not isinstance(norm, nn.BatchNorm2d) or norm.running_var is None:
        return
    dtype, contiguous = convolution.weight.dtype, convolution.weight.is_contiguous()
    folded = fuse_conv_bn_eval(convolution.double(), norm.double()).to(dtype)
    setattr(parent, first, folded.to(memory_format=torch.contiguous_format if contiguous else torch.channels_last))
    setattr(parent, second, nn.Identity())
