"""Loader processes, which end with the process that they work for, not before and not after."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from utils.distributed.exit import run_main
from utils.distributed.graceful_stop import STOP_SIGNALS, GracefulStop
from utils.distributed.loader_processes import end_workers, loader_died, shield_worker

# What went wrong

BUS = (
    "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
SHM = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nRuntimeError: "
    "unable to allocate shared memory(shm) for file </torch_71_1_0>: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(BUS), "ran out of shared memory: make /dev/shm larger"),
        (RuntimeError(SHM), "ran out of shared memory: make /dev/shm larger"),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), "short of memory: lower --workers"),
        (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), "short of memory: lower --workers"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nshape mismatch"), ""),
        (RuntimeError("Caught ValueError in DataLoader worker process 0.\nshared memory killed by signal"), ""),
        (RuntimeError("DataLoader timed out after 5 seconds"), ""),
        (RuntimeError("a bus was killed"), ""),
        (ValueError(BUS), ""),
    ],
)
def test_loader_died(error: Exception, said: str) -> None:
    found = loader_died(error)
    assert said in found
    assert bool(found) == bool(said)


class Deadly(Dataset[int]):
    """An item ends the process that loads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_loader_process_that_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: list(DataLoader(Deadly(), num_workers=1, worker_init_fn=shield_worker)))
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "error: a loader process was ended; if nobody did that, the system was short of memory: lower --workers\n"
    )


# Processes

FORK = multiprocessing.get_context("fork")
LIFE = 60  # seconds, should nothing end it


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def work(mouth: Connection) -> None:
    shield_worker(0)
    mouth.send(os.getpid())
    time.sleep(LIFE)


def employ(mouth: Connection) -> None:
    """A training process: its loader process says that it is there."""
    FORK.Process(target=work, args=(mouth,)).start()
    time.sleep(LIFE)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, int]]]:
    """Start a process of this; it, and the number of the loader process, which may be the same."""
    started: list[int] = []

    def run(target: Callable[[Connection], None]) -> tuple[Any, int]:
        ear, mouth = FORK.Pipe(duplex=False)
        process = FORK.Process(target=target, args=(mouth,))
        process.start()
        assert ear.poll(30)
        worker = ear.recv()
        started.extend([process.pid or 0, worker])
        return process, worker

    yield run
    for pid in started:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def from_elsewhere(number: int, pid: int) -> None:
    """A signal that does not come from the process that the worker works for."""
    subprocess.run(["kill", f"-{number}", str(pid)], check=True)


def test_signals_to_the_whole_job_pass_a_loader_process(start: Callable[..., tuple[Any, int]]) -> None:
    """The one that it works for asks for the end when it has saved; and hears only what is sent to itself."""
    with GracefulStop() as stop:
        process, worker = start(work)
        for number in (*STOP_SIGNALS, signal.SIGTERM):
            from_elsewhere(number, worker)
        process.join(0.5)
        assert process.is_alive()
        assert stop.requested() == ""
    process.terminate()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize("prctl", [True, False])
def test_a_loader_process_ends_with_the_one_that_it_works_for(
    prctl: bool, start: Callable[..., tuple[Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: None) -> None:
        raise OSError("no such library")

    if not prctl:  # as on systems other than Linux: it looks for itself
        monkeypatch.setattr(ctypes, "CDLL", missing)
    process, worker = start(employ)
    assert not gone(worker)
    process.kill()
    process.join(30)
    assert until(lambda: gone(worker))


def test_end_workers(start: Callable[..., tuple[Any, int]]) -> None:
    _, worker = start(work)
    end_workers()
    assert gone(worker)
