"""Whole runs with `lr_factor` and --freeze by name: on two processes, killed and resumed, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.weights import read_weights
from tests.conftest import CallMain, RunScript
from tests.curves import identical, refused, rows, same_curve
from tests.faults.fault_points import planted
from tests.test_deepspeed import by

BACKBONE_ROWS = 10  # of yolov5n.yaml


def moved(start: Path, end: Path) -> set[int]:
    """Return the numbers of the layers whose weights differ; statistics of BatchNorm are not compared."""
    before, after = read_weights(start).state, read_weights(end).state
    learned = [name for name in before if name.endswith((".weight", ".bias"))]
    return {int(name.split(".")[1]) for name in learned if not torch.equal(before[name], after[name])}


@pytest.mark.long
def test_factors_of_a_resumed_run_of_two_processes(
    fine_tune: Callable[..., str],
    run_script: RunScript,
    call_main: CallMain,
    single: Path,
    learned: Path,
    tmp_path: Path,
) -> None:
    """A factor of 0 keeps the backbone; the other columns of rates are those of a run without factors."""
    flags = ("--hyp.lr_factor", "{backbone: 0, head: 1}", "--processes", "2", "--save-steps", "1")
    fine_tune(tmp_path, *flags)
    fine_tune(tmp_path, *flags, code=1, **planted("SIGKILL", "optimizer step", 4))
    folder = tmp_path / "exp2"
    code, printed = call_main("train.py", "--resume", str(folder), "--hyp.lr_factor", "{head: 2}")
    assert code in (1, 2)
    refused(printed, "--hyp.lr_factor is {'head': 2.0}")
    run_script("train.py", "--resume", str(folder), OMP_NUM_THREADS="1")
    identical(folder, tmp_path / "exp")
    for row, plain in zip(rows(folder), rows(single), strict=True):
        assert [row[f"x/lr{number}"] for number in range(6)] == [0, 0, 0, *(plain[f"x/lr{k}"] for k in range(3))]
    layers = moved(learned, folder / "weights" / "last.pt")
    assert layers
    assert min(layers) >= BACKBONE_ROWS


@pytest.mark.long
def test_a_frozen_part(fine_tune: Callable[..., str], learned: Path, tmp_path: Path) -> None:
    printed = fine_tune(tmp_path, "--freeze", "backbone", "model.13", "--epochs", "1")
    assert " parameters are frozen: backbone, model.13\n" in printed
    layers = moved(learned, tmp_path / "exp" / "weights" / "last.pt")
    assert layers
    assert min(layers) >= BACKBONE_ROWS
    assert 13 not in layers


@pytest.mark.long
def test_factors_of_a_run_that_leaves_zero(
    fine_tune: Callable[..., str], run_script: RunScript, learned: Path, tmp_path: Path
) -> None:
    """The groups of both are the same: a state that ZeRO has saved is continued by one process without it."""
    flags = ("--hyp.lr_factor", "{backbone: 0, '*.bias': 2}", "--sync-bn", "--save-steps", "1")
    fine_tune(tmp_path, *flags)
    fault = planted("SIGKILL", "optimizer step", 4)
    fine_tune(tmp_path, *flags, launcher=by("zero2"), fails=True, DS_ACCELERATOR="cpu", **fault)
    run_script("train.py", "--resume", str(tmp_path / "exp2"), OMP_NUM_THREADS="1")
    same_curve(tmp_path / "exp2", tmp_path / "exp")
    assert list(rows(tmp_path / "exp2")[0]) == list(rows(tmp_path / "exp")[0])
    unmoved = set(range(BACKBONE_ROWS)) - moved(learned, tmp_path / "exp2" / "weights" / "last.pt")
    assert not unmoved  # biases have a factor of their own
