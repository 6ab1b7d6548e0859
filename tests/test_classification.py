"""Classification: the same promises as a detector's, on drawn shapes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
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

from data.builtin.shapes import NAMES
from job import resolve, settings_of
from models.tasks.classification.task import ClassificationTask
from models.tasks.classification.torchvision_models import default_weights
from models.weights import read_weights
from tests.conftest import ROOT, VAL, CallMain, OnProcesses, RunScript
from tests.curves import CLASSIFIED, floats, identical, refused, rows, same_curve
from tests.faults.fault_points import planted
from tests.machines import ACCELERATE, CONFIGS, on_machine
from tests.making import noise
from tests.whole_runs import Parts, within
from utils.distributed.launch import start
from utils.distributed.ranks import ranks
from utils.run import Run

GENTLE = {"lr0": 0.0005, "crop_scale": 0.3}
Train = Callable[..., str]


@pytest.fixture(scope="session")
def train(run_script: RunScript, drawn_classes: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train yolov5n-cls from scratch for two epochs, on one thread per process; return what was printed.

    Not a ResNet: from scratch, with its small epsilon, rounding grows a thousandfold in five steps, on one process too.
    """
    hyp = tmp_path_factory.mktemp("hyp") / "gentle.yaml"
    hyp.write_text(yaml.safe_dump(GENTLE))
    what = ("--data", str(drawn_classes), "--cfg", "yolov5n-cls.yaml", "--hyp", str(hyp), "--imgsz", "64")
    how = ("--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu")

    def run(project: Path, *flags: str, **more: Any) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})

    return run


@pytest.fixture
def begin(call_main: CallMain, drawn_classes: Path, tmp_path: Path) -> Train:
    """Start a training in this process, which loads all images once; return what was printed."""
    what = ("--data", str(drawn_classes), "--cfg", "yolov5n-cls.yaml", "--imgsz", "64", "--batch-size", "8")
    how = ("--workers", "0", "--device", "cpu", "--noplots", "--project", str(tmp_path))

    def run(*flags: str) -> str:
        code, printed = call_main("train.py", *what, *how, *flags)
        assert code == 0, printed
        return printed

    return run


@pytest.fixture(scope="session")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    project = tmp_path_factory.mktemp("alone")
    train(project)
    return project / "exp"


# One curve. Measured: losses within 5e-7, weights within 1e-7, scores equal.


def test_the_columns(alone: Path) -> None:
    assert list(rows(alone)[0]) == ["epoch", *CLASSIFIED, "x/lr0", "x/lr1", "x/lr2"]


def test_two_processes_by_a_flag(train: Train, alone: Path, tmp_path: Path) -> None:
    printed = train(tmp_path, "--sync-bn", "--processes", "2")
    same_curve(tmp_path / "exp", alone)
    assert printed.count("epoch 2/2") == printed.count("results in") == 1
    assert "warn" not in printed.lower()


@pytest.mark.long
def test_four_processes_by_accelerate(train: Train, alone: Path, tmp_path: Path) -> None:
    launcher = (*ACCELERATE, "--config_file", str(CONFIGS / "cpu.yaml"), "--num_processes", "4")
    train(tmp_path, "--sync-bn", launcher=launcher)
    same_curve(tmp_path / "exp", alone)


@pytest.mark.long
def test_two_machines(hosts: tuple[str, str], train: Train, alone: Path, tmp_path: Path) -> None:
    def machine(rank: int) -> str:
        return train(tmp_path / str(rank), "--sync-bn", launcher=on_machine(hosts[rank], rank))

    with ThreadPoolExecutor() as pool:
        list(pool.map(machine, (0, 1)))
    same_curve(tmp_path / "0" / "exp", alone)
    assert not (tmp_path / "1").exists()


