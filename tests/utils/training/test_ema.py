"""The moving average of a model, compared with values computed by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from utils.training.ema import ModelEMA, ramp_of


def decay(update: int) -> float:
    """Return YOLOv5's decay: 0.9999 (1 - exp(-updates / 2000))."""
    return 0.9999 * (1 - math.exp(-update / 2000))


def network(value: float) -> nn.Module:
    """Return a linear layer and a BatchNorm with all floating-point values equal to `value`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(value)


def test_a_shared_parameter_is_averaged_once() -> None:
    model = network(1)
    model.append(nn.Linear(2, 2))  # type: ignore[operator]
    model[2].weight = model[0].weight  # type: ignore[index]
    ema = ModelEMA(model)
    fill(model, 3)
    ema.update(model)
    assert ema.model[2].weight is ema.model[0].weight  # type: ignore[index]
    torch.testing.assert_close(ema.model[0].weight, torch.full((2, 2), decay(1) + 3 * (1 - decay(1))))  # type: ignore[index]


def test_two_updates_by_hand() -> None:
    model = network(1)
    ema = ModelEMA(model)
    fill(model, 3)
    ema.update(model)
    first = decay(1) * 1 + (1 - decay(1)) * 3
    fill(model, -5)
    ema.update(model)
    second = decay(2) * first + (1 - decay(2)) * -5
    assert ema.updates == 2
    floating = {name: value for name, value in ema.model.state_dict().items() if value.is_floating_point()}
    assert set(floating) == {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    for name, value in floating.items():
        torch.testing.assert_close(value, torch.full_like(value, second), msg=name)


def test_a_skipped_step_changes_nothing() -> None:
    model = network(1)
    ema = ModelEMA(model)
    fill(model, 3)
    ema.update(model)
    before = copy.deepcopy(ema.model.state_dict())
    fill(model, -5)
    ema.update(model, taken=torch.tensor(False))
    assert ema.updates == 1
    assert all(torch.equal(value, before[name]) for name, value in ema.model.state_dict().items())
    ema.update(model, taken=torch.tensor(True))
    assert ema.updates == 2
    expected = decay(2) * (3 - 2 * decay(1)) - (1 - decay(2)) * 5
    torch.testing.assert_close(ema.model.get_parameter("0.weight"), torch.full((2, 2), expected))


def test_integers_are_not_averaged() -> None:
    """BatchNorm's count of batches has no effect if it has a momentum, as here."""
    model = network(1)
    model(torch.rand(3, 2))
    ema = ModelEMA(model)
    model(torch.rand(3, 2))
    ema.update(model)
    assert model.get_buffer("1.num_batches_tracked").item() == 2
    assert ema.model.get_buffer("1.num_batches_tracked").item() == 1
    assert ema.model.get_buffer("1.num_batches_tracked").dtype == torch.int64


def test_the_average_is_in_fp32() -> None:
    model = network(1).half()
    ema = ModelEMA(model)
    fill(model, 3)
    ema.update(model)
    expected = 3 - 2 * decay(1)
    for value in ema.model.state_dict().values():
        if value.is_floating_point():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, torch.full_like(value, expected))
    assert next(model.parameters()).dtype == torch.float16


def test_the_model_is_unchanged() -> None:
    model = network(1).train()
    ema = ModelEMA(model)
    ema.model[0].weight.fill_(7)  # type: ignore[union-attr, operator]
    before = copy.deepcopy(model.state_dict())
    ema.update(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


# Short runs


@pytest.mark.parametrize(("share", "updates"), [(0.1, 260), (0.05, 1000), (0.1, 5000)])
def test_the_average_spans_a_share_of_a_short_run(share: float, updates: int) -> None:
    ramp = ramp_of(share, updates)
    assert math.exp(updates / ramp) == pytest.approx(share * updates)
    model = nn.Linear(2, 2)
    ema = ModelEMA(model, share, updates)  # type: ignore[arg-type]
    nn.init.constant_(ema.model.weight, 0.0)  # type: ignore[arg-type]
    nn.init.constant_(model.weight, 1.0)
    ema.updates.fill_(updates - 1)
    ema.update(model)
    expected = torch.full((2, 2), 1 / (share * updates))
    torch.testing.assert_close(ema.model.weight, expected, rtol=0.1, atol=0)


@pytest.mark.parametrize(("share", "updates"), [(0, 100), (0.1, 1_000_000), (0.1, 20_000)])
def test_long_runs_and_other_recipes_have_the_usual_ramp(share: float, updates: int) -> None:
    assert ramp_of(share, updates) == 2000
