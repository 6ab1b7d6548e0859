"""How a run ends: who failed, who is lost, who hangs; loader processes end with their parent."""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from tests.conftest import without_greetings
from utils.distributed import failure
from utils.distributed import ranks as ranks_module
from utils.distributed.failure import (
    Stopped,
    Watchdog,
    barrier,
    end_workers,
    init_worker,
    keep_freed_memory,
    known_cause,
    on_failure,
    run_main,
)
from utils.distributed.launch import connect, spawn
from utils.distributed.ranks import Ranks, RunStore, ranks
from utils.distributed.stop import STOP_SIGNALS, GracefulStop
from utils.errors import UserError
from utils.files import ROOT

# Who failed


def test_the_reason_is_passed_on_once(capsys: pytest.CaptureFixture[str]) -> None:
    """To trackers, which may alert somebody; their errors change nothing."""
    reasons: list[str] = []

    def listen(reason: str) -> None:
        reasons.append(reason)
        raise ValueError("an error of the listener")

    def main() -> None:
        raise UserError("20 steps were not finite")

    on_failure(lambda reason: reasons.append("of an earlier run"))
    on_failure(listen)
    for _ in range(2):
        with pytest.raises(SystemExit):
            run_main(main)
    assert reasons == ["20 steps were not finite"]
    assert capsys.readouterr().err == 2 * "error: 20 steps were not finite\n"


def test_a_script_that_succeeds_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(lambda: None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("a.yaml, line 3: fix it"), 1, "error: a.yaml, line 3: fix it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Stopped(143), 143, ""),  # everything is printed
    ],
)
def test_exit_codes(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_main(main)
    assert raised.value.code == code
    assert capsys.readouterr() == ("", message)


def test_a_wrong_launch_is_an_error_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SystemExit) as raised:
        run_main(lambda: pytest.fail("it ran"))
    assert raised.value.code == 1
    assert capsys.readouterr().err.startswith("error: the environment variable WORLD_SIZE is 'two'")


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shape mismatch")])
def test_an_unexpected_error_keeps_its_traceback(error: Exception) -> None:
    def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_main(main)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("SystemExit(0)", "error: {}, line 2: SystemExit: 0; fix it there"),
        (
            "RuntimeError('gloo/pair.cc: Connection closed by peer [10.0.0.2]:5540')",
            "error: the connection to the other processes broke",
        ),
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


# The barrier


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], list]:
    """Three threads that act as processes: `work` gets the rank; its results or errors, by rank."""
    shared, local = distributed.HashStore(), threading.local()
    monkeypatch.setattr(ranks_module, "ranks", lambda: Ranks(local.rank, 3, local.rank, 3))
    monkeypatch.setattr(failure, "run_store", lambda: RunStore(shared))
    monkeypatch.setattr(failure, "world_size", lambda: 3)
    monkeypatch.setattr(failure, "_barrier_numbers", itertools.repeat(0))

    def run(work: Callable[[int], object]) -> list:
        def process(rank: int) -> object:
            local.rank = rank
            try:
                return work(rank)
            except (UserError, KeyError) as error:
                return error

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(process, range(3)))

    return run


def test_all_wait_for_the_slowest_process(three: Callable) -> None:
    def work(rank: int) -> tuple[float, float]:
        with barrier(60):
            time.sleep(0.3 * (rank == 1))
            done = time.monotonic()
        return done, time.monotonic()

    times = three(work)
    assert min(after for _, after in times) >= max(done for done, _ in times)


def test_a_process_that_does_not_finish_in_time_is_named(three: Callable) -> None:
    def work(rank: int) -> None:
        with barrier(0.2):
            if rank == 1:
                raise KeyError

    first, failed, last = three(work)
    assert isinstance(failed, KeyError)
    for error in (first, last):
        assert str(error).startswith("process 1 did not read the data within 0.2 s")


def test_one_process_does_not_wait() -> None:
    with barrier(0):
        pass


# Who hangs


