"""How a run ends: who failed, who is lost, who hangs; stops at one step; loader processes end with their parent."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from tests.conftest import OnProcesses, free_port, without_greetings
from tests.processes import forking
from utils.distributed import failure, launch
from utils.distributed.failure import (
    STOP_SIGNALS,
    TIME_LIMIT,
    GracefulStop,
    StopRequested,
    Watchdog,
    barrier,
    init_worker,
    known_cause,
    on_failure,
    run_main,
)
from utils.distributed.launch import connect, spawn
from utils.distributed.ranks import ranks
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


# Before the processes are connected


def fail_early(failing: tuple[int, ...], port: str, printed: Path) -> None:
    sys.stderr = printed.open("a")
    failure.ROLL_CALL_SECONDS = failure.EXPLAIN_SECONDS = 1.0
    failure.POLL_SECONDS = 0.1
    if port:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    if ranks().rank in failing:
        raise UserError("a wrong flag", 2)
    connect("cpu", 60.0)


@pytest.mark.parametrize("failing", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("hosted", [True, False])
def test_an_early_error_is_printed_once(
    failing: tuple[int, ...], hosted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under a launcher with a store, which ends all processes once one has failed, and under one that does neither."""
    monkeypatch.setattr(launch, "SHUTDOWN_SECONDS", 0.0 if hosted else 60.0)
    starts = 3 if hosted else 1
    for _ in range(starts):
        with forking(), pytest.raises(SystemExit) as caught:
            spawn(functools.partial(fail_early, failing, "" if hosted else free_port(), tmp_path / "printed"), 2)
        assert caught.value.code == 2
    assert (tmp_path / "printed").read_text() == "error: a wrong flag\n" * starts


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


def hang_in_a_step(folder: Path) -> None:
    """After steps of less than a tenth of a second."""
    failure.MIN_STALL_SECONDS, failure.STALL_FACTOR = 2.0, 1
    hang_on_the_second(folder, 60.0, "training step")


def hang_on_the_second(folder: Path, timeout: float = 2.0, work: str = "") -> None:
    failure.ROLL_CALL_SECONDS = failure.EXPLAIN_SECONDS = 1.0
    failure.POLL_SECONDS = 0.1
    connect("cpu", 60.0)
    with Watchdog(timeout, folder) as watched:
        for step in range(10):
            watched.keep_alive(work)
            if ranks().rank == 1 and step == 3:
                hang()
            distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize("work", [hang_on_the_second, hang_in_a_step, hang_while_reading])