@pytest.mark.long  # tests/test_deepspeed.py runs stage 2 each time
@pytest.mark.parametrize("stage", [1, 2, 3])
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
    """yolov5n-cls with dropout, mixed images and accumulated batches; without dropout the losses differ."""
    model = yaml.safe_load((ROOT / "models" / "yolov5n-cls.yaml").read_text())
    model["head"] = [[-1, 1, "Classify", ["nc", 0.5]]]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model))
    hyp = tmp_path / "mixed.yaml"
    hyp.write_text(yaml.safe_dump({**GENTLE, "nbs": 16, "mixup": 0.4, "cutmix": 0.3, "erasing": 0.3, "randaugment": 1}))
    flags = ("--cfg", str(tmp_path / "model.yaml"), "--hyp", str(hyp), "--label-smoothing", "0.1", "--sync-bn")
    train(tmp_path, *flags, "--name", "one")
    train(tmp_path, *flags, "--name", "two", "--processes", "2")
    same_curve(tmp_path / "two", tmp_path / "one")
    model["head"] = [[-1, 1, "Classify", ["nc"]]]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model))
    train(tmp_path, *flags, "--name", "whole")
    assert rows(tmp_path / "whole")[0]["train/loss"] != rows(tmp_path / "one")[0]["train/loss"]


@pytest.mark.long
def test_statistics_are_averaged_without_sync_bn(
    train: Train, run_script: RunScript, drawn_classes: Path, tmp_path: Path
) -> None:
    """Two processes get the table of one, and validate each image once; their number is prime."""
    train(tmp_path, "--processes", "2")
    weights = str(tmp_path / "exp" / "weights" / "last.pt")
    how = ("--imgsz", "64", "--workers", "0", "--device", "cpu", "--project", str(tmp_path / "val"))
    last, tables = rows(tmp_path / "exp")[-1], []
    for name, more in (("one", ()), ("two", ("--processes", "2", "--batch-size", "7"))):
        printed = run_script(
            "val.py", "--data", str(drawn_classes), "--weights", weights, *how, *more, "--name", name, "--save-txt",
            OMP_NUM_THREADS="1",
        )  # fmt: skip
        tables.append([line for line in printed.splitlines() if line.startswith(" ")])
        assert len(list((tmp_path / "val" / name / "labels").iterdir())) == VAL
    assert tables[0] == tables[1]
    (overall,) = (words for words in map(str.split, tables[0]) if words[0] == "all")
    assert overall[1] == str(VAL)
    assert overall[4:] == [f"{last[f'metrics/accuracy_top{k}']:.4f}" for k in (1, 5)]


# Resumed


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed(processes: int, train: Train, run_script: RunScript, alone: Path, tmp_path: Path) -> None:
    """It is killed in an epoch, then in a validation."""
    here = ("--processes", "2") if processes > 1 else ()
    straight = alone
    if processes > 1:
        train(tmp_path, *here, "--name", "straight")
        straight = tmp_path / "straight"
    code, rank = (-signal.SIGKILL, 0) if processes == 1 else (1, 1)
    fault = planted("SIGKILL", "optimizer step", 3, rank)
    train(tmp_path, *here, "--save-steps", "1", "--name", "killed", **fault, code=code)
    resume = ("--resume", str(tmp_path / "killed"))
    fault = planted("SIGKILL", "validation batch of a classifier", rank=0)
    run_script("train.py", *resume, **fault, OMP_NUM_THREADS="1", code=code)
    assert "resuming " in run_script("train.py", *resume, OMP_NUM_THREADS="1")
    identical(tmp_path / "killed", straight)


def test_resume_looks_at_the_recipe(call_main: CallMain, alone: Path, tmp_path: Path) -> None:
    """The recipe's keys are those of this task."""
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**GENTLE, "lr0": 0.5}))
    code, printed = call_main("train.py", "--resume", str(alone), "--hyp", str(other))
    assert code == 1
    refused(printed, "lr0")


# The recipe's options


