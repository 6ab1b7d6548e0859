"""A run: every process makes the same calls, and the main one prints, draws and logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator

from tests.conftest import OnProcesses
from utils.run import Run
from utils.tracking.tracker import Tracker


class Recorder(Tracker):
    """A tracker that keeps what it gets."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.points: list[tuple[Any, Any]] = []
        self.files: list[tuple[list[str], int]] = []
        self.config: dict[str, Any] = {}
        self.patience = 0.0

    @property
    def tracker(self) -> Recorder:
        return self

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.config = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.points.append((values, step))

    def line(self, text: str) -> None:
        self.lines.append(text)

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        self.files.append((list(files), step))

    def finish(self, patience: float = 0.0) -> None:
        self.patience = patience


def run_in(folder: Path, quiet: bool = False, exist_ok: bool = False) -> Run:
    return Run(Accelerator(cpu=True), str(folder), "exp", exist_ok, quiet)


@pytest.mark.parametrize(("quiet", "printed"), [(False, "a\nwarning: b\nc\nd\n"), (True, "warning: b\nd\n")])
def test_lines(quiet: bool, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, recorder = run_in(tmp_path, quiet), Recorder()
    run.start_trackers(lambda: [recorder], {"epochs": 3}, 0)
    run.print("a", "warning: b")
    run.print("c")
    run.print("d", always=True)
    assert capsys.readouterr().out == printed
    assert recorder.lines == ["a", "warning: b", "c", "d"]  # trackers get all of them
    assert recorder.config == {"epochs": 3}


def test_folders(tmp_path: Path) -> None:
    assert run_in(tmp_path / "new").path == tmp_path / "new" / "exp"
    (tmp_path / "exp").mkdir()
    assert run_in(tmp_path).path == tmp_path / "exp2"
    assert run_in(tmp_path, exist_ok=True).files.path == tmp_path / "exp"


def test_points_and_pictures(tmp_path: Path) -> None:
    run, recorder = run_in(tmp_path), Recorder()
    run.plot(pytest.fail)  # nothing is drawn yet
    assert not run.is_tracked
    run.start_trackers(lambda: [recorder], {}, 12)
    assert run.is_tracked
    run.enable_plots()
    run.plot(lambda: {"a.jpg": np.zeros((2, 2, 3), np.uint8)})
    run.finish(60.0)
    assert (run.path / "a.jpg").is_file()
    assert recorder.files == [(["pictures/a"], 12)]
    assert recorder.patience == 60.0
    run.log_point({"step": 13, "step/loss": 0.5, "step/norm": None}, 13)
    assert recorder.points == [({"step": 13, "step/loss": 0.5}, 13)]
    assert run.step == 13


def on_two(folder: str) -> list[Any]:
    """What a process of two has of a run."""
    run, recorder, work = run_in(Path(folder)), Recorder(), []
    run.start_trackers(lambda: [recorder], {}, 0)
    run.on_main(lambda: work.append("done"))
    run.print("once")
    run.enable_plots()
    run.plot(lambda: {"a.png": np.zeros((2, 2, 3), np.uint8)})
    run.files.add_row({"epoch": 0})
    run.files.save_state({"format": "lockstep-state-1"})
    run.files.finish_writing()
    run.finish()
    state = run.files.read_state() or {}
    table = run.process_table(iter([[SimpleNamespace(image=k), SimpleNamespace(image=9)] for k in range(5)]))
    return [run.path.name, work, len(run.trackers), run.is_tracked, state["rows"], table]


def test_two_processes(tmp_path: Path, on_processes: OnProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = on_processes(2, on_two, str(tmp_path))
    *shared, table = one[3:]
    assert one[:3] == ["exp", ["done"], 1]
    assert other[:3] == ["exp", [], 0]
    assert other[3:] == one[3:]
    assert shared == [True, ["epoch", "0"]]
    assert [line.partition(" on ")[0] for line in table] == ["process 0 of 2", "process 1 of 2"]
    assert all(", cpu" in line and line.endswith(": images 0 9; 1 9") for line in table)
    assert capfd.readouterr().out.count("once") == 1
    assert (tmp_path / "exp" / "a.png").is_file()
