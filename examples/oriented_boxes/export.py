"""The module of an exported file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.tasks.contract import Model

from .geometry import canonical, unspun
from .head import BOX_OUTPUTS, OrientedDetect, decode


class DecodedOriented(nn.Module):
    """A detector with its decoding, in fp32."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert isinstance(model.head, OrientedDetect)
        self.model, self.head = model, model.head

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, 3, h, w) to boxes (b, n, 5 + classes): box in pixels, see geometry.py, and confidences."""
        raw, places = self.head.cells(self.model(images))
        return torch.cat((canonical(unspun(decode(raw, places))), raw[..., BOX_OUTPUTS:].sigmoid()), 2)
