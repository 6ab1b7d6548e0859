"""The start of an Accelerator on several processes, its precision, and the description of its batches."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands import launch
from torch import distributed

from tests.conftest import OnProcesses
from tests.making import without_launcher
from utils.distributed.accelerator import (
    LAUNCHER_PRECISION,
    Precision,
    choose_precision,
    plan,
    reset_accelerate,
    seed_everything,
    start,
)
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.files import ROOT

DEFAULTS = {"cpu": "no", "mps": "no", "cuda": "bf16", "cuda without bf16": "fp16"}
LAUNCH_FILES = sorted(
    file for file in (ROOT / "accelerate_configs").glob("*.yaml") if "compute_environment" in file.read_text()
)  # the others are for clusters


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    monkeypatch.delenv(LAUNCHER_PRECISION, raising=False)


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


# Precision: the same rule for every way to launch, every launch file and every device


def set_device(monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """Stub what the device is fast at; return its kind."""
    kind, _, lacking = device.partition(" ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not lacking)
    return kind


@pytest.mark.parametrize("device", DEFAULTS)
@pytest.mark.parametrize("named", ["", "no", "bf16", "fp16"])
def test_a_flag_then_the_launcher_then_the_device(named: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """'no' of a launcher is not a choice: `accelerate launch` sets it if its user names nothing."""
    kind = set_device(monkeypatch, device)
    monkeypatch.setenv(LAUNCHER_PRECISION, named)
    for requested in ("", "no", "bf16", "fp16"):
        expected = requested or named.removeprefix("no") or DEFAULTS[device]
        if (kind, expected) == ("cpu", "fp16"):
            with pytest.raises(UserError, match=r"mixed precision fp16 .* is not supported on the CPU; use bf16 or no"):
                choose_precision(requested, kind, by_zero=False)
        else:
            assert choose_precision(requested, kind, by_zero=False).name == expected


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda file: file.name)
def test_a_launch_file_that_names_a_precision_gets_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` passes it on."""
    named = yaml.safe_load(file.read_text()).get("mixed_precision", "no")
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    monkeypatch.setenv(LAUNCHER_PRECISION, launch._validate_launch_command(arguments)[0].mixed_precision)
    assert choose_precision("", "cpu", by_zero=False).name == named


@pytest.mark.parametrize(
    ("requested", "named", "reason"),
    [("no", "bf16", "by a flag"), ("", "bf16", LAUNCHER_PRECISION), ("", "no", "the default on the CPU")],
)
def test_the_reason_names_its_source(requested: str, named: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PRECISION, named)
    assert reason in str(choose_precision(requested, "cpu", by_zero=False))


def test_a_default_of_deepspeed_is_never_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(monkeypatch, "cuda without bf16")
    assert choose_precision("", "cuda", by_zero=True).name == "no"


@pytest.mark.parametrize(
    ("name", "by_zero", "message"), [("fp8", False, "use one of no, fp16"), ("fp16", True, "bf16")]
)
def test_other_precisions_are_refused(name: str, by_zero: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PRECISION, name)
    with pytest.raises(UserError, match=message):
        choose_precision("", "cuda", by_zero)


def chosen_by_two() -> Precision:
    """Return the precision of a process whose own launcher names another one than the main process's."""
    os.environ[LAUNCHER_PRECISION] = ("bf16", "fp16")[ranks().rank]
    return start("cpu", "", 60.0)[1]


def test_all_processes_take_the_choice_of_the_main_one(on_processes: OnProcesses) -> None:
    first, second = itertools.repeat(choose_precision("bf16", "cpu", by_zero=False).name, 2)
    assert [precision.name for precision in on_processes(2, chosen_by_two)] == [first, second]
