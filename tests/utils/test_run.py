"""Runs on one process and on two: the main process prints, draws and logs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from accelerate import Accelerator

from tests.conftest import OnProcesses
from utils.checkpoint import STATE_FORMAT
from utils.console import log
from utils.distributed.launch import Precision
from utils.distributed.stop import StopRequested
from utils.run import Run
from utils.tracking.trackers import Tracker


class Recorder(Tracker):
    """A tracker that records its calls."""

    def __init__(self) -> None:
        super().__init__("recorder", "", {})
        self.lines: list[str] = []
        self.points: list[tuple[Any, Any]] = []
        self.media: list[tuple[Any, int]] = []
        self.config: dict[str, Any] = {}
        self.patience = 0.0

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.config = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.points.append((values, step))

    def log_media(self, make: Any, step: int) -> None:
        self.media.append((make, step))

    def with_wandb(self, job: Any) -> None:
        job(SimpleNamespace(write_logs=lambda text: self.lines.append(text.rstrip())))

    def finish(self, patience: float = 0.0) -> None:
        self.patience = patience


def run_in(folder: Path, quiet: bool = False, exist_ok: bool = False) -> Run:
    run = Run(Accelerator(cpu=True), Precision("no", "the default on the CPU"), quiet)
    run.open_folder(str(folder), "exp", exist_ok)
    return run


@pytest.mark.parametrize(("quiet", "printed"), [(False, "a\nwarning: b\nc\nd\n"), (True, "warning: b\nd\n")])
def test_printed_lines(quiet: bool, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, recorder = run_in(tmp_path, quiet), Recorder()
    run.start_trackers(lambda: [recorder], {"epochs": 3}, 0)
    log("a", "warning: b")
    log("c")
    log("d", always=True)
    assert capsys.readouterr().out.endswith(printed)
    assert recorder.lines == ["a", "warning: b", "c", "d"]  # trackers get all of them
    assert recorder.config == {"epochs": 3}


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(Accelerator(cpu=True), Precision("no", "the default on the CPU"))
    run.files.write_settings({"epochs": 3})  # nothing is written or printed until the folder is open
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""
    run.open_folder(str(tmp_path / "new"), "exp", exist_ok=False)
    assert run.path == tmp_path / "new" / "exp"
    assert "mixed precision no" in capsys.readouterr().out
    assert run.devices[0].startswith(f"{os.uname().nodename} cpu (")
    (tmp_path / "exp").mkdir()
    assert run_in(tmp_path).path == tmp_path / "exp2"
    assert run_in(tmp_path, exist_ok=True).files.path == tmp_path / "exp"


def test_points_and_pictures(tmp_path: Path) -> None:
    run, recorder = run_in(tmp_path), Recorder()
    run.plot(pytest.fail)  # before `enable_plots`
    assert not run.is_tracked
    run.start_trackers(lambda: [recorder], {}, 12)
    assert run.is_tracked
    run.enable_plots()
    run.plot(lambda: {"a.jpg": np.zeros((2, 2, 3), np.uint8)})
    run.finish(60.0)
    assert (run.path / "a.jpg").is_file()
    ((make, step),) = recorder.media
    assert (make.args, step) == (({"a.jpg": run.path / "a.jpg"},), 12)
    assert recorder.patience == 60.0
    run.log_point({"step": 13, "step/loss": 0.5, "step/norm": None}, 13)
    assert recorder.points == [({"step": 13, "step/loss": 0.5}, 13)]
    assert run.step == 13


# Ending early


def test_a_signal_and_the_time_limit_stop_a_run() -> None:
    run = Run(Accelerator(cpu=True), Precision("no", "the default on the CPU"))
    age = time.time() - psutil.Process().create_time()  # seconds
    run.check_stop(1)  # before `graceful_stop`
    with run.graceful_stop(age / 3600 / 2), pytest.raises(StopRequested, match="0"):
        run.check_stop(1)
    with run.graceful_stop(0.0):
        run.check_stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 30
        while not run.stop_requested() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(StopRequested, match="143"):
            run.check_stop(2)


# Two processes


def on_two(folder: str) -> dict[str, list[Any]]:
    """Return the results of a run's methods on a process of two."""
    run = run_in(Path(folder))
    return {"stops": stops_of_two(run), "run": use_on_two(run)}


def stops_of_two(run: Run) -> list[Any]:
    """Return the results of `stop_together` if none, both, or one of two processes has a reason, and the devices."""
    outcomes, main = [], run.accelerator.is_main_process
    for reason in ("", "SIGTERM", "" if main else "SIGUSR1", "SIGINT" if main else "SIGTERM"):
        try:
            outcomes.append(run.stop_together(reason))
        except StopRequested as stopped:
            outcomes.append((stopped.reason, stopped.code))
    return [*outcomes, run.devices]


def use_on_two(run: Run) -> list[Any]:
    recorder, work = Recorder(), []
    run.start_trackers(lambda: [recorder], {}, 0)
    run.on_main(lambda: work.append("done"))
    log("once")
    run.enable_plots()
    run.plot(lambda: {"a.png": np.zeros((2, 2, 3), np.uint8)})
    run.files.add_row({"epoch": 0})
    run.files.save_state({"format": STATE_FORMAT})
    run.files.finish_writing()
    run.finish()
    state = run.collectives.broadcast(run.files.read_state()) or {}
    return [run.path.name, work, len(run.trackers), run.is_tracked, state["rows"]]


def test_two_processes(tmp_path: Path, on_processes: OnProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    main, other = on_processes(2, on_two, str(tmp_path))
    assert main["stops"] == other["stops"]
    *outcomes, devices = main["stops"]
    assert outcomes == [None, ("SIGTERM", 143), ("SIGUSR1", 138), ("SIGINT", 130)]  # the first process's reason
    assert len(devices) == 2
    assert main["run"][:3] == ["exp", ["done"], 1]
    assert other["run"][:3] == ["exp", [], 0]
    assert other["run"][3:] == main["run"][3:]
    assert main["run"][3:] == [True, ["epoch", "0"]]
    printed = capfd.readouterr().out
    assert printed.count("once") == printed.count("process 1: ") == 1
    assert (tmp_path / "exp" / "a.png").is_file()
