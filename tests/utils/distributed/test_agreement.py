"""What the main process decides for all; tests/utils/checkpoint/test_resume.py has more on several processes."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed.agreement import decide_on_main
from utils.distributed.exit import Stopped
from utils.distributed.ranks import ranks
from utils.errors import UserError


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


def decided(what: str) -> Any:
    """What a process gets, of a decision that depends on its rank."""
    decide = {"value": lambda: {"rank": ranks().rank}, "stop": stop, "fail": fail}[
        what if ranks().rank == 0 else "value"
    ]
    outcome: Any
    try:
        outcome = decide_on_main(decide, "test", 60.0)
    except UserError as error:
        outcome = f"error: {error}"
    except Stopped as stopped:
        outcome = f"stopped {stopped.code}"
    distributed.init_process_group("gloo")
    distributed.barrier()
    return outcome


@pytest.mark.parametrize(("what", "outcome"), [("value", {"rank": 0}), ("stop", "stopped 3"), ("fail", "error: no")])
def test_all_processes_get_what_the_main_one_decides(what: str, outcome: object, on_processes: OnProcesses) -> None:
    assert on_processes(2, decided, what) == [outcome] * 2
