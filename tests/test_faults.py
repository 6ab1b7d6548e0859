"""Whole runs with a planted fault end with one sentence, on all processes, in bounded time."""

from __future__ import annotations

import importlib
import operator
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.conftest import CallMain, RunScript, not_here
from tests.curves import refused, rows
from tests.faults.fault_points import POINTS, planted
from tests.machines import ACCELERATE, CONFIGS
from utils.checkpoint import StateFiles
from utils.files import ROOT, read_yaml

HERE = ("--processes", "2")
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(run_script: RunScript, small_data: Path, recipe: Path) -> Train:
    """Train for a short time into a project; return what was printed."""
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(recipe))
    how = ("--imgsz", "64", "--epochs", "3", "--batch-size", "4", "--workers", "1", "--device", "cpu")

    def run(project: Path, *more: str, **options: Any) -> str:
        flags = (*what, *how, "--noautoanchor", "--project", str(project), *more)
        return run_script("train.py", *flags, **{"OMP_NUM_THREADS": "1", **options})

    return run


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_point_is_there(point: str) -> None:
    module, function = POINTS[point]
    assert callable(operator.attrgetter(function)(importlib.import_module(module)))


# One of several processes


def test_one_raises(train: Train, tmp_path: Path) -> None:
    """An error of our code prints its traceback and, once, the process."""
    printed = train(tmp_path, *HERE, **planted("raise", "loss", 3, rank=1), fails=True)
    assert printed.count("Traceback") == 1
    assert printed.count("error: ") == 1
    assert f"error: process 1 on {os.uname().nodename} failed: ValueError: a planted fault" in printed


@pytest.mark.long
def test_one_is_killed_under_a_launcher(train: Train, tmp_path: Path) -> None:
    """The launcher's SIGTERM does not keep the other processes from naming the killed one."""
    launcher = (*ACCELERATE, "--config_file", str(CONFIGS / "cpu.yaml"))
    printed = train(tmp_path, launcher=launcher, **planted("SIGKILL", "loss", 3, rank=1), fails=True)
    refused(printed, f"error: process 1 on {os.uname().nodename} ended")


@pytest.mark.long
def test_one_stalls(train: Train, tmp_path: Path) -> None:
    """The error names the process; the stack of every process is written to the run folder."""
    printed = train(tmp_path, *HERE, "--dist-timeout", "10", **planted("stall", "loss", 3, rank=1), fails=True)
    refused(printed, f"error: process 1 on {os.uname().nodename} made no progress")
    stacks = tmp_path / "exp" / "stacks"
    assert str(stacks) in printed
    assert "_call_impl" in (stacks / "process0.txt").read_text() or "train_on" in (stacks / "process0.txt").read_text()
    assert "in go_wrong" in (stacks / "process1.txt").read_text()


@pytest.mark.long
def test_a_loader_process_is_killed(train: Train, tmp_path: Path) -> None:
    printed = train(tmp_path, **planted("SIGKILL", "sample", 3), fails=True)
    refused(printed, "error: a loader process was killed")
    assert "Traceback" not in printed


# Gradients that are not finite


@pytest.mark.long
def test_too_many_steps_are_not_finite(train: Train, recipe: Path, tmp_path: Path) -> None:
    """The learning rate is huge: the error names the step, its images and the cause; the last good state stays."""
    wild = tmp_path / "wild.yaml"
    wild.write_text(yaml.safe_dump({**read_yaml(recipe), "lr0": 1e30, "warmup_epochs": 0}))
    printed = train(tmp_path, *HERE, "--hyp", str(wild), "--epochs", "11", fails=True)
    for named in ("error: 20 optimizer steps", "step 21", "box_loss, obj_loss, cls_loss", "lr0 than 1e+30"):
        refused(printed, named)
    assert StateFiles(tmp_path / "exp" / "checkpoint").files()


# Memory and disks


@pytest.mark.long
def test_out_of_memory(train: Train, tmp_path: Path) -> None:
    printed = train(tmp_path, *HERE, **planted("memory", "loss", rank=1), fails=True)
    refused(printed, "try --batch-size 2")


def test_auto_batch_on_the_cpu(call_main: CallMain, small_data: Path, tmp_path: Path) -> None:
    """It is measured on GPUs only."""
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--workers", "0")
    code, printed = call_main("train.py", *what, "--device", "cpu", "--project", str(tmp_path), "--batch-size", "-1")
    assert (code, "--batch-size -1" in printed) == (0, True)
    assert read_yaml(tmp_path / "exp" / "settings.yaml")["batch_size"] == 16


@pytest.mark.gpu
def test_auto_batch_on_a_gpu(train: Train, tmp_path: Path) -> None:
    """Training uses the measured batch size: at 64 pixels 28 images fit."""
    printed = train(tmp_path, "--batch-size", "-1", "--epochs", "1", "--device", "0")
    assert "--batch-size -1: taking 16, by measurement" in printed
    printed = train(tmp_path, "--batch-size", "-1", "--epochs", "1", "--device", "0", "--imgsz", "1280")
    assert ", by measurement" in printed
    assert len(rows(tmp_path / "exp2")) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 50 MB: room for the weights and one state of 21 MB, but not for a second state."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        not_here(f"permission to mount a disk ({made.stderr.decode().strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_a_full_disk(train: Train, run_script: RunScript, small_disk: Path) -> None:
    """Training continues; the error at the end names what could not be written, and the previous state is whole."""
    printed = train(small_disk, fails=True)
    assert printed.count("warning: ") == 1
    assert f"{small_disk / 'exp' / 'checkpoint'} cannot be written now: No space left on device" in printed
    refused(printed, f"cannot be written: No space left on device; fix that, and continue with --resume {small_disk}")
    assert len(rows(small_disk / "exp")) == 3
    state = StateFiles(small_disk / "exp" / "checkpoint").read(pytest.fail)
    assert state is not None
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    before = (small_disk / "exp" / "results.csv").read_bytes()
    run_script("train.py", "--resume", str(small_disk / "exp"), OMP_NUM_THREADS="1")
    assert (small_disk / "exp" / "results.csv").read_bytes() == before
    assert (small_disk / "exp" / "weights" / "best.pt").is_file()


def test_little_shared_memory(train: Train, tmp_path: Path) -> None:
    """Batches that do not fit into /dev/shm are loaded without loader processes, instead of a bus error."""
    little = 'mount -t tmpfs -o size=100k tmpfs /dev/shm && exec "$@"'
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "sh", "-c", little, "sh", "true"]).returncode:
        not_here("permission to mount in a namespace")
    launcher = ("unshare", "-m", "sh", "-c", little, "sh", sys.executable)
    printed = train(tmp_path, "--epochs", "1", launcher=launcher)
    assert "warning: /dev/shm has 0 MiB free, enough for the batches of 0 loader processes" in printed


@pytest.mark.long
def test_a_killed_run_whose_processes_are_importing(small_data: Path, tmp_path: Path) -> None:
    """Spawned processes have imported everything before they can look at their parent."""
    what = ["--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--project", str(tmp_path)]
    command = [sys.executable, "train.py", *what, "--processes", "2", "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        parent = psutil.Process(run.pid)
        while len(started := [each for each in parent.children() if "spawn_main" in " ".join(each.cmdline())]) < 2:
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    _, alive = psutil.wait_procs(started, 60)
    for process in alive:
        process.kill()
    assert alive == []
