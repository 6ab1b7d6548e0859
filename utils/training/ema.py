"""The exponential moving average of a model: what is validated and saved."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

DECAY, RAMP = 0.9999, 2000  # YOLOv5's: decay x (1 - exp(-updates / ramp)), so that early averages follow quickly


class ModelEMA:
    """A copy of the model in fp32 whose floating tensors, buffers included, trail the model's. One on every process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        self.updates = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self, model: nn.Module, taken: Tensor | bool = True) -> None:
        """Move towards `model` by one optimizer step; where it was not `taken`, () on the model's device, stay."""
        self.updates += taken
        share = ((1 - DECAY) + DECAY * (-self.updates / RAMP).exp()) * taken  # 1 - decay, exact where that is small
        own, live = self._floating(self.model), self._floating(model)
        ways = torch._foreach_sub(live, own)
        torch._foreach_mul_(ways, share)
        torch._foreach_add_(own, ways)

    @staticmethod
    def _floating(model: nn.Module) -> list[Tensor]:
        return [value.detach().float() for value in model.state_dict().values() if value.is_floating_point()]
