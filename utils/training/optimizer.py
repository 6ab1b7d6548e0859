"""Parameter groups, the optimizer, and the schedule as a pure function of the step. Called by train.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from utils.config.hyperparameters import Recipe
from utils.console import log
from utils.errors import plural

NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
MIN_WARMUP_BATCHES = 100
BIAS, WEIGHT, NORM = range(3)  # order of the groups, and of x/lr0, x/lr1, x/lr2 in results.csv
PLAIN_GROUPS = ((1.0, BIAS), (1.0, WEIGHT), (1.0, NORM))  # the groups without `lr_factor`
NO_FACTORS: Mapping[str, float] = {}

Factors = Mapping[str, float]  # factor of the learning rate by parameter name; 1 for a parameter that is not in it
GroupKey = tuple[float, int]  # factor of the learning rate; BIAS, WEIGHT or NORM


def grouped_parameters(model: nn.Module, factors: Factors = NO_FACTORS) -> dict[GroupKey, list[nn.Parameter]]:
    """Return the parameters of each group, in the order of the groups.

    Without factors the groups are biases, weights, and weights of normalisation layers, and may be empty. With factors
    there are up to three groups for each factor, the smallest factor first; none is empty.
    """
    steps = sorted({1.0, *factors.values()})
    groups: dict[GroupKey, list[nn.Parameter]] = {(step, kind): [] for step in steps for kind in (BIAS, WEIGHT, NORM)}
    listed: set[nn.Parameter] = set()  # a parameter may stand under several modules
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            kind = BIAS if name.endswith("bias") else NORM if isinstance(module, NORM_LAYERS) else WEIGHT
            if parameter not in listed:
                groups[factors.get(name, 1.0), kind].append(parameter)
            listed.add(parameter)
    return {key: parameters for key, parameters in groups.items() if parameters or not factors}


def build_optimizer(
    model: nn.Module, name: str, hyp: Recipe, known: float | None, images: int, factors: Factors = NO_FACTORS
) -> torch.optim.Optimizer:
    """Build SGD (with Nesterov momentum), Adam or AdamW over the groups; only weights decay.

    `momentum` is Adam's first beta.

    Args:
        known: share of the classes that the initial weights know, see `Recipe.weights_factor`
        images: number of images of an optimizer step
        factors: factors of the learning rates, by parameter name
    """
    lr, decay = hyp.lr0 * hyp.weights_factor(known), hyp.decay(images)
    groups = [
        {"params": parameters, "weight_decay": decay if kind == WEIGHT else 0.0}
        for (_, kind), parameters in grouped_parameters(model, factors).items()
    ]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, momentum=hyp.momentum, nesterov=True, fused=True)
    kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]
    return kind(groups, lr=lr, betas=(hyp.momentum, 0.999), fused=True)


def step_if(optimizer: Any, finite: Tensor) -> Tensor:
    """Take a step of a fused optimizer, prepared by Accelerate, if `finite`, bool (); return `finite`.

    The kernels read `finite` on the device, like the `found_inf` of a gradient scaler, so the host does not wait.
    """
    inner = optimizer.optimizer
    inner.found_inf = (~finite).float()
    optimizer.step()
    del inner.found_inf
    return finite


class Rates(NamedTuple):
    """Learning rates of biases, weights and norms, and momentum."""

    lrs: tuple[float, float, float]
    momentum: float


@dataclass(frozen=True)
class Schedule:
    """Learning rates and momentum as a pure function of the batch number.

    The rate falls from epoch to epoch, linearly or as a cosine, from `peak` to `peak` x lrf. Warm-up interpolates
    linearly: biases start at `warmup_bias_lr`, the other groups at 0, the momentum at `warmup_momentum`.
    """

    epochs: int
    batches: int  # batches per epoch
    cosine: bool
    hyp: Recipe  # with the rates of this run
    groups: tuple[GroupKey, ...] = PLAIN_GROUPS  # the optimizer's groups, in order

    @classmethod
    def of(
        cls,
        hyp: Recipe,
        known: float | None,
        epochs: int,
        batches: int,
        cosine: bool,
        model: nn.Module,
        factors: Factors = NO_FACTORS,
    ) -> Schedule:
        """Return the schedule of a run; log what is lower or shorter than usual.

        The arguments are those of `build_optimizer`.
        """
        scale = hyp.weights_factor(known)
        hyp = replace(hyp, lr0=hyp.lr0 * scale, warmup_bias_lr=hyp.warmup_bias_lr * scale)
        schedule = cls(epochs, batches, cosine, hyp, tuple(grouped_parameters(model, factors)))
        if schedule.warmup < (usual := replace(schedule, hyp=replace(hyp, warmup_share=0.0)).warmup):
            share = f"{hyp.warmup_share:.0%} of the run's {epochs * batches:,}"
            log(f"warm-up: {plural(schedule.warmup, 'batch')} instead of {usual}, limited to {share}")
        if schedule.peak < hyp.lr0:
            lower = f"learning rate {schedule.peak:.2g} instead of {hyp.lr0:.2g}"
            log(f"{lower}, as the warm-up is too short for more")
        return schedule

    @property
    def warmup(self) -> int:
        """Number of warm-up batches: 0, or at least `MIN_WARMUP_BATCHES`, but at most `warmup_share` of all batches."""
        warmup = max(round(self.hyp.warmup_epochs * self.batches), MIN_WARMUP_BATCHES) if self.hyp.warmup_epochs else 0
        share = self.hyp.warmup_share
        return min(warmup, round(share * self.epochs * self.batches)) if share else warmup

    @property
    def peak(self) -> float:
        """The rate after the warm-up: lr0, but no more than `warmup_rise` for each batch of the warm-up."""
        lr0, rise = self.hyp.lr0, self.hyp.warmup_rise
        return min(lr0, max(self.warmup, 1) * rise) if rise else lr0

    def epoch_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch without warm-up."""
        if self.cosine:
            share = (1 - math.cos(epoch * math.pi / self.epochs)) / 2 * (self.hyp.lrf - 1) + 1
        else:
            share = (1 - epoch / self.epochs) * (1 - self.hyp.lrf) + self.hyp.lrf
        return self.peak * share

    def at(self, batch: int) -> Rates:
        """Return the rates of a batch, counted from the start of the run."""
        hyp, rate = self.hyp, self.epoch_rate(batch // self.batches)
        if batch >= self.warmup:
            return Rates((rate, rate, rate), hyp.momentum)
        done = batch / self.warmup
        bias = _interpolate(hyp.warmup_bias_lr, rate, done)
        return Rates((bias, rate * done, rate * done), _interpolate(hyp.warmup_momentum, hyp.momentum, done))

    def apply(self, optimizer: torch.optim.Optimizer, batch: int) -> Rates:
        """Set the rates of a batch in the optimizer and return them. Adam's betas are not warmed up."""
        rates = self.at(batch)
        for group, (factor, kind) in zip(optimizer.param_groups, self.groups, strict=True):
            group["lr"] = rates.lrs[kind] * factor
            if "momentum" in group:
                group["momentum"] = rates.momentum
        return rates


def _interpolate(start: float, end: float, share: float) -> float:
    return start + (end - start) * share
