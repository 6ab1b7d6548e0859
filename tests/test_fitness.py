"""Whole runs with --fitness, on two processes, killed and resumed: the same curve, and another best epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.weights import read_weights
from tests.conftest import CallMain, RunScript
from tests.curves import refused, rows, same_curve
from tests.faults.fault_points import planted

COLUMN = "mAP_0.5:0.95"


@pytest.mark.long
@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_epoch_of_a_resumed_run(
    sign: int, fine_tune: Callable[..., str], run_script: RunScript, call_main: CallMain, single: Path, tmp_path: Path
) -> None:
    """Opposite weights prefer opposite epochs of one curve; --resume keeps the weights, and refuses others."""
    folder, fitness, result = tmp_path / "exp", f"{COLUMN}={sign}", tmp_path / "result.json"
    flags = ("--fitness", fitness, "--processes", "2", "--sync-bn", "--save-period", "1")
    printed = fine_tune(tmp_path, *flags, code=1, **planted("SIGKILL", "validation batch", 2))
    assert f"the best epoch is the one with the highest {fitness}" in printed
    code, printed = call_main("train.py", "--resume", str(folder), "--fitness", "recall=1")
    assert code in (1, 2)
    refused(printed, "--fitness is 'recall=1'")
    printed = run_script("train.py", "--resume", str(folder), OMP_NUM_THREADS="1", LOCKSTEP_RESULT=str(result))
    same_curve(folder, single)
    values = [sign * row[f"metrics/{COLUMN}"] for row in rows(folder)]
    best = values.index(max(values))
    assert f"best epoch: {best + 1} of 2, fitness {max(values):.4f}\n" in printed
    assert json.loads(result.read_text())["fitness"] == pytest.approx(max(values), abs=1e-6)
    chosen, of_epoch = (read_weights(folder / "weights" / name).state for name in ("best.pt", f"epoch{best}.pt"))
    assert all(torch.equal(chosen[name], of_epoch[name]) for name in of_epoch)
