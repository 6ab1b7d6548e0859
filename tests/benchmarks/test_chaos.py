"""The soak of faults: four rounds of it, and that its checks see what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.oracle import repeated, wrong_messages, wrong_rows
from tests.conftest import ROOT, not_here

LOST = "error: process 1 on b ended without an error message, or cannot be reached"
ROWS = "epoch,train/box_loss,metrics/mAP_0.5\n0,0.125,0.5\n1,0.0625,0.75\n"


@pytest.mark.long
def test_four_rounds(tmp_path: Path) -> None:
    """One after another: a machine is killed, the newest state is damaged, the cable is cut, a machine is away."""
    faults = ("SIGKILL to a whole machine", "a byte of the newest state is flipped")
    faults = (*faults, "the cable is cut", "a machine leaves and comes back")
    command = ["-m", "benchmarks.chaos", "--rounds", "4", "--epochs", "3", "--folder", str(tmp_path / "soak"), "--only"]
    soak = subprocess.run([sys.executable, *command, *faults], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "cannot be mounted" in soak.stderr or "network namespaces" in soak.stderr:
        not_here(soak.stderr.strip())
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert all(fault in line for fault, line in zip(faults, soak.stdout.splitlines()[:4], strict=True)), soak.stdout


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (LOST, []),
        (f"epoch 1/3\n{LOST}\n{LOST}", [f"several errors: ['{LOST}', '{LOST}']"]),
        ("error: something", ["unknown message: error: something"]),
        (f'File "{ROOT}/train.py", line 1', ["a traceback of ours"]),
        (f'File "{ROOT}/.venv/lib/python3/site-packages/torch/x.py", line 1', []),
    ],
)
def test_messages(text: str, wrong: list[str]) -> None:
    assert wrong_messages(text) == wrong


@pytest.mark.parametrize(
    ("actual", "exact", "failures"),
    [
        ("", True, 0),
        (ROWS, True, 0),
        (ROWS[:-13], True, 0),
        (ROWS.replace("0.125", "0.12500001"), True, 1),
        (ROWS.replace("0.125", "0.12500001"), False, 0),
        (ROWS.replace("0.125", "0.126"), False, 1),
        (ROWS.replace("0.75", "0.7"), False, 1),
        (ROWS.replace("train/", ""), False, 1),
        (ROWS.replace("0,0.125,0.5\n", ""), False, 3),
    ],
)
def test_rows(actual: str, exact: bool, failures: int) -> None:
    assert len(wrong_rows(actual, ROWS, exact)) == failures


def test_repeated_steps() -> None:
    assert repeated([1, 2, 3]) == []
    assert repeated([1, 2, 2, 3]) == [2]
