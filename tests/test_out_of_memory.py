"""Whole runs whose batch does not fit the memory, which is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.conftest import RECIPE
from tests.curves import rows
from tests.making import write_yaml
from utils.errors import UserError


@pytest.fixture
def job(small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments of a run on a device that holds the forward pass of three images."""
    plain = train.Training.loss_terms

    def loss_terms(training: train.Training, module: Any, batch: Any) -> Any:
        if len(batch.infos) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(training, module, batch)

    monkeypatch.setattr(train.Training, "loss_terms", loss_terms)
    hyp = write_yaml(tmp_path / "hyp.yaml", {**RECIPE, "nbs": 16})
    return {
        **{
            "data": small_data,
            "weights": "",
            "cfg": "yolov5n.yaml",
            "hyp": hyp,
            "imgsz": 64,
            "epochs": 1,
            "workers": 0,
        },
        **{"device": "cpu", "noautoanchor": True, "noplots": True, "log_with": "none", "project": tmp_path},
    }


def test_a_run_continues_with_parts_of_its_batches(
    job: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train.run(**job, batch_size=8)
    printed = "".join(capfd.readouterr())
    assert printed.count("warning: out of memory") == 2
    assert "each batch is computed in 4 parts of 2 images, accumulated to the same --batch-size" in printed
    (row,) = rows(tmp_path / "exp")
    assert all(row[name] > 0 for name in ("train/box_loss", "train/obj_loss", "train/cls_loss"))


@pytest.mark.long
def test_logical_processes_take_turns(job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bytes: of four logical processes with two images each, only one fits."""
    running = [0]
    plain = train.Training.loss_terms

    def loss_terms(training: train.Training, module: Any, batch: Any) -> Any:
        if training.add_gradients.one_by_one or not limited[0]:
            return plain(training, module, batch)
        running[0] += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    limited = [False]
    monkeypatch.setattr(train.Training, "loss_terms", loss_terms)
    for name in ("roomy", "full"):
        train.run(**job, batch_size=8, logical_processes=4, name=name)
        limited[0] = True
    assert running[0] > 0
    assert (tmp_path / "full" / "results.csv").read_bytes() == (tmp_path / "roomy" / "results.csv").read_bytes()


def test_without_the_retry(job: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"out of memory of a GPU with batch_size=8 at 64 pixels; try batch_size=4"):
        train.run(**job, batch_size=8, no_oom_retry=True)
