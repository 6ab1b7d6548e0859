"""Loader processes, which end together with their training process."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from utils.distributed.failure import describe_system_failure, run_main
from utils.distributed.loader_processes import end_workers, init_worker
from utils.distributed.stop import STOP_SIGNALS, GracefulStop
from utils.files import ROOT

# Errors

BUS = (
    "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
SHM = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nRuntimeError: "
    "unable to allocate shared memory(shm) for file </torch_71_1_0>: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (RuntimeError(BUS), "ran out of shared memory: make /dev/shm larger"),
        (RuntimeError(SHM), "ran out of shared memory: make /dev/shm larger"),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), "if so, lower --workers"),
        (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), "if so, lower --workers"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nshape mismatch"), ""),
        (RuntimeError("Caught ValueError in DataLoader worker process 0.\nshared memory killed by signal"), ""),
        (RuntimeError("DataLoader timed out after 5 seconds"), ""),
        (RuntimeError("a bus was killed"), ""),
        (ValueError(BUS), ""),
        (OSError(errno.EMFILE, "Too many open files", "a.jpg"), "raise the limit with ulimit -n"),
        (
            RuntimeError("Too many open files. Communication with the workers is no longer"),
            "raise the limit with ulimit",
        ),
    ],
)
def test_loader_died(error: Exception, part: str) -> None:
    message = describe_system_failure(error)
    assert part in message
    assert bool(message) == bool(part)


def count_new_pages(result: Connection) -> None:
    """Send the pages that the system gives to a loader process for a hundred items of four images."""
    init_worker(0)
    before = 0
    for number in range(110):
        if number == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        images = [np.ones((480, 640, 3), np.uint8) for _ in range(4)]
        del images
    result.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_a_loader_process_reuses_the_memory_of_images() -> None:
    """Their 90,000 pages would be new ones, each filled with zeros."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=count_new_pages, args=(sender,))
    process.start()
    assert receiver.recv() < 9000
    process.join(60)


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
    assert capsys.readouterr().err == (
        "error: a loader process was killed, possibly by the system because memory ran out; if so, lower --workers\n"
    )


# Processes

FORK = multiprocessing.get_context("fork")
LIFE_SECONDS = 60  # of a process that nothing ends


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ends(pid: int) -> bool:
    end = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return gone(pid)


def load(sender: Connection) -> None:
    """A loader process, which sends its number."""
    init_worker(0)
    sender.send(os.getpid())
    time.sleep(LIFE_SECONDS)


def train(sender: Connection) -> None:
    """A training process with a loader process."""
    FORK.Process(target=load, args=(sender,)).start()
    time.sleep(LIFE_SECONDS)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, int]]]:
    """Start a process; return it and the number of the loader process, which may be the same."""
    started: list[int] = []

    def run(target: Callable[[Connection], None]) -> tuple[Any, int]:
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=target, args=(sender,))
        process.start()
        assert receiver.poll(30)
        worker = receiver.recv()
        started.extend([process.pid or 0, worker])
        return process, worker

    yield run
    for pid in started:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_loader_process_ends_on_its_parents_signal_only(start: Callable[..., tuple[Any, int]]) -> None:
    with GracefulStop() as stop:
        process, worker = start(load)
        for number in STOP_SIGNALS:
            subprocess.run(["kill", f"-{number}", str(worker)], check=True)
        process.join(0.5)
        assert process.is_alive()
        assert stop.requested() == ""
    process.terminate()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize("prctl", [True, False])
def test_a_loader_process_ends_with_its_training_process(
    prctl: bool, start: Callable[..., tuple[Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: None) -> None:
        raise OSError("no such library")

    if not prctl:  # as on systems other than Linux
        monkeypatch.setattr(ctypes, "CDLL", missing)
    process, worker = start(train)
    assert not gone(worker)
    process.kill()
    process.join(30)
    assert ends(worker)


def test_end_workers(start: Callable[..., tuple[Any, int]]) -> None:
    _, worker = start(load)
    end_workers()
    assert gone(worker)


STARTS_SLOWLY = """
import os, sys, time
from torch.utils.data import DataLoader
from utils.distributed.failure import Stopped, run_main
from utils.distributed.loader_processes import init_worker
def main():
    os.register_at_fork(after_in_child=lambda: time.sleep(60))
    loader = DataLoader(range(4), num_workers=1, worker_init_fn=init_worker)
    main.batches = iter(loader)
    raise Stopped(0)
run_main(main)
"""


def test_a_loader_process_that_has_just_started_ends_without_an_error() -> None:
    """It is killed by the signal, because it has no handler yet."""
    ended = subprocess.run([sys.executable, "-c", STARTS_SLOWLY], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (0, "")


GIVES_UP = """
import multiprocessing, os, sys, tempfile
from utils.distributed.failure import hard_exit
from utils.distributed.loader_processes import share_temporary_folder
share_temporary_folder()
made = tempfile.TemporaryDirectory(prefix="package-")
made.itself = made
loader = multiprocessing.get_context("fork").Process(target=hard_exit, args=("of the loader",), daemon=True)
loader.start()
loader.join()
print(sorted(os.listdir(os.environ["TMPDIR"])), flush=True)
hard_exit("of the parent")
"""


def test_temporary_folders_go_with_the_process_that_made_them(tmp_path: Path) -> None:
    """They would stay on the disk; and without that of sockets the other loader processes could send nothing."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", GIVES_UP]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "of the loader\nof the parent\n")
    assert re.fullmatch(r"\['package-\w+', 'pymp-\w+'\]\n", ended.stdout)
    assert not list(tmp_path.iterdir())


WAITS = """
import sys
from utils.distributed.loader_processes import share_temporary_folder
share_temporary_folder()
print("ready", flush=True)
sys.stdin.read()
"""


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    def started() -> subprocess.Popen[str]:
        command, pipes = [sys.executable, "-c", WAITS], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    (tmp_path / "pymp-other").mkdir()  # of another program
    killed = started()
    of_killed = set(tmp_path.iterdir())
    living = started()
    of_living = set(tmp_path.iterdir()) - of_killed
    assert (len(of_killed), len(of_living)) == (2, 1)
    killed.kill()
    killed.wait()
    last = started()
    assert {tmp_path / "pymp-other", *of_living} < set(tmp_path.iterdir())
    assert len(set(tmp_path.iterdir())) == 3
    for process in (living, last):
        process.communicate()
    assert list(tmp_path.iterdir()) == [tmp_path / "pymp-other"]


LOADS = """
import torch
from torch.utils.data import DataLoader
from utils.distributed.loader_processes import init_worker, share_temporary_folder

if __name__ == "__main__":
    share_temporary_folder()
    print(sum(int(batch) for batch in DataLoader(torch.arange(4), num_workers=1, worker_init_fn=init_worker)))
"""


def test_a_long_path_of_the_temporary_folder(tmp_path: Path) -> None:
    """A socket's path has at most 107 bytes; without the socket the training would wait for ever."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    short = set(Path("/tmp").glob("pymp-*"))
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOADS]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "6\n", "")
    assert not list(folder.iterdir())
    assert set(Path("/tmp").glob("pymp-*")) <= short


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
