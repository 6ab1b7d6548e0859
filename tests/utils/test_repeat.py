"""Receipts, and runs that are repeated from their folder: on other numbers of processes, and with planted differences."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import pytest
import torch
import yaml

import export
import train
import utils.receipt
import val
from models.yolo import build_model
from tests.conftest import RunScript
from tests.making import label_file, tiny_detector, write_yaml
from utils.checkpoint import serialised, weights_content
from utils.compare_runs import weights_hash
from utils.errors import Stopped, UserError
from utils.files import VERSION
from utils.repeat import main
from utils.tracking.run_log import git_commit

MODEL: dict[str, Any] = {**tiny_detector(), "nc": 6, "task": "detect"}
AUGMENTATION = "def dim(image, rng):\n    return image // {}\n\n\nAUGMENTATIONS = [dim]\n"


def write_weights(file: Path, seed: int) -> None:
    torch.manual_seed(seed)
    content = weights_content(build_model(MODEL), MODEL, dict(enumerate("abcdef")), {"imgsz": 64})
    file.write_bytes(serialised(content))


@pytest.fixture(scope="module")
def finished(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, weights, an augmentation, and `exp`, the run that was trained with them."""
    folder = tmp_path_factory.mktemp("repeated")
    shutil.copytree(small_data.parent, folder / "data")
    write_weights(folder / "start.pt", 0)
    (folder / "mine.py").write_text(AUGMENTATION.format(2))
    files = {"data": folder / "data" / small_data.name, "weights": folder / "start.pt", "augmentations": folder / "mine.py"}
    how = {"epochs": 2, "imgsz": 64, "batch_size": 8, "workers": 0, "device": "cpu", "noplots": True}
    train.run(project=str(folder), logical_processes=4, hyp="low", **how, **{name: str(file) for name, file in files.items()})
    return folder


def in_process(command: Sequence[str], env: Any) -> SimpleNamespace:
    """Call train.py as `subprocess.run` does."""
    try:
        train.main(command[2:])
    except (UserError, Stopped) as error:
        print(error)
        return SimpleNamespace(returncode=error.code)
    return SimpleNamespace(returncode=0)


def repeated(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    return int(end.value.code or 0)


def test_the_receipt(finished: Path) -> None:
    receipt = yaml.safe_load((finished / "exp" / "receipt.yaml").read_text())
    content = torch.load(finished / "exp" / "weights" / "best.pt", weights_only=True)
    assert (content["version"], content["receipt"]) == (VERSION, receipt["sha256"])
    assert receipt["results"]["last.pt"] == weights_hash(finished / "exp")
    assert receipt["revision"] == git_commit()
    assert (finished / "exp" / "code.diff").exists() == receipt["revision"].endswith("+")
    assert str(finished) not in str(receipt)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_run_is_repeated(
    processes: int, finished: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(command: Sequence[str], env: Any) -> SimpleNamespace:
        print(run_script("train.py", *command[2:], OMP_NUM_THREADS=env["OMP_NUM_THREADS"]))
        return SimpleNamespace(returncode=0)

    augmentations = str(finished / "mine.py")  # this user's cache does not know it
    monkeypatch.setattr(subprocess, "run", run)
    assert repeated(finished / "exp", "--processes", processes, "--augmentations", augmentations) == 0
    printed = capfd.readouterr().out
    assert ("processes 3, was 1 (need not be equal)" in printed) == (processes == 3)
    assert printed.endswith(": the same bytes\n")