@pytest.mark.long
def test_fine_tuning_the_head_alone(train: Train, drawn_classes: Path, alone: Path, tmp_path: Path) -> None:
    """Weights of other classes: tensors that fit are loaded, a line says which do not, and only the head is trained."""
    names = [*reversed(NAMES), "weeds"]  # another order, and one more
    spec = yaml.safe_load(drawn_classes.read_text())
    (tmp_path / "six.yaml").write_text(yaml.safe_dump({**spec, "names": names}))
    weights = str(alone / "weights" / "last.pt")
    flags = ("--data", str(tmp_path / "six.yaml"), "--weights", weights, "--freeze", "-1")
    printed = train(tmp_path, *flags)
    assert re.search(r"tensors taken from \S+last.pt, not its head: it is for 6 classes\n", printed)
    assert "layers 0, 1, 2, 3, 4, 5, 6, 7, 8 are frozen" in printed
    assert "has no images of the class 'weeds'" in printed
    before, after = (read_weights(run / "weights" / "last.pt").state for run in (alone, tmp_path / "exp"))
    assert torch.equal(before["model.8.cv3.conv.weight"], after["model.8.cv3.conv.weight"])
    assert after["model.9.linear.weight"].shape == (7, 1280)


def test_local_weights_of_torchvision(begin: Train, tmp_path: Path) -> None:
    """A file of tensors without metadata, in torchvision's form."""
    torch.save(resnet18(num_classes=10).state_dict(), tmp_path / "resnet18.pth")
    printed = begin("--cfg", "models/resnet18.yaml", "--weights", str(tmp_path / "resnet18.pth"), "--freeze", "9")
    others = "not its head: it is for 10 classes"
    assert f"120 of 122 tensors taken from {tmp_path / 'resnet18.pth'}, {others}\n" in printed
    assert "another task" not in printed
    assert "layers 0, 1, 2, 3, 4, 5, 6, 7, 8 are frozen" in printed


def write_default_weights(torch_home: Path) -> None:
    """Write random weights where torch caches the recommended ones of ResNet-18."""
    cached = torch_home / "hub" / "checkpoints" / Path(default_weights("resnet18")).name
    cached.parent.mkdir(parents=True)
    torch.save(resnet18(num_classes=1000).state_dict(), cached)


def are_taken(printed: str, run: Path) -> None:
    assert "starting from torchvision's weights; --weights '' trains from scratch\n" in printed
    assert "120 of 122 tensors taken from DEFAULT, not its head: it is for 1000 classes\n" in printed
    assert yaml.safe_load((run / "settings.yaml").read_text())["weights"] == "DEFAULT"


