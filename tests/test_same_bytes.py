"""--logical-processes: whole runs on one to four processes that are equal to the byte, killed and resumed too."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RECIPE, RunScript, not_here
from tests.curves import identical, killed_and_moved, refused, rows
from tests.faults.fault_points import planted
from tests.machines import TORCHRUN, living, on_machine
from tests.making import tiny_anchor_free, write_yaml
from tests.wandb_files import one_run
from utils.checkpoint import StateFiles
from utils.files import ROOT, read_yaml

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


def test_two_machines(train: Train, alone: Path, tmp_path: Path, hosts: tuple[str, ...]) -> None:
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
    """One, three and four processes: in an epoch, in a validation, in the next epoch."""
    train(tmp_path, "--save-steps", "1", **planted("SIGKILL", "optimizer step", 3), code=-signal.SIGKILL)
    resume = ("train.py", "--resume", "--project", str(tmp_path), "--processes")
    run_script(*resume, "3", **planted("SIGKILL", "validation batch", 1, rank=0), code=1)
    printed = run_script(*resume, "4")
    assert "resuming " in printed
    assert "warning" not in printed
    identical(tmp_path / "exp", alone)


def test_data_sets_by_share(train: Train, small_data: Path, tmp_path: Path) -> None:
    flags = ("--data", str(by_share(small_data, tmp_path)), "--fitness", "mAP_0.5(night)=1", "--epochs", "1")
    for count in ("1", "2"):
        train(tmp_path, *flags, "--processes", count, "--name", count)
    identical(tmp_path / "2", tmp_path / "1")
    assert {"metrics/mAP_0.5(night)", "metrics/recall(day)"} < {*rows(tmp_path / "1")[0]}


def by_share(data: Path, folder: Path) -> Path:
    sets = [{"path": f"images/{split}", "name": name} for split, name in (("train", "day"), ("val", "night"))]
    content = {**read_yaml(data), "train": [{**entry, "share": 0.5} for entry in sets], "val": sets}
    return write_yaml(folder / "by_share.yaml", content)


@pytest.mark.parametrize("name", ["NAdam", pytest.param("lion_pytorch:Lion", marks=pytest.mark.long)])
def test_another_optimizer(name: str, train: Train, run_script: RunScript, tmp_path: Path) -> None:
    """Killed on one process and continued on two; another name is refused, as is another version of its package."""
    if ":" in name and not find_spec("lion_pytorch"):
        not_here("lion-pytorch")
    which = ("--optimizer", name, "--hyp.optimizer_args", "{betas: [0.9, 0.99]}", "--hyp.lr0", "0.001")
    assert f"choose lr0 for {name[-5:].lstrip(':')}" in " ".join(train(tmp_path / "alone", *which).split())
    train(tmp_path, *which, "--save-steps", "1", **planted("SIGKILL", "optimizer step", 3), code=-signal.SIGKILL)
    resume = ("train.py", "--resume", str(tmp_path / "exp"))
    assert "--optimizer is 'Adam'" in run_script(*resume, "--optimizer", "Adam", code=1)
    if ":" in name:
        settings = tmp_path / "exp" / "settings.yaml"
        written = settings.read_text()
        settings.write_text(re.sub("lion-pytorch [0-9.]+", "lion-pytorch 0.0.1", written))
        assert "the version of --optimizer" in run_script(*resume, code=1)
        settings.write_text(written)
    run_script(*resume, "--processes", "2")
    identical(tmp_path / "exp", tmp_path / "alone" / "exp")


HOOKS = """
import os, random, numpy, torch
from accelerate import PartialState
from train import StopTraining

def on_epoch(epoch, model, results):
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    model(torch.rand(1, 3, 64, 64))
    do = os.environ.get("DO") if PartialState().process_index else ""
    if do == "stop":
        raise StopTraining
    assert results["epoch"] == epoch and results.pop("metrics/recall") >= 0
    return 1 / (do != "fail")