def end(monkeypatch: pytest.MonkeyPatch, folder: Path, *late: int, answers: bool = True) -> str:
    """Return the message if process 0 and the ranks `late` are late. answers: whether the store can be reached."""
    shared = distributed.HashStore()
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (1, 2):
        monkeypatch.setenv("RANK", str(rank))
        RunStore(shared).write("present", rank not in late)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(failure, "ROLL_CALL_SECONDS", 0)
    monkeypatch.setattr(ranks_module, "run_store", lambda: RunStore(shared) if answers else None)

    messages: list[str] = []
    ended = threading.Event()

    def leave(message: str, code: int = 1) -> None:
        messages.append(message)
        ended.set()
        threading.Event().wait()  # as a process that has ended

    monkeypatch.setattr(failure, "hard_exit", leave)
    with Watchdog(0.1, folder):
        assert ended.wait(30)
    if answers:
        assert RunStore(shared).values("present")[0] is False
        assert RunStore(shared).value("alarm")
    return messages[-1]


def test_the_message_names_late_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = end(monkeypatch, tmp_path)
    assert message.startswith("error: process 0 made no progress")
    assert "0.1 s (--dist-timeout)" in message
    assert str(tmp_path / "stacks") in message
    assert "test_the_message" in (tmp_path / "stacks" / "process0.txt").read_text()
    assert end(monkeypatch, tmp_path, 2).startswith("error: process 0 and process 2 made no progress")
    assert end(monkeypatch, tmp_path, 1, 2).startswith("error: no process made progress")
    assert end(monkeypatch, tmp_path, answers=False).startswith(
        "error: process 1 and process 2 made no progress, or can"
    )


def test_a_folder_that_is_not_writable_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").touch()
    assert end(monkeypatch, tmp_path / "run").startswith("error: process 0 made no progress")


# Three processes


def hang() -> None:
    time.sleep(1e6)


def hang_on_the_second(folder: Path) -> None:
    failure.ROLL_CALL_SECONDS = failure.EXPLAIN_SECONDS = 1.0
    connect("cpu", 60.0)
    with Watchdog(2.0, folder) as watched:
        for step in range(10):
            watched.beat()
            if ranks().rank == 1 and step == 3:
                hang()
            distributed.all_reduce(torch.ones(1))


def test_a_process_that_hangs_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: spawn(functools.partial(hang_on_the_second, tmp_path), 3))
    assert caught.value.code == 1
    printed = capfd.readouterr()
    assert without_greetings(printed.out) == ""
    assert printed.err.startswith(f"error: process 1 on {socket.gethostname()} made no progress")
    assert printed.err.count("\n") == 1
    stacks = {file.name: file.read_text() for file in (tmp_path / "stacks").iterdir()}
    assert set(stacks) == {f"process{rank}.txt" for rank in range(3)}
    assert [name for name, text in stacks.items() if "in hang\n" in text] == ["process1.txt"]
    assert all("in hang_on_the_second" in text for text in stacks.values())


# Errors of others

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
        (RuntimeError("[/x/gloo/pair.cc:561] Connection closed by peer [10.0.0.2]:5540. GLHF!"), "peer [10.0.0.2]"),
        (distributed.DistNetworkError("something else\nmore"), "(something else)"),
        (RuntimeError(BUS), "/dev/shm"),
        (RuntimeError(SHM), "/dev/shm"),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), "--workers"),
        (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), "--workers"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nshape mismatch"), ""),
        (RuntimeError("DataLoader timed out after 5 seconds"), ""),
        (RuntimeError("shape mismatch"), ""),
        (ValueError(BUS), ""),
    ],
)
def test_known_causes(error: Exception, part: str) -> None:
    cause = known_cause(error)
    assert part in cause
    assert bool(cause) == bool(part)


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
    assert capsys.readouterr().err.startswith("error: a loader process was killed")


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
from utils.distributed.failure import init_worker
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


# Memory


BYTES = 2**26  # of a block, larger than glibc reuses by itself


def count_pages_of_blocks(result: Connection) -> None:
    """Send the pages that the system gives to a process for each of two blocks, of which one is freed first."""
    keep_freed_memory()
    pages = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"1" * BYTES
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    result.send(pages)


def test_a_large_block_is_reused() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=count_pages_of_blocks, args=(sender,))
    process.start()
    first, second = receiver.recv()
    process.join(60)
    assert second < first / 4


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
