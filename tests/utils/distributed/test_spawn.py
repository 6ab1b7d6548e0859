"""Where a launcher has put a process, starting processes, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed.exit import lost_contact, run_main, sign_in
from utils.distributed.ranks import Place, place, speaks
from utils.distributed.spawn import spread
from utils.errors import UserError


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert place() == Place(0, 1, 0, 1)
    assert speaks()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert place() == Place(5, 8, 1, 4)
    assert not speaks()


def my_place() -> tuple[Place, str, str, int]:
    distributed.init_process_group("gloo")
    total = torch.tensor([place().rank + 1])
    distributed.all_reduce(total)
    return place(), os.environ["OMP_NUM_THREADS"], multiprocessing.get_start_method(), int(total)


def test_spread(on_processes: OnProcesses) -> None:
    """Loader processes start as they would without it: forked, where that is the system's way."""
    method = multiprocessing.get_start_method()
    assert on_processes(3, my_place) == [(Place(rank, 3, rank, 3), "1", method, 6) for rank in range(3)]


def test_spread_leaves_one_process_and_launched_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spread(pytest.fail, 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not spread(pytest.fail, 2)


# How processes end: these are what they do


def all_fail() -> None:
    distributed.init_process_group("gloo")
    raise UserError("everyone sees this")


def fail_before_meeting() -> None:
    raise UserError("everyone sees this")


def the_first_fails() -> None:
    distributed.init_process_group("gloo")
    if place().rank == 0:
        raise UserError("only the first sees this")
    distributed.all_reduce(torch.ones(1))


def the_last_fails() -> None:
    distributed.init_process_group("gloo")
    if place().rank == 2:
        raise UserError("only the last sees this")
    distributed.all_reduce(torch.ones(1))


def the_last_is_killed() -> None:
    distributed.init_process_group("gloo")
    if place().rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.ones(1))


def the_last_leaves_silently() -> None:
    distributed.init_process_group("gloo")
    sign_in()
    if place().rank == 2:
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
        run_main(lambda: spread(work, 3))  # type: ignore[arg-type]
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
        spread(kill_the_second, 2)


def kill_the_second() -> None:
    if place().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[/x/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"), "for 5 s"),
        (RuntimeError("[/x/gloo/pair.cc:561] Connection closed by peer [10.0.0.2]:5540. GLHF!"), "on 10.0.0.2 has"),
        (distributed.DistNetworkError("something else\nmore"), "(something else)"),
        (RuntimeError("shape mismatch"), ""),
    ],
)
def test_lost_contact(error: RuntimeError, said: str) -> None:
    found = lost_contact(error)
    assert said in found
    assert bool(found) == bool(said)


# One process


def test_a_script_that_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(lambda: None)
    assert capsys.readouterr() == ("", "")


def test_a_users_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise UserError("a.yaml, line 3: mend it")

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 1
    assert capsys.readouterr() == ("", "error: a.yaml, line 3: mend it\n")


def test_interruption_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError("shape mismatch")])
def test_a_mistake_of_ours_keeps_its_traceback(error: Exception) -> None:
    def main() -> None:
        raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        run_main(main)
