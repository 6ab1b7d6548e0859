"""A fixture for the tests of weight files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path for weights in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights.pt"
