"""Decisions of the main process; more on several processes in tests/utils/checkpoint/test_resume.py."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed.agreement import decide_on_main
from utils.distributed.exit import Stopped
from utils.distributed.ranks import ranks
from utils.errors import UserError


def give() -> dict[str, Any]:
    return {"rank": ranks().rank}


def stop() -> NoReturn:
    raise Stopped(3)


def fail() -> NoReturn:
    raise UserError("no")


def test_one_process_decides_for_itself() -> None:
    value = {"numbers": (1, 2)}
    assert decide_on_main(lambda: value, "test", 1.0) is value
    with pytest.raises(Stopped):
        decide_on_main(stop, "test", 1.0)
    with pytest.raises(UserError, match=r"^no$"):
        decide_on_main(fail, "test", 1.0)


def outcomes() -> list[Any]:
    """Return the outcome of each decision on this process; only the main process may make it."""
    results: list[Any] = []
    for decide in (give, stop, fail):
        try:
            results.append(decide_on_main(decide if ranks().rank == 0 else pytest.fail, decide.__name__, 60.0))
        except (UserError, Stopped) as error:
            results.append(str(error))
    distributed.init_process_group("gloo")
    distributed.barrier()
    return results


def test_all_processes_get_the_main_ones_decision(on_processes: OnProcesses) -> None:
    assert on_processes(2, outcomes) == [[{"rank": 0}, "stopped, exit code 3", "no"]] * 2
