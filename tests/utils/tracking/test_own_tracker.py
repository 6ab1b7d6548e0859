"""Trackers in a user's Python files, which --log-with names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from utils.errors import UserError
from utils.tracking.accelerate_tracker import AccelerateTracker
from utils.tracking.own_tracker import add_own_trackers
from utils.tracking.tracker import requested_trackers
from utils.tracking.tracker_arguments import TRACKER_ARGUMENTS

TRACKER = """
from accelerate.tracking import GeneralTracker

class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name):
        super().__init__()
        self.lines = [run_name]

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
    monkeypatch.setitem(TRACKER_ARGUMENTS, "own_mine", dict)
    monkeypatch.setitem(sys.modules, "own_mine", None)
    del sys.modules["own_mine"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own_mine.py"
    path.write_text(TRACKER)
    return path


def test_a_tracker_is_one_of_accelerates(file: Path, tmp_path: Path) -> None:
    """It is named like its file, and gets the project, the settings and each point once."""
    add_own_trackers(f"wandb,{file}")
    assert requested_trackers(f"{file},{file}", no_wandb=False) == (["own_mine"], [])
    printed: list[str] = []
    for resumed in (False, True):
        tracker = AccelerateTracker("own_mine", tmp_path, {"project": "cats", "name": "exp", "id": "a"}, printed.append)
        tracker.store_init_configuration({"hyperparameters": {"lr0": 0.1}})
        tracker.log({"step": 1, "step/box_loss": 2.0}, step=1)
        tracker.finish()
        lines = tracker.inner.lines
        expected = ["cats", {"hyperparameters.lr0": 0.1}, (1, {"step/box_loss": 2.0})] if not resumed else ["cats"]
        assert lines == expected
    assert printed == []
    assert json.loads((tmp_path / ".own_mine.json").read_text())["last"] == {"step": 1}


def test_a_tracker_that_fails_is_one_warning(file: Path, tmp_path: Path) -> None:
    file.write_text(TRACKER.replace("self.lines.append((step, values))", "raise OSError('no disk')"))
    add_own_trackers(str(file))
    printed: list[str] = []
    tracker = AccelerateTracker("own_mine", tmp_path, {"project": "cats", "name": "exp", "id": "a"}, printed.append)
    tracker.store_init_configuration({})
    for step in (1, 2):
        tracker.log({"step": step, "step/box_loss": 2.0}, step=step)
    tracker.finish()
    assert len(printed) == 1
    assert "own_mine has failed" in printed[0]
    assert "no disk" in printed[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines no tracker; write one class that extends accelerate.tracking.GeneralTracker"),
        ("from accelerate.tracking import GeneralTracker\n", "defines no tracker"),
        (TRACKER + "\nclass Other(Mine):\n    pass\n", "defines several trackers, Mine, Other"),
        ("import accelerate\n1 / 0\n", "line 2: ZeroDivisionError"),
    ],
)
def test_files_without_a_tracker(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        add_own_trackers(str(file))


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--log-with .*absent.py is not a file; give the path of a Python file"):
        add_own_trackers(str(tmp_path / "absent.py"))


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(TRACKER)
    with pytest.raises(UserError, match=r"another module has it; rename it"):
        add_own_trackers(str(tmp_path / "json.py"))


def test_a_file_that_only_a_run_folder_names(file: Path) -> None:
    """It is run for a user who has run it before, with the same content."""
    with pytest.raises(UserError, match=r"the run's settings.yaml names .*own_mine.py, a Python file"):
        add_own_trackers(str(file), is_named=False)
    add_own_trackers(str(file))
    add_own_trackers(str(file), is_named=False)
    file.write_text(TRACKER + "# changed\n")
    with pytest.raises(UserError, match="would be run"):
        add_own_trackers(str(file), is_named=False)
