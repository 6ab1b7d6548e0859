"""Whole runs from trained weights, with the hyperparameters that --hyp auto chooses, data/hyps/finetune.yaml.

One curve on one and two processes, and resumed to the byte.
"""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RunScript
from tests.curves import identical, same_curve
from tests.faults.fault_points import planted
from tests.making import write_yaml
from utils.files import read_yaml

Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(run_script: RunScript, drawn: Path, learned: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Fine-tune the learned weights on the same drawings with one class more; return what was printed."""
    content = read_yaml(drawn)
    names = {**content["names"], len(content["names"]): "cloud"}
    data = write_yaml(tmp_path_factory.mktemp("more") / "more.yaml", {**content, "names": names})
    what = ("--data", str(data), "--weights", str(learned), "--imgsz", "96")
    how = ("--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--seed", "1")

    def run(project: Path, *flags: str, **more: str) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="module")
def single(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    project = tmp_path_factory.mktemp("single")
    printed = train(project)
    for message in (
        "hyperparameters: --hyp finetune, because the run starts from trained weights; --hyp low has YOLOv5's values",
        "from its head the boxes and 6 of 7 classes",
        "BatchNorm statistics are kept from the weights",
        "the weights know 86% of the classes and outputs",
        "warm-up: 2 batches instead of 100",
        "EMA: a ramp of 10 steps instead of 2000",
    ):
        assert printed.count(message) == 1, printed
    settings = read_yaml(project / "exp" / "settings.yaml")
    assert (settings["optimizer"], settings["cos_lr"]) == ("AdamW", True)
    return project / "exp"


@pytest.mark.long
def test_two_processes(train: Train, single: Path, tmp_path: Path) -> None:
    """Even without --sync-bn, for BatchNorm computes no statistics."""
    train(tmp_path, "--processes", "2")
    same_curve(tmp_path / "exp", single)


@pytest.mark.long
def test_killed_and_resumed(train: Train, single: Path, run_script: RunScript, tmp_path: Path) -> None:
    train(tmp_path, "--save-steps", "1", **planted("SIGKILL", "optimizer step", 3), code=-signal.SIGKILL)  # type: ignore[arg-type]
    printed = run_script("train.py", "--resume", "--project", str(tmp_path), "--hyp", "auto", OMP_NUM_THREADS="1")
    assert "resuming " in printed
    identical(tmp_path / "exp", single)


@pytest.mark.long
def test_twenty_photos_of_two_classes_give_something_useful(
    run_script: RunScript, shared: Path, tmp_path: Path
) -> None:
    """Without a flag for the recipe. YOLOv5's would still be warming up at the end."""
    cells = shared / "data" / "bccd"
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for photo in sorted((cells / "images" / "train").iterdir())[:20]:
        (tmp_path / "images" / photo.name).symlink_to(photo)
        labels = (cells / "labels" / "train" / f"{photo.stem}.txt").read_text().splitlines()
        rows = [row for row in labels if row.split()[0] in ("0", "1")]
        (tmp_path / "labels" / f"{photo.stem}.txt").write_text("\n".join(rows))
    names = {0: "first", 1: "second"}
    data = write_yaml(
        tmp_path / "few.yaml", {"path": str(tmp_path), "train": "images", "val": "images", "names": names}
    )
    what = ("--data", str(data), "--weights", str(shared / "weights" / "yolov5n.pt"), "--imgsz", "192")
    run_script("train.py", *what, "--epochs", "40", "--noval", "--workers", "1", "--project", str(tmp_path / "runs"))
    with (tmp_path / "runs" / "exp" / "results.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["metrics/mAP_0.5"]) > 0.2
