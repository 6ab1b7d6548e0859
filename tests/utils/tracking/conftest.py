"""Fixtures of the tests of trackers."""

from __future__ import annotations

import os

import pytest
from accelerate import PartialState


@pytest.fixture(autouse=True)
def no_wandb_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)  # Accelerate's trackers ask it for the rank
