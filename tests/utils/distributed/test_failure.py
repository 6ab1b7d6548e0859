"""How a run ends: who failed, who is lost, who hangs; loader processes end with their parent."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from tests.conftest import without_greetings
from utils.distributed import failure
from utils.distributed.failure import (
    Watchdog,
    barrier,
    init_worker,
    known_cause,
    on_failure,
    run_main,
)
from utils.distributed.launch import connect, spawn
from utils.distributed.ranks import ranks
from utils.distributed.stop import STOP_SIGNALS, GracefulStop
from utils.errors import Stopped, UserError
from utils.files import ROOT

# Who failed


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (UserError("a.yaml, line 3: fix it"), 1, "error: a.yaml, line 3: fix it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Stopped(143), 143, ""),  # everything is printed
    ],
)
def test_exit_codes(error: BaseException | None, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The listener, which closes the trackers, is called once after a failure; its errors change nothing."""
    called: list[str] = []

    def listen() -> None:
        called.append("of this run")
        raise ValueError("an error of the listener")

    def main() -> None:
        on_failure(lambda: called.append("of an earlier run"))
        on_failure(listen)
        if error:
            raise error

    with pytest.raises(SystemExit) if code else nullcontext(SimpleNamespace(value=SystemExit(0))) as raised:
        run_main(main)
    assert raised.value.code == code
    assert capsys.readouterr() == ("", message)
    assert called == (["of this run"] if message else [])


def test_a_wrong_launch_and_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latter keeps its traceback."""
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 / 0)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SystemExit) as raised:
        run_main(lambda: pytest.fail("it ran"))
    assert raised.value.code == 1
    assert "WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("SystemExit(0)", "error: {}, line 2: "),
        ("RuntimeError('gloo/pair.cc: Connection closed by peer [10.0.0.2]:5540')", "error: the connection to"),
    ],
)
def test_an_error_in_a_users_code_is_one_sentence(error: str, sentence: str, tmp_path: Path) -> None:
    """A layer of the user's may exchange BatchNorm's statistics when another process is lost."""
    file = tmp_path / "raising.py"
    file.write_text(f"def go():\n    raise {error}\n")
    text = f"""
from pathlib import Path
from utils.distributed.failure import run_main
from utils.user_code import imported

with imported(Path({str(file)!r}), "--task-file") as module:
    pass
run_main(module.go)
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith(sentence.format(file))
    assert done.stderr.count("\n") == 1


# Three processes


def hang() -> None:
    time.sleep(1e6)


def hang_while_reading(_: Path) -> None:
    """Hang on the second process, after all have waited for it once."""
    failure.ROLL_CALL_SECONDS = failure.EXPLAIN_SECONDS = 1.0
    failure.POLL_SECONDS = 0.1
    connect("cpu", 60.0)
    with barrier(60.0):
        time.sleep(ranks().rank / 2)
    with barrier(2.0):
        if ranks().rank == 1:
            hang()


def hang_on_the_second(folder: Path) -> None:
    failure.ROLL_CALL_SECONDS = failure.EXPLAIN_SECONDS = 1.0
    failure.POLL_SECONDS = 0.1
    connect("cpu", 60.0)
    with Watchdog(2.0, folder) as watched:
        for step in range(10):
            watched.beat()
            if ranks().rank == 1 and step == 3:
                hang()
            distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize("work", [hang_on_the_second, hang_while_reading])
def test_a_process_that_hangs_is_named(
    work: Callable[[Path], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: spawn(functools.partial(work, tmp_path), 3))
    assert caught.value.code == 1
    printed = capfd.readouterr()
    assert without_greetings(printed.out) == ""
    assert printed.err.startswith(f"error: process 1 on {socket.gethostname()} made no progress")
    assert printed.err.count("\n") == 1
    if work == hang_while_reading:
        return
    stacks = {file.name: file.read_text() for file in (tmp_path / "stacks").iterdir()}
    assert set(stacks) == {f"process{rank}.txt" for rank in range(3)}
    assert [name for name, text in stacks.items() if "in hang\n" in text] == ["process1.txt"]
    assert all("in hang_on_the_second" in text for text in stacks.values())


# Errors of others

SHM = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nRuntimeError: "
    "unable to allocate shared memory(shm) for file </torch_71_1_0>: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (distributed.DistNetworkError("something else\nmore"), "(something else)"),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Bus error. It is possible"), "/dev/shm"),
        (RuntimeError(SHM), "/dev/shm"),
        (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), "--workers"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nshape mismatch"), ""),
        (ValueError(SHM), ""),
    ],
)
def test_known_causes(error: Exception, part: str) -> None:
    cause = known_cause(error)
    assert part in cause
    assert bool(cause) == bool(part)


class Deadly(Dataset[int]):
    """A data set that kills the process that loads an item."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_loader_process_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: list(DataLoader(Deadly(), num_workers=1, worker_init_fn=init_worker)))
    assert caught.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "--workers" in printed


# Loader processes

FORK = multiprocessing.get_context("fork")
LIFE_SECONDS = 60  # of a process that nothing ends


def ends(pid: int, seconds: float = 30.0) -> bool:
    """Return whether a process ends soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
                continue
        return True
    return False


def load(sender: Connection) -> None:
    """A loader process, which sends its number."""
    init_worker(0)
    sender.send(os.getpid())
    time.sleep(LIFE_SECONDS)


def started(target: Callable[[Connection], None]) -> tuple[Any, int]:
    """Start a process; return it and the number of the loader process, which may be the same."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=target, args=(sender,))
    process.start()
    assert receiver.poll(30)
    return process, receiver.recv()


def test_a_loader_process_ends_on_its_parents_signal_only() -> None:
    with GracefulStop() as stop:
        process, worker = started(load)
        for number in STOP_SIGNALS:
            subprocess.run(["kill", f"-{number}", str(worker)], check=True)
        assert not ends(worker, 0.5)
        assert stop.requested() == ""
    process.terminate()
    process.join(30)
    assert process.exitcode == 0


# Memory


def count_pages(result: Connection) -> None:
    """Send the pages that the system gives to a process for the images of its first items, and of a hundred others."""
    init_worker(0)
    pages = []
    for items in (1, 10, 100):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(items):
            [np.ones((480, 640, 3), np.uint8) for _ in range(4)]
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    result.send(pages)


def test_freed_memory_is_reused() -> None:
    """The images would need 90,000 new pages, each filled with zeros."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=count_pages, args=(sender,))
    process.start()
    first, _, others = receiver.recv()
    process.join(60)
    assert others < min(9000, 20 * first)


def test_a_package_is_imported_while_wandb_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a user's function: W&B's import hooks call a thread that only the training process has."""
    wandb = pytest.importorskip("wandb")
    (tmp_path / "xgboost.py").write_text("NUMBER = 7\n")  # one of W&B's list
    monkeypatch.syspath_prepend(tmp_path)

    def collate(items: list[int]) -> int:
        import xgboost

        return int(xgboost.NUMBER)

    with wandb.init(mode="offline", dir=tmp_path):
        loader = DataLoader([0], num_workers=1, collate_fn=collate, worker_init_fn=init_worker)  # type: ignore[arg-type]
        assert list(loader) == [7]
    wandb.teardown()
