"""What processes write for each other at a store; more of it is in tests/utils/distributed/test_preflight.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import distributed

from utils.distributed import store as board
from utils.distributed.ranks import Place
from utils.distributed.store import Board
from utils.errors import UserError


def boards(processes: int, about: str = "start", store: distributed.Store | None = None) -> list[Board]:
    """The board as each of so many processes sees it."""
    store = store or distributed.HashStore()
    found = [Board(store, about) for _ in range(processes)]
    for rank, one in enumerate(found):
        one.own = Place(rank, processes, rank, processes)
    return found


@pytest.mark.parametrize("value", [None, False, 0, "", [], {"a": [1, 2.5, None]}, "ä"])
def test_all_read_what_is_put(value: Any) -> None:
    main, other = boards(2)
    main.put("answer", value)
    assert main.of_main("answer", 1.0) == other.of_main("answer", 1.0) == value
    assert other.read("answer", 0.0) == {0: value}
    other.put("answer", [value])
    assert main.read("answer", 1.0) == {0: value, 1: [value]}


def test_the_last_value_counts() -> None:
    (own,) = boards(1)
    own.put("answer", 1)
    own.put("answer", 2)
    assert own.read("answer", 1.0) == {0: 2}
    assert own.times("answer", 0) == 2
    assert own.times("other", 0) == 0


def test_what_comes_later_is_waited_for() -> None:
    main, other = boards(2)
    late = threading.Timer(0.2, main.put, ("answer", "late"))
    late.start()
    assert other.of_main("answer", 30.0) == "late"
    late = threading.Timer(0.2, other.put, ("answer", "later"))
    late.start()
    assert main.read("answer", 30.0) == {0: "late", 1: "later"}


def test_a_main_process_that_does_not_answer() -> None:
    _, other = boards(2)
    other.put("answer", 1)
    with pytest.raises(UserError, match=r"the main process has not answered for 0\.1 s: see what it printed"):
        other.of_main("answer", 0.1)


def test_boards_about_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a store, and so do the runs of a launcher that starts the processes anew."""
    store = distributed.HashStore()
    (one,) = boards(1, "doctor", store)
    one.put("answer", 1)
    (other,) = boards(1, "resume", store)
    assert other.read("answer", 0.0) == {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (again,) = boards(1, "doctor", store)
    assert again.read("answer", 0.0) == {}


def test_the_main_process_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for those that came, and for no longer than a moment."""
    main, other, _ = boards(3)
    main.put("facts", 1)
    other.put("facts", 1)
    left: list[str] = []

    def leave() -> None:
        left.append("other")
        other.leave("facts")

    threading.Timer(0.2, leave).start()
    main.leave("facts")
    assert left == ["other"]
    monkeypatch.setattr(board, "SLACK", 0.1)
    main, other, _ = boards(3)
    other.put("facts", 1)
    main.leave("facts")
    assert main.read("left", 0.0) == {0: True}
