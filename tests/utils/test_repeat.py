"""Receipts, and runs that are repeated from their folder, on other numbers of processes too, or with a difference."""

from __future__ import annotations

import hashlib
import re
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
from data.builtin import shapes
from models.yolo import build_model
from tests.conftest import CallMain, RunScript, data_yaml
from tests.making import tiny_detector
from utils.checkpoint import serialised, weights_content
from utils.compare_runs import weights_hash
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
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, weights, an augmentation, and `exp`, the run that was trained with them."""
    folder = tmp_path_factory.mktemp("repeated")
    data = data_yaml(shapes.draw_dataset(folder / "small", train=16, val=8))
    write_weights(folder / "start.pt", 0)
    (folder / "mine.py").write_text(AUGMENTATION.format(2))
    files = {"data": data, "weights": folder / "start.pt", "augmentations": folder / "mine.py", "project": folder}
    how = {"epochs": 2, "imgsz": 64, "batch_size": 8, "workers": 0, "device": "cpu", "noplots": True, "hyp": "low"}
    train.run(logical_processes=4, **how, **{name: str(file) for name, file in files.items()})
    return folder


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
    processes: int,
    finished: Path,
    run_script: RunScript,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
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


def change_pixel(folder: Path) -> Path:
    file = next((folder / "small" / "images" / "train").iterdir())
    pixels = cv2.imread(str(file))
    pixels[5, 5] ^= 64
    cv2.imwrite(str(file), pixels)
    return file


def change_label(folder: Path) -> Path:
    file = next((folder / "small" / "labels" / "val").glob("*.txt"))
    file.write_text(file.read_text().replace("0.", "0.0", 1))
    return file


def change_weights(folder: Path) -> Path:
    write_weights(folder / "start.pt", 1)
    return folder / "start.pt"


def change_augmentation(folder: Path) -> Path:
    (folder / "mine.py").write_text(AUGMENTATION.format(3))
    return folder / "mine.py"


def change_seed(folder: Path) -> Path:
    file = folder / "exp" / "settings.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    return file


def remove_data(folder: Path) -> Path:
    (folder / "small.yaml").unlink()
    return folder / "small.yaml"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_pixel, "cannot be repeated here: .*train images "),
        (change_label, "cannot be repeated here: .*val labels "),
        (change_weights, "cannot be repeated here: initial weights [0-9a-f.]+, was [0-9a-f.]+$"),
        (change_augmentation, "cannot be repeated here: your files augmentations mine.py "),
        (change_seed, "cannot be repeated here: settings seed 1, was 0$"),
        (remove_data, "small.yaml"),
        (None, "cannot be repeated here: code 0, was "),
    ],
)
def test_a_difference_is_named_before_training(
    change: Callable[[Path], Path] | None,
    said: str,
    finished: Path,
    call_main: CallMain,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before, the same check finds none, also with data and weights in another place."""

    def run(command: Sequence[str], env: Any) -> SimpleNamespace:
        code, printed = call_main("train.py", *command[2:])
        print(printed)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    given = [finished / "exp", "--check"]
    folders = {*finished.iterdir()}
    if change is None:
        moved = shutil.copy(finished / "small.yaml", finished / "exp" / "moved.yaml")
        again = shutil.copy(finished / "start.pt", finished / "exp" / "again.pt")
        assert repeated(*given, "--data", moved, "--weights", again, "--augmentations", finished / "mine.py") == 0
        monkeypatch.setattr(utils.receipt, "code_hash", lambda root: "0")
        assert repeated(*given) == 2
    else:
        parts = [finished / "mine.py", *finished.glob("small/*/*/*"), *finished.glob("*.*"), *finished.glob("exp/*.*")]
        before = {file: file.read_bytes() for file in parts if file.is_file()}
        changed = change(finished)
        assert repeated(*given, "--augmentations", finished / "mine.py") == 2
        changed.write_bytes(before[changed])
    assert {*finished.iterdir()} == folders
    errors = [line for line in "".join(capfd.readouterr()).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(said, errors[0])


def test_receipts_of_val_and_export(finished: Path) -> None:
    weights = finished / "exp" / "weights" / "best.pt"
    how = {"weights": str(weights), "device": "cpu", "imgsz": 64}
    metrics = val.run(data=str(finished / "small.yaml"), project=str(finished), name="val", noplots=True, **how)
    (file,) = export.run(include=["safetensors"], **how)
    receipts = [finished / "val" / "receipt.yaml", weights.with_name("best.receipt.yaml")]
    validated, exported = (yaml.safe_load(receipt.read_text()) for receipt in receipts)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert validated["inputs"]["weights"] == exported["inputs"]["weights"] == [{"file": "best.pt", "sha256": digest}]
    assert validated["results"]["fitness"] == metrics["fitness"]
    assert exported["results"] == {"best.safetensors": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
