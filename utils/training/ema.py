"""The exponential moving average (EMA) of a model, which is validated and saved. Made by train.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from utils.console import log
from utils.errors import plural

if TYPE_CHECKING:
    from models.tasks.contract import Model

DECAY = 0.9999
RAMP_UPDATES = 2000  # YOLOv5's decay is DECAY x (1 - exp(-updates / ramp)), so that early averages follow quickly


class ModelEMA:
    """An average of the model's floating-point tensors, including buffers, in fp32. Every process holds one.

    Args:
        share: share of the run's steps that the average spans at its end; 0 keeps YOLOv5's ramp, see `ramp_of`
        updates: number of optimizer steps of the run
    """

    model: Model

    def __init__(self, model: Model, share: float = 0.0, updates: int = 0) -> None:
        self.ramp = ramp_of(share, updates)
        if self.ramp < RAMP_UPDATES:
            steps = plural(round(self.ramp), "step")
            log(f"EMA: a ramp of {steps} instead of {RAMP_UPDATES}, because the run has only {updates:,}")
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        self.replicas: Sequence[nn.Module] = [self.model]
        self._layers: dict[nn.Module, list[nn.Module]] = {}  # of each model
        self.updates = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self, *models: nn.Module, taken: Tensor | bool = True) -> None:
        """Update the average after an optimizer step.

        Args:
            models: models of this process's logical processes, in the order of `replicas`; their parameters are equal
            taken: whether the step was taken, bool () on the model's device; False changes nothing
        """
        self.updates += taken
        # 1 - decay, written so that it is exact if it is small
        share = ((1 - DECAY) + DECAY * (-self.updates / self.ramp).exp()) * taken
        averages, live = self._floating(self.replicas), self._floating(models)
        differences = torch._foreach_sub(live, averages)
        torch._foreach_mul_(differences, share)
        torch._foreach_add_(averages, differences)

    def state(self) -> dict[str, Any]:
        """Return the averaged tensors and the number of updates."""
        return {"ema": self.model.state_dict(), "updates": int(self.updates)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Load what `state` returned; `saved` may contain more."""
        self.model.load_state_dict(saved["ema"])
        self.updates.fill_(saved["updates"])

    def _floating(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the floating-point tensors of the first model's state, and such buffers of the others.

        `state_dict` would take the host a tenth of a training step on a GPU, so the layers are listed once.
        """
        floating: list[Tensor] = []
        for model in models:
            tensors: list[Tensor | None] = []
            if model not in self._layers:
                self._layers[model] = [each for each in model.modules() if each._parameters or each._buffers]
            for layer in self._layers[model]:
                if model is models[0]:
                    tensors += layer._parameters.values()
                hidden = layer._non_persistent_buffers_set
                tensors += [value for name, value in layer._buffers.items() if name not in hidden]
            once = {id(value): value for value in tensors if value is not None}  # they may stand under several modules
            floating += [value for value in once.values() if value.is_floating_point()]
        return [value if value.dtype == torch.float32 else value.float() for value in floating]


def ramp_of(share: float, updates: int) -> float:
    """Return the ramp with which the average spans `share` of a run's `updates` at its end: 1 / (1 - decay) updates.

    The ramp is at most `RAMP_UPDATES`; a share of 0 means `RAMP_UPDATES`.
    """
    return min(updates / max(math.log(max(share * updates, 1)), 1), RAMP_UPDATES) if share else RAMP_UPDATES
