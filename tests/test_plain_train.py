"""examples/plain_train.py: after 20 optimizer steps it has the weights of train.py, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.yolo import build_model
from tests.conftest import OnProcesses, RunScript
from tests.making import write_yaml
from tests.whole_runs import Parts, within

EPOCHS, STEPS = 5, 20  # 28 images: 7 batches of 4, and 4 steps of 2, 2, 2 and 1 batches in each epoch
RECIPE = {"nbs": 8, "lr0": 0.02, "warmup_epochs": 1.0, "warmup_bias_lr": 0.02}


def trained(flags: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights that train.py has after its last epoch, not their average."""

    def work(parts: Parts) -> dict[str, Tensor]:
        for _ in range(EPOCHS):
            parts.train_one_epoch()
            parts.steps.next_epoch()
        assert parts.steps.progress.step == STEPS
        return dict(parts.model.model.state_dict())

    return within(flags, work)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_weights_are_those_of_train(
    processes: int,
    run_script: RunScript,
    on_processes: OnProcesses,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save(build_model("yolov5n.yaml", nc=7, imgsz=64).state_dict(), tmp_path / "initial.pt")
    what = ["--data", str(small_data), "--cfg", "yolov5n.yaml", "--weights", str(tmp_path / "initial.pt")]
    how = ["--hyp", str(write_yaml(tmp_path / "recipe.yaml", RECIPE)), "--epochs", str(EPOCHS), "--batch-size", "4"]
    flags = [*what, *how, "--imgsz", "64", "--workers", "0", "--device", "cpu"]
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2") if processes == 2 else ()
    saved = ("--save", str(tmp_path / "plain.pt"))
    run_script("examples/plain_train.py", *flags, *saved, launcher=(sys.executable, *launcher), OMP_NUM_THREADS="1")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)["state"]
    expected, *_ = on_processes(processes, trained, [*flags, "--noautoanchor", "--project", str(tmp_path)])
    assert plain.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(plain[name], expected[name])] == []
