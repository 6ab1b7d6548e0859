"""The watchdog: which process is late, when it ends a run, and its message."""

from __future__ import annotations

import functools
import socket
import sys
import time
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import distributed

from tests.conftest import without_greetings
from utils.distributed import failure
from utils.distributed import store as store_module
from utils.distributed.failure import Heartbeat, Watchdog, is_waiting, lagging_ranks, run_main, start_failure_monitor
from utils.distributed.ranks import ranks
from utils.distributed.spawn import spawn
from utils.distributed.store import RunStore


def at(waits: bool, batches: int) -> Heartbeat:
    return Heartbeat(batches, waits)


@pytest.mark.parametrize(
    ("heartbeats", "late"),
    [
        pytest.param({0: at(True, 5), 2: at(True, 5)}, {1}, id="one does not answer"),
        pytest.param({0: at(True, 5), 2: at(False, 4)}, {1}, id="one does not answer, whatever others do"),
        pytest.param({}, {0, 1, 2}, id="nobody answers"),
        pytest.param({0: at(True, 5), 1: at(False, 5), 2: at(True, 5)}, {1}, id="one does not wait"),
        pytest.param({0: at(True, 5), 1: at(False, 6), 2: at(True, 5)}, {1}, id="one does not wait, ahead"),
        pytest.param({0: at(False, 5), 1: at(False, 5), 2: at(True, 5)}, {0, 1}, id="two do not wait"),
        pytest.param({0: at(True, 5), 1: at(True, 4), 2: at(True, 5)}, {1}, id="all wait, one a batch behind"),
        pytest.param({0: at(False, 5), 1: at(False, 4), 2: at(False, 5)}, {1}, id="none waits, one is behind"),
        pytest.param({0: at(True, 5), 1: at(True, 5), 2: at(True, 5)}, set(), id="all wait alike"),
        pytest.param({0: at(False, 5), 1: at(False, 5), 2: at(False, 5)}, set(), id="none waits, all alike"),
    ],
)
def test_late_ranks(heartbeats: dict[int, Heartbeat], late: set[int]) -> None:
    assert lagging_ranks(3, heartbeats) == late


def stack(*files: str) -> FrameType:
    """Return the innermost frame of a stack of functions of these files, the last one innermost."""
    inner: Any = sys._getframe
    for file in reversed(files):
        code = compile("def run(inner):\n    return inner()\n", file, "exec")
        space: dict[str, Any] = {}
        exec(code, space)
        inner = functools.partial(space["run"], inner)
    return inner()


SITE = "/x/site-packages"


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        (["/repository/train.py", f"{SITE}/torch/distributed/distributed_c10d.py"], True),
        (["/repository/train.py", f"{SITE}/torch/autograd/graph.py"], True),
        (["/repository/train.py", f"{SITE}/deepspeed/comm/comm.py"], True),
        ([f"{SITE}/torch/distributed/distributed_c10d.py", "/repository/utils/distributed/comm_hooks.py"], True),
        (["C:\\Lib\\site-packages\\torch\\distributed\\distributed_c10d.py"], True),
        (["/repository/train.py", f"{SITE}/torch/nn/modules/module.py"], False),
        (["/repository/train.py", f"{SITE}/torch/utils/data/dataloader.py", "/python/queue.py"], False),
        (["/repository/utils/distributed.py"], False),
    ],
)
def test_is_waiting(files: list[str], waits: bool) -> None:
    assert is_waiting(stack(*files)) == waits


def test_no_stack_is_no_wait() -> None:
    assert not is_waiting(sys._getframe())
    assert not is_waiting(None)


# The end of a process


class Ended(Exception):
    pass


class Observed(Watchdog):
    def end(self) -> NoReturn:
        raise Ended


def run_clock(monkeypatch: pytest.MonkeyPatch, beats_until: float, off_at: float = float("inf")) -> float:
    """Return the time at which a watchdog of 5 s ends the process; 0 if it does not. It checks every 0.5 s."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now <= beats_until:
            observed.beat()
        observed.on = now < off_at

    monkeypatch.setattr(failure, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    observed = Observed(5.0, Path("runs"))
    observed.on = True
    try:
        observed.watch()
    except Ended:
        return now
    return 0.0


def test_it_ends_a_process_without_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_clock(monkeypatch, 20.0) == 25.5  # the first check after 5 s
    assert run_clock(monkeypatch, 20.0, off_at=23.0) == 0.0
    assert run_clock(monkeypatch, 20.0, off_at=25.5) == 0.0


def test_one_process_is_not_watched() -> None:
    with Observed(1e-6, Path("runs")) as observed:
        assert not observed.on
        assert observed.batches == 1
        observed.beat()
        assert observed.batches == 2


def end(monkeypatch: pytest.MonkeyPatch, folder: Path, *late: int, answers: bool = True) -> str:
    """Return the message if process 0 and the ranks `late` are late. answers: whether the store can be reached."""
    shared = distributed.HashStore()
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (1, 2):
        monkeypatch.setenv("RANK", str(rank))
        RunStore(shared).write("heartbeats", at(rank not in late, 0))
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(failure, "HEARTBEATS_SECONDS", 0)
    monkeypatch.setattr(store_module, "run_store", lambda: RunStore(shared) if answers else None)

    messages: list[str] = []
    monkeypatch.setattr(failure, "exit_reporting_once", lambda explain: messages.append(explain()))
    Watchdog(9.5, folder).end()
    if answers:
        assert RunStore(shared).values("heartbeats")[0] == list(at(False, 0))
        assert RunStore(shared).value("alarm")
    return messages[-1]


def test_the_message_names_late_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(monkeypatch, tmp_path) == (
        "error: process 0 made no progress for 9.5 s (--dist-timeout) while the others waited; the stack of each "
        f"process is in {tmp_path}/stacks"
    )
    assert "test_the_message" in (tmp_path / "stacks" / "process0.txt").read_text()
    assert end(monkeypatch, tmp_path, 2).startswith("error: process 0 and process 2 made no progress for")
    assert end(monkeypatch, tmp_path, 1, 2).startswith("error: no process made progress for 9.5 s")
    assert end(monkeypatch, tmp_path, answers=False).startswith(
        "error: process 1 and process 2 made no progress, or could not be reached, for 9.5 s (--dist-timeout)"
    )


def test_a_folder_that_is_not_writable_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").touch()
    assert end(monkeypatch, tmp_path / "run").startswith("error: process 0 made no progress")


# Three processes


def hang() -> None:
    time.sleep(1e6)


def hang_on_the_second(folder: Path) -> None:
    failure.HEARTBEATS_SECONDS = failure.EXPLAIN_SECONDS = 1.0
    distributed.init_process_group("gloo")
    start_failure_monitor()
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
    assert printed.err.startswith(f"error: process 1 on {socket.gethostname()} made no progress for 2 s")
    assert printed.err.count("\n") == 1
    stacks = {file.name: file.read_text() for file in (tmp_path / "stacks").iterdir()}
    assert set(stacks) == {f"process{rank}.txt" for rank in range(3)}
    assert [name for name, text in stacks.items() if "in hang\n" in text] == ["process1.txt"]
    assert all("in hang_on_the_second" in text for text in stacks.values())
