"""Runs and their folders, on one process and on two: the main process prints, draws, logs and writes."""

from __future__ import annotations

import errno
import io
import math
import os
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from torch import nn

from models.weights import read_weights
from tests.conftest import OnProcesses
from tests.making import contents
from utils.checkpoint import STATE_FORMAT
from utils.console import log
from utils.distributed.failure import StopRequested
from utils.distributed.launch import Precision
from utils.errors import UserError
from utils.run import Run, RunFolder
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


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write fail as on a full disk."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


# The folder

WRITTEN = {
    "settings.yaml",
    "receipt.yaml",
    "problems.txt",
    "classes.csv",
    "n\udcffmes.txt",
    "weights/last.pt",
    "weights/best.pt",
}
CONTENT: dict[str, Any] = {"yaml": {"task": "detect", "nc": 1}, "names": {0: "a"}, "settings": {"epochs": 3}}


def fill(folder: RunFolder) -> None:
    """Call every method that writes."""
    folder.write_inputs({"names": ["ä", "b"], "epochs": 3}, ["a.jpg is empty; left out", "b\udcff.jpg too"])
    folder.write_documents({"classes.csv": "a,b\n", "n\udcffmes.txt": "\udcff"})
    folder.append_row({"epoch": 0, "loss": 1 / 3, "mAP": None})
    folder.save_weights(["last.pt", "best.pt"], nn.Linear(2, 1), **CONTENT)
    folder.save_weights([], nn.Linear(2, 1), **CONTENT)
    folder.save_state({"format": STATE_FORMAT, "number": 7})
    folder.finish_writing()


def files(folder: Path) -> set[str]:
    """Return the names of all files but states and the lock."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}
    return {name for name in names if not name.startswith("checkpoint/")}


def test_files(tmp_path: Path) -> None:
    """A new run in the same folder removes what it would add to, and leaves the user's files."""
    folder = RunFolder(tmp_path, True)
    fill(folder)
    assert yaml.safe_load((tmp_path / "settings.yaml").read_text()) == {"names": ["ä", "b"], "epochs": 3}
    assert (tmp_path / "problems.txt").read_bytes() == b"a.jpg is empty; left out\nb\xff.jpg too\n"
    assert (tmp_path / "n\udcffmes.txt").read_bytes() == b"\xff"
    assert (tmp_path / "results.csv").read_text() == "epoch,loss,mAP\n0,0.333333333,\n"
    for name in ("last.pt", "best.pt"):
        assert read_weights(tmp_path / "weights" / name).names == {0: "a"}
    assert files(tmp_path) == WRITTEN | {"results.csv"}
    mine = {
        "notes.txt",
        ".mine.part",
        "tensorboard/events.txt",
        *(f"weights/epoch{s}.pt" for s in ("s of mine", "3 a")),
    }
    earlier = ("weights/epoch3.pt", "tensorboard/events.out.tfevents.1.host.2.0", ".wandb.json")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "weights/epoch4.pt").mkdir()
    for name in (*mine, *earlier):
        (tmp_path / name).touch()
    folder.restore_to_state(None)
    assert folder.read_state() is None
    assert files(tmp_path) == WRITTEN | mine


@pytest.mark.parametrize(
    "name", ["results.csv", "problems.txt", "receipt.yaml", "weights", "weights/last.pt", "checkpoint"]
)
def test_what_stands_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    """It is named at the start."""
    (tmp_path / "photos.v1").mkdir()
    if Path(name).suffix:
        (tmp_path / name).mkdir(parents=True)
    else:
        (tmp_path / name).touch()
    RunFolder(tmp_path, False)
    with pytest.raises(UserError, match=f"^{tmp_path / name} is in the way "):
        RunFolder(tmp_path, True)


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, False)
    fill(folder)
    folder.restore_to_state(None)
    assert folder.read_state() is None
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_restores_the_rows_of_its_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, True)
    folder.append_row({"epoch": 0})
    folder.save_state({"format": STATE_FORMAT, "weights": torch.ones(3)})
    folder.append_row({"epoch": 1})
    folder.write_inputs({}, ["of data that are better now"])
    folder.write_inputs({}, [])
    folder.finish_writing()
    (tmp_path / "weights").mkdir()
    for name in (".results.csv-abc.part", "weights/.last.pt-abc.part", "notes.txt"):
        (tmp_path / name).touch()
    folder.restore_to_state(folder.read_state())
    assert files(tmp_path) == {"results.csv", "settings.yaml", "notes.txt"}
    assert (tmp_path / "results.csv").read_text() == "epoch\n0\n"
    folder.append_row({"epoch": 1})
    assert (tmp_path / "results.csv").read_text() == "epoch\n0\n1\n"


