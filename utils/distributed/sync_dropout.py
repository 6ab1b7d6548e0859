"""Dropout that does not depend on the number of processes: each draws for the whole batch and takes its own part."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from utils.distributed.ranks import place


def draw_for_all(model: nn.Module) -> None:
    """Replace what drops at random in `model` by layers whose choices are those of the batch of all processes.

    The choices follow from torch's seed, which must be the same on all processes. Names and parameters stay.
    """
    stochastic_depth = getattr(sys.modules.get("torchvision.ops.stochastic_depth"), "StochasticDepth", ())
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # under each of its names
            if type(child) is nn.Dropout and child.p:
                module.register_module(name, GlobalDropout(child.p, rows=False).train(child.training))
            elif isinstance(child, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)) and child.p:
                module.register_module(name, GlobalDropout(child.p, rows=False, maps=True).train(child.training))
            elif isinstance(child, stochastic_depth) and child.p and child.mode == "row":
                module.register_module(name, GlobalDropout(child.p, rows=True).train(child.training))


class GlobalDropout(nn.Module):
    """Zeroes each value with the probability `p`, with `rows` each image, with `maps` each channel of one, and
    scales up the rest.

    Input and output (b, ...): this process's part of the batch, one after another in the order of the ranks.
    """

    def __init__(self, p: float, rows: bool, maps: bool = False) -> None:
        super().__init__()
        self.p, self.rows, self.maps = p, rows, maps

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        own, here = len(input), place()
        apart = 1 if self.rows else 2 if self.maps else input.dim()  # dimensions in which it is drawn anew
        shape = [own * here.processes, *input.shape[1:apart], *[1] * (input.dim() - apart)]
        kept = torch.empty(shape, device=input.device).bernoulli_(1 - self.p)[own * here.rank : own * (here.rank + 1)]
        return input * (kept / max(1 - self.p, 1e-12)).to(input.dtype)