def test_a_process_that_hangs_is_named(
    work: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with forking(printing=True), pytest.raises(SystemExit) as caught:
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


# Stops


def until(condition: Callable[[], Any]) -> Any:
    """Wait for another thread or process, until `condition` returns a true value; return that."""
    end = time.monotonic() + 30
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return value


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Give SIGHUP its default action, which a runner under nohup has taken away."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop(number: int) -> None:
    with GracefulStop() as stop:
        assert stop.stop_reason(1) == stop.requested() == ""
        os.kill(os.getpid(), number)
        assert until(stop.requested) == signal.Signals(number).name
        assert stop.stop_reason(2) == stop.stop_reason(3) == signal.Signals(number).name
        other = signal.SIGUSR1 if number == signal.SIGTERM else signal.SIGTERM
        os.kill(os.getpid(), other)  # the last one counts
        assert until(lambda: stop.stop_reason(4) == other.name)


def test_ctrl_c_once_everything_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not interrupt the clean-up of loaders and bars."""

    def stop() -> None:
        raise StopRequested("SIGINT")

    monkeypatch.setattr("utils.distributed.failure.log.reset", lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match=r"^130$"):
            run_main(stop)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    """Where SIGHUP is ignored it stays so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert until(stop.requested) == "SIGTERM"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("processes", [1, 2])
def test_signals_after_an_error(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several processes still receives them: a launcher's SIGTERM must not end it while it prints its error."""

    def leave() -> None:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            raise StopRequested(until(stop.requested))

    monkeypatch.setattr("utils.distributed.failure.world_size", lambda: processes)
    handled: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: handled.append(number)) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with pytest.raises(StopRequested) as raised:
            leave()
        assert (raised.value.reason, raised.value.code) == ("SIGTERM", 143)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled == ([signal.SIGTERM] if processes == 1 else [])
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


TWO_CTRL_C = """
import os, signal, time
from utils.distributed.failure import GracefulStop
with GracefulStop() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    while not stop.requested():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, passed on by the launcher too
    time.sleep(1)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
NOTEBOOK = """
import os, signal, time
from utils.distributed.failure import GracefulStop
from utils.python_api import call

def interrupted(words):
    with GracefulStop() as stop:
        stop.finished = True
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(600):
            time.sleep(0.1)

try:
    call(interrupted, {})
except KeyboardInterrupt:
    raise SystemExit("goes on")
"""
FINISHED = """
import os, signal, time
from utils.distributed.failure import GracefulStop
with GracefulStop() as stop:
    stop.finished = True
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_ctrl_c_does_not_end_a_notebook() -> None:
    ended = subprocess.run([sys.executable, "-c", NOTEBOOK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "goes on\n")


@pytest.mark.parametrize(("script", "code"), [(TWO_CTRL_C, 130), (FINISHED, 143)])
def test_a_second_ctrl_c_or_a_signal_after_the_last_epoch_ends_the_process(script: str, code: int) -> None:
    """Everything is saved; pictures and trackers need not be waited for."""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "goes on\n", 1)


def test_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = psutil.Process().create_time()
    now = begun
    monkeypatch.setattr(failure.time, "time", lambda: now)
    stop = GracefulStop(hours=0.5)
    now = begun + 1799
    assert stop.stop_reason(1) == ""
    now = begun + 1801  # counted from the start of the process
    assert stop.stop_reason(2) == TIME_LIMIT
    assert stop.requested() == ""  # a signal only
    monkeypatch.setenv(failure.RESULT, "result.json")
    assert GracefulStop(hours=0.5).stop_reason(2) == GracefulStop().stop_reason(2) == ""  # of a call; without a limit
    assert StopRequested(TIME_LIMIT).code == 0


STEPS = 10_000  # at most
Signals = dict[int, tuple[int, int]]  # by rank: the step of the signal, or 0 for a random time, and its number
Ended = tuple[int, str, str]


def train(signals: Signals, hours: float) -> Ended:
    """Return the last step of this process, the reason of the stop, and `requested` afterwards."""
    step, reason = 0, ""
    when, number = signals.get(ranks().rank, (-1, 0))
    at_random_time = threading.Timer(0.02 * random.random(), os.kill, (os.getpid(), number))
    with GracefulStop(hours) as stop:
        if when == 0:
            at_random_time.start()
        while not reason and step < STEPS:
            step += 1
            distributed.all_reduce(torch.ones(1))
            if step == when:
                os.kill(os.getpid(), number)
                until(lambda: stop.signal)
            reason = stop.stop_reason(step)
        if when == 0:
            at_random_time.join()
        requested = until(stop.requested) if signals else stop.requested()
        distributed.barrier()
    return step, reason, requested


def runs(cases: list[tuple[Signals, float]]) -> list[Ended]:
    """Train one run after another, as if a launcher restarted the processes."""
    connect("cpu", 60.0)
    random.seed(ranks().rank)
    ended = []
    for number, (signals, hours) in enumerate(cases):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        ended.append(train(signals, hours))
    return ended


CASES: list[tuple[Signals, float]] = [
    *(({1: (7, signal.SIGTERM)}, 0), ({0: (7, signal.SIGINT)}, 1e9), ({}, 1e-9)),
    *(({0: (5, signal.SIGINT), 2: (5, signal.SIGTERM)}, 0), ({0: (5, signal.SIGTERM), 1: (6, signal.SIGUSR1)}, 0)),
    *[({0: (0, signal.SIGTERM), 2: (0, signal.SIGUSR1)}, 0)] * 30,  # at random times
]


def test_all_processes_stop_at_the_same_step(on_processes: OnProcesses) -> None:
    """The step after the first signal in the store, for its reason; or when the main process is past the time limit."""
    ended = list(zip(*on_processes(3, runs, CASES), strict=True))  # per run, the result of each rank
    assert ended[:3] == [((8, "SIGTERM", "SIGTERM"),) * 3, ((8, "SIGINT", "SIGINT"),) * 3, ((2, TIME_LIMIT, ""),) * 3]
    assert [step for step, *_ in ended[3]] == [6] * 3
    assert [result[:2] for result in ended[4]] == [(6, "SIGTERM")] * 3
    for results in ended[3:]:
        ((step, reason),) = {result[:2] for result in results}
        assert step < STEPS
        assert reason in ("SIGINT", "SIGTERM", "SIGUSR1")
        assert all(requested for *_, requested in results)


def one_step_ahead(_: object = None) -> list[int]:
    """Stop a run whose processes wait for a step's gradients only after the next step has begun, as on GPUs.

    The process that gets the signal is late, so that the other has ended a step more.
    """
    connect("cpu", 60.0)
    ended: list[int] = []
    for last in (5, 6):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(last)
        with GracefulStop() as stop:
            step, reason, before = 0, "", None
            while not reason:
                step += 1
                reduced = distributed.all_reduce(torch.ones(1), async_op=True)
                if before is not None:
                    before.wait()
                before = reduced
                if ranks().rank == 0 and step == last:
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGTERM)
                    until(lambda: stop.signal)
                reason = stop.stop_reason(step, lag=1)
            before.wait()
        ended.append(step)
    return ended


def test_processes_that_run_one_step_ahead_stop_together(on_processes: OnProcesses) -> None:
    assert on_processes(2, one_step_ahead) == [[7, 8]] * 2


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
