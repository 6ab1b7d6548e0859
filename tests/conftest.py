"""Fixtures of all tests: runs of the scripts, several processes, two machines, drawn data, trained weights."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from filelock import FileLock

import train
import val
from data.builtin import shapes, shapes_cls, shapes_seg
from tests import processes
from tests.machines import machines
from tests.making import write_yaml
from tests.web import Server, serving
from utils.console import Background, log
from utils.distributed.failure import STOP_SIGNALS, run_main
from utils.distributed.launch import reset_accelerate
from utils.distributed.ranks import ranks
from utils.errors import Stopped

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TRAIN, VAL = 37, 31  # images of the runs that are compared: primes, which no batch size divides
# 16 images per optimizer step: two batches of 8, and the fifth and last of an epoch alone. The rates leave trained
# weights trained.
RECIPE = {"nbs": 16, "lr0": 0.002, "warmup_bias_lr": 0.002, "warmup_epochs": 1.0}
# From scratch to mAP50 0.1 on the drawn set in 300 steps: gains that suit 96 pixels and 6 classes, no augmentation.
LEARNING = {
    **{"lr0": 0.004, "lrf": 0.02, "weight_decay": 0.01, "nbs": 8, "warmup_epochs": 2.0, "warmup_bias_lr": 0.004},
    **{"box": 0.1, "cls": 4.0, "obj": 22.0, "flipud": 0.5},
    **dict.fromkeys(("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "mosaic"), 0.0),
}
NOT_HERE = "not on this machine: "  # begins the reason of each skip that is expected
pytest.register_assert_rewrite("tests.curves")


def pytest_collection_finish() -> None:
    """Keep what imports have made out of later garbage collections, each of which would take 0.2 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    processes.stop_server()
    gc.unfreeze()  # otherwise C++ modules report leaks at the end


def pytest_sessionstart() -> None:
    """Turn hard exits of this process into failures, and trackers and downloads off."""
    os.environ["WANDB_MODE"] = "disabled"
    os.environ["LOCKSTEP_RELEASES"] = "http://127.0.0.1:9/releases/download"  # where nobody answers
    tests, leave = os.getpid(), os._exit

    def refuse(code: int) -> NoReturn:
        if os.getpid() != tests:  # forked
            leave(code)
        traceback.print_stack(file=sys.__stderr__)
        leave(1)

    os._exit = refuse


def not_here(reason: str) -> NoReturn:
    """Skip a test for lack of something that not every machine has. Any other skip fails: see below."""
    pytest.skip(f"{NOT_HERE}{reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped without `not_here` would prove nothing unnoticed."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and NOT_HERE not in report.longrepr[2]:
        report.outcome, report.longrepr = "failed", f"{item.nodeid}: unexpected skip: {report.longrepr[2]}"
    return report


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the global generators: what a test draws from them does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget threads that earlier tests have abandoned: `run_main` would end this process for them; print all lines."""
    monkeypatch.setattr(Background, "abandoned", False)
    log.reset()


@pytest.fixture(autouse=True)
def empty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk look empty: the caches write nothing to a disk that is 90% full, which the machine's may be."""
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (real := usage(path))._replace(free=real.total))


RunScript = Callable[..., str]  # see `run_script`
CallMain = Callable[..., tuple[int, str]]  # see `call_main`
OnProcesses = Callable[..., list[Any]]  # see `on_processes`


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> RunScript:
    """Return a function that runs a script of the repository as a user does, and returns what it printed.

    Runs get their own cache folder, must end with `code`, or with 1 or 2 if `fails`, and leave no process behind.
    launcher: the command before the script, by default python. plots: with pictures, which take longer than such a run.
    variables: of the environment; None removes one.
    """
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}

    def run(
        script: str,
        *flags: str,
        fails: bool = False,
        code: int = 0,
        launcher: Sequence[str] = (sys.executable,),
        plots: bool = False,
        **variables: str | None,
    ) -> str:
        quick = [] if plots or script not in ("train.py", "val.py") else ["--noplots"]
        given, folder = {**os.environ, **cache, **variables}, tmp_path_factory.mktemp("printed")
        environment = {name: value for name, value in given.items() if value is not None}
        ended, printed, left = processes.run_script(script, [*flags, *quick], launcher, environment, folder)
        assert ended in ((1, 2) if fails else (code,)), printed
        assert not left, printed
        return printed

    return run


