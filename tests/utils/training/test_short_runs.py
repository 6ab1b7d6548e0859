"""Warm-up and EMA of short runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from utils.training.ema import ModelEMA
from utils.training.optimizer import Schedule
from utils.training.short_runs import messages, ramp_of


@pytest.mark.parametrize(("share", "updates"), [(0.1, 260), (0.05, 1000), (0.1, 5000)])
def test_the_average_spans_a_share_of_a_short_run(share: float, updates: int) -> None:
    ramp = ramp_of(share, updates)
    assert math.exp(updates / ramp) == pytest.approx(share * updates)
    model = nn.Linear(2, 2)
    ema = ModelEMA(model, ramp)  # type: ignore[arg-type]
    nn.init.constant_(ema.model.weight, 0.0)  # type: ignore[arg-type]
    nn.init.constant_(model.weight, 1.0)
    ema.updates.fill_(updates - 1)
    ema.update(model)
    expected = torch.full((2, 2), 1 / (share * updates))
    torch.testing.assert_close(ema.model.weight, expected, rtol=0.1, atol=0)


@pytest.mark.parametrize(("share", "updates"), [(0, 100), (0.1, 1_000_000), (0.1, 20_000)])
def test_long_runs_and_other_recipes_have_the_usual_ramp(share: float, updates: int) -> None:
    assert ramp_of(share, updates) == 2000


def test_the_ramp_is_no_longer_than_the_shortest_run() -> None:
    assert ramp_of(0.1, 1) == 1


def test_messages() -> None:
    schedule = Schedule(10, 50, False, 0.01, 0.1, 0.9, warmup_epochs=3, warmup_momentum=0.8, warmup_bias_lr=0.1)
    assert messages(schedule, 2000, 500) == []
    short = Schedule(10, 50, False, 0.01, 0.1, 0.9, 3, 0.8, 0.1, warmup_share=0.1)
    assert messages(short, ramp_of(0.1, 500), 500) == [
        "warm-up: 50 batches instead of 150, for they are 10% of the run's 500",
        "EMA: a ramp of 128 steps instead of 2000, for the run has only 500",
    ]
