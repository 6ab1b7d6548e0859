"""The files of a run folder, which the main process writes in the background; a failure is a warning at first."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from models.weights import read_weights
from utils.checkpoint import STATE_FORMAT
from utils.errors import UserError
from utils.run import BackgroundWriter, RunFolder

WRITTEN = {"settings.yaml", "problems.txt", "classes.csv", "n\udcffmes.txt", "weights/last.pt", "weights/best.pt"}


def fill(folder: RunFolder) -> None:
    """Call every method that writes."""
    folder.write_settings({"names": ["ä", "b"], "epochs": 3})
    folder.write_problems(["a.jpg is empty; left out", "b\udcff.jpg too"])
    folder.write_documents({"classes.csv": "a,b\n", "n\udcffmes.txt": "\udcff"})
    folder.add_row({"epoch": 0, "loss": 1 / 3, "mAP": None})
    content = {"yaml": {"task": "detect", "nc": 1}, "names": {0: "a"}, "settings": {"epochs": 3}}
    folder.save_weights(["last.pt", "best.pt"], nn.Linear(2, 1), **content)
    folder.save_weights([], nn.Linear(2, 1), **content)
    folder.save_state({"format": STATE_FORMAT, "number": 7})
    folder.wait_for_writing()
    folder.finish_writing()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}


def test_files(tmp_path: Path) -> None:
    fill(RunFolder(tmp_path, True))
    assert yaml.safe_load((tmp_path / "settings.yaml").read_text()) == {"names": ["ä", "b"], "epochs": 3}
    assert (tmp_path / "problems.txt").read_bytes() == b"a.jpg is empty; left out\nb\xff.jpg too\n"
    assert (tmp_path / "n\udcffmes.txt").read_bytes() == b"\xff"
    assert (tmp_path / "results.csv").read_text() == "epoch,loss,mAP\n0,0.333333333,\n"
    for name in ("last.pt", "best.pt"):
        assert read_weights(tmp_path / "weights" / name).names == {0: "a"}
    assert {each for each in files(tmp_path) if "checkpoint" not in each} == WRITTEN | {"results.csv"}


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, False)
    fill(folder)
    folder.restore_to_state(None)
    assert folder.read_state() is None
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_restores_the_rows_of_its_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, True)
    folder.add_row({"epoch": 0})
    folder.save_state({"format": STATE_FORMAT, "weights": torch.ones(3)})
    folder.add_row({"epoch": 1})
    folder.write_problems(["of data that are better now"])
    folder.write_problems([])
    folder.finish_writing()
    (tmp_path / "weights").mkdir()
    for name in (".results.csv-abc.part", "weights/.last.pt-abc.part", "notes.txt"):
        (tmp_path / name).touch()
    folder.restore_to_state(folder.read_state())
    assert {each for each in files(tmp_path) if "checkpoint" not in each} == {"results.csv", "notes.txt"}
    assert (tmp_path / "results.csv").read_text() == "epoch\n0\n"
    folder.add_row({"epoch": 1})
    assert (tmp_path / "results.csv").read_text() == "epoch\n0\n1\n"


def test_a_new_run_removes_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, True)
    fill(folder)
    (tmp_path / "notes.txt").touch()  # the user's
    folder.restore_to_state(None)
    assert folder.read_state() is None
    assert files(tmp_path) == WRITTEN | {"notes.txt"}


def test_a_file_that_cannot_be_written_is_a_warning_and_finally_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path, True)
    (tmp_path / "weights").touch()
    folder.save_weights(["last.pt"], nn.Linear(2, 1), yaml={"task": "detect"}, names={}, settings={})
    folder.wait_for_writing()
    assert capsys.readouterr().out.startswith(f"warning: {tmp_path}/weights/last.pt ")
    with pytest.raises(UserError, match=r"last\.pt cannot be written"):
        folder.finish_writing()
    folder.save_state({"format": STATE_FORMAT})
    with pytest.raises(UserError, match=f"--resume {tmp_path}"):
        folder.finish_writing()


# The writer


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder that cannot be made until the file in its place is removed; root may write everywhere else."""
    (tmp_path / "weights").touch()
    return tmp_path / "weights"


def test_jobs_run_in_the_background_one_after_another() -> None:
    writer, done, go = BackgroundWriter(), list[str](), threading.Event()

    def slow() -> None:
        go.wait(60)
        done.append("slow")

    writer.submit({Path("a"): slow})
    assert done == []
    go.set()
    writer.submit({Path("b"): lambda: done.append("quick")}, then=lambda: done.append("then"))
    writer.wait()
    assert done == ["slow", "quick", "then"]
    writer.submit({Path("a"): lambda: [].pop()})
    with pytest.raises(IndexError):  # a programming error
        writer.wait()


def test_each_file_that_fails_is_one_warning_and_the_newest_job_is_repeated(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = BackgroundWriter()
    for number in range(3):
        writer.write([weights / "last.pt", weights / "best.pt"], b"%d" % number)
        writer.write([weights.parent / "results.csv"], b"epoch")
    writer.wait()
    warned = [line.partition(" cannot")[0] for line in capsys.readouterr().out.splitlines()]
    assert warned == [f"warning: {weights}/{name}.pt" for name in ("last", "best")]
    assert (weights.parent / "results.csv").read_bytes() == b"epoch"
    weights.unlink()
    writer.write([weights / "last.pt"], b"last")  # a later success ends a failure
    writer.wait()
    writer.finish("start again")
    assert ((weights / "last.pt").read_bytes(), (weights / "best.pt").read_bytes()) == (b"last", b"2")
    assert capsys.readouterr().out == ""


def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, file = BackgroundWriter(), tmp_path / "last.pt"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.write([file], b"old")
    writer.wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        writer.write([file], b"new")
        writer.wait()
        assert capsys.readouterr().out.startswith(f"warning: {file} ")
        assert file.read_bytes() == b"old"
        with pytest.raises(UserError, match=r"last\.pt"):
            writer.finish("start again")
    writer.finish("start again")  # there is space again
    assert file.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
