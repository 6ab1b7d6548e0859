"""Parameter groups, the optimizer, the schedule as a pure function of the step, and the average of the weights (EMA).

Called by train.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from utils.config.flags import RECIPE_OPTIMIZERS
from utils.config.hyperparameters import Recipe
from utils.console import log
from utils.errors import UserError, plural
from utils.user_code import as_user_error, class_named

if TYPE_CHECKING:
    from models.tasks.contract import Model

NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
MIN_WARMUP_BATCHES = 100
BIAS, WEIGHT, NORM = range(3)  # order of the groups, and of x/lr0, x/lr1, x/lr2 in results.csv
PLAIN_GROUPS = ((1.0, BIAS), (1.0, WEIGHT), (1.0, NORM))  # the groups without `lr_factor`
NO_FACTORS: Mapping[str, float] = {}
DECAY = 0.9999  # of the average
RAMP_UPDATES = 2000  # YOLOv5's decay is DECAY x (1 - exp(-updates / ramp)), so that early averages follow quickly

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
    model: nn.Module, name: str, hyp: Recipe, pretrained_share: float | None, images: int, factors: Factors = NO_FACTORS
) -> torch.optim.Optimizer:
    """Build an optimizer over the groups, of which only weights decay: a class of torch.optim, or `module:Class`.

    SGD has Nesterov momentum, unless it is 0; `momentum` is the first beta of Adam and AdamW. All classes get
    `optimizer_args`. `pretrained_share` is the share in `Recipe.weights_factor`. Raises `UserError`.
    """
    lr, decay = hyp.lr0 * hyp.weights_factor(pretrained_share), hyp.decay(images)
    groups = [
        {"params": parameters, "weight_decay": decay if kind == WEIGHT else 0.0}
        for (_, kind), parameters in grouped_parameters(model, factors).items()
    ]
    adam: dict[str, Any] = {"betas": (hyp.momentum, 0.999), "fused": True}
    sgd = {"momentum": hyp.momentum, "nesterov": hyp.momentum > 0, "fused": True}
    arguments = {**{"SGD": sgd, "Adam": adam, "AdamW": adam}.get(name, {}), **hyp.optimizer_args}
    if wrong := {"params", "lr", "weight_decay", *(["momentum"] if name == "SGD" else [])} & {*hyp.optimizer_args}:
        raise UserError(f"optimizer_args has {min(wrong)}: give the hyperparameter lr0, weight_decay or momentum")
    with as_user_error(f"--optimizer {name}", f" (optimizer_args: {dict(hyp.optimizer_args)})"):
        optimizer_class: Any = class_named(name if ":" in name else f"torch.optim:{name}")
        if not issubclass(optimizer_class, torch.optim.Optimizer):
            raise TypeError("it does not extend torch.optim.Optimizer")
        return optimizer_class(groups, lr=lr, **arguments)


def log_optimizer(optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
    """Log the optimizer, its highest rate, the schedule's shape, and the number of trained tensors of each kind."""
    tensors = [0, 0, 0]
    for group, (_, kind) in zip(optimizer.param_groups, schedule.groups, strict=True):
        tensors[kind] += sum(parameter.requires_grad for parameter in group["params"])
    decay = max(group["weight_decay"] for group in optimizer.param_groups) * ("weight_decay" in optimizer.defaults)
    shape = "cosine" if schedule.cosine else "linear"
    log(
        f"optimizer: {type(optimizer).__name__}(lr={schedule.peak:.3g}, {shape}), {plural(tensors[WEIGHT], 'weight')} "
        f"with decay {decay:.3g}, {tensors[NORM]} without, {tensors[BIAS]} biases"
    )
    if (name := type(optimizer).__name__) not in RECIPE_OPTIMIZERS:
        log(f"the recipe's learning rate is for {', '.join(RECIPE_OPTIMIZERS)}: choose lr0 for {name} (--hyp.lr0)")


