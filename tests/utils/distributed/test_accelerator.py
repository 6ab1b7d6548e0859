"""The start of an Accelerator on several processes, and the description of its batches."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed.accelerator import plan, reset_accelerate, seed_everything, start
from utils.distributed.ranks import ranks
from utils.errors import UserError


def start_twice() -> int:
    """Start as if the launcher had restarted the processes with the same store, the second one late."""
    start("cpu", "no", 60.0)
    distributed.destroy_process_group()
    reset_accelerate()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if ranks().rank == 1:
        time.sleep(1)
    accelerator, _ = start("cpu", "no", 10.0)
    return int(accelerator.reduce(torch.tensor([ranks().rank + 1]))[0])


def test_a_restarted_launch_ignores_the_addresses_of_the_last_attempt(on_processes: OnProcesses) -> None:
    assert on_processes(2, start_twice) == [3, 3]


@pytest.mark.parametrize(
    ("processes", "accumulation", "batch", "epoch"),
    [
        (1, 2, "batch size 8 (1 process), 2 batches per optimizer step (16 images)", "5 batches, 3 optimizer steps"),
        (2, 1, "batch size 8 (2 processes x 4), 1 batch per optimizer step (8 images)", "5 batches, 5 optimizer steps"),
    ],
)
def test_plan(processes: int, accumulation: int, batch: str, epoch: str) -> None:
    accelerator: Any = SimpleNamespace(num_processes=processes, gradient_accumulation_steps=accumulation)
    assert plan(accelerator, batch_size=8, batches=5, epochs=4) == [batch, f"{epoch} per epoch; 4 epochs"]


@pytest.mark.parametrize(
    ("cuda", "deterministic", "message"),
    [
        (True, True, []),
        (False, True, []),
        (True, False, ["--no-deterministic: equal runs differ by rounding"]),
        (False, False, ["--no-deterministic: no effect without CUDA"]),
    ],
)
def test_deterministic_kernels(
    cuda: bool, deterministic: bool, message: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(cuda and not deterministic)  # of a run before
    try:
        assert seed_everything(7, deterministic) == message
        assert torch.are_deterministic_algorithms_enabled() == (cuda and deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    assert int(torch.randint(10**9, ())) == int(torch.randint(10**9, (), generator=torch.Generator().manual_seed(7)))


def test_a_process_on_the_cpu_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("utils.distributed.accelerator.keep_freed_memory", lambda: calls.append("kept"))
    start("cpu", "no", 60.0)
    reset_accelerate()
    assert calls == ["kept"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "fast"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "x"),
        ("ACCELERATE_DEBUG_MODE", "maybe"),
        ("ACCELERATE_CPU_AFFINITY", "maybe"),
    ],
)
def test_a_wrong_environment_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reset_accelerate()
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^Accelerate cannot use {name}={value} of the environment \(.+\); correct"):
        start("cpu", "", 1)
    reset_accelerate()
