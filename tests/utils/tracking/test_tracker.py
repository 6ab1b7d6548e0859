"""The trackers that flags and environment request."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from utils.config.flags import TRACKERS
from utils.tracking.tracker import TENSORBOARD, WANDB, requested_trackers


@pytest.mark.parametrize(
    ("log_with", "no_wandb", "expected"),
    [
        ("", False, [WANDB]),
        ("", True, []),
        ("none", False, []),
        ("wandb", False, [WANDB]),
        ("tensorboard,wandb", False, [TENSORBOARD, WANDB]),
        ("wandb,tensorboard,wandb", True, [TENSORBOARD]),
        ("tensorboard", False, [TENSORBOARD]),
        ("all", False, [WANDB, TENSORBOARD]),
        ("all", True, [TENSORBOARD]),
    ],
)
def test_requested_trackers(log_with: str, no_wandb: bool, expected: list[str], installed: set[str]) -> None:
    assert requested_trackers(log_with, no_wandb) == (expected, [])


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [("WANDB_MODE", "disabled", True), ("WANDB_MODE", "offline", False), ("WANDB_DISABLED", "true", True)],
)
def test_the_environment_can_disable_wandb(
    name: str, value: str, off: bool, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert requested_trackers("all", False)[0] == ([TENSORBOARD] if off else [WANDB, TENSORBOARD])


def test_a_missing_package_is_a_warning_only_if_it_is_requested(installed: set[str]) -> None:
    installed.clear()
    assert requested_trackers("", False) == ([], [])
    names, warnings = requested_trackers("all", False)
    assert names == []
    assert [line.split()[1] for line in warnings] == [WANDB, TENSORBOARD]
    assert all("pip install" in line for line in warnings)


def test_all_are_those_that_are_installed(installed: set[str]) -> None:
    installed |= {"trackio", "mlflow", "unknown"}
    assert requested_trackers("all", False) == ([WANDB, TENSORBOARD, "mlflow", "trackio"], [])
    names, warnings = requested_trackers("clearml,mlflow", False)
    assert names == ["mlflow"]
    assert warnings == ["warning: clearml is not installed, so nothing is logged there: pip install clearml"]


def test_the_names_are_those_of_accelerate() -> None:
    assert {*TRACKERS} == {*LOGGER_TYPE_TO_CLASS}


def test_a_folder_of_that_name_is_not_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    assert requested_trackers("", False) == ([], [])
