"""Decisions that the main process makes for all processes before they form a process group.

Called by precision and utils/checkpoint/resume.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from utils.distributed.exit import Stopped
from utils.distributed.ranks import ranks
from utils.distributed.rendezvous import connect
from utils.errors import UserError

T = TypeVar("T")


def decide_on_main(decide: Callable[[], T], name: str, timeout: float) -> T:
    """Return the main process's result of `decide` on every process; a file may become visible later on other machines.

    A `UserError` or `Stopped` of the main process is raised on every process. The result must be plain JSON values;
    with more than one process, tuples arrive as lists. name: topic in the store. timeout: seconds.
    """
    if ranks().world_size == 1:
        return decide()
    store = connect(timeout, name)
    answer: dict[str, Any]
    if ranks().rank == 0:
        try:
            answer = {"value": decide()}
        except UserError as error:
            answer = {"error": str(error)}
        except Stopped as stopped:
            answer = {"exit_code": stopped.code}
        store.write("answer", answer)
        if "value" not in answer:  # this process is about to end, and may host the store that the others read
            store.write("received", True)
            store.wait_for_values("received", timeout)
    else:
        answer = store.wait_for_main("answer", timeout)
        store.write("received", True)
    if "error" in answer:
        raise UserError(answer["error"])
    if "exit_code" in answer:
        raise Stopped(answer["exit_code"])
    value: T = answer["value"]
    return value
