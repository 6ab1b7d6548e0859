"""Stops on signals and at the time limit, on all processes at the same step."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from tests.conftest import ROOT, OnProcesses
from utils.distributed import stop as stopping
from utils.distributed.ranks import ranks
from utils.distributed.stop import STOP_SIGNALS, TIME_LIMIT, GracefulStop, StopRequested


def until(condition: Callable[[], Any]) -> Any:
    """Wait for another thread or process, until `condition` returns a true value; return that."""
    end = time.monotonic() + 30
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return value


# One process


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Give SIGHUP its default action, which a runner under nohup has taken away."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop(number: int) -> None:
    with GracefulStop() as stop:
        assert stop.after(1) == stop.requested() == ""
        os.kill(os.getpid(), number)
        assert until(stop.requested) == signal.Signals(number).name
        assert stop.after(2) == stop.after(3) == signal.Signals(number).name
        other = signal.SIGUSR1 if number == signal.SIGTERM else signal.SIGTERM
        os.kill(os.getpid(), other)  # the last one counts
        assert until(lambda: stop.after(4) == other.name)


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    """Where SIGHUP is ignored it stays so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert until(stop.requested) == "SIGTERM"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_signals_are_still_received_after_an_error() -> None:
    """They do not reach the handlers of before: the launcher's SIGTERM must not end a process that prints its error."""

    def leave() -> None:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            raise StopRequested(until(stop.requested))

    handled: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: handled.append(number)) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        for _ in range(2):
            with pytest.raises(StopRequested) as raised:
                leave()
            assert (raised.value.reason, raised.value.code) == ("SIGTERM", 143)
            os.kill(os.getpid(), signal.SIGTERM)
        assert handled == []
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


TWO_CTRL_C = """
import os, signal, time
from utils.distributed.stop import GracefulStop
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
FINISHED = """
import os, signal, time
from utils.distributed.stop import GracefulStop
with GracefulStop() as stop:
    stop.finished = True
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.parametrize(("script", "code"), [(TWO_CTRL_C, 130), (FINISHED, 143)])
def test_a_second_ctrl_c_or_a_signal_after_the_last_epoch_ends_the_process(script: str, code: int) -> None:
    """Everything is saved; pictures and trackers need not be waited for."""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "goes on\n", 1)


def test_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = psutil.Process().create_time()
    now = begun
    monkeypatch.setattr(stopping.time, "time", lambda: now)
    stop = GracefulStop(hours=0.5)
    now = begun + 1799
    assert stop.after(1) == ""
    now = begun + 1801  # counted from the start of the process
    assert stop.after(2) == TIME_LIMIT
    assert stop.requested() == ""  # a signal only
    assert GracefulStop().after(2) == ""  # no limit
    assert StopRequested(TIME_LIMIT).code == 0


# Several processes

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
            reason = stop.after(step)
        if when == 0:
            at_random_time.join()
        distributed.barrier()
        requested = stop.requested()
    return step, reason, requested


def runs(cases: list[tuple[Signals, float]]) -> list[Ended]:
    """Train one run after another, as if a launcher restarted the processes."""
    distributed.init_process_group("gloo")
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
    distributed.init_process_group("gloo")
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
                reason = stop.after(step, behind=1)
            before.wait()
        ended.append(step)
    return ended


def test_processes_that_run_one_step_ahead_stop_together(on_processes: OnProcesses) -> None:
    assert on_processes(2, one_step_ahead) == [[7, 8]] * 2
