"""Dropout that does not depend on the number of processes: each draws for the whole batch and takes its own part."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from utils.place import place


def draw_for_all(model: nn.Module) -> None:
    """Replace what drops at random in `model` by layers whose choices are those of the batch of all processes.

    The choices follow from torch's seed, which must be the same on all processes. Names and parameters stay.
    """
    stochastic_depth = getattr(sys.modules.get("torchvision.ops.stochastic_depth"), "StochasticDepth", ())
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # under each of its names
            if type(child) is nn.Dropout and child.p:
                module.register_module(name, GlobalDropout(child.p, rows=False).train(child.training))
            elif isinstance(child, stochastic_depth) and child.p and child.mode == "row":
                module.register_module(name, GlobalDropout(child.p, rows=True).train(child.training))


class GlobalDropout(nn.Module):
    """Zeroes each value with the probability `p`, or with `rows` each image, and scales up the rest.

    Input and output (b, ...): this process's part of the batch, one after another in the order of the ranks.
    """

    def __init__(self, p: float, rows: bool) -> None:
        super().__init__()
        self.p, self.rows = p, rows

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        own, here = len(input), place()
        shape = [own * here.processes, *([1] * (input.dim() - 1) if self.rows else input.shape[1:])]
        kept = torch.empty(shape, device=input.device).bernoulli_(1 - self.p)[own * here.rank : own * (here.rank + 1)]
        return input * (kept / max(1 - self.p, 1e-12)).to(input.dtype)
