"""The process of the tests keeps its priority and its threads."""

from __future__ import annotations

import os

import cv2
import pytest


@pytest.fixture(autouse=True)
def not_nicer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keep the priority of the test process; return the requested changes."""
    changes: list[int] = []
    monkeypatch.setattr(os, "nice", changes.append)
    monkeypatch.setattr(cv2, "setNumThreads", lambda count: None)
    return changes
