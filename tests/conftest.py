"""What several test files need."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol
from uuid import uuid4

import psutil
import pytest
import torch
import yaml
from torch.multiprocessing.spawn import start_processes

from data.builtin.shapes import NAMES, draw_dataset
from tests.machines import machines
from utils.distributed.ranks import ranks
from utils.distributed.spawn import spawn
from utils.files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TRAIN, VAL = 37, 31  # images of the runs that are compared: primes, so that nothing divides
# 16 images per optimizer step: two batches of 8, and the fifth and last of an epoch alone. Rates that leave trained
# weights trained.
RECIPE = {"nbs": 16, "lr0": 0.002, "warmup_bias_lr": 0.002, "warmup_epochs": 1.0}
pytest.register_assert_rewrite("tests.curves")


def pytest_sessionstart() -> None:
    """A hard exit of a process that runs tests would look like the success of all of them. Runs are not tracked, and
    fetch no official weights, unless a test wants it."""
    os.environ["WANDB_MODE"] = "disabled"
    os.environ["LOCKSTEP_RELEASES"] = "http://127.0.0.1:9/releases/download"  # where nobody answers
    tests, leave = os.getpid(), os._exit

    def refuse(code: int) -> NoReturn:
        if os.getpid() != tests:  # forked
            leave(code)
        traceback.print_stack(file=sys.__stderr__)
        leave(1)

    os._exit = refuse


class RunScript(Protocol):
    """Starts a script of the repository as a user does; what it printed, both streams.

    `launcher`: what stands before the script, python alone by default. `plots`: with its pictures, which take longer
    than such a run. `variables`: of the environment.
    """

    def __call__(
        self,
        script: str,
        *flags: str,
        fails: bool = False,
        code: int = 0,
        launcher: Sequence[str] = (sys.executable,),
        plots: bool = False,
        **variables: str,
    ) -> str: ...


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> RunScript:
    """Runs are given a cache of their own, and must end with `code`, or where they are to fail with 1 or 2.

    None may leave a process behind.
    """
    cache = str(tmp_path_factory.mktemp("cache"))

    def run(
        script: str,
        *flags: str,
        fails: bool = False,
        code: int = 0,
        launcher: Sequence[str] = (sys.executable,),
        plots: bool = False,
        **variables: str,
    ) -> str:
        quick = [] if plots or script not in ("train.py", "val.py") else ["--noplots"]
        mark = f"LOCKSTEP_TEST={uuid4()}"  # launchers start sessions and groups of their own, but keep the environment
        started = subprocess.Popen(
            ["env", mark, *launcher, str(ROOT / script), *flags, *quick],
            env={**os.environ, "XDG_CACHE_HOME": cache, **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            printed = "".join(started.communicate(timeout=900))
        finally:
            left = left_behind(mark)
            for process in left:
                process.kill()
        assert started.returncode in ((1, 2) if fails else (code,)), printed
        assert not left, printed
        return printed

    return run


def left_behind(mark: str, patience: float = 10.0) -> list[psutil.Process]:
    """Processes with a mark in their environment that live on after their run: loaders end themselves within 5 s."""
    end = time.monotonic() + patience
    while (alive := list(_living(mark))) and time.monotonic() < end:
        time.sleep(0.1)
    return alive


def _living(mark: str) -> Iterator[psutil.Process]:
    name, _, value = mark.partition("=")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                yield process


class OnProcesses(Protocol):
    """Calls a function of a test file on so many processes that can talk to each other; what each returned, by rank."""

    def __call__(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]: ...


@pytest.fixture
def on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnProcesses:
    """One thread each: they share the machine. What is returned must be tensors and plain values."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        work = functools.partial(_keep, tmp_path / "returned", function, arguments)
        if not spawn(work, count):
            start_processes(_alone, (work,), nprocs=1, start_method="spawn")
        return [torch.load(tmp_path / "returned" / f"{rank}.pt", weights_only=False) for rank in range(count)]

    return run


def _alone(rank: int, work: Callable[[], object]) -> None:
    work()


def _keep(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(function(*arguments), folder / f"{ranks().rank}.pt")


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two machines: the names of network namespaces joined by a cable, 10.77.0.1 and 10.77.0.2.

    Skips where making them is not permitted.
    """
    names = tuple(f"lockstep{os.getpid()}{letter}" for letter in "ab")
    if not shutil.which("ip"):
        pytest.skip("needs the command ip (package iproute2)")
    try:
        with machines(names):
            yield names[0], names[1]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data YAML of a small drawing of the built-in set: 28 images to train (no multiple of 8), 8 to validate."""
    folder = draw_dataset(tmp_path_factory.mktemp("data") / "shapes", train=28, val=8)
    file = folder.parent / "small.yaml"
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(NAMES))}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with YOLOv5's own numbers, weights and small data sets; it is not part of the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"needs YOLOv5's reference files in {SHARED}")
    return SHARED


@pytest.fixture
def tiny_yaml() -> dict[str, Any]:
    """A detector of two levels, strides 4 and 8, quick to build."""
    return {
        "nc": 3,
        "anchors": [[4, 4, 8, 4], [16, 16, 32, 24]],
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]]],
        "head": [[[1, 2], 1, "Detect", ["nc", "anchors"]]],
    }


# What runs are compared on


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hyp") / "gentle.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    return file


@pytest.fixture(scope="session")
def photos(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data YAML of some photos of coco128, for which official weights are trained."""
    folder = tmp_path_factory.mktemp("photos")
    images = sorted((shared / "data" / "coco128").rglob("*.jpg"))
    for split, chosen in {"train": images[:TRAIN], "val": images[TRAIN : TRAIN + VAL]}.items():
        (folder / f"{split}.txt").write_text("\n".join(map(str, chosen)))
    names = read_yaml(ROOT / "data" / "coco128.yaml")["names"]
    file = folder / "photos.yaml"
    file.write_text(yaml.safe_dump({"path": str(folder), "train": "train.txt", "val": "val.txt", "names": names}))
    return file


@pytest.fixture(scope="session")
def fine_tune(run_script: RunScript, shared: Path, photos: Path, recipe: Path) -> Callable[..., str]:
    """Trains official weights for two epochs, on one thread per process; what it printed."""
    weights = str(shared / "weights" / "yolov5n.pt")
    what = ("--data", str(photos), "--weights", weights, "--hyp", str(recipe), "--imgsz", "192", "--noautoanchor")
    how = ("--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--noplots")

    def run(project: Path, *flags: str, **more: Any) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})

    return run


@pytest.fixture(scope="session")
def single(fine_tune: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    project = tmp_path_factory.mktemp("single")
    fine_tune(project)
    return project / "exp"


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data YAML of a drawing of the built-in set."""
    folder = draw_dataset(tmp_path_factory.mktemp("drawn") / "shapes", train=TRAIN, val=VAL)
    file = folder.parent / "drawn.yaml"
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(NAMES))}
    file.write_text(yaml.safe_dump(content))
    return file
