"""--logical-processes: whole runs on one, two and four processes that are equal to the byte, killed and resumed too."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RECIPE, RunScript
from tests.curves import identical, killed_and_moved, rows
from tests.faults.fault_points import planted
from tests.machines import on_machine
from tests.making import tiny_anchor_free, write_yaml
from tests.wandb_files import one_run
from utils.files import ROOT

FOUR = ("--logical-processes", "4")
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(run_script: RunScript, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Two epochs of four batches of eight images, two batches per optimizer step, of several sizes, a layer frozen."""
    hyp = write_yaml(tmp_path_factory.mktemp("hyp") / "often.yaml", {**RECIPE, "nbs": 16})
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(hyp), "--multi-scale")
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--freeze", "1")

    def run(project: Path, *more: str, **variables: Any) -> str:
        flags = (*what, *how, *FOUR, "--noautoanchor", "--project", str(project), *more)
        return run_script("train.py", *flags, **{"OMP_NUM_THREADS": "1", **variables})

    return run


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of one process."""
    train(project := tmp_path_factory.mktemp("alone"))
    return project / "exp"


def test_two_machines(train: Train, alone: Path, tmp_path: Path, hosts: tuple[str, str]) -> None:
    """No interface is named, although the host's name resolves to the loopback here. One W&B run is made."""

    def machine(rank: int) -> str:
        return train(tmp_path / str(rank), launcher=on_machine(hosts[rank], rank), WANDB_MODE="offline")

    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(machine, (0, 1)))
    identical(tmp_path / "0" / "exp", alone)
    assert "2 processes" in printed[0]
    assert "epoch" not in printed[1]
    assert not (tmp_path / "1").exists()  # only the main process writes
    one_run(tmp_path / "0" / "exp")


def test_killed_and_resumed_on_other_processes(
    train: Train, run_script: RunScript, alone: Path, tmp_path: Path
) -> None:
    """One, two and four processes: in an epoch, in a validation, in the next epoch."""
    train(tmp_path, "--save-steps", "1", **planted("SIGKILL", "optimizer step", 2), code=-signal.SIGKILL)
    resume = ("train.py", "--resume", "--project", str(tmp_path), "--processes")
    run_script(*resume, "2", **planted("SIGKILL", "validation batch", 1, rank=0), code=1)
    printed = run_script(*resume, "4")
    assert "resuming " in printed
    assert "warning" not in printed
    identical(tmp_path / "exp", alone)


@pytest.mark.long
def test_class_weights_on_one_and_two_processes(train: Train, alone: Path, tmp_path: Path) -> None:
    weighted = ("--epochs", "1", "--hyp.class_weights", "{disc: 5}")
    for processes in ("1", "2"):
        train(tmp_path, "--processes", processes, "--name", processes, *weighted)
    identical(tmp_path / "2", tmp_path / "1")
    assert rows(tmp_path / "1")[0]["train/cls_loss"] != rows(alone)[0]["train/cls_loss"]


@pytest.mark.gpu2
def test_two_gpus(train: Train, tmp_path: Path) -> None:
    for devices in ("0", "0,1"):
        train(tmp_path, "--device", devices, "--name", devices)
    identical(tmp_path / "0,1", tmp_path / "0")


SCRATCH = ("drawn", "--weights", "", "--cfg")


@pytest.mark.long
@pytest.mark.parametrize(
    "job",
    [
        ("learned", "--hyp", "finetune", "--optimizer", "AdamW", "--mixed-precision", "bf16"),
        ("learned", "--hyp", "low"),
        ("learned", "--hyp.lr_factor", "{backbone: 0, head: 1}"),
        (*SCRATCH, "yolov5n.yaml", "--augmentations", str(ROOT / "examples" / "own_augmentations.py")),
        (*SCRATCH, "ANCHOR-FREE"),  # with an auxiliary branch
        ("drawn_outlines", "--weights", "", "--cfg", "yolov5n-seg.yaml", "--hyp", "low", "--optimizer", "Adam"),
        ("drawn_classes", "--weights", "", "--cfg", "resnet18.yaml", "--mixed-precision", "bf16"),
        ("drawn_classes", "--weights", "", "--cfg", "DROPOUT"),  # and stochastic depth
    ],
    ids=lambda job: f"{job[0]} {job[-1].rpartition('/')[2]}",
)
def test_other_jobs(
    job: tuple[str, ...], run_script: RunScript, drawn: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On one process, on four, and killed on two and resumed on one."""
    name, *flags = job
    path = str(request.getfixturevalue(name))
    dropout = {"task": "classify", "architecture": "efficientnet_b0", "nc": 6, "args": {"dropout": 0.4}}
    models = {"DROPOUT": dropout, "ANCHOR-FREE": {**tiny_anchor_free(), "nc": 6}}
    flags = [str(write_yaml(tmp_path / "model.yaml", models[flag])) if flag in models else flag for flag in flags]
    given = ("--data", str(drawn), "--weights", path) if name == "learned" else ("--data", path)
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "16", "--workers", "1", "--device", "cpu", *FOUR)

    def train(project: Path, *more: str, **variables: Any) -> str:
        return run_script("train.py", *given, *flags, *how, "--project", str(project), *more, **variables)

    train(tmp_path, "--name", "one")
    train(tmp_path, "--name", "four", "--processes", "4")
    identical(tmp_path / "four", tmp_path / "one")
    killed_and_moved(train, run_script, tmp_path / "one")
