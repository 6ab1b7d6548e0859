"""What every test of the data package gets: a cache folder of its own, away from the data it reads."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's `$XDG_CACHE_HOME`; the user's own is never touched."""
    folder = tmp_path_factory.mktemp("cache-home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
