"""The files of a run folder, which the main process writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from torch import nn

from models.weights.reader import read_weights
from utils.checkpoint.state_files import STATE_FORMAT
from utils.distributed.ranks import Collectives
from utils.errors import UserError
from utils.run_folder import RunFolder


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path, warnings: list[str]) -> RunFolder:
    return RunFolder(tmp_path, Collectives(Accelerator(cpu=True)), True, warnings.append)


def fill(folder: RunFolder) -> None:
    """Call every method that writes."""
    folder.write_settings({"names": ("ä", "b"), "epochs": 3})
    folder.write_problems(["a.jpg is empty; left out", "b\udcff.jpg too"])
    folder.write_documents({"classes.csv": "a,b\n", "n\udcffmes.txt": "\udcff"})
    folder.add_row({"epoch": 0, "loss": 1 / 3, "mAP": None})
    folder.save_weights(
        ["last.pt", "best.pt"],
        nn.Linear(2, 1),
        yaml={"task": "detect", "nc": 1},
        names={0: "a"},
        settings={"epochs": 3},
    )
    folder.save_state({"format": STATE_FORMAT, "number": 7})
    folder.wait_for_writing()
    folder.finish_writing()


def test_files(folder: RunFolder, tmp_path: Path) -> None:
    fill(folder)
    assert yaml.safe_load((tmp_path / "settings.yaml").read_text().replace("!!python/tuple", "")) == {
        "names": ["ä", "b"],
        "epochs": 3,
    }
    assert (tmp_path / "problems.txt").read_bytes() == b"a.jpg is empty; left out\nb\xff.jpg too\n"
    assert (tmp_path / "classes.csv").read_text() == "a,b\n"
    assert (tmp_path / "n\udcffmes.txt").read_bytes() == b"\xff"
    assert (tmp_path / "results.csv").read_text() == "epoch,loss,mAP\n0,0.333333333,\n"
    for name in ("last.pt", "best.pt"):
        assert read_weights(tmp_path / "weights" / name).names == {0: "a"}
    assert len(list((tmp_path / "checkpoint").iterdir())) == 1


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Collectives(Accelerator(cpu=True)), False, print)
    fill(folder)
    folder.restore_to_state(None)
    assert folder.read_state() is None
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_problems_file_without_problems(folder: RunFolder, tmp_path: Path) -> None:
    folder.write_problems([])
    assert not (tmp_path / "problems.txt").exists()
    folder.write_problems(["a.jpg is empty; left out"])
    folder.write_problems([])  # of a run that is resumed with better data, or of another run in the folder
    assert not (tmp_path / "problems.txt").exists()


def state_of(folder: RunFolder) -> dict[str, Any]:
    state = folder.read_state()
    assert state is not None
    return state


def test_rewind_restores_the_rows_of_the_state(folder: RunFolder, tmp_path: Path, warnings: list[str]) -> None:
    folder.add_row({"epoch": 0})
    folder.save_state({"format": STATE_FORMAT, "weights": torch.ones(3)})
    folder.add_row({"epoch": 1})
    folder.finish_writing()
    (tmp_path / "weights").mkdir()
    for name in (".results.csv-abc.part", "weights/.last.pt-abc.part"):
        (tmp_path / name).touch()
    state = state_of(folder)
    assert state["rows"] == ["epoch", "0"]
    folder.restore_to_state(state)
    assert (tmp_path / "results.csv").read_text() == "epoch\n0\n"
    assert not list(tmp_path.rglob("*.part"))
    folder.add_row({"epoch": 1})
    assert (tmp_path / "results.csv").read_text() == "epoch\n0\n1\n"
    assert warnings == []


def test_a_new_run_removes_what_an_earlier_one_has_left(folder: RunFolder, tmp_path: Path) -> None:
    fill(folder)
    (tmp_path / "notes.txt").touch()  # the user's
    folder.restore_to_state(None)
    assert folder.read_state() is None
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {".lock"} == {
        "settings.yaml",
        "notes.txt",
        "weights/last.pt",
        "weights/best.pt",
        "problems.txt",
        "classes.csv",
        "n\udcffmes.txt",
    }


def test_a_resumed_run_removes_nothing(folder: RunFolder, tmp_path: Path) -> None:
    fill(folder)
    before = sorted(path for path in tmp_path.rglob("*"))
    folder.restore_to_state({"rows": []})
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_no_file_names_write_no_weights(folder: RunFolder, tmp_path: Path) -> None:
    folder.save_weights([], nn.Linear(2, 1), yaml={}, names={}, settings={})
    folder.finish_writing()
    assert not (tmp_path / "weights").exists()


def test_a_file_that_cannot_be_written_is_a_warning_and_finally_an_error(
    folder: RunFolder, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "weights").touch()
    folder.save_weights(["last.pt"], nn.Linear(2, 1), yaml={"task": "detect"}, names={}, settings={})
    folder.wait_for_writing()
    assert [warning.partition(" cannot")[0] for warning in warnings] == [f"warning: {tmp_path}/weights/last.pt"]
    with pytest.raises(UserError, match=r"last\.pt cannot be written: .*; fix that, and start the run again"):
        folder.finish_writing()
    folder.save_state({"format": STATE_FORMAT})
    with pytest.raises(UserError, match=f"fix that, and continue with --resume {tmp_path}$"):
        folder.finish_writing()
