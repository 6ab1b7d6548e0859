"""A layer of your own, which own_layer.yaml names in its rows: `python train.py --cfg examples/own_layer.yaml
--layers examples/own_layer.py --weights '' --data my.yaml`; val.py, detect.py and export.py take --layers too.

Every class that extends nn.Module can be named in a row; the names of its parameters decide what it is called with
(docs/models.md). Channels and strides are measured, nothing else has to be written.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import Conv


class LargeKernel(nn.Module):
    """A convolution to c2 channels, then n blocks of a depthwise 7x7 and two pointwise convolutions (arXiv 2201.03545).

    c1, c2: channels of the input and, scaled by width_multiple, of the output. n: the row's number, scaled by
    depth_multiple. (b, c1, h, w) to (b, c2, h, w).
    """

    def __init__(self, c1: int, c2: int, n: int = 1) -> None:
        super().__init__()
        self.enter = Conv(c1, c2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c2, c2, 7, padding=3, groups=c2), Conv(c2, 2 * c2), nn.Conv2d(2 * c2, c2, 1))
            for _ in range(n)
        )
        self.scale = nn.Parameter(torch.full((n, c2, 1, 1), 0.1))  # of each block: they begin near the identity

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for scale, block in zip(self.scale, self.blocks, strict=True):
            x = x + scale * block(x)
        return x
