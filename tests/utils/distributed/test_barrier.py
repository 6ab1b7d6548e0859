"""Processes that prepare in their own time: those that are done wait for the others, and not for the dead."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from utils.distributed import barrier, store
from utils.distributed.barrier import untimed_barrier
from utils.distributed.ranks import Ranks
from utils.distributed.store import RunStore
from utils.errors import UserError


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], list]:
    """Threads that take themselves for three processes: each is given its rank; what they return, or raise."""
    shared, own = distributed.HashStore(), threading.local()
    monkeypatch.setattr(store, "ranks", lambda: Ranks(own.rank, 3, own.rank, 3))
    for module in (barrier, store):
        monkeypatch.setattr(module, "run_store", lambda: RunStore(shared))
    monkeypatch.setattr(barrier, "world_size", lambda: 3)
    monkeypatch.setattr(barrier, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(barrier, "HEARTBEAT_SECONDS", 0.02)

    def run(work: Callable[[int], object]) -> list:
        def one(rank: int) -> object:
            own.rank = rank
            try:
                return work(rank)
            except (UserError, KeyError) as error:
                return error

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(one, range(3)))

    return run


def test_all_go_on_together_however_long_one_takes(three: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a silence that would end them: who works gives signs of life."""
    monkeypatch.setattr(barrier, "SILENCE_LIMIT_SECONDS", 0.2)

    def work(rank: int) -> tuple[float, float]:
        with untimed_barrier():
            time.sleep(0.6 * (rank == 1))
            done = time.monotonic()
        return done, time.monotonic()

    times = three(work)
    assert min(after for _, after in times) >= max(done for done, _ in times)


def test_who_has_died_is_named(three: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "SILENCE_LIMIT_SECONDS", 0.2)

    def work(rank: int) -> None:
        if rank != 1:
            with untimed_barrier():
                time.sleep(0.3 * rank)

    first, dead, last = three(work)
    assert dead is None
    for error in (first, last):
        assert str(error).startswith("process 1 ended without a word, or cannot be reached: no sign of life for 0.2 s")


def test_an_error_is_not_waited_with(three: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes its way at once; the others are ended by it, which is the business of failures."""
    monkeypatch.setattr(barrier, "SILENCE_LIMIT_SECONDS", 0.2)

    def work(rank: int) -> None:
        with untimed_barrier():
            if rank == 0:
                raise KeyError

    failed, *others = three(work)
    assert isinstance(failed, KeyError)
    assert all(str(error).startswith("process 0 ended") for error in others)


def test_one_process_waits_for_nobody() -> None:
    with untimed_barrier():
        pass