def test_a_file_is_written_in_the_background_and_then_something_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, go, done = RunFolder(tmp_path, True), threading.Event(), list[str]()
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go.wait(60), flush(file)))
    folder.save_weights(["last.pt"], nn.Linear(2, 1), lambda: done.append("then"), **CONTENT)
    assert (done, (tmp_path / "weights" / "last.pt").exists()) == ([], False)
    go.set()
    folder.wait_for_writing()
    assert (done, (tmp_path / "weights" / "last.pt").exists()) == (["then"], True)


def test_a_file_that_cannot_be_written_is_one_warning_and_finally_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest of what failed is written in the end; a later success ends a failure."""
    folder, weights = RunFolder(tmp_path, True), tmp_path / "weights"
    weights.touch()  # in place of the folder; root may write everywhere else
    for number in range(3):
        folder.save_weights(["last.pt", "best.pt"], nn.Linear(2, 1), **{**CONTENT, "names": {0: str(number)}})
        folder.write_documents({"a.txt": "written"})
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == 2
    assert all(f"{weights}/{name}.pt " in line for line, name in zip(warnings, ("last", "best"), strict=True))
    with pytest.raises(UserError, match=r"last\.pt"):
        folder.finish_writing()
    folder.save_state({"format": STATE_FORMAT})
    with pytest.raises(UserError, match=f"--resume {tmp_path}"):
        folder.finish_writing()
    weights.unlink()
    folder.save_weights(["last.pt"], nn.Linear(2, 1), **{**CONTENT, "names": {0: "last"}})
    folder.finish_writing()
    assert [read_weights(weights / f"{name}.pt").names for name in ("last", "best")] == [{0: "last"}, {0: "2"}]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(("tensor", "value"), [("weight", math.nan), ("running_var", -math.inf)])
def test_weights_that_are_not_finite_replace_no_file(tensor: str, value: float, is_main: bool, tmp_path: Path) -> None:
    folder, model = RunFolder(tmp_path, is_main), nn.BatchNorm1d(2)
    folder.save_weights(["last.pt", "best.pt"], model, **CONTENT)
    folder.save_state({"format": STATE_FORMAT, "ema": model.state_dict()})
    folder.finish_writing()
    before = contents(tmp_path)
    model.state_dict()[tensor][1] = value
    refused = partial(pytest.raises, UserError, match=f"1 tensor, first in {tensor}, .* {tmp_path} ")
    with refused():
        folder.save_weights(["last.pt", "best.pt"], model, **CONTENT)
    with refused():
        folder.save_state({"format": STATE_FORMAT, "ema": model.state_dict()})
    folder.finish_writing()
    assert contents(tmp_path) == before


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path, True)
    folder.write_documents({"a.txt": "old"})
    before = contents(tmp_path)
    with monkeypatch.context() as patched:
        fill_disk(patched)
        folder.write_documents({"a.txt": "new"})
        with pytest.raises(UserError, match=r"a\.txt"):
            folder.finish_writing()
        assert contents(tmp_path) == before
    folder.finish_writing()  # there is space again
    assert (tmp_path / "a.txt").read_text() == "new"


# The run


def test_points_and_pictures(tmp_path: Path) -> None:
    run, recorder = run_in(tmp_path), Recorder()
    run.plot(pytest.fail)  # before `enable_plots`
    assert not run.is_tracked
    run.start_trackers(lambda: [recorder], {"epochs": 3, "data": "http://me:secret@host"}, 12)
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
    log("a line")
    assert recorder.lines[-1] == "a line"
    assert recorder.config == {"epochs": 3, "data": "http://host"}


# Two processes


def stop_two(folder: str) -> tuple[list[Any], str]:
    """Return what `stop_together` does if none, both, or one of two processes has a reason; and what is printed."""
    with redirect_stdout(io.StringIO()) as printed:
        run = run_in(Path(folder))
        outcomes, main = [], run.accelerator.is_main_process
        for reason in ("", "SIGTERM", "" if main else "SIGUSR1", "SIGINT" if main else "SIGTERM"):
            try:
                outcomes.append(run.stop_together(reason))
            except StopRequested as stopped:
                outcomes.append((stopped.reason, stopped.code))
    return [*outcomes, len(run.devices), run.path.name], printed.getvalue()


def test_two_processes_stop_together(tmp_path: Path, on_processes: OnProcesses) -> None:
    """For the first process's reason; only the main one prints. Whole runs of two processes show the rest."""
    (main, printed), (other, nothing) = on_processes(2, stop_two, str(tmp_path))
    assert main == other == [None, ("SIGTERM", 143), ("SIGUSR1", 138), ("SIGINT", 130), 2, "exp"]
    assert (printed.count("process 1: "), nothing) == (1, "")
