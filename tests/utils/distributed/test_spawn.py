"""Starting processes, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed.exit import run_main, sign_in
from utils.distributed.ranks import Ranks, ranks
from utils.distributed.spawn import spawn
from utils.errors import UserError


def my_ranks() -> tuple[Ranks, str, str, int]:
    distributed.init_process_group("gloo")
    total = torch.tensor([ranks().rank + 1])
    distributed.all_reduce(total)
    return ranks(), os.environ["OMP_NUM_THREADS"], multiprocessing.get_start_method(), int(total)


def test_spawn(on_processes: OnProcesses) -> None:
    """Loader processes start as they would without it: forked, where that is the system's way."""
    method = multiprocessing.get_start_method()
    assert on_processes(3, my_ranks) == [(Ranks(rank, 3, rank, 3), "1", method, 6) for rank in range(3)]


def test_spawn_leaves_one_process_and_launched_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spawn(pytest.fail, 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not spawn(pytest.fail, 2)


# How processes end: these are what they do


def all_fail() -> None:
    distributed.init_process_group("gloo")
    raise UserError("everyone sees this")


def fail_before_meeting() -> None:
    raise UserError("everyone sees this")


def the_first_fails() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 0:
        raise UserError("only the first sees this")
    distributed.all_reduce(torch.ones(1))


def the_last_fails() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 2:
        raise UserError("only the last sees this")
    distributed.all_reduce(torch.ones(1))


def the_last_is_killed() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.ones(1))


def the_last_leaves_silently() -> None:
    distributed.init_process_group("gloo")
    sign_in()
    if ranks().rank == 2:
        time.sleep(1)  # the others wait for it already
        os._exit(0)
    distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (all_fail, "everyone sees this"),
        (fail_before_meeting, "everyone sees this"),
        (the_first_fails, "only the first sees this"),
        (the_last_fails, "only the last sees this"),
        (the_last_is_killed, "process 2 on"),
        (the_last_leaves_silently, "process 2 on"),
    ],
)
def test_one_sentence_and_nobody_left(
    work: object, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: spawn(work, 3))  # type: ignore[arg-type]
    assert caught.value.code == 1
    printed = capfd.readouterr()
    assert printed.err.count("error: ") == 1, printed
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_killed_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of all processes tells, unless one that waited for the killed one was faster."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(UserError, match=r"process 1 on \S+ was ended by SIGKILL"):
        spawn(kill_the_second, 2)


def kill_the_second() -> None:
    if ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
