"""The points of the step curves: means since the last point; tests/test_tracking.py has two processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.rehearsal.cuda_queries import GIB, CudaQueries
from utils.console import Bar
from utils.training.step_log import StepLog, peak_memory, used_memory


def step_log(interval: int = 0, steps: int = 8, enabled: bool = True) -> StepLog:
    return StepLog(("a", "b"), Accelerator(cpu=True), interval, steps, enabled=enabled)


def sgd(rate: float = 0.1) -> Any:
    group = {"lr": rate, "momentum": 0.9}
    return SimpleNamespace(param_groups=[group, {"lr": 2 * rate, "betas": (0.8, 0.999)}])


@pytest.mark.parametrize(
    ("interval", "steps", "expected"), [(0, 8, 1), (0, 40, 2), (0, 1850, 50), (7, 1850, 7), (1, 8, 1)]
)
def test_the_interval_of_points(interval: int, steps: int, expected: int) -> None:
    log = step_log(interval, steps)
    assert log.interval == expected
    due = [step for step in range(1, 200) if log.is_due(step, last=False)]
    assert due == list(range(expected, 200, expected))


def test_the_last_step_of_an_epoch_is_a_point() -> None:
    assert step_log(7).is_due(8, last=True)
    assert not step_log(7, enabled=False).is_due(7, last=True)


def test_means_since_the_last_point() -> None:
    log = step_log()
    for losses in ([1.0, 2.0], [3.0, 4.0]):
        log.add_batch(torch.tensor(losses))
    log.norm = torch.tensor(5.0)
    first = log.values(log.point(1, 0.25, sgd(), 16))
    log.add_batch(torch.tensor([7.0, 8.0]))
    second = log.values(log.point(2, 0.5, sgd(0.05), 16))
    assert (first["step"], first["step/epoch"], first["step/a"], first["step/b"]) == (1, 0.25, 2.0, 3.0)
    assert (second["step/a"], second["step/b"], second["step/gradient_norm"]) == (7.0, 8.0, 5.0)
    assert [second[f"step/lr{k}"] for k in (0, 1)] == [0.05, 0.1]
    assert [second[f"step/momentum{k}"] for k in (0, 1)] == [0.9, 0.8]
    assert "step/loss_scale" not in first
    assert "step/gpu_memory" not in first


def test_speed_and_share_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("utils.training.step_log.time.monotonic", lambda: now[0])
    log, bar = step_log(), Bar("", 0, False)
    bar.waited = 3.0
    log.start_epoch(bar)
    log.add_batch(torch.zeros(2))
    log.add_batch(torch.zeros(2))
    now[0], bar.waited = 104.0, 4.0
    values = log.values(log.point(1, 1.0, sgd(), 16))
    assert values["step/images_per_second"] == values["step/images_per_second_per_device"] == 8.0
    assert values["step/data_wait"] == 0.25


def test_values_that_are_missing_or_not_finite() -> None:
    log = step_log()
    log.add_batch(torch.tensor([math.nan, math.inf]))
    values = log.values(log.point(1, 1.0, sgd(), 16))
    assert "step/gradient_norm" not in values
    assert math.isnan(values["step/a"])
    assert values["step/b"] == math.inf
    log.norm = math.inf
    log.add_batch(torch.zeros(2))
    assert log.values(log.point(2, 1.0, sgd(), 16))["step/gradient_norm"] == math.inf


def test_memory() -> None:
    assert peak_memory(torch.device("cpu")) == 0
    assert 0.01 < used_memory(torch.device("cpu")) < 1000


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, gpu = CudaQueries().install(monkeypatch), torch.device("cuda", 0)
    queries.allocate(3 * GIB)
    assert peak_memory(gpu) == used_memory(gpu) == 3.0
    assert peak_memory(torch.device("cpu")) == 0.0
