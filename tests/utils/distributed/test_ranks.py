"""Ranks and world sizes from the environment variables of a launcher."""

from __future__ import annotations

import pytest

from tests.making import without_launcher
from utils.distributed.ranks import (
    SPAWNED,
    Ranks,
    launched,
    local_world_size,
    ranks,
    speaks_for_machine,
    world_size,
)


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    assert ranks() == Ranks(0, 1, 0, 1)
    assert (world_size(), local_world_size()) == (1, 1)
    assert speaks_for_machine()
    assert not launched()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(5, 8, 1, 4)
    assert (world_size(), local_world_size()) == (8, 4)
    assert not speaks_for_machine()
    assert launched()
    monkeypatch.setenv(SPAWNED, "1")
    assert not launched()
