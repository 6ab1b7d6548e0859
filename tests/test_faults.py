"""Whole runs with a planted fault end with one sentence, on all processes, in bounded time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train as train_script
from tests.conftest import RunScript, not_here
from tests.curves import refused, rows
from tests.faults.fault_points import planted
from tests.machines import ACCELERATE, CONFIGS
from utils.checkpoint import StateFiles
from utils.errors import UserError

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


def test_out_of_memory(small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a batch size; tests/utils/training/test_memory.py has the batch that fits."""

    def train_one_epoch(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train_script, "train_one_epoch", train_one_epoch)
    job = {"data": small_data, "weights": "", "cfg": "yolov5n.yaml", "imgsz": 64, "workers": 0, "device": "cpu"}
    quiet = {"noautoanchor": True, "noplots": True, "log_with": "none", "project": tmp_path}
    with pytest.raises(UserError, match="--batch-size 4"):
        train_script.run(**job, **quiet, batch_size=8)


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