def step_if(optimizer: Any, finite: Tensor) -> Tensor:
    """Take a step of an optimizer, prepared by Accelerate, if `finite`, bool (); return `finite`.

    The kernels of a fused one read `finite` on the device, like the `found_inf` of a gradient scaler, so the host does
    not wait. Any other would apply what is not finite, so the host decides.
    """
    inner = optimizer.optimizer
    if not getattr(inner, "_step_supports_amp_scaling", False):  # what torch's GradScaler asks too
        if finite:
            optimizer.step()
        return finite
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
        pretrained_share: float | None,
        epochs: int,
        batches: int,
        cosine: bool,
        model: nn.Module,
        factors: Factors = NO_FACTORS,
    ) -> Schedule:
        """Return the schedule for an optimizer with these arguments; log what is lower or shorter than usual."""
        scale = hyp.weights_factor(pretrained_share)
        hyp = replace(hyp, lr0=hyp.lr0 * scale, warmup_bias_lr=hyp.warmup_bias_lr * scale)
        schedule = cls(epochs, batches, cosine, hyp, tuple(grouped_parameters(model, factors)))
        if schedule.warmup < replace(schedule, hyp=replace(hyp, warmup_share=0.0)).warmup:
            log(f"warm-up: {schedule.warmup:,} of {epochs * batches:,} iterations")
        if schedule.peak < hyp.lr0:
            log(f"learning rate lowered to {schedule.peak:.2g} because of the short warm-up")
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
        bias = hyp.warmup_bias_lr + (rate - hyp.warmup_bias_lr) * done
        momentum = hyp.warmup_momentum + (hyp.momentum - hyp.warmup_momentum) * done
        return Rates((bias, rate * done, rate * done), momentum)

    def apply(self, optimizer: torch.optim.Optimizer, batch: int) -> Rates:
        """Set the rates of a batch in the optimizer and return them. Only SGD's momentum is warmed up."""
        rates = self.at(batch)
        for group, (factor, kind) in zip(optimizer.param_groups, self.groups, strict=True):
            group["lr"] = rates.lrs[kind] * factor
            if "dampening" in group:  # SGD
                group["momentum"] = rates.momentum
        return rates


class ModelEMA:
    """An average of the model's floating-point tensors, including buffers, in fp32, which is validated and saved.

    Every process holds one. At its end it spans a `share` of the run's steps, 1 / (1 - decay); 0 keeps YOLOv5's ramp.
    """

    model: Model

    def __init__(self, model: Model, share: float = 0.0, updates: int = 0) -> None:
        self.ramp: float = RAMP_UPDATES
        if share:
            self.ramp = min(updates / max(math.log(max(share * updates, 1)), 1), RAMP_UPDATES)
        if self.ramp < RAMP_UPDATES:
            log(f"EMA: tau {self.ramp:.0f} (default {RAMP_UPDATES}) for a run of {plural(updates, 'step')}")
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        self.replicas: Sequence[nn.Module] = [self.model]
        self._layers: dict[nn.Module, list[nn.Module]] = {}  # of each model
        self.updates = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self, *models: nn.Module, taken: Tensor | bool = True) -> None:
        """Update the average after an optimizer step by the models of `replicas`, whose parameters are equal.

        A step that was not `taken`, bool () on the models' device, changes nothing.
        """
        self.updates += taken
        # 1 - decay, written so that it is exact if it is small
        weight = ((1 - DECAY) + DECAY * (-self.updates / self.ramp).exp()) * taken
        averages, live = self._floating(self.replicas), self._floating(models)
        if weight.device.type == "cpu":  # in a third of the time; on a GPU the host would wait for the weight
            torch._foreach_lerp_(averages, live, float(weight))
            return
        differences = torch._foreach_sub(live, averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)

    def state(self) -> dict[str, Any]:
        """Return the averaged tensors and the number of updates."""
        return {"ema": dict(self.model.state_dict()), "updates": int(self.updates)}

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
                self._layers[model] = [layer for layer in model.modules() if layer._parameters or layer._buffers]
            for layer in self._layers[model]:
                if model is models[0]:
                    tensors += layer._parameters.values()
                hidden = layer._non_persistent_buffers_set
                tensors += [value for name, value in layer._buffers.items() if name not in hidden]
            once = {id(value): value for value in tensors if value is not None}  # they may stand under several modules
            floating += [value.float() for value in once.values() if value.is_floating_point()]
        return floating
