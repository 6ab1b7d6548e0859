"""DeepSpeed's real engine on two CPU processes, against DDP and one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models.weights import read_weights
from tests.conftest import RunScript
from tests.curves import SCORES, refused, rows, same_curve
from tests.machines import ACCELERATE, CONFIGS
from tests.wandb_files import one_run


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


@pytest.mark.long
def test_fp16_without_a_scaler_is_refused(fine_tune: Callable[..., str], tmp_path: Path) -> None:
    printed = fine_tune(tmp_path, "--mixed-precision", "fp16", launcher=by("zero2"), fails=True, DS_ACCELERATOR="cpu")
    refused(printed, "use one of no, bf16")
    assert not (tmp_path / "exp").exists()
