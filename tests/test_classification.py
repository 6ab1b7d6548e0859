"""Classification: the same promises as a detector's, on drawn shapes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor
from torchvision.models import resnet18

import val
from data.builtin.shapes import NAMES
from job import resolve, settings_of
from models.tasks.classify import ClassificationTask, default_weights
from models.weights import read_weights
from tests.conftest import ROOT, VAL, CallMain, OnProcesses, RunScript
from tests.curves import CLASSIFIED, floats, refused, rows, same_bytes_when_killed, same_curve
from tests.machines import ACCELERATE, CONFIGS, on_machine
from tests.making import noise, write_yaml
from tests.whole_runs import Parts, within
from utils.distributed.launch import start
from utils.distributed.ranks import ranks
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


@pytest.mark.long
def test_two_machines(hosts: tuple[str, str], train: Train, alone: Path, tmp_path: Path) -> None:
    def machine(rank: int) -> str:
        return train(tmp_path / str(rank), "--sync-bn", launcher=on_machine(hosts[rank], rank))

    with ThreadPoolExecutor() as pool:
        list(pool.map(machine, (0, 1)))
    same_curve(tmp_path / "0" / "exp", alone)
    assert not (tmp_path / "1").exists()


@pytest.mark.long  # tests/test_deepspeed.py runs stage 2 each time
@pytest.mark.parametrize("stage", [1, 3])
def test_under_zero(stage: int, train: Train, alone: Path, tmp_path: Path) -> None:
    launcher = (*ACCELERATE, "--config_file", str(CONFIGS / f"deepspeed_zero{stage}.yaml"))
    train(tmp_path, "--sync-bn", launcher=launcher, DS_ACCELERATOR="cpu")
    same_curve(tmp_path / "exp", alone)


def epoch_in_float64(flags: Sequence[str]) -> dict[str, Tensor]:
    build_model, inputs = ClassificationTask.build_model, ClassificationTask.inputs
    ClassificationTask.build_model = lambda self, *described: build_model(self, *described).double()
    ClassificationTask.inputs = lambda self, batch: inputs(self, batch).double()

    def work(parts: Parts) -> dict[str, Tensor]:
        parts.train_one_epoch()
        return dict(parts.model.model.state_dict())

    return within(flags, work)


@pytest.mark.long
def test_a_resnet_in_float64(on_processes: OnProcesses, drawn_classes: Path, tmp_path: Path) -> None:
    """Five steps of batches of 8. Measured: 2e-13."""
    what = ["--data", str(drawn_classes), "--cfg", "resnet18.yaml", "--weights", "", "--imgsz", "64"]
    what += ["--batch-size", "8", "--sync-bn"]
    flags = [*what, "--workers", "0", "--device", "cpu", "--noplots", "--project", str(tmp_path)]
    (single,) = on_processes(1, epoch_in_float64, flags)
    for state in on_processes(2, epoch_in_float64, flags):
        for name, value in single.items():
            if value.is_floating_point():
                assert value.dtype == torch.float64
                assert (state[name] - value).norm() <= 1e-9 * value.norm(), name


@pytest.mark.long
def test_dropout_does_not_depend_on_the_processes(train: Train, tmp_path: Path) -> None:
    """yolov5n-cls with dropout, mixed images and accumulated batches."""
    model = yaml.safe_load((ROOT / "models" / "yolov5n-cls.yaml").read_text())
    cfg = write_yaml(tmp_path / "model.yaml", {**model, "head": [[-1, 1, "Classify", ["nc", 0.5]]]})
    mixed = {"nbs": 16, "mixup": 0.4, "cutmix": 0.3, "erasing": 0.3, "randaugment": 1}
    hyp = write_yaml(tmp_path / "mixed.yaml", {**GENTLE, **mixed})
    flags = ("--cfg", str(cfg), "--hyp", str(hyp), "--label-smoothing", "0.1", "--sync-bn")
    train(tmp_path, *flags, "--name", "one")
    train(tmp_path, *flags, "--name", "two", "--processes", "2")
    same_curve(tmp_path / "two", tmp_path / "one")


@pytest.mark.long
def test_statistics_are_averaged_without_sync_bn(train: Train, drawn_classes: Path, tmp_path: Path) -> None:
    """One process gets the scores of two, and validates each image once; their number is prime."""
    train(tmp_path, "--processes", "2")
    how: dict[str, Any] = {"imgsz": 64, "workers": 0, "device": "cpu", "noplots": True, "save_txt": True}
    weights = tmp_path / "exp" / "weights" / "last.pt"
    result = val.run(data=drawn_classes, weights=weights, project=tmp_path / "val", **how)
    last = rows(tmp_path / "exp")[-1]
    for name in ("metrics/accuracy_top1", "metrics/accuracy_top5"):
        assert result[name] == pytest.approx(last[name], abs=1e-4)
    assert len(list((tmp_path / "val" / "exp" / "labels").iterdir())) == VAL


# Resumed


@pytest.mark.long
def test_killed_and_resumed(train: Train, run_script: RunScript, tmp_path: Path) -> None:
    same_bytes_when_killed(train, run_script, tmp_path, "validation batch of a classifier")


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
    spec = yaml.safe_load(drawn_classes.read_text())
    data = write_yaml(
        tmp_path / "seven.yaml", {**spec, "names": [*reversed(NAMES), "weeds"]}
    )  # another order, one more
    weights = str(alone / "weights" / "last.pt")
    printed = train(tmp_path, "--data", str(data), "--weights", weights, "--freeze", "-1")
    assert re.search(r"tensors taken from \S+last.pt, not its head: it is for 6 classes\n", printed)
    assert "layers 0, 1, 2, 3, 4, 5, 6, 7, 8 are frozen" in printed
    assert "'weeds'" in printed
    before, after = (read_weights(run / "weights" / "last.pt").state for run in (alone, tmp_path / "exp"))
    assert torch.equal(before["model.8.cv3.conv.weight"], after["model.8.cv3.conv.weight"])
    assert after["model.9.linear.weight"].shape == (7, 1280)


def write_default_weights(torch_home: Path) -> None:
    """Write random weights where torch caches the recommended ones of ResNet-18."""
    cached = torch_home / "hub" / "checkpoints" / Path(default_weights("resnet18")).name
    cached.parent.mkdir(parents=True)
    torch.save(resnet18(num_classes=1000).state_dict(), cached)


@pytest.mark.parametrize("case", ["a file", "recommended", "no network", "a detector"])
def test_first_weights(
    case: str,
    begin: Callable[..., tuple[int, str]],
    learned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    weights, message = {
        "a file": (str(file), f"120 of 122 tensors taken from {file}, not its head"),
        "recommended": ("DEFAULT", "120 of 122 tensors taken from DEFAULT, not its head"),
        "no network": ("", "training from scratch"),
        "a detector": (str(learned), "is a model for another task, 'detect'"),
    }[case]
    assert printed.count(message) == 1
    assert yaml.safe_load((tmp_path / "runs" / "exp" / "settings.yaml").read_text())["weights"] == weights
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
    folder = tmp_path / "photos"
    shutil.copytree(drawn_classes.with_suffix("") / "train", folder)
    pixels = noise(50, 40)
    for mode, name in {"L": "ring/grey.png", "CMYK": "ring/cmyk.jpg", "RGBA": "bar/alpha.png"}.items():
        Image.fromarray(pixels).convert(mode).save(folder / name)
    (folder / "bar" / "broken.jpg").write_bytes(b"\xff\xd8nothing")
    data = write_yaml(tmp_path / "photos.yaml", {"path": str(folder), "split": 0.25})
    printed = train(tmp_path, "--data", str(data), "--epochs", "1", "--cos-lr")
    assert "train: 29 images of 6 classes" in printed
    assert "val: 11 images of 6 classes" in printed
    assert "broken.jpg" in printed
    run = tmp_path / "exp"
    indices = json.loads((run / "class_indices.json").read_text())
    assert indices == {str(k): name for k, name in enumerate(sorted(NAMES))}
    table = [line.split(",") for line in (run / "split.csv").read_text().splitlines()]
    assert table[0] == ["split", "class", "image"]
    assert len({row[2] for row in table[1:]}) == len(table) - 1 == 40
    assert all(row[1] == Path(row[2]).parent.name for row in table[1:])
    assert "broken.jpg" in (run / "problems.txt").read_text()
    how = ("--data", str(data), "--imgsz", "64", "--device", "cpu", "--workers", "0", "--noplots")
    code, printed = call_main("val.py", *how, "--weights", str(run / "weights" / "last.pt"), "--project", str(tmp_path))
    assert (code, "val: 11 images of 6 classes" in printed) == (0, True)
    code, printed = call_main("train.py", *how, "--cfg", "yolov5n-cls.yaml", "--strict", "--project", str(tmp_path))
    assert code == 1
    refused(printed, "broken.jpg")


@pytest.mark.long
def test_the_built_in_job_learns(run_script: RunScript, tmp_path: Path) -> None:
    """`python train.py --cfg models/resnet18.yaml --data data/shapes-cls.yaml`, as a new user types it."""
    what = ("--cfg", "models/resnet18.yaml", "--data", "data/shapes-cls.yaml", "--device", "cpu")
    run_script("train.py", *what, "--project", str(tmp_path), OMP_NUM_THREADS=str(os.cpu_count()))
    assert rows(tmp_path / "exp")[-1]["metrics/accuracy_top1"] > 0.8


def test_defaults(begin: Callable[..., tuple[int, str]], drawn_classes: Path, tmp_path: Path) -> None:
    """Defaults come from the task, the data YAML overrides them, and the command line overrides both."""
    given = {"imgsz": 48, "batch_size": 64, "hyp": "data/hyps/shapes-cls.yaml"}
    data = write_yaml(tmp_path / "data.yaml", {**yaml.safe_load(drawn_classes.read_text()), "defaults": given})
    code, printed = begin("--data", str(data), "--imgsz", "32")
    assert code == 0, printed
    settings = yaml.safe_load((tmp_path / "runs" / "exp" / "settings.yaml").read_text())
    assert [settings[name] for name in ("imgsz", "batch_size", "epochs", "hyp")] == [32, 8, 30, given["hyp"]]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--cfg", "resnet43.yaml"), "resnet43.yaml"),
        (("--data", "data/shapes.yaml"), "has no folders of images"),
        (("--single-cls",), "--single-cls"),
        (("--rect",), "--rect"),
        (("--noautoanchor",), "--noautoanchor"),
        (("--hyp", "low.yaml"), "'box'"),
        (("--freeze", "12"), "layer 10"),
        (("--cfg", "resnet18.yaml", "--imgsz", "8192", "--weights", "DEFAULT"), "cannot be downloaded"),
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
