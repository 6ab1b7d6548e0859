"""Receipts, and runs that are repeated from their folder, on other numbers of processes too, or with a difference."""

from __future__ import annotations

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
from models.weights import read_weights
from models.yolo import build_model
from tests.conftest import CallMain, RunScript, data_yaml
from tests.making import tiny_detector
from utils.checkpoint import serialise, weights_content
from utils.compare_runs import FORMAT, FORMAT_FILE, HASHES, weights_hash
from utils.files import VERSION
from utils.receipt import files_hash
from utils.repeat import first_difference, main

MODEL: dict[str, Any] = {**tiny_detector(), "nc": 6, "task": "detect"}
AUGMENTATION = "def dim(image, rng):\n    return image // {}\n\n\nAUGMENTATIONS = [dim]\n"


def write_weights(file: Path, seed: int) -> None:
    torch.manual_seed(seed)
    content = weights_content(build_model(MODEL), MODEL, dict(enumerate("abcdef")), {"imgsz": 64})
    file.write_bytes(serialise(content))


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


def test_the_first_difference_is_named(finished: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(finished / "exp", tmp_path / "other"))
    assert first_difference(finished / "exp", other) == ""
    lines = (other / "results.csv").read_text().splitlines()
    (other / "results.csv").write_text("\n".join([*lines[:2], lines[2].replace(lines[2].split(",")[1], "9")]))
    assert first_difference(finished / "exp", other) == "differs first in epoch 1: train/box_loss"
    for run, digest in ((finished / "exp", 1), (other, 2)):
        (run / HASHES).write_text(f"step,epoch,batch,pixels,targets\n7,1,7,{digest},3\n")
        (run / FORMAT_FILE).write_text(f"format: {FORMAT}")
    difference = first_difference(finished / "exp", other)
    (finished / "exp" / HASHES).unlink()
    assert difference == "differs first at step 7 (epoch 1, batch 7): targets are equal; these differ: pixels"


def change_pixel(file: Path) -> None:
    pixels = cv2.imread(str(file))
    pixels[5, 5] ^= 64
    cv2.imwrite(str(file), pixels)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("small/images/train/*", change_pixel, "cannot be repeated here: .*train images "),
        ("small/labels/val/*.txt", lambda file: file.write_text("0 .5 .5 .5 .5\n"), "repeated here: .*val labels "),
        ("start.pt", lambda file: write_weights(file, 1), "repeated here: initial weights [0-9a-f.]+, was [0-9a-f.]+$"),
        ("mine.py", lambda file: file.write_text(AUGMENTATION.format(3)), "here: your files augmentations mine.py "),
        (
            "exp/settings.yaml",
            lambda file: file.write_text(file.read_text().replace("seed: 0", "seed: 1")),
            "seed 1, was 0",
        ),
        ("small.yaml", Path.unlink, "small.yaml"),
        ("", None, "cannot be repeated here: code 0, was "),
    ],
)
def test_a_difference_is_named_before_training(
    name: str,
    change: Callable[[Path], object],
    said: str,
    finished: Path,
    call_main: CallMain,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def run(command: Sequence[str], env: Any) -> SimpleNamespace:
        code, printed = call_main("train.py", *command[2:])
        print(printed)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    given = [finished / "exp", "--check", "--augmentations", finished / "mine.py"]
    folders = {*finished.iterdir()}
    if name:
        file = min(finished.glob(name))
        before = file.read_bytes()
        change(file)
        assert repeated(*given) == 2
        file.write_bytes(before)
    else:
        moved = [shutil.copy(finished / file, finished / "exp" / file) for file in ("small.yaml", "start.pt")]
        assert repeated(*given, "--data", moved[0], "--weights", moved[1]) == 0
        monkeypatch.setattr(utils.receipt, "code_hash", lambda root: "0")
        assert repeated(*given) == 2
    assert {*finished.iterdir()} == folders
    (error,) = [line for line in "".join(capfd.readouterr()).splitlines() if line.startswith("error: ")]
    assert re.search(said, error)


def test_receipts_of_val_and_export(finished: Path) -> None:
    weights = finished / "exp" / "weights" / "best.pt"
    how = {"weights": str(weights), "device": "cpu", "imgsz": 64}
    metrics = val.run(data=str(finished / "small.yaml"), project=str(finished), name="val", noplots=True, **how)
    (file,) = export.run(include=["safetensors"], **how)
    receipts = [finished / "val" / "receipt.yaml", weights.with_name("best.receipt.yaml")]
    validated, exported = (yaml.safe_load(receipt.read_text()) for receipt in receipts)
    assert validated["inputs"]["weights"] == exported["inputs"]["weights"] == read_weights(weights).origin.files[-1:]
    assert validated["results"]["fitness"] == metrics["fitness"]
    assert exported["results"] == {"best.safetensors": files_hash([Path(file)])}
