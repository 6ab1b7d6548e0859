"""Parameter groups, skipped steps, and the schedule by YOLOv5's formulas."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from utils.config.hyperparameters import Recipe
from utils.distributed.logical import start_momentum
from utils.training.optimizer import Schedule, build_optimizer, grouped_parameters, step_if

# Groups


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )


def names(network: nn.Module, group: dict) -> list[str]:
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    return sorted(known[id(parameter)] for parameter in group["params"])


def test_groups(network: nn.Module) -> None:
    biases, weights, norms = build_optimizer(network, "SGD", HYP, None, 64).param_groups
    assert names(network, biases) == ["0.bias", "1.1.bias", "2.bias", "3.bias", "4.bias"]
    assert names(network, weights) == ["0.weight", "1.0.weight", "4.weight"]
    assert names(network, norms) == ["1.1.weight", "2.weight", "3.weight"]
    assert [group["weight_decay"] for group in (biases, weights, norms)] == [0, HYP.decay(64), 0]


HYP = Recipe(lr0=0.01, momentum=0.9, weight_decay=0.1)


def test_a_shared_parameter_is_in_one_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = build_optimizer(model, "SGD", HYP, None, 64, {"1.weight": 0.1})
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3


def test_other_parameters_decay() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(3))

    assert [len(parameters) for parameters in grouped_parameters(Scale()).values()] == [0, 1, 0]


def test_optimizers(network: nn.Module) -> None:
    sgd = build_optimizer(network, "SGD", HYP, None, 64)
    assert isinstance(sgd, torch.optim.SGD)
    assert [(g["lr"], g["momentum"], g["nesterov"], g["weight_decay"]) for g in sgd.param_groups] == [
        (0.01, 0.9, True, decay) for decay in (0, 0.1, 0)
    ]
    for name in ("Adam", "AdamW"):
        optimizer = build_optimizer(network, name, HYP, None, 64)
        assert type(optimizer).__name__ == name
        assert [(g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
            ((0.9, 0.999), decay) for decay in (0, 0.1, 0)
        ]


# Factors of the learning rate

FACTORS = {"0.weight": 0.1, "0.bias": 0.1, "1.1.weight": 0.1, "4.weight": 2.0}


def test_groups_by_factor(network: nn.Module) -> None:
    """The smallest factor first, biases, weights and norms of each; none is empty, as DeepSpeed requires."""
    assert [
        (key, names(network, {"params": group})) for key, group in grouped_parameters(network, FACTORS).items()
    ] == [
        ((0.1, 0), ["0.bias"]),
        ((0.1, 1), ["0.weight"]),
        ((0.1, 2), ["1.1.weight"]),
        ((1.0, 0), ["1.1.bias", "2.bias", "3.bias", "4.bias"]),
        ((1.0, 1), ["1.0.weight"]),
        ((1.0, 2), ["2.weight", "3.weight"]),
        ((2.0, 1), ["4.weight"]),
    ]


def test_rates_by_factor(network: nn.Module) -> None:
    optimizer = build_optimizer(network, "SGD", HYP, None, 64, FACTORS)
    schedule = replace(LINEAR, groups=tuple(grouped_parameters(network, FACTORS)))
    bias, weight, norm = schedule.apply(optimizer, 50).lrs
    assert [group["lr"] for group in optimizer.param_groups] == [
        *(0.1 * bias, 0.1 * weight, 0.1 * norm, bias, weight, norm, 2 * weight)
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.1, 0, 0, 0.1, 0, 0.1]


# Schedule

SLOW = Recipe(lr0=0.01, lrf=0.1, momentum=0.937, warmup_epochs=3, warmup_momentum=0.8, warmup_bias_lr=0.1)
LINEAR = Schedule(epochs=10, batches=50, cosine=False, hyp=SLOW)


def linear(batches: int = 50, **keys: float) -> Schedule:
    """Return the schedule with other hyperparameters."""
    return replace(LINEAR, batches=batches, hyp=replace(SLOW, **keys))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "bias", "others", "momentum"),
    [
        (0, 0.1, 0, 0.8),
        (30, 0.1 + (0.01 - 0.1) / 5, 0.01 / 5, 0.8 + 0.137 / 5),  # a fifth of 150 batches of warm-up
        (75, 0.1 + (0.0091 - 0.1) / 2, 0.0091 / 2, 0.8685),  # half of it, in epoch 1: 0.01 (0.9 x 0.9 + 0.1)
        (149, 0.1 + (0.0082 - 0.1) * 149 / 150, 0.0082 * 149 / 150, 0.8 + 0.137 * 149 / 150),
        (150, 0.0073, 0.0073, 0.937),  # epoch 3: 0.01 (0.7 x 0.9 + 0.1)
        (199, 0.0073, 0.0073, 0.937),  # the same to the epoch's end
        (200, 0.0064, 0.0064, 0.937),
        (499, 0.0019, 0.0019, 0.937),  # epoch 9, the last: 0.01 (0.1 x 0.9 + 0.1)
    ],
)
def test_linear(batch: int, bias: float, others: float, momentum: float) -> None:
    rates = LINEAR.at(batch)
    assert rates.lrs == pytest.approx((bias, others, others))
    assert rates.momentum == pytest.approx(momentum)


@pytest.mark.parametrize(
    ("epoch", "rate"), [(0, 0.01), (4, 0.01 - 0.009 * (1 - math.cos(0.4 * math.pi)) / 2), (5, 0.0055), (10, 0.001)]
)
def test_cosine(epoch: int, rate: float) -> None:
    cosine = replace(LINEAR, cosine=True)
    assert cosine.epoch_rate(epoch) == pytest.approx(rate)
    if epoch >= 3:
        assert cosine.at(epoch * 50 + 49).lrs == pytest.approx((rate,) * 3)


@pytest.mark.parametrize(
    ("epochs", "batches", "warmup"), [(3, 50, 150), (3, 10, 100), (0.1, 50, 100), (2.5, 61, 152), (0, 50, 0)]
)
def test_warmup_has_at_least_100_batches_or_none(epochs: float, batches: int, warmup: int) -> None:
    schedule = linear(batches, warmup_epochs=epochs, warmup_bias_lr=0.5)
    assert schedule.warmup == warmup
    full = schedule.at(warmup)
    assert full.lrs[0] == full.lrs[1] == schedule.epoch_rate(warmup // batches)
    assert full.momentum == 0.937
    if warmup:
        assert schedule.at(warmup - 1).lrs[0] > full.lrs[0] * 1.1


@pytest.mark.parametrize(("share", "warmup"), [(0, 150), (0.1, 50), (1, 150)])
def test_warmup_is_at_most_a_share_of_the_run(share: float, warmup: int) -> None:
    schedule = linear(warmup_share=share)
    assert schedule.warmup == warmup


@pytest.mark.parametrize(("rise", "peak"), [(0, 0.01), (0.0002, 0.01), (0.0001, 0.005)])
def test_a_short_warmup_lowers_the_rate(rise: float, peak: float) -> None:
    """The rate rises by at most `warmup_rise` in a batch; a warm-up of 50 batches reaches 50 times that."""
    schedule = linear(warmup_share=0.1, warmup_rise=rise)
    assert (schedule.warmup, schedule.peak) == (50, peak)
    assert schedule.at(25).lrs[1] == pytest.approx(peak / 2)
    assert schedule.at(50).lrs == pytest.approx([0.91 * peak] * 3)  # epoch 1: 0.9 x 0.9 + 0.1


def test_the_schedule_is_a_pure_function_of_the_batch() -> None:
    forwards = [LINEAR.at(batch) for batch in range(500)]
    order = list(range(500))
    random.Random(0).shuffle(order)
    assert all(LINEAR.at(batch) == forwards[batch] for batch in order)
    with pytest.raises(FrozenInstanceError):
        LINEAR.epochs = 1  # type: ignore[misc]


def test_rates_are_set_in_the_optimizer(network: nn.Module) -> None:
    sgd = build_optimizer(network, "SGD", Recipe(momentum=0.937, weight_decay=0.0), None, 64)
    assert LINEAR.apply(sgd, 30) == LINEAR.at(30)
    assert [group["lr"] for group in sgd.param_groups] == list(LINEAR.at(30).lrs)
    assert [group["momentum"] for group in sgd.param_groups] == [LINEAR.at(30).momentum] * 3
    adam = build_optimizer(network, "Adam", Recipe(momentum=0.937, weight_decay=0.0), None, 64)
    LINEAR.apply(adam, 30)
    assert [group["lr"] for group in adam.param_groups] == list(LINEAR.at(30).lrs)
    assert [group["betas"] for group in adam.param_groups] == [(0.937, 0.999)] * 3
    assert all("momentum" not in group for group in adam.param_groups)


# Skipped steps


class Prepared:
    """An optimizer as prepared by Accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.step = optimizer, optimizer.step


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_skipped_step_changes_nothing(network: nn.Module, name: str) -> None:
    """Neither does the first one, nor does it affect the next."""
    other = copy.deepcopy(network)
    plain, guarded = (
        build_optimizer(model, name, Recipe(lr0=0.1, momentum=0.9, weight_decay=0.01), None, 64)
        for model in (other, network)
    )
    prepared = Prepared(guarded)
    start_momentum(prepared)
    gradients = [torch.randn_like(parameter) for parameter in network.parameters()]
    for taken in (False, True, False, True):
        for model, broken in ((network, not taken), (other, False)):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = torch.full_like(gradient, float("nan")) if broken else gradient.clone()
        assert step_if(prepared, torch.tensor(taken)).item() is taken
        if taken:
            plain.step()
    for actual, expected in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(actual, expected)
        for key, value in plain.state[expected].items():
            assert torch.equal(guarded.state[actual][key], value), key


def test_frozen_parameters_have_no_momentum(network: nn.Module) -> None:
    network[0].requires_grad_(False)
    optimizer = build_optimizer(network, "SGD", Recipe(lr0=0.1, momentum=0.9, weight_decay=0.01), None, 64)
    start_momentum(Prepared(optimizer))
    assert network[0].weight not in optimizer.state
    assert not optimizer.state[network[4].weight]["momentum_buffer"].any()
