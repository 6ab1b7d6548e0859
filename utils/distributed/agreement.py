"""Decisions that the main process makes for all processes before they form a process group. --resume uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from utils.distributed.accelerator import meet
from utils.distributed.exit import Stopped
from utils.distributed.ranks import place
from utils.distributed.store import Board
from utils.errors import UserError


def decide_on_main(decide: Callable[[], dict[str, Any]], name: str, timeout: float) -> dict[str, Any]:
    """Return what `decide` returns on the main process, on every process: other machines may see files later.

    A `UserError` or `Stopped` of the main process is raised on every process. The result must be plain JSON values;
    with more than one process, tuples arrive as lists. name: of the decision, in the store; timeout: in seconds.
    """
    if place().processes == 1:
        return decide()
    board = Board(meet(timeout), name)
    answer: dict[str, Any]
    if place().rank == 0:
        try:
            answer = {"value": decide()}
        except UserError as error:
            answer = {"error": str(error)}
        except Stopped as stopped:
            answer = {"exit_code": stopped.code}
        board.put("answer", answer)
        if "value" not in answer:  # this process is about to end, and may host the store that the others read from
            board.put("heard", True)
            board.read("heard", timeout)
    else:
        answer = board.of_main("answer", timeout)
        board.put("heard", True)
    if "error" in answer:
        raise UserError(answer["error"])
    if "exit_code" in answer:
        raise Stopped(answer["exit_code"])
    value: dict[str, Any] = answer["value"]
    return value