@pytest.fixture
def call_main(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[CallMain]:
    """Return a function that calls the `main` of train.py or val.py, with flags, in this process.

    It returns the exit code and what was printed. Instead of training, all images are loaded once.
    """
    cache = tmp_path_factory.mktemp("cache")
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    made: list[val.Evaluator] = []

    def evaluator(*given: Any, **named: Any) -> val.Evaluator:
        made.append(val.make_evaluator(*given, **named))
        return made[-1]

    def load_all(run: Any, job: Any, model: Any, loader: Any, *rest: Any) -> NoReturn:
        trained = [batch for shares in loader for batch in shares]
        assert sum(len(batch.infos) for batch in (*trained, *made.pop().loader)) > 0
        raise Stopped(0)

    def call(script: str, *flags: str) -> tuple[int, str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(sys, "argv", [script, *flags])
        monkeypatch.setattr(train, "make_evaluator", evaluator)
        monkeypatch.setattr(train, "train_one_epoch", load_all)
        code = 0
        try:
            run_main({"train.py": train, "val.py": val}[script].main)
        except SystemExit as end:
            code = int(end.code or 0)
        gc.collect()  # releases the lock of the run folder
        gc.freeze()  # the next collection need not visit what is left
        return code, "".join(capfd.readouterr())

    yield call
    reset_accelerate()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnProcesses:
    """Return a function that calls a function of a test file on `count` connected processes, of one thread each.

    It returns what each returned, by rank: tensors and plain values.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        processes.run_function(functools.partial(_keep, tmp_path / "returned", function, arguments), count)
        return [torch.load(tmp_path / "returned" / f"{rank}.pt", weights_only=False) for rank in range(count)]

    return run


def _keep(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(function(*arguments), folder / f"{ranks().rank}.pt")


def without_greetings(printed: str) -> str:
    """Remove the line that older versions of gloo print on each process; lines of several processes mix in pieces."""
    pieces = r"\[Gloo\] Rank |\d+| is connected to | peer ranks\. Expected number of connected peer ranks is : |\n"
    for _ in range(5 if "[Gloo]" in printed else 0):
        printed = re.sub(pieces, "", printed)  # a piece inside of another leaves that one whole
    return printed


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Three machines: the names of network namespaces joined by cables, 10.77.0.1, 10.77.0.2 and 10.77.0.3."""
    names = tuple(f"lockstep{os.getpid()}{letter}" for letter in "abc")
    if not shutil.which("ip"):
        not_here("the command ip (package iproute2)")
    try:
        with machines(names):
            yield names
    except subprocess.CalledProcessError as error:
        not_here(f"network namespaces ({error.stderr.strip()})")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server for downloads, without a proxy."""
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with YOLOv5's own numbers and weights, and with small data sets; it is not part of the repository."""
    if not SHARED.is_dir():
        not_here(f"YOLOv5's reference files in {SHARED}")
    return SHARED


# Drawn data


def data_yaml(folder: Path) -> Path:
    """Write the YAML of a drawn detection set beside its folder."""
    names = dict(enumerate(shapes.names))
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": names}
    return write_yaml(folder.with_suffix(".yaml"), content)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small drawing of the built-in set: 28 images to train (no multiple of 8), 8 to validate."""
    return data_yaml(shapes.draw_dataset(tmp_path_factory.mktemp("data") / "small", train=28, val=8))


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawing of the built-in set, for runs that are compared."""
    return data_yaml(shapes.draw_dataset(tmp_path_factory.mktemp("data") / "drawn", train=TRAIN, val=VAL))


@pytest.fixture(scope="session")
def drawn_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawing of the built-in classification set, for runs that are compared."""
    folder = shapes_cls.draw_dataset(tmp_path_factory.mktemp("data") / "classes", train=TRAIN, val=VAL)
    return write_yaml(folder.with_suffix(".yaml"), {"path": str(folder), "train": "train", "val": "val"})


@pytest.fixture(scope="session")
def drawn_outlines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawing of the built-in segmentation set, for runs that are compared."""
    return data_yaml(shapes_seg.draw_dataset(tmp_path_factory.mktemp("data") / "outlines", train=TRAIN, val=VAL))


# Runs that several files compare with; processes of pytest-xdist share them


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills, once for all processes that run tests."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with FileLock(f"{folder}.lock"):
        done = folder / "done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def learned(run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of yolov5n that detect something: trained from scratch on a drawing of their own."""

    def make(folder: Path) -> None:
        data = data_yaml(shapes.draw_dataset(folder / "drawn", train=200, val=8))
        hyp = write_yaml(folder / "learning.yaml", LEARNING)
        what = ("--data", str(data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(hyp), "--imgsz", "96")
        how = ("--epochs", "6", "--batch-size", "8", "--optimizer", "AdamW", "--noval")
        run_script(
            "train.py", *what, *how, "--workers", "1", "--device", "cpu", "--project", str(folder), OMP_NUM_THREADS="1"
        )

    return made_once(tmp_path_factory, "learned", make) / "exp" / "weights" / "last.pt"


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_yaml(tmp_path_factory.mktemp("hyp") / "gentle.yaml", RECIPE)


@pytest.fixture(scope="session")
def fine_tune(run_script: RunScript, drawn: Path, learned: Path, recipe: Path) -> Callable[..., str]:
    """Train the learned weights for two epochs, on one thread per process; return what was printed."""
    what = ("--data", str(drawn), "--weights", str(learned), "--hyp", str(recipe), "--imgsz", "96", "--noautoanchor")
    how = ("--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--noplots")

    def run(project: Path, *flags: str, **more: Any) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})

    return run


@pytest.fixture(scope="session")
def single(fine_tune: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    return made_once(tmp_path_factory, "single", fine_tune) / "exp"
