"""The last layer of a detector of oriented boxes. Imported by the task, so that a model YAML may name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.layers import Conv, Head
from models.tasks.contract import Model, upcast_half
from models.yolo import LAYERS

from .geometry import canonical, unspun

BOX_OUTPUTS = 6  # of a cell, before its class scores: centre, size, cos and sin of twice the angle
TYPICAL_STRIDES = 4.0  # side of a box with a raw size of 0, in strides of its level
MAX_LOG_SIZE = 5.0  # of a side in typical ones
EXPECTED_OBJECTS = 5  # of an image of 640 px, on each level: the class scores of an untrained head


class Cells(NamedTuple):
    """The raw outputs of all n cells of an image, by level, row and column, and where they are."""

    raw: Tensor  # (b, n, 6 + classes), at least float32
    places: Tensor  # (n, 3): x and y of the cell's centre, and its stride, pixels


class OrientedDetect(Head):
    """An anchor-free head: per cell a box with an angle, and class scores that are confidences.

    nc: classes. channels: of the input maps.
    """

    description = "head for oriented boxes"
    example = "[[17, 20, 23], 1, OrientedDetect, [nc]]"
    stride: Tensor  # (levels,) pixels per cell

    def __init__(self, nc: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.nc = nc
        self.register_buffer("stride", torch.ones(len(channels)), persistent=False)
        self.levels = nn.ModuleList(
            nn.Sequential(Conv(c1, c1, 3), nn.Conv2d(c1, BOX_OUTPUTS + nc, 1)) for c1 in channels
        )

    @torch.no_grad()
    def set_strides(self, strides: Sequence[float]) -> None:
        """Set the strides of the levels, in pixels, and the biases from which a training from scratch starts."""
        self.stride.copy_(torch.tensor(strides))
        for level, stride in zip(self.levels, strides, strict=True):
            bias = level.get_parameter("1.bias")
            bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0] + [0.0] * self.nc))
            bias[BOX_OUTPUTS:] = torch.tensor(EXPECTED_OBJECTS / self.nc / (640 / stride) ** 2).log()

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Map (b, channels, h, w) of each level to raw outputs (b, 6 + classes, h, w)."""
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]

    def cells(self, outputs: Sequence[Tensor]) -> Cells:
        """Join the raw outputs of the levels."""
        rows = [raw.flatten(2).transpose(1, 2) for raw in outputs]
        strides = self.stride.to(outputs[0].device, torch.float32)
        places = [_places(raw, stride) for raw, stride in zip(outputs, strides, strict=True)]
        return Cells(upcast_half(torch.cat(rows, 1)), torch.cat(places))


def _places(raw: Tensor, stride: Tensor) -> Tensor:
    """Return the places of the cells of a map (b, c, h, w): (h x w, 3)."""
    height, width = raw.shape[2:]
    x = (torch.arange(width, device=raw.device, dtype=torch.float32) + 0.5) * stride
    y = (torch.arange(height, device=raw.device, dtype=torch.float32) + 0.5) * stride
    parts = x[:, None], y[:, None, None], stride[None]
    return torch.cat([part.expand(height, width, 1) for part in parts], 2).view(-1, 3)


def decode(raw: Tensor, places: Tensor) -> Tensor:
    """Return the boxes (..., 6), as `spun` does, of raw outputs (..., 6 or more) at places (..., 3)."""
    stride, direction = places[..., 2:], raw[..., 4:BOX_OUTPUTS]
    centre = places[..., :2] + raw[..., :2] * stride
    size = raw[..., 2:4].clamp(-MAX_LOG_SIZE, MAX_LOG_SIZE).exp() * stride * TYPICAL_STRIDES
    length = (direction.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return torch.cat((centre, size, direction / length), -1)


class DecodedOriented(nn.Module):
    """The module of an exported file: a detector with its decoding, in fp32."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert isinstance(model.head, OrientedDetect)
        self.model, self.head = model, model.head

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, 3, h, w) to boxes (b, n, 5 + classes): box in pixels, see geometry.py, and confidences."""
        raw, places = self.head.cells(self.model(images))
        return torch.cat((canonical(unspun(decode(raw, places))), raw[..., BOX_OUTPUTS:].sigmoid()), 2)


LAYERS["OrientedDetect"] = OrientedDetect
