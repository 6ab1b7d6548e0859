"""Dropout independent of the number of processes: each process draws the global batch's mask. Called by prepare."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from utils.distributed.ranks import ranks


def synchronise_dropout(model: nn.Module) -> None:
    """Replace the dropout and stochastic depth layers of `model`, in place, by `GlobalDropout`.

    torch's seed must be the same on all processes. The names of modules and parameters do not change.
    """
    stochastic_depth = getattr(sys.modules.get("torchvision.ops.stochastic_depth"), "StochasticDepth", ())
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # a shared layer under each of its names
            if type(child) is nn.Dropout and child.p:
                module.register_module(name, GlobalDropout(child.p, rows=False).train(child.training))
            elif isinstance(child, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)) and child.p:
                module.register_module(name, GlobalDropout(child.p, rows=False, maps=True).train(child.training))
            elif isinstance(child, stochastic_depth) and child.p and child.mode == "row":
                module.register_module(name, GlobalDropout(child.p, rows=True).train(child.training))


def draw_masks_of(model: nn.Module, number: int, processes: int, generator: torch.Generator) -> None:
    """Let the dropout layers of `model` draw the masks of logical process `number` of `processes` by `generator`."""
    for module in model.modules():
        if isinstance(module, GlobalDropout):
            module.number, module.processes, module.generator = number, processes, generator


class GlobalDropout(nn.Module):
    """Dropout with probability `p` of values, of whole images (`rows`), or of channels of an image (`maps`).

    Input and output are (b, ...): the slice of process `number` of `processes` of the global batch.

    Attributes:
        generator: draws the masks; None takes torch's own generator
    """

    generator: torch.Generator | None = None

    def __init__(self, p: float, rows: bool, maps: bool = False) -> None:
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
