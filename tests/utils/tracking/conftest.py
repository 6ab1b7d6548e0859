"""Fixtures of the tests of trackers."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

import pytest
from accelerate import PartialState

from utils.tracking.tracker import TENSORBOARD, WANDB


@pytest.fixture(autouse=True)
def no_wandb_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))}
    for name in (*names, "WANDB_PROJECT", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)  # Accelerate's trackers ask it for the rank


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that count as installed."""
    names = {WANDB, TENSORBOARD}
    spec = SimpleNamespace(origin="somewhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in names else None)
    return names
