"""The start of processes, and their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed

from tests.conftest import OnProcesses, without_greetings
from utils.distributed import spawn as spawn_module
from utils.distributed.failure import run_main, start_failure_monitor
from utils.distributed.ranks import Ranks, ranks
from utils.distributed.rendezvous import RUN_RENDEZVOUS
from utils.distributed.spawn import spawn
from utils.errors import UserError


def my_ranks() -> tuple[Ranks, str, str, int]:
    distributed.init_process_group("gloo")
    total = torch.tensor([ranks().rank + 1])
    distributed.all_reduce(total)
    return ranks(), os.environ["OMP_NUM_THREADS"], multiprocessing.get_start_method(), int(total)


def test_spawn(on_processes: OnProcesses) -> None:
    """The start method, that of loader processes, is the default of the system."""
    method, environment = multiprocessing.get_start_method(), dict(os.environ)
    assert on_processes(3, my_ranks) == [(Ranks(rank, 3, rank, 3), "1", method, 6) for rank in range(3)]
    assert dict(os.environ) == environment  # a later run of this process may have other numbers


def listening_addresses() -> list[str]:
    """Return the addresses at which this process and the one that started it listen."""
    distributed.init_process_group("gloo", init_method=RUN_RENDEZVOUS)
    connections = [
        each for process in (psutil.Process(), psutil.Process().parent()) for each in process.net_connections()
    ]
    distributed.barrier()
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


def test_no_other_machine_can_connect_to_the_processes_of_one(on_processes: OnProcesses) -> None:
    (addresses, others) = on_processes(2, listening_addresses)
    assert set(addresses) | set(others) == {"127.0.0.1"}


def test_spawn_does_nothing_for_one_process_or_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spawn(pytest.fail, 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not spawn(pytest.fail, 2)


# The end of processes: functions that they run


def all_fail() -> None:
    distributed.init_process_group("gloo")
    raise UserError("the same on all")


def fail_before_meeting() -> None:
    raise UserError("the same on all")


def the_first_fails() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 0:
        raise UserError("on the first only")
    distributed.all_reduce(torch.ones(1))


def the_last_fails() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 2:
        raise UserError("on the last only")
    distributed.all_reduce(torch.ones(1))


def the_last_is_killed() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.ones(1))


def the_last_leaves_silently() -> None:
    distributed.init_process_group("gloo")
    start_failure_monitor()
    if ranks().rank == 2:
        time.sleep(1)  # the others are waiting for it
        os._exit(0)
    distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("work", "processes", "part"),
    [
        (all_fail, 2, "the same on all"),
        pytest.param(fail_before_meeting, 2, "the same on all", marks=pytest.mark.long),
        pytest.param(the_first_fails, 2, "on the first only", marks=pytest.mark.long),
        pytest.param(the_last_fails, 3, "on the last only", marks=pytest.mark.long),
        pytest.param(the_last_is_killed, 3, "process 2 on", marks=pytest.mark.long),
        (the_last_leaves_silently, 3, "process 2 on"),
    ],
)
def test_a_failed_run_prints_one_line(
    work: object, processes: int, part: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: spawn(work, processes))  # type: ignore[arg-type]
    assert caught.value.code == 1
    printed = capfd.readouterr()
    assert printed.err.count("error: ") == 1, printed
    assert part in printed.err
    assert "Traceback" not in printed.err
    assert without_greetings(printed.out) == ""


def test_a_killed_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(spawn_module, "SHUTDOWN_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"process 1 on \S+ was killed by SIGKILL"):
        spawn(kill_the_second, 2)


def kill_the_second() -> None:
    if ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_the_second_ctrl_c_kills_processes_that_ignore_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SURVIVED", str(tmp_path / "survived"))
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        spawn(press_ctrl_c_twice, 2)
    assert (tmp_path / "survived").exists()
    assert time.monotonic() - before < 300  # far less than the processes sleep


def press_ctrl_c_twice() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ranks().rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)
        Path(os.environ["SURVIVED"]).touch()
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1000)
