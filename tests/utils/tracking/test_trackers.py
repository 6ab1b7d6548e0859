"""Accelerate's trackers and the user's, called in a thread."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from utils.errors import UserError
from utils.tracking.trackers import Tracker, add_user_trackers, requested_trackers

TRACKER = """
from accelerate.tracking import GeneralTracker

class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = True
    tracker = None

    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.lines = [run_name, logging_dir]

    def store_init_configuration(self, values):
        self.lines.append(values)

    def log(self, values, step=None, **_):
        self.lines.append((step, values))
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the files stays; no file has been run before."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "own_mine", None)  # undone afterwards
    monkeypatch.setitem(sys.modules, "own_mine", None)
    del sys.modules["own_mine"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own_mine.py"
    path.write_text(TRACKER)
    return path


def test_a_tracker_of_the_users(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named like its file, and gets the project, the run folder, flat settings, and points without their axis."""
    add_user_trackers(f"wandb,{file}")
    assert requested_trackers(f"{file},{file}") == ["own_mine"]
    tracker = Tracker("own_mine", "cats", tmp_path)
    tracker.store_init_configuration({"hyperparameters": {"lr0": 0.1}, "sizes": [1]})
    tracker.log({"step": 1, "step/loss": 2.0, "metrics/mAP_0.5(B)": 0.5}, step=1)
    tracker.finish()
    values = {"step/loss": 2.0, "metrics/mAP_0.5_B_": 0.5}
    assert tracker.inner.lines == ["cats", str(tmp_path), {"hyperparameters.lr0": 0.1, "sizes": "[1]"}, (1, values)]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("failing", ["super().__init__()", "self.lines.append(values)", "self.lines.append((step"])
def test_a_tracker_that_fails_is_one_warning(
    failing: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(TRACKER.replace(failing, f"raise OSError('no disk'); {failing}"))
    add_user_trackers(str(file))
    tracker = Tracker("own_mine", "cats", tmp_path)
    tracker.store_init_configuration({})
    for step in (1, 2):
        tracker.log({"step": step, "step/loss": 2.0}, step=step)
    tracker.finish()
    printed = capsys.readouterr().out
    assert printed.count("warning") == printed.count("no disk") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_process_forked_while_a_tracker_starts_a_program(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not get the program's pipes: else the tracker would wait until that process ends."""
    program = "__import__('subprocess').check_output(['true'])"
    file.write_text(TRACKER.replace("super().__init__()", f"super().__init__(); {program}"))
    add_user_trackers(str(file))
    starting, execute = threading.Event(), subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_slowly(*arguments: Any, **options: Any) -> None:
        starting.set()
        time.sleep(0.3)
        execute(*arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", execute_slowly)
    tracker = Tracker("own_mine", "cats", tmp_path)
    tracker.store_init_configuration({})
    assert starting.wait(60)
    loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    loader.start()
    tracker.finish(20)
    assert loader.is_alive()
    assert capsys.readouterr().out == ""
    loader.kill()


def test_files_that_are_refused(file: Path) -> None:
    """Without one tracker; and a file that only a run folder names is run only for a user who has run it before."""
    other = TRACKER + "\nclass Other(Mine):\n    pass\n"
    for text, by_user in (("x = 1\n", True), (other, True), ("import accelerate\n1 / 0\n", True), (TRACKER, False)):
        file.write_text(text)
        with pytest.raises(UserError, match="own_mine"):
            add_user_trackers(str(file), by_user)
    add_user_trackers(str(file))
    add_user_trackers(str(file), named_by_user=False)
    file.write_text(TRACKER + "# changed\n")
    with pytest.raises(UserError, match="own_mine"):
        add_user_trackers(str(file), named_by_user=False)
    file.unlink()
    with pytest.raises(UserError, match="own_mine"):
        add_user_trackers(str(file))


@pytest.mark.parametrize(
    ("log_with", "no_wandb", "mode", "names", "warnings"),
    [
        ("", False, "", ["wandb"], 0),
        ("", True, "", [], 0),
        ("wandb,tensorboard", False, "disabled", ["tensorboard"], 0),
        ("none", False, "", [], 0),
        ("all", False, "", ["wandb", "tensorboard"], 0),
        ("mlflow,wandb,wandb", False, "offline", ["wandb"], 1),
    ],
)
def test_the_trackers_that_are_asked_for(
    log_with: str, no_wandb: bool, mode: str, names: list[str], warnings: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spec = SimpleNamespace(origin="somewhere")
    installed = ("wandb", "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in installed else None)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert requested_trackers(log_with, no_wandb) == names
    assert capsys.readouterr().out.count("warning: ") == warnings
