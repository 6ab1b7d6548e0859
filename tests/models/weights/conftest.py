"""Fixtures of the tests of weight files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test puts its weights, alone in the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights.pt"
