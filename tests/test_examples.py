"""The examples that are a file: own layer, tracker and hooks in a whole run, the notebook. Others have own tests."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, RunScript, not_here

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "train.ipynb"


def test_a_layer_a_tracker_and_hooks(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    """The weights have the layer, and the tracker has the steps and the row of the epoch."""
    model = ("--cfg", str(EXAMPLES / "own_layer.yaml"), "--layers", str(EXAMPLES / "own_layer.py"), "--weights", "")
    how = ("--imgsz", "64", "--epochs", "1", "--batch-size", "8", "--workers", "0", "--device", "cpu")
    logged = ("--log-with", str(EXAMPLES / "own_tracker.py"), "--hooks", str(EXAMPLES / "own_hooks.py"))
    run_script("train.py", *model, *how, *logged, "--data", str(small_data), "--project", str(tmp_path))
    run = tmp_path / "exp"
    weights = torch.load(run / "weights" / "last.pt", weights_only=True)
    assert any("blocks.0" in key for key in weights["state"])
    first, *lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    assert (first["project"], first["settings"]["epochs"]) == (tmp_path.name, 1)
    assert [line["step"] for line in lines if "step/box_loss" in line] == [1, 2, 3, 4]
    (epoch,) = (line for line in lines if "metrics/mAP_0.5" in line)
    (row,) = csv.DictReader((run / "results.csv").open())
    for key in ("train/box_loss", "val/obj_loss", "metrics/recall"):
        assert epoch[key] == pytest.approx(float(row[key]))

    assert (run / "confusion" / "shares.csv").is_file()


@pytest.mark.long
def test_unfreezing(run_script: RunScript, small_data: Path, learned: Path, tmp_path: Path) -> None:
    how = ("--imgsz", "64", "--epochs", "4", "--batch-size", "8", "--workers", "0", "--device", "cpu")
    what = ("--data", str(small_data), "--weights", str(learned), "--project", str(tmp_path))
    assert "stopped by on_epoch" in run_script("examples/unfreeze.py", *what, *how)
    assert [len((tmp_path / name / "results.csv").read_text().splitlines()) for name in ("exp", "exp2")] == [4, 5]


@pytest.mark.long
def test_a_search_is_continued(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    if not find_spec("optuna"):
        not_here("optuna")
    flags = ("--data", str(small_data), "--epochs", "1", "--folder", str(tmp_path), "--img", "32", "--hyp.box", "0.1")
    for trials in ("1", "2"):
        printed = run_script("examples/tune.py", *flags, "--trials", trials, OMP_NUM_THREADS="1")
        assert "best fitness" in printed
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"trial0", "trial1"}


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.long
def test_the_notebook_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        not_here("nbclient and ipykernel")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, data, training, detections, exported = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    for part in (data, training, detections):
        assert any("image/png" in output.get("data", ()) for output in part), part
    assert "results in" in training[-1]["text"]
    assert "bytes; " in exported[-1]["text"]
    rows = list(csv.DictReader((tmp_path / "runs" / "notebook" / "curves" / "results.csv").open()))
    assert len(rows) == 2
    assert (tmp_path / "runs" / "notebook" / "curves" / "weights" / "best.torchscript").is_file()
