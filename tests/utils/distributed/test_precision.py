"""The precision of autocast: the same rule for every way to launch, every launch file and every device."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands import launch

from tests.conftest import OnProcesses
from tests.making import without_launcher
from utils.distributed.accelerator import start
from utils.distributed.precision import LAUNCHER_PRECISION, Precision, choose_precision
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
