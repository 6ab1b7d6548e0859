"""What all tests of pictures share."""

from __future__ import annotations

import pytest

from utils.plots import validation_images


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enlarge validation images to half of the usual size: easier numbers."""
    monkeypatch.setattr(validation_images, "MIN_TILE_PIXELS", 160)
