"""Parameter groups, the optimizer, and the schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from utils.errors import UserError

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
LEAST_WARMUP = 100  # batches
BIAS, WEIGHT, NORM = range(3)  # the groups' order, and that of results.csv's x/lr0, x/lr1, x/lr2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Biases, weights and weights of normalisation layers; only the weights decay."""
    groups: list[list[nn.Parameter]] = [[], [], []]
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = BIAS if name.endswith("bias") else NORM if isinstance(module, NORMS) else WEIGHT
            groups[kind].append(parameter)
    decays = (0.0, weight_decay, 0.0)
    return [{"params": params, "weight_decay": decay} for params, decay in zip(groups, decays, strict=True)]


def numbered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order of the groups, by which torch numbers them in an optimizer's state."""
    return [parameter for group in parameter_groups(model, 0.0) for parameter in group["params"]]


def build_optimizer(
    model: nn.Module, name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """SGD (with Nesterov momentum), Adam or AdamW over the three groups; `momentum` is Adam's first beta."""
    groups = parameter_groups(model, weight_decay)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True, fused=True)
    kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]
    return kind(groups, lr=lr, betas=(momentum, 0.999), fused=True)


def start_momentum(optimizer: Any) -> None:
    """Give SGD its momentum, zero, before its first step: torch's own would be unset where that one is skipped.

    optimizer: as Accelerate has prepared it.
    """
    inner = optimizer.optimizer
    for group in inner.param_groups if isinstance(inner, torch.optim.SGD) else ():
        for parameter in group["params"]:
            if parameter.requires_grad and group["momentum"]:
                inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def step_if(optimizer: Any, finite: Tensor) -> Tensor:
    """A step of a fused optimizer, as Accelerate has prepared it, that does nothing unless `finite`: (), bool.

    The kernels look at it on the device, as they do at what a gradient scaler has found. Returns `finite`.
    """
    inner = optimizer.optimizer
    inner.found_inf = (~finite).float()
    optimizer.step()
    del inner.found_inf
    return finite


def freeze(model: nn.Module, layers: Sequence[int]) -> list[int]:
    """Stop the learning of the first N layers, for (N,), of all but the last N, for (-N,), or of just these, for
    several; which they are.

    A model's layers are the children of its `model`, a sequence, or else its own. Raises `UserError` for a number that
    is no layer of it.
    """
    layered = dict(model.named_children()).get("model", model)
    rows = list(layered.children())
    count = len(rows)
    if len(layers) > 1:
        chosen = list(layers)
    elif layers[0] >= 0:
        chosen = list(range(layers[0]))
    else:
        chosen = list(range(count + layers[0])) if -layers[0] <= count else list(layers)
        for parameter in layered.parameters(recurse=False):  # of no layer, such as a transformer's class token
            parameter.requires_grad_(False)
    for number in chosen:
        if not 0 <= number < count:
            raise UserError(
                f"--freeze {' '.join(map(str, layers))}: the model has layers 0 to {count - 1}, no {number}"
            )
        rows[number].requires_grad_(False)
    return chosen


class Rates(NamedTuple):
    """What the optimizer is given for a step: a learning rate per group, and the momentum."""

    lrs: tuple[float, float, float]
    momentum: float


@dataclass(frozen=True)
class Schedule:
    """Learning rates and momentum by the number of the batch: nothing is stepped, so nothing can be stepped twice.

    The rate falls from epoch to epoch, linearly or as a cosine, from lr0 to lr0 x lrf. In the first batches it is
    blended in: biases come down from `warmup_bias_lr`, the others up from 0, the momentum up from `warmup_momentum`.
    """

    epochs: int
    batches: int  # per epoch
    cosine: bool
    lr0: float
    lrf: float
    momentum: float
    warmup_epochs: float
    warmup_momentum: float
    warmup_bias_lr: float

    @property
    def warmup(self) -> int:
        """Batches of warm-up; at least 100 where there is one at all."""
        return max(round(self.warmup_epochs * self.batches), LEAST_WARMUP) if self.warmup_epochs else 0

    def epoch_rate(self, epoch: int) -> float:
        """The learning rate of an epoch, warm-up apart."""
        if self.cosine:
            share = (1 - math.cos(epoch * math.pi / self.epochs)) / 2 * (self.lrf - 1) + 1
        else:
            share = (1 - epoch / self.epochs) * (1 - self.lrf) + self.lrf
        return self.lr0 * share

    def at(self, batch: int) -> Rates:
        """The rates of a batch, counted from the start of the run."""
        rate = self.epoch_rate(batch // self.batches)
        if batch >= self.warmup:
            return Rates((rate, rate, rate), self.momentum)
        done = batch / self.warmup
        bias = _blend(self.warmup_bias_lr, rate, done)
        return Rates((bias, rate * done, rate * done), _blend(self.warmup_momentum, self.momentum, done))

    def apply(self, optimizer: torch.optim.Optimizer, batch: int) -> Rates:
        """Write the rates of a batch into the optimizer. Adam's betas are not warmed up."""
        rates = self.at(batch)
        for group, lr in zip(optimizer.param_groups, rates.lrs, strict=True):
            group["lr"] = lr
            if "momentum" in group:
                group["momentum"] = rates.momentum
        return rates


def _blend(start: float, end: float, share: float) -> float:
    return start + (end - start) * share
