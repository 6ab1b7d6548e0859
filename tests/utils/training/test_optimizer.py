"""Parameter groups, skipped steps, the schedule by YOLOv5's formulas, and the average of the weights (EMA)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from utils.config.hyperparameters import Recipe
from utils.errors import UserError
from utils.training.optimizer import ModelEMA, Schedule, build_optimizer, grouped_parameters, log_optimizer

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


HYP = Recipe(lr0=0.01, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "momentum", "values"),
    [
        ("SGD", 0.9, {"momentum": 0.9, "nesterov": True}),
        ("SGD", 0.0, {"momentum": 0.0, "nesterov": False}),
        ("Adam", 0.9, {"betas": (0.9, 0.999)}),
        ("AdamW", 0.0, {"betas": (0.0, 0.999)}),
    ],
)
def test_groups(network: nn.Module, name: str, momentum: float, values: dict[str, Any]) -> None:
    """Biases, weights and norms; only weights decay."""
    optimizer = build_optimizer(network, name, replace(HYP, momentum=momentum), None, 64)
    assert type(optimizer).__name__ == name
    assert [names(network, group) for group in optimizer.param_groups] == [
        ["0.bias", "1.1.bias", "2.bias", "3.bias", "4.bias"],
        ["0.weight", "1.0.weight", "4.weight"],
        ["1.1.weight", "2.weight", "3.weight"],
    ]
    for group, decay in zip(optimizer.param_groups, (0, 0.1, 0), strict=True):
        expected = {"lr": 0.01, "weight_decay": decay, **values}
        assert {key: group[key] for key in expected} == expected


def test_another_class_has_its_own_arguments(network: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """Its momentum is not warmed up; one line says whose the learning rate is."""
    hyp = replace(HYP, optimizer_args={"momentum": 0.3, "foreach": False})
    optimizer = build_optimizer(network, "torch.optim:RMSprop", hyp, None, 64)
    schedule = Schedule.of(hyp, None, 10, 200, True, network)
    schedule.apply(optimizer, 5)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.3] * 3
    log_optimizer(optimizer, schedule)
    assert "choose lr0 for RMSprop" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("NAdam", {"size": 1}, "--optimizer NAdam: TypeError: .*'size'"),
        ("SGD", {"momentum": 0.1}, "optimizer_args has momentum"),
        ("torch.optim:Muon", {}, "--optimizer torch.optim:Muon: ValueError: .*2D"),
        ("torch.nn:Linear", {}, "does not extend"),
    ],
)
def test_a_class_that_cannot_be_used(network: nn.Module, name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        build_optimizer(network, name, replace(HYP, optimizer_args=arguments), None, 64)


def test_the_optimizer_as_it_is_used(network: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """With the rate after the warm-up; frozen parameters are not counted."""
    network[0].requires_grad_(False)
    hyp = replace(HYP, warmup_rise=1e-5, warmup_epochs=1)
    schedule = Schedule.of(hyp, None, 10, 200, True, network)
    log_optimizer(build_optimizer(network, "AdamW", hyp, None, 64), schedule)
    line = capsys.readouterr().out.splitlines()[-1]
    assert all(words in line for words in ("AdamW", "0.002", "cosine", "2 weights", "0.1", "3 without", "4 biases"))


def test_a_shared_parameter_is_in_one_group_and_other_ones_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.register_parameter("gamma", nn.Parameter(torch.ones(3)))
    assert [len(parameters) for parameters in grouped_parameters(model).values()] == [2, 2, 0]
    optimizer = build_optimizer(model, "SGD", HYP, None, 64, {"1.weight": 0.1})
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


# Factors of the learning rate

FACTORS = {"0.weight": 0.1, "0.bias": 0.1, "1.1.weight": 0.1, "4.weight": 2.0}


def test_groups_and_rates_by_factor(network: nn.Module) -> None:
    """The smallest factor first, biases, weights and norms of each; none is empty, as DeepSpeed requires."""
    groups = grouped_parameters(network, FACTORS)
    assert [(key, names(network, {"params": group})) for key, group in groups.items()] == [
        ((0.1, 0), ["0.bias"]),
        ((0.1, 1), ["0.weight"]),
        ((0.1, 2), ["1.1.weight"]),
        ((1.0, 0), ["1.1.bias", "2.bias", "3.bias", "4.bias"]),
        ((1.0, 1), ["1.0.weight"]),
        ((1.0, 2), ["2.weight", "3.weight"]),
        ((2.0, 1), ["4.weight"]),
    ]
    optimizer = build_optimizer(network, "SGD", HYP, None, 64, FACTORS)
    bias, weight, norm = replace(LINEAR, groups=tuple(groups)).apply(optimizer, 50).lrs
    assert {group["momentum"] for group in optimizer.param_groups} == {LINEAR.at(50).momentum}
    rates = [0.1 * bias, 0.1 * weight, 0.1 * norm, bias, weight, norm, 2 * weight]
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.1, 0, 0, 0.1, 0, 0.1]


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
    ("epochs", "batches", "share", "warmup"),
    [
        *((3, 50, 0, 150), (3, 10, 0, 100), (0.1, 50, 0, 100), (2.5, 61, 0, 152), (0, 50, 0, 0)),
        *((3, 50, 0.1, 50), (3, 50, 1, 150)),
    ],
)
def test_warmup_has_at_least_100_batches_or_none_but_at_most_a_share(
    epochs: float, batches: int, share: float, warmup: int
) -> None:
    schedule = linear(batches, warmup_epochs=epochs, warmup_bias_lr=0.5, warmup_share=share)
    assert schedule.warmup == warmup
    full = schedule.at(warmup)
    assert full.lrs[0] == full.lrs[1] == schedule.epoch_rate(warmup // batches)
    assert full.momentum == 0.937
    if warmup:
        assert schedule.at(warmup - 1).lrs[0] > full.lrs[0] * 1.1


@pytest.mark.parametrize(("rise", "peak"), [(0, 0.01), (0.0002, 0.01), (0.0001, 0.005)])
def test_a_short_warmup_lowers_the_rate(rise: float, peak: float) -> None:
    """The rate rises by at most `warmup_rise` in a batch; a warm-up of 50 batches reaches 50 times that."""
    schedule = linear(warmup_share=0.1, warmup_rise=rise)
    assert (schedule.warmup, schedule.peak) == (50, peak)
    assert schedule.at(25).lrs[1] == pytest.approx(peak / 2)
    assert schedule.at(50).lrs == pytest.approx([0.91 * peak] * 3)  # epoch 1: 0.9 x 0.9 + 0.1


# The average of the weights


def decay(update: int) -> float:
    """Return YOLOv5's decay: 0.9999 (1 - exp(-updates / 2000))."""
    return 0.9999 * (1 - math.exp(-update / 2000))


