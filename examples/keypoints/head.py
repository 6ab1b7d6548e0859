"""The last layer of a heat map model. Imported by the task, so that a model YAML may name it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import Head
from models.yolo import LAYERS


class Heatmap(Head):
    """A 1x1 convolution: maps (b, c1, h, w) to logits (b, nc, h, w). c1: input channels. nc: classes."""

    description = "heat map head"
    example = "[-1, 1, Heatmap, [nc]]"

    def __init__(self, c1: int, nc: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, nc, 1)
        assert self.conv.bias is not None
        with torch.no_grad():
            self.conv.bias.fill_(-4.0)  # keypoints are rare

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.conv(maps)
        return logits


LAYERS["Heatmap"] = Heatmap
