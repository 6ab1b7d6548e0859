"""The exponential moving average of a model: what is validated and saved."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

DECAY, RAMP = 0.9999, 2000  # YOLOv5's: decay x (1 - exp(-updates / ramp)), so that early averages follow quickly


class ModelEMA:
    """A copy of the model in fp32 whose floating tensors, buffers included, trail the model's. One on every process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards `model` by one optimizer step."""
        self.updates += 1
        decay = DECAY * (1 - math.exp(-self.updates / RAMP))
        own, live = self._floating(self.model), self._floating(model)
        torch._foreach_lerp_(own, live, 1 - decay)

    @staticmethod
    def _floating(model: nn.Module) -> list[Tensor]:
        return [value.detach().float() for value in model.state_dict().values() if value.is_floating_point()]