def averaged_network(value: float) -> Any:
    """Return two linear layers of one weight, and a BatchNorm, with all floating-point values equal to `value`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return filled(model, value)


def filled(model: Any, value: float) -> Any:
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(value)
    return model


def average_of(ema: ModelEMA) -> float:
    """Return the value that all floating-point tensors have; the average is in fp32."""
    floating = [value for value in ema.model.state_dict().values() if value.is_floating_point()]
    assert len(floating) == 8
    assert all(value.dtype == torch.float32 for value in floating)
    (value,) = {round(number, 6) for value in floating for number in value.flatten().tolist()}
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updates_by_hand(dtype: torch.dtype) -> None:
    """A shared parameter is averaged once, integers are not, a skipped step changes nothing, nor does the model."""
    model = averaged_network(1).to(dtype).train()
    ema, expected = ModelEMA(model), 1.0
    ema.model[1].num_batches_tracked.fill_(7)  # type: ignore[index, union-attr]
    for value, taken, updates in ((3, True, 1), (9, False, 1), (-5, True, 2)):
        before = copy.deepcopy(filled(model, value).state_dict())
        ema.update(model, taken=torch.tensor(taken))
        if taken:
            expected = decay(updates) * expected + (1 - decay(updates)) * value
        assert average_of(ema) == pytest.approx(expected, abs=2e-6)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert ema.updates == 2
    assert ema.model[2].weight is ema.model[0].weight  # type: ignore[index]
    assert ema.model[1].num_batches_tracked == 7  # type: ignore[index]
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("share", "updates"), [(0.1, 260), (0.05, 1000), (0.1, 5000)])
def test_the_average_spans_a_share_of_a_short_run(share: float, updates: int) -> None:
    model: Any = nn.Linear(2, 2)
    ema = ModelEMA(model, share, updates)
    assert math.exp(updates / ema.ramp) == pytest.approx(share * updates)
    filled(ema.model, 0.0)
    ema.updates.fill_(updates - 1)
    ema.update(filled(model, 1.0))
    torch.testing.assert_close(ema.model.weight, torch.full((2, 2), 1 / (share * updates)), rtol=0.1, atol=0)


@pytest.mark.parametrize(("share", "updates"), [(0, 100), (0.1, 1_000_000), (0.1, 20_000)])
def test_long_runs_and_other_recipes_have_the_usual_ramp(share: float, updates: int) -> None:
    assert ModelEMA(nn.Linear(2, 2), share, updates).ramp == 2000  # type: ignore[arg-type]
