"""Whole runs with --fitness, on two processes, killed and resumed: the same curve, and another best epoch."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.weights.reader import read_weights
from tests.conftest import CallMain, RunScript
from tests.curves import refused, rows, same_curve
from tests.faults.fault_points import planted
from tests.making import write_yaml
from utils.files import read_yaml

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
    refused(printed, f"--fitness is 'recall=1' now, and {folder} was started with '{fitness}'")
    printed = run_script("train.py", "--resume", str(folder), OMP_NUM_THREADS="1", LOCKSTEP_RESULT=str(result))
    same_curve(folder, single)
    values = [sign * row[f"metrics/{COLUMN}"] for row in rows(folder)]
    best = values.index(max(values))
    assert f"best epoch: {best + 1} of 2, fitness {max(values):.4f}\n" in printed
    assert json.loads(result.read_text())["fitness"] == pytest.approx(max(values), abs=1e-6)
    chosen, of_epoch = (read_weights(folder / "weights" / name).state for name in ("best.pt", f"epoch{best}.pt"))
    assert all(torch.equal(chosen[name], of_epoch[name]) for name in of_epoch)


@pytest.mark.long
def test_a_class_and_early_stopping(fine_tune: Callable[..., str], tmp_path: Path) -> None:
    """The fitness is that of classes.csv, which belongs to the best epoch; the run ends after the first worse one."""
    folder, result = tmp_path / "exp", tmp_path / "result.json"
    flags = ("--fitness", "AP(disc)=-1", "--patience", "1", "--epochs", "3")
    printed = fine_tune(tmp_path, *flags, LOCKSTEP_RESULT=str(result))
    with (folder / "classes.csv").open() as file:
        of_class = {row["class"]: float(row["AP50-95"]) for row in csv.DictReader(file)}
    assert json.loads(result.read_text())["fitness"] == pytest.approx(-of_class["disc"], abs=1e-8)
    numbers = re.search(r"best epoch: (\d) of (\d), fitness ", printed)
    assert numbers
    best, trained = map(int, numbers.groups())
    assert trained == len(rows(folder)) == min(best + 1, 3)
    assert ("stopped by --patience 1" in printed) == (trained < 3)


@pytest.mark.parametrize(
    ("fitness", "message"),
    [
        ("recal=1", "--fitness 'recal=1': unknown metric 'recal' (did you mean 'recall'?); known are precision, "),
        ("AP(dog)=1", "AP50(CLASS), AP(CLASS) of the classes disc, ring, square, triangle, cross, bar, cat"),
        ("0.9,0.1", "--fitness '0.9,0.1': it is not of the form METRIC=WEIGHT"),
        ("AP(cat)=1", "--fitness: AP(cat) has no value, because no validation image has a label 'cat'"),
    ],
)
def test_one_sentence(fitness: str, message: str, small_data: Path, call_main: CallMain, tmp_path: Path) -> None:
    content = read_yaml(small_data)
    unseen = write_yaml(tmp_path / "unseen.yaml", {**content, "names": [*content["names"].values(), "cat"]})
    what = ("--data", str(unseen), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--device", "cpu")
    code, printed = call_main("train.py", *what, "--project", str(tmp_path), "--fitness", fitness)
    assert code in (1, 2)
    refused(printed, message)
    assert not (tmp_path / "exp").exists()
