"""What several test files need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from data.shapes import NAMES, draw_dataset

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


class RunScript(Protocol):
    """Starts a script of the repository as a user does; what it printed, both streams."""

    def __call__(self, script: str, *flags: str, fails: bool = False) -> str: ...


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> RunScript:
    """Runs are given a cache of their own, and must end with 0, or where they are to fail with 1 or 2."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}

    def run(script: str, *flags: str, fails: bool = False) -> str:
        command = [sys.executable, str(ROOT / script), *flags]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode in ((1, 2) if fails else (0,)), done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data YAML of a small drawing of the built-in set: 28 images to train (no multiple of 8), 8 to validate."""
    folder = draw_dataset(tmp_path_factory.mktemp("data") / "shapes", train=28, val=8)
    file = folder.parent / "small.yaml"
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(NAMES))}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with YOLOv5's own numbers, weights and small data sets; it is not part of the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"needs YOLOv5's reference files in {SHARED}")
    return SHARED


@pytest.fixture
def tiny_yaml() -> dict[str, Any]:
    """A detector of two levels, strides 4 and 8, quick to build."""
    return {
        "nc": 3,
        "anchors": [[4, 4, 8, 4], [16, 16, 32, 24]],
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]]],
        "head": [[[1, 2], 1, "Detect", ["nc", "anchors"]]],
    }
