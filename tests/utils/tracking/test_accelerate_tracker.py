"""Trackers of Accelerate: MLflow and Trackio with stores on this machine. None blocks or fails a run."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
from pathlib import Path

import pytest

from tests.conftest import not_here
from tests.making import launched
from utils.tracking.accelerate_tracker import AccelerateTracker

RUN = {"project": "cats", "name": "exp", "id": "abc"}
CONFIG = {"epochs": 3, "hyperparameters": {"lr0": 0.01, "anchors": [1, 2]}}


def logged(name: str, folder: Path, first: int, last: int) -> list[str]:
    """Log steps and an epoch in a new tracker; return what it printed."""
    printed: list[str] = []
    folder.mkdir(exist_ok=True)
    tracker = AccelerateTracker(name, folder, RUN, printed.append)
    tracker.store_init_configuration(CONFIG)
    for step in range(first, last + 1):
        tracker.log({"step": step, "step/loss": step / 10}, step=step)
    tracker.log({"epoch": last, "metrics/mAP_0.5(B)": 0.5, "epoch/train_seconds": float("nan")}, step=last)
    tracker.finish()
    return printed


def points(run: Path, key: str) -> list[tuple[float, int]]:
    """Return the values of a metric with their steps, of a run in MLflow's files."""
    lines = (run / "metrics" / key).read_text().splitlines()
    return [(float(value), int(step)) for _, value, step in map(str.split, lines)]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is continued logs no step twice. The launcher's variables do not make Accelerate wait for others."""
    pytest.importorskip("mlflow")
    launched(monkeypatch, 2, 2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert logged("mlflow", tmp_path / "exp", 1, 3) == []
    assert logged("mlflow", tmp_path / "exp", 2, 4) == []
    (run,) = [file.parent for file in tmp_path.glob("mlruns/*/*/meta.yaml")]
    assert run.name == json.loads((tmp_path / "exp" / ".mlflow.json").read_text())["remote_id"]
    assert points(run, "step/loss") == [(0.1, 1), (0.2, 2), (0.3, 3), (0.4, 4)]
    assert points(run, "metrics/mAP_0.5_B_") == [(0.5, 3), (0.5, 4)]
    assert (run / "params" / "hyperparameters.lr0").read_text() == "0.01"
    assert (run / "params" / "hyperparameters.anchors").read_text() == "[1, 2]"
    assert (run / "tags" / "mlflow.runName").read_text() == "exp"


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("trackio") is None:
        not_here("Trackio: make test-trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert logged("trackio", tmp_path / "exp", 1, 3) == []
    with sqlite3.connect(tmp_path / "trackio" / "cats.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, *_ in rows} == {"exp-abc"}
    values = [json.loads(metrics) for _, _, metrics in rows]
    assert [value["step/loss"] for value in values if "step/loss" in value] == [0.1, 0.2, 0.3]
    assert [value["metrics/mAP_0.5_B_"] for value in values if "step/loss" not in value] == [0.5]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "this version of accelerate has no tracker unknown: pip install -U accelerate"),
        pytest.param("swanlab", "No module named 'swanlab'", marks=pytest.mark.long),
    ],
)
def test_a_tracker_that_fails_is_one_warning(name: str, reason: str, tmp_path: Path) -> None:
    assert "swanlab" not in os.listdir(tmp_path)
    assert logged(name, tmp_path, 1, 3) == [
        f"warning: {name}: {reason}; training continues, results.csv has its numbers"
    ]
