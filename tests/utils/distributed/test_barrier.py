"""The barrier without a time limit: it waits for working processes, and not for processes that have ended."""

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
    """Three threads that act as processes, with short times: `work` gets the rank; its results or errors, by rank."""
    shared, local = distributed.HashStore(), threading.local()
    monkeypatch.setattr(store, "ranks", lambda: Ranks(local.rank, 3, local.rank, 3))
    for module in (barrier, store):
        monkeypatch.setattr(module, "run_store", lambda: RunStore(shared))
    monkeypatch.setattr(barrier, "world_size", lambda: 3)
    monkeypatch.setattr(barrier, "barrier_numbers", itertools.repeat(0))
    monkeypatch.setattr(barrier, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(barrier, "SILENCE_LIMIT_SECONDS", 0.2)

    def run(work: Callable[[int], object]) -> list:
        def process(rank: int) -> object:
            local.rank = rank
            try:
                return work(rank)
            except (UserError, KeyError) as error:
                return error

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(process, range(3)))

    return run


def test_all_wait_for_a_process_that_works_longer_than_the_silence_limit(three: Callable) -> None:
    def work(rank: int) -> tuple[float, float]:
        with untimed_barrier():
            time.sleep(0.6 * (rank == 1))
            done = time.monotonic()
        return done, time.monotonic()

    times = three(work)
    assert min(after for _, after in times) >= max(done for done, _ in times)


def test_a_process_that_has_ended_is_named(three: Callable) -> None:
    def work(rank: int) -> None:
        if rank != 1:
            with untimed_barrier():
                time.sleep(0.3 * rank)

    first, absent, last = three(work)
    assert absent is None
    for error in (first, last):
        assert str(error) == (
            "process 1 ended without an error message, or cannot be reached: no heartbeat for 0.2 s while the other "
            "processes waited"
        )


def test_an_error_in_the_block_is_raised_at_once(three: Callable) -> None:
    def work(rank: int) -> None:
        with untimed_barrier():
            if rank == 0:
                raise KeyError

    failed, *others = three(work)
    assert isinstance(failed, KeyError)
    assert all(str(error).startswith("process 0 ended") for error in others)


def test_one_process_does_not_wait() -> None:
    with untimed_barrier():
        pass
