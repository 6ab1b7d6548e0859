"""Dropout for any number of processes: each draws the mask of the global batch. Called by model.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.ranks import ranks


def synchronise_dropout(model: nn.Module) -> None:
    """Replace the dropout and stochastic depth layers of `model` by `GlobalDropout`, with the same names, in place."""
    stochastic_depth = getattr(sys.modules.get("torchvision.ops.stochastic_depth"), "StochasticDepth", ())
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # a shared layer under each of its names
            layer: Any = child
            rows = isinstance(child, stochastic_depth) and layer.mode == "row"
            maps = isinstance(child, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
            if (rows or maps or type(child) is nn.Dropout) and layer.p:
                module.register_module(name, GlobalDropout(layer.p, rows, maps).train(layer.training))


class GlobalDropout(nn.Module):
    """Dropout with probability `p` of values, of whole images (`rows`), or of channels of an image (`maps`).

    Input and output are (b, ...): the slice of process `number` of `processes` of the global batch.
    """

    generator: torch.Generator | None = None  # draws the masks; None takes torch's own generator

    def __init__(self, p: float, rows: bool = False, maps: bool = False) -> None:
        super().__init__()
        self.p, self.rows, self.maps = p, rows, maps
        self.number, self.processes = ranks()[:2]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        images = len(input)
        drawn_dims = 1 if self.rows else 2 if self.maps else input.dim()  # the mask is constant over the other axes
        shape = [images * self.processes, *input.shape[1:drawn_dims], *[1] * (input.dim() - drawn_dims)]
        mask = torch.empty(shape, device=input.device).bernoulli_(1 - self.p, generator=self.generator)
        mask = mask[images * self.number : images * (self.number + 1)]
        return input * (mask / max(1 - self.p, 1e-12)).to(input.dtype)