def on_end(folder, results):
    (folder / f"{PartialState().process_index}.txt").write_text(str(results["fitness"]))
"""


def test_hooks(train: Train, run_script: RunScript, alone: Path, tmp_path: Path) -> None:
    """One that only reads changes no byte; one process may fail, which --resume continues, or end the run for all."""
    (file := tmp_path / "hooks.py").write_text(HOOKS)
    which = ("--processes", "2", "--hooks", str(file))
    refused(train(tmp_path, *which, DO="fail", code=1), f"{file}, line 13: ZeroDivisionError: division by zero, in ")
    run_script("train.py", "--resume", str(tmp_path / "exp"))  # the hooks have run before
    identical(tmp_path / "exp", alone)
    assert len({(tmp_path / "exp" / f"{rank}.txt").read_text() for rank in (0, 1)}) == 1
    assert "stopped by on_epoch" in train(tmp_path, *which, "--name", "ended", DO="stop")
    assert len(rows(tmp_path / "ended")) == 1
    assert "is finished" in run_script("train.py", "--resume", str(tmp_path / "ended"))


@pytest.mark.parametrize("count", ["1", pytest.param("4", marks=pytest.mark.long)])
def test_sync_bn(count: str, train: Train, tmp_path: Path) -> None:
    """The logical processes of a process meet in each BatchNorm layer."""
    for processes in (count, "3"):
        train(tmp_path, "--processes", processes, "--name", processes, "--sync-bn", "--epochs", "1")
    identical(tmp_path / "3", tmp_path / count)


@pytest.mark.long
def test_a_machine_leaves_and_returns(train: Train, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    """Torch's launcher on three machines: one is killed, two go on, it returns, and three finish."""
    job = ("--epochs", "40", "--noval")
    train(tmp_path, *job, "--name", "alone")
    mark = "LOCKSTEP_MACHINE"

    def machine(rank: int, code: int) -> str:
        size = ("--nnodes", "1:3", "--nproc_per_node", "1", "--max-restarts", "9", "--rdzv_backend", "c10d")
        here = ("--local-addr", f"10.77.0.{rank + 1}", "--rdzv_conf", f"last_call_timeout=5,is_host={rank == 0:d}")
        rendezvous = ("--rdzv_id", "elastic", "--rdzv_endpoint", "10.77.0.1:29500", *here)
        launcher = ("ip", "netns", "exec", hosts[rank], *TORCHRUN, *size, *rendezvous)
        saved = ("--save-steps", "1", "--resume", "auto", "--exist-ok", "--name", "elastic")
        variables = {mark: f"{tmp_path}{rank}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return train(tmp_path, *job, *saved, launcher=launcher, code=code, **variables)

    def wait_for(step: int) -> int:
        """Wait until a step is saved, and return the last one."""
        files, end = StateFiles(tmp_path / "elastic" / "checkpoint"), time.monotonic() + 300
        while (last := (files.read(lambda warning: None) or {"progress": {"step": 0}})["progress"]["step"]) < step:
            assert time.monotonic() < end
            time.sleep(0.2)
        return int(last)

    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(machine, *pair) for pair in ((0, 0), (1, 0), (2, -signal.SIGKILL))]
        step = wait_for(2)
        for process in living(f"{mark}={tmp_path}2"):
            process.kill()
        runs[2].result()
        wait_for(step + 3)
        printed = [run.result() for run in (pool.submit(machine, 2, 0), *runs[:2])]
    plans = re.findall(r"batch size 8 \((\d) processes", printed[1])
    assert (plans[0], "2" in plans, plans[-1]) == ("3", True, "3")
    identical(tmp_path / "elastic", tmp_path / "alone")


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
        ("BY SHARE", "--weights", "", "--cfg", "yolov5n.yaml"),
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
    path = str(by_share(drawn, tmp_path) if name == "BY SHARE" else request.getfixturevalue(name))
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
