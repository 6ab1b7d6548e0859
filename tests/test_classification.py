"""Classification: the same promises as a detector's, on drawn shapes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from data.builtin import NAMES
from job import resolve, settings_of
from models.tasks.classify import default_weights
from models.weights import read_weights
from tests.conftest import VAL, CallMain, OnProcesses, RunScript
from tests.curves import CLASSIFIED, floats, refused, rows, same_curve
from tests.making import noise, write_yaml
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


# One curve. Measured: losses within 5e-7, weights within 1e-7, scores equal.


def test_two_processes_by_a_flag(train: Train, alone: Path, tmp_path: Path) -> None:
    printed = train(tmp_path, "--sync-bn", "--processes", "2")
    same_curve(tmp_path / "exp", alone)
    assert printed.count("epoch 2/2") == printed.count("results in") == 1
    assert "warn" not in printed.lower()


def test_resume_looks_at_the_recipe(call_main: CallMain, alone: Path, tmp_path: Path) -> None:
    """The recipe's keys are those of this task."""
    other = write_yaml(tmp_path / "other.yaml", {**GENTLE, "lr0": 0.5})
    code, printed = call_main("train.py", "--resume", str(alone), "--hyp", str(other))
    assert code == 1
    refused(printed, "lr0")


# From other weights


@pytest.mark.long
def test_fine_tuning_the_head_alone(train: Train, drawn_classes: Path, alone: Path, tmp_path: Path) -> None:
    """Weights of other classes: tensors that fit are loaded, a line says which do not, and only the head is trained."""
    spec = read_yaml(drawn_classes)
    names = [*reversed(NAMES), "weeds"]  # another order, one more
    data = write_yaml(tmp_path / "seven.yaml", {**spec, "names": names})
    weights = str(alone / "weights" / "last.pt")
    printed = train(tmp_path, "--data", str(data), "--weights", weights, "--freeze", "-1")
    assert "it is for 6 classes" in printed
    before, after = (read_weights(run / "weights" / "last.pt").state for run in (alone, tmp_path / "exp"))
    assert torch.equal(before["model.8.cv3.conv.weight"], after["model.8.cv3.conv.weight"])
    assert after["model.9.linear.weight"].shape == (7, 1280)


def write_default_weights(torch_home: Path) -> None:
    """Write random weights where torch caches the recommended ones of ResNet-18."""
    cached = torch_home / "hub" / "checkpoints" / Path(default_weights("resnet18")).name
    cached.parent.mkdir(parents=True)
    torch.save(resnet18(num_classes=1000).state_dict(), cached)


@pytest.mark.parametrize(
    ("case", "weights", "message"),
    [
        ("a file", "{file}", "120 of 122 tensors taken from {file}"),
        ("recommended", "DEFAULT", "120 of 122 tensors taken from DEFAULT"),
        ("no network", "", "training from scratch"),
        ("a detector", "{learned}", "'detect'"),
    ],
)
def test_first_weights(
    case: str, weights: str, message: str, begin: Callable[..., tuple[int, str]], learned: Path, tmp_path: Path,
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
    elif case == "a detector":
        flags = ["--weights", str(learned)]
    code, printed = begin(*flags)
    assert code == 0, printed
    assert printed.count(message.format(file=file)) == 1
    settings = read_yaml(tmp_path / "runs" / "exp" / "settings.yaml")
    assert settings["weights"] == weights.format(file=file, learned=learned)
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
    settings = settings_of(flags)
    run = Run(*start("cpu", "", 60.0))
    job = resolve(settings, run.collectives.broadcast)
    assert job.start.weights is None
    return job.settings.options.weights


# Data and settings


@pytest.mark.long
def test_one_folder(drawn_classes: Path, train: Train, call_main: CallMain, tmp_path: Path) -> None:
    """Images of several modes and a broken one; the split and the class numbers are written to files."""
    folder, pixels = tmp_path / "photos", noise(50, 40)
    shutil.copytree(drawn_classes.with_suffix("") / "train", folder)
    for mode, name in {"L": "ring/grey.png", "CMYK": "ring/cmyk.jpg", "RGBA": "bar/alpha.png"}.items():
        Image.fromarray(pixels).convert(mode).save(folder / name)
    (folder / "bar" / "broken.jpg").write_bytes(b"\xff\xd8nothing")
    data = write_yaml(tmp_path / "photos.yaml", {"path": str(folder), "split": 0.25})
    printed = train(tmp_path, "--data", str(data), "--epochs", "1", "--cos-lr")
    assert "train: 29 images of 6 classes" in printed
    assert "val: 11 images of 6 classes" in printed
    run = tmp_path / "exp"
    indices = json.loads((run / "class_indices.json").read_text())
    assert indices == {str(k): name for k, name in enumerate(sorted(NAMES))}
    _, *table = [line.split(",") for line in (run / "split.csv").read_text().splitlines()]
    assert len({image for _, _, image in table}) == len(table) == 40
    assert all(label == Path(image).parent.name for _, label, image in table)
    assert "broken.jpg" in (run / "problems.txt").read_text()
    how = ("--data", str(data), "--imgsz", "64", "--device", "cpu", "--workers", "0", "--noplots")
    code, printed = call_main("val.py", *how, "--weights", str(run / "weights" / "last.pt"), "--project", str(tmp_path))
    assert (code, "val: 11 images of 6 classes" in printed) == (0, True)


@pytest.mark.long
def test_the_built_in_job_learns(run_script: RunScript, tmp_path: Path) -> None:
    """`python train.py --cfg models/resnet18.yaml --data data/shapes-cls.yaml`, as a new user types it."""
    what = ("--cfg", "models/resnet18.yaml", "--data", "data/shapes-cls.yaml", "--device", "cpu")
    run_script("train.py", *what, "--project", str(tmp_path), OMP_NUM_THREADS=str(os.cpu_count()))
    assert rows(tmp_path / "exp")[-1]["metrics/accuracy_top1"] > 0.8


def test_defaults(begin: Callable[..., tuple[int, str]], drawn_classes: Path, tmp_path: Path) -> None:
    """Defaults come from the task, the data YAML overrides them, and the command line overrides both."""
    given = {"imgsz": 48, "batch_size": 64, "hyp": "data/hyps/shapes-cls.yaml"}
    data = write_yaml(tmp_path / "data.yaml", {**read_yaml(drawn_classes), "defaults": given})
    code, printed = begin("--data", str(data), "--imgsz", "32")
    assert code == 0, printed
    settings = read_yaml(tmp_path / "runs" / "exp" / "settings.yaml")
    assert [settings[name] for name in ("imgsz", "batch_size", "epochs", "hyp")] == [32, 8, 30, given["hyp"]]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--cfg", "resnet43.yaml"), "resnet43.yaml"),
        (("--data", "data/shapes.yaml"), "shapes.yaml"),
        (("--single-cls",), "--single-cls"),
        (("--rect",), "--rect"),
        (("--noautoanchor",), "--noautoanchor"),
        (("--hyp", "low.yaml"), "'box'"),
        (("--freeze", "12"), "--freeze 12"),
        (("--cfg", "resnet18.yaml", "--imgsz", "8192", "--weights", "DEFAULT"), "resnet18-f37072fd.pth"),
        pytest.param(("--batch-size", "7", "--processes", "2"), "6 or 8", marks=pytest.mark.long),
        (("--weights", "yolov5n-cls.pt"), "yolov5n-cls.pt"),
    ],
)
def test_bad_input(flags: tuple[str, ...], named: str, begin: Callable[..., tuple[int, str]]) -> None:
    code, printed = begin(*flags)
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
