"""DeepSpeed's real engine on two CPU processes, against DDP and one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from models.weights import read_weights
from tests.conftest import CallMain, OnProcesses, RunScript
from tests.curves import SCORES, floats, refused, rows, same_curve
from tests.machines import ACCELERATE, CONFIGS
from tests.utils.training.test_steps import BATCHES, HYP, steps_of, train
from tests.wandb_files import one_run
from utils.distributed.deepspeed import FLOOR
from utils.distributed.launch import reset_accelerate, start
from utils.run import Run


def by(name: str) -> tuple[str, ...]:
    return (*ACCELERATE, "--config_file", str(CONFIGS / f"deepspeed_{name}.yaml"))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param("zero1", 1, marks=pytest.mark.long),
        ("zero2", 2),
        pytest.param("zero3", 3, marks=pytest.mark.long),  # test_resume.py runs it too
        pytest.param("zero3_offload", 3, marks=pytest.mark.long),
    ],
)
def test_the_curve_of_one_process(
    name: str,
    stage: int,
    single: Path,
    fine_tune: Callable[..., str],
    run_script: RunScript,
    drawn: Path,
    tmp_path: Path,
) -> None:
    """Required: 1e-3; measured: 2e-7. There is one W&B run. val.py gets the same scores from stage 3's weight file."""
    printed = fine_tune(tmp_path, "--sync-bn", launcher=by(name), DS_ACCELERATOR="cpu", WANDB_MODE="offline")
    assert f"2 processes under DeepSpeed ZeRO-{stage}, mixed precision no" in " ".join(printed.split())
    assert "WARNING" not in printed
    same_curve(tmp_path / "exp", single)
    one_run(tmp_path / "exp")
    weights = tmp_path / "exp" / "weights" / "last.pt"
    assert read_weights(weights).state.keys() == read_weights(single / "weights" / "last.pt").state.keys()
    if stage < 3:  # whose parameters are partitioned
        return
    how = ("--imgsz", "96", "--batch-size", "16", "--workers", "0", "--device", "cpu", "--project", str(tmp_path))
    printed = run_script("val.py", "--data", str(drawn), "--weights", str(weights), *how, OMP_NUM_THREADS="1")
    overall = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["all"])
    assert overall[5:] == [f"{rows(tmp_path / 'exp')[-1][score]:.3f}" for score in SCORES]


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero2_bf16", "zero3_bf16"])
def test_bf16_stays_near(name: str, single: Path, fine_tune: Callable[..., str], tmp_path: Path) -> None:
    """Losses are within 2 % of fp32 (measured: 0.2 %), but not equal."""
    printed = fine_tune(tmp_path, "--sync-bn", launcher=by(name), DS_ACCELERATOR="cpu")
    assert "mixed precision bf16" in printed
    same_curve(tmp_path / "exp", single, losses=0.02, scores=0.02, weights=5e-3)
    losses = [row["train/box_loss"] for row in rows(tmp_path / "exp")]
    assert losses != pytest.approx([row["train/box_loss"] for row in rows(single)], rel=1e-5)


@pytest.mark.long
def test_it_ends_in_order_twenty_times(run_script: RunScript, drawn: Path, tmp_path: Path) -> None:
    """The exit code is 0 each time; without an orderly shutdown some runs would abort."""
    flags = ("--data", str(drawn), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--epochs", "1")
    how = ("--batch-size", "8", "--workers", "0", "--noplots", "--device", "cpu", "--project", str(tmp_path))
    for _ in range(20):
        run_script("train.py", *flags, *how, launcher=by("zero2"), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("flag", ["--nosave", "--doctor"])
def test_an_older_version_is_refused(
    flag: str, call_main: CallMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one sentence, before anything is written."""
    reset_accelerate()
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.4" if name == "deepspeed" else version(name))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")  # of a launcher
    code, printed = call_main("train.py", "--device", "cpu", "--project", str(tmp_path / "runs"), flag)
    refused(printed, f"DeepSpeed 0.17.4 is installed, but versions before {FLOOR} ")
    assert (code, list(tmp_path.iterdir())) == (1, [])
    assert printed.endswith(f"pip install deepspeed=={FLOOR}\n")


# Five steps of a small network, without a launcher


def five_steps(folder: str, stage: int, precision: str) -> tuple[list[float], Tensor]:
    """Train under a stage of ZeRO, or DDP if it is 0; return the gradients' norms, and how far the EMA is after each.

    The large weights lie before a small one: a gather that only waits for its last part reads them too early.
    """
    if stage:
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage))
    run = Run(*start("cpu", precision, 60.0))
    run.open_folder(folder, f"zero{stage}", exist_ok=False)
    torch.manual_seed(0)
    pairs = pairwise((64, 2048, 2048, 64, 1))
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.BatchNorm1d(pair[1]), nn.SiLU())]
    images = torch.rand(8 * BATCHES, 64, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(TensorDataset(images), batch_size=8)
    steps, loader = steps_of(run, nn.Sequential(*layers[:-2]), loader, replace(HYP, lr0=0.01), precision=precision)

    def weights() -> Tensor:
        return torch.cat([weight.flatten() for weight in steps.ema.model.parameters()])

    before, norms, moved = weights(), [], []
    for number in range(BATCHES):
        train(steps, loader, start=number, stop=number + 1)
        norms.append(float(steps.log.norm))
        moved.append(weights() - before)
    steps.end_epoch()
    content: Any = {"yaml": {"task": "detect", "nc": 1}, "names": {0: "a"}, "settings": {}}
    run.files.save_weights(["last.pt"], steps.ema.model, **content)
    run.files.finish_writing()
    run.collectives.broadcast(None)
    assert floats(run.path).isfinite().all()
    return norms, torch.stack(moved)


EVERY = [(stage, precision) for stage in (1, 2, 3) for precision in ("no", "bf16")]
QUICK = [(2, "bf16"), (3, "no")]


@pytest.mark.parametrize(
    ("stage", "precision"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in EVERY]
)
def test_five_steps_as_under_ddp(stage: int, precision: str, on_processes: OnProcesses, tmp_path: Path) -> None:
    """Measured: 1e-4, because DDP's norm is a sum in float32, and 2e-2 with bf16."""
    (norms, moved), _ = on_processes(2, five_steps, str(tmp_path), stage, precision)
    (expected_norms, expected), _ = on_processes(2, five_steps, str(tmp_path), 0, precision)
    tolerance = 1e-3 if precision == "no" else 6e-2
    assert norms == pytest.approx(expected_norms, rel=tolerance)
    assert (moved - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("refused_flag", ["--hashes", "--optimizer=Adafactor"])
def test_flags_are_refused_before_anything_is_written(
    refused_flag: str, call_main: CallMain, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.config.settings.is_requested", lambda: True)
    flags = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--device", "cpu")
    code, printed = call_main("train.py", *flags, refused_flag, "--project", str(tmp_path / "runs"))
    assert (code, printed.count("\n"), (tmp_path / "runs").exists()) == (1, 1, False)
    assert printed.startswith(f"error: {refused_flag.replace('=', ' ')} ")
