"""The files that a run has written: listed, and removed by another run in the same folder."""

from __future__ import annotations

import json
from pathlib import Path

from utils.checkpoint.written_files import LIST_FILE, WrittenFiles

OF_A_RUN = ("classes.csv", "b\udcff.csv", "profile/operators.csv", "val_batch0_pred.jpg")
UNLISTED = ("results.csv", "stacks/process0.txt", "profile/trace_0.json", "weights/epoch3.pt", "events.out.tfevents.1")
OF_OTHERS = ("notes.csv", "photo.jpg", "weights/last.pt", "weights/best.pt", "weights/best.onnx", "settings.yaml")


def filled(folder: Path) -> None:
    for name in (*OF_A_RUN, *UNLISTED, *OF_OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_another_run_removes_them_and_nothing_else(tmp_path: Path) -> None:
    filled(tmp_path)
    first = WrittenFiles(tmp_path)
    first.add(OF_A_RUN[:2])
    first.add(OF_A_RUN)
    WrittenFiles(tmp_path).remove_all()
    assert names(tmp_path) == set(OF_OTHERS)
    assert not (tmp_path / "stacks").exists()
    assert not (tmp_path / "profile").exists()
    WrittenFiles(tmp_path).remove_all()  # nothing is left


def test_a_list_never_leads_out_of_the_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    outside, inside = tmp_path / "other.csv", run / "classes.csv"
    for file in (outside, inside):
        file.touch()
    (run / LIST_FILE).write_text(json.dumps(["../other.csv", str(outside), "classes.csv", "missing.csv"]))
    WrittenFiles(run).remove_all()
    assert outside.exists()
    assert not inside.exists()


def test_a_damaged_list_is_an_empty_one(tmp_path: Path) -> None:
    for text in ('["classes.csv', "3", ""):
        (tmp_path / LIST_FILE).write_text(text)
        (tmp_path / "classes.csv").touch()
        WrittenFiles(tmp_path).remove_all()
        assert (tmp_path / "classes.csv").exists()