def test_the_recommended_weights_are_the_default(begin: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are in torch's cache; a resumed run does not look for them again."""
    write_default_weights(tmp_path / "torch")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    are_taken(begin("--cfg", "resnet18.yaml"), tmp_path / "exp")


@pytest.mark.long
def test_the_recommended_weights_on_two_processes(train: Train, tmp_path: Path) -> None:
    write_default_weights(tmp_path / "torch")
    flags = ("--cfg", "resnet18.yaml", "--epochs", "1", "--processes", "2", "--save-steps", "1")
    are_taken(train(tmp_path, *flags, TORCH_HOME=str(tmp_path / "torch")), tmp_path / "exp")


def test_without_a_network_training_is_from_scratch(
    begin: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, and it takes no longer than the server may."""
    nowhere = {"TORCH_HOME": str(tmp_path / "torch"), "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    printed = begin("--cfg", "resnet18.yaml")
    assert printed.count("training from scratch: torchvision's weights cannot be downloaded\n") == 1
    assert "tensors taken" not in printed
    assert yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text())["weights"] == ""


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


def test_a_detectors_backbone(begin: Train, learned: Path) -> None:
    printed = begin("--weights", str(learned))
    assert "is a model for another task, 'detect'" in printed
    assert "taken from" in printed


@pytest.mark.long
def test_a_cosine_to_a_floor(train: Train, tmp_path: Path) -> None:
    hyp = tmp_path / "floor.yaml"
    hyp.write_text(yaml.safe_dump({**GENTLE, "lrf": 0.1}))
    train(tmp_path, "--hyp", str(hyp), "--cos-lr", "--epochs", "3", "--nosave")
    rates = [row["x/lr1"] for row in rows(tmp_path / "exp")]
    assert rates == pytest.approx([0.0005, 0.0003875, 0.0001625])


@pytest.mark.long
def test_a_loss_that_is_not_finite(train: Train, tmp_path: Path) -> None:
    hyp = tmp_path / "wild.yaml"
    hyp.write_text(yaml.safe_dump({**GENTLE, "lr0": 1e18}))
    printed = train(tmp_path, "--hyp", str(hyp), "--epochs", "5", fails=True)
    refused(printed, "20 optimizer steps in a row were skipped")


# A split of one folder, and the run folder


@pytest.mark.long
def test_one_folder(drawn_classes: Path, train: Train, run_script: RunScript, tmp_path: Path) -> None:
    """Images of several modes and a broken one; the split and the class numbers are written to files."""
    folder = tmp_path / "photos"
    shutil.copytree(drawn_classes.with_suffix("") / "train", folder)
    pixels = noise(50, 40)
    Image.fromarray(pixels).convert("L").save(folder / "ring" / "grey.png")
    Image.fromarray(pixels).convert("CMYK").save(folder / "ring" / "cmyk.jpg")
    Image.fromarray(pixels).convert("RGBA").save(folder / "bar" / "alpha.png")
    (folder / "bar" / "broken.jpg").write_bytes(b"\xff\xd8nothing")
    data = tmp_path / "photos.yaml"
    data.write_text(yaml.safe_dump({"path": str(folder), "split": 0.25}))
    flags = ("--data", str(data), "--epochs", "1")
    printed = train(tmp_path, *flags)
    assert "train: 29 images of 6 classes" in printed
    assert "val: 11 images of 6 classes" in printed
    assert "broken.jpg: not readable as an image" in printed
    run = tmp_path / "exp"
    assert json.loads((run / "class_indices.json").read_text()) == {
        str(k): name for k, name in enumerate(sorted(NAMES))
    }
    table = [line.split(",") for line in (run / "split.csv").read_text().splitlines()]
    assert table[0] == ["split", "class", "image"]
    assert len({row[2] for row in table[1:]}) == len(table) - 1 == 40
    assert all(row[1] == Path(row[2]).parent.name for row in table[1:])
    assert "broken.jpg" in (run / "problems.txt").read_text()
    refused(train(tmp_path, *flags, "--strict", fails=True), "broken.jpg: not readable as an image")
    how = ("--imgsz", "64", "--device", "cpu", "--workers", "0", "--project", str(tmp_path / "val"))
    printed = run_script("val.py", "--data", str(data), "--weights", str(run / "weights" / "last.pt"), *how)
    assert "val: 11 images of 6 classes" in printed


def test_the_run_folder(train: Train, alone: Path, tmp_path: Path) -> None:
    """Counts by class, the confusion matrix, and pictures; with --noplots none of these."""
    train(tmp_path, plots=True)
    run = tmp_path / "exp"
    names = {file.name for file in run.iterdir()}
    assert {"classes.csv", "confusion_matrix.csv", "class_indices.json", "split.csv"} <= names
    assert {"confusion_matrix.png", "confusion_matrix_counts.png", "mistakes.jpg", "train_batch0.jpg"} <= names
    assert {"labels.jpg", "results.png"} <= names
    matrix = [line.split(",")[1:] for line in (run / "confusion_matrix.csv").read_text().splitlines()[1:]]
    counts = np.array(matrix, int)
    best = max(rows(run), key=lambda row: row["metrics/accuracy_top1"])
    assert counts.sum() == VAL
    assert np.trace(counts) / VAL == pytest.approx(best["metrics/accuracy_top1"])
    classes = [line.split(",") for line in (run / "classes.csv").read_text().splitlines()[1:]]
    assert [int(row[1]) for row in classes] == counts.sum(1).tolist()
    assert [float(row[3]) for row in classes] == pytest.approx((np.diag(counts) / counts.sum(1)).tolist())
    assert not [file for file in alone.iterdir() if file.suffix in (".png", ".jpg")]


# The built-in set


@pytest.mark.long
def test_the_built_in_job_learns(run_script: RunScript, tmp_path: Path) -> None:
    """`python train.py --cfg models/resnet18.yaml --data data/shapes-cls.yaml`, as a new user types it."""
    what = ("--cfg", "models/resnet18.yaml", "--data", "data/shapes-cls.yaml", "--device", "cpu")
    run_script("train.py", *what, "--project", str(tmp_path), OMP_NUM_THREADS=str(os.cpu_count()))
    assert rows(tmp_path / "exp")[-1]["metrics/accuracy_top1"] > 0.8


@pytest.mark.long
def test_its_defaults_are_taken(run_script: RunScript, tmp_path: Path) -> None:
    """Defaults come from the task, the data YAML overrides them, and the command line overrides both."""
    what = ("--cfg", "resnet18", "--data", "data/shapes-cls.yaml", "--batch-size", "256", "--epochs", "1")
    run_script("train.py", *what, "--device", "cpu", "--noval", "--noplots", "--project", str(tmp_path))
    settings = yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text())
    assert (settings["imgsz"], settings["batch_size"], settings["epochs"]) == (48, 256, 1)
    assert (settings["weights"], settings["hyp"]) == ("", "data/hyps/shapes-cls.yaml")
    assert floats(tmp_path / "exp").isfinite().all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cfg", "resnet43.yaml"), "model 'resnet43.yaml' is not a file"),
        (("--data", "data/shapes.yaml"), "has no folders of images"),
        (("--single-cls",), "--single-cls leaves a classifier only one class"),
        (("--rect",), "--rect needs "),
        (("--noautoanchor",), "--noautoanchor needs anchors, which classify"),
        (("--hyp", "low.yaml"), "low.yaml: unknown key 'box'"),
        (("--freeze", "12"), "the model has layers 0 to 9, but no layer 10"),
        (("--cfg", "resnet18.yaml", "--imgsz", "8192", "--weights", "DEFAULT"), "cannot be downloaded"),
        pytest.param(("--batch-size", "7", "--processes", "2"), "take 6 or 8", marks=pytest.mark.long),
        (("--weights", "yolov5n-cls.pt"), "yolov5n-cls.pt cannot be downloaded"),
    ],
)
def test_bad_input(
    flags: tuple[str, ...], message: str, call_main: CallMain, drawn_classes: Path, tmp_path: Path
) -> None:
    given = ("--data", str(drawn_classes), "--cfg", "yolov5n-cls.yaml", "--imgsz", "64", "--device", "cpu")
    code, printed = call_main("train.py", *given, "--project", str(tmp_path / "runs"), *flags)
    assert code in (1, 2)
    refused(printed, message)


@pytest.mark.gpu
def test_on_a_gpu(train: Train, alone: Path, tmp_path: Path) -> None:
    """The curve is close to the CPU's; a model of torchvision trains in bf16."""
    train(tmp_path, "--device", "0", "--mixed-precision", "no")
    same_curve(tmp_path / "exp", alone, losses=1e-2, scores=0.07, weights=1e-2)
    model = ("--cfg", "models/resnet18.yaml", "--weights", "")
    train(tmp_path, "--device", "0", *model, "--name", "bf16", "--epochs", "1")
    assert floats(tmp_path / "bf16").isfinite().all()
