"""Classification: the same promises as a detector's, on drawn shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.models import get_model_weights, resnet18

from job import read_job
from tests.conftest import VAL, CallMain, OnProcesses, RunScript
from tests.curves import CLASSIFIED, floats, refused, rows, same_curve
from tests.making import write_yaml
from utils.config.settings import read_settings
from utils.distributed.launch import start
from utils.distributed.ranks import ranks
from utils.files import read_yaml
from utils.run import Run

GENTLE = {"lr0": 0.0005, "crop_scale": 0.3}
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(run_script: RunScript, drawn_classes: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train yolov5n-cls from scratch for two epochs, on one thread per process; return what was printed.

    Not a ResNet: from scratch, with its small epsilon, rounding grows a thousandfold in five steps, on one process too.
    """
    hyp = write_yaml(tmp_path_factory.mktemp("hyp") / "gentle.yaml", GENTLE)
    what = ("--data", str(drawn_classes), "--cfg", "yolov5n-cls.yaml", "--hyp", str(hyp), "--imgsz", "64")
    how = ("--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu")

    def run(project: Path, *flags: str, **more: Any) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})

    return run


@pytest.fixture
def begin(call_main: CallMain, drawn_classes: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Start a training in this process, which loads all images once; return the exit code and what was printed."""
    what = ("--data", str(drawn_classes), "--cfg", "yolov5n-cls.yaml", "--imgsz", "64", "--batch-size", "8")
    how = ("--workers", "0", "--device", "cpu", "--noplots", "--project", str(tmp_path / "runs"))
    return lambda *flags: call_main("train.py", *what, *how, *flags)


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process, with pictures."""
    project = tmp_path_factory.mktemp("alone")
    train(project, plots=True)
    return project / "exp"


def test_the_run_folder(alone: Path) -> None:
    """Counts by class, the confusion matrix, and pictures."""
    assert list(rows(alone)[0]) == ["epoch", *CLASSIFIED, "x/lr0", "x/lr1", "x/lr2"]
    names = {file.name for file in alone.iterdir()}
    assert {"classes.csv", "confusion_matrix.csv", "class_indices.json", "split.csv", "labels.jpg"} <= names
    assert {"confusion_matrix.png", "mistakes.jpg", "train_batch0.jpg"} <= names
    matrix = [line.split(",")[1:] for line in (alone / "confusion_matrix.csv").read_text().splitlines()[1:]]
    counts = np.array(matrix, int)
    best = max(rows(alone), key=lambda row: row["metrics/accuracy_top1"])
    assert counts.sum() == VAL
    assert np.trace(counts) / VAL == pytest.approx(best["metrics/accuracy_top1"])
    classes = [line.split(",") for line in (alone / "classes.csv").read_text().splitlines()[1:]]
    assert [int(row[1]) for row in classes] == counts.sum(1).tolist()
    assert [float(row[3]) for row in classes] == pytest.approx((np.diag(counts) / counts.sum(1)).tolist())


def write_default_weights(torch_home: Path) -> None:
    """Write random weights where torch caches the recommended ones of ResNet-18."""
    cached = torch_home / "hub" / "checkpoints" / Path(get_model_weights("resnet18").DEFAULT.url).name
    cached.parent.mkdir(parents=True)
    torch.save(resnet18(num_classes=1000).state_dict(), cached)


@pytest.mark.parametrize(
    ("case", "weights", "message"),
    [
        ("a file", "{file}", "120 of 122 tensors taken from {file}"),
        ("recommended", "DEFAULT", "120 of 122 tensors taken from DEFAULT"),
        ("no network", "", "training from scratch"),
    ],
)
def test_first_weights(
    case: str, weights: str, message: str, begin: Callable[..., tuple[int, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A file of tensors in torchvision's form; by default the recommended weights, or none without a network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    file, flags = tmp_path / "resnet18.pth", ["--cfg", "resnet18.yaml"]
    if case == "a file":
        torch.save(resnet18(num_classes=10).state_dict(), file)
        flags += ["--weights", str(file)]
    elif case == "recommended":
        write_default_weights(tmp_path / "torch")
    code, printed = begin(*flags)
    assert code == 0, printed
    assert printed.count(message.format(file=file)) == 1
    settings = read_yaml(tmp_path / "runs" / "exp" / "settings.yaml")
    assert settings["weights"] == weights.format(file=file)
    assert ("taken from" in printed) == (case != "no network")


def test_a_main_process_without_the_weights_decides_for_all(
    on_processes: OnProcesses, drawn_classes: Path, tmp_path: Path
) -> None:
    flags = ["--data", str(drawn_classes), "--cfg", "resnet18.yaml", "--imgsz", "64", "--batch-size", "8"]
    flags += ["--device", "cpu", "--workers", "0", "--noplots", "--project", str(tmp_path / "runs")]
    assert on_processes(2, weights_on_one_machine, flags, str(tmp_path)) == ["", ""]


def weights_on_one_machine(flags: list[str], folder: str) -> str:
    """Return what a process decides if all but the main one have the weights."""
    rank = ranks().rank
    os.environ |= {"TORCH_HOME": f"{folder}/torch{rank}", "https_proxy": "http://127.0.0.1:9", "no_proxy": "localhost"}
    if rank:
        write_default_weights(Path(folder, f"torch{rank}"))
    settings = read_settings(flags, pytest.fail)
    run = Run(*start("cpu", "", 60.0))
    job = read_job(settings, run.collectives.broadcast)
    assert job.start.weights is None
    return job.settings.options.weights


@pytest.mark.long
def test_the_built_in_job_learns(run_script: RunScript, tmp_path: Path) -> None:
    """`python train.py --cfg models/resnet18.yaml --data data/shapes-cls.yaml`, as a new user types it."""
    what = ("--cfg", "models/resnet18.yaml", "--data", "data/shapes-cls.yaml", "--device", "cpu")
    run_script("train.py", *what, "--project", str(tmp_path), OMP_NUM_THREADS=str(os.cpu_count()))
    assert rows(tmp_path / "exp")[-1]["metrics/accuracy_top1"] > 0.8


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--data", "DETECTION"), "small.yaml"),
        (("--hyp", "low.yaml"), "low.yaml is a detector's recipe: "),
        (("--cfg", "resnet18.yaml", "--weights", "DEFAULT"), "resnet18-f37072fd.pth"),
    ],
)
def test_bad_input(flags: tuple[str, ...], named: str, begin: Callable[..., tuple[int, str]], small_data: Path) -> None:
    code, printed = begin(*(str(small_data) if flag == "DETECTION" else flag for flag in flags))
    assert code in (1, 2)
    refused(printed, named)


@pytest.mark.gpu
def test_on_a_gpu(train: Train, alone: Path, tmp_path: Path) -> None:
    """The curve is close to the CPU's; a model of torchvision trains in bf16."""
    train(tmp_path, "--device", "0", "--mixed-precision", "no")
    same_curve(tmp_path / "exp", alone, losses=1e-2, scores=0.07, weights=1e-2)
    model = ("--cfg", "models/resnet18.yaml", "--weights", "")
    train(tmp_path, "--device", "0", *model, "--name", "bf16", "--epochs", "1")
    assert floats(tmp_path / "bf16").isfinite().all()
