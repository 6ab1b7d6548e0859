"""The run's store: values per rank, one value for all, counters, and answers within a time limit."""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed import store as store_module
from utils.distributed.ranks import ranks
from utils.distributed.store import RunStore, query_store, run_store


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns a `RunStore` for each of several processes."""

    def make(processes: int, topic: str = "start", store: distributed.Store | None = None) -> list[RunStore]:
        store, made = store or distributed.HashStore(), []
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(processes))
            for rank in range(processes):
                patch.setenv("RANK", str(rank))
                made.append(RunStore(store, topic))
        return made

    return make


def test_what_an_intruder_writes_is_as_if_it_had_not_been_written() -> None:
    """Not even under the run's keys, which a store may list."""
    shared = distributed.HashStore()
    run, intruder, observer = (RunStore(shared, token=token) for token in ("secret", "guess", ""))
    for other in (intruder, observer):
        other.write("names", "me")
        other.write_once("alarm", True)
        assert other.value("alarm") is True
        assert run.values("names") == {}
        assert run.value("alarm") is None
    run.write("names", "process 0")
    run.write_once("stop", [3, "SIGTERM"])
    key = "lockstep/" + hashlib.sha256(b"secret").hexdigest()[:16] + "/0/{}"
    stop = shared.get(key.format("stop"))
    assert run.value("stop") == run.wait_for_value("stop") == [3, "SIGTERM"]
    for forged in ("true", "true\n", b"\xff", "", stop):
        shared.set(key.format("alarm"), forged)
        shared.set(key.format("names/0"), forged)
        assert (run.value("alarm"), run.wait_for_value("alarm")) == (None, None)
        assert run.values("names") == {}


# Values of each rank


@pytest.mark.parametrize("value", [False, 0, "", [], {"a": [1, 2.5, None]}, "ä"])
def test_all_processes_read_a_value(value: Any, stores: Any) -> None:
    main, other = stores(2)
    main.write("answer", value)
    assert main.values("answer") == other.values("answer") == {0: value}
    other.write("answer", [value])
    assert main.values("answer") == other.values("answer") == {0: value, 1: [value]}


def test_the_last_value_counts(stores: Any) -> None:
    (store,) = stores(1)
    store.write("answer", 1)
    store.write("answer", 2)
    assert store.values("answer") == {0: 2}


def test_topics_and_attempts_have_their_own_names(monkeypatch: pytest.MonkeyPatch, stores: Any) -> None:
    shared = distributed.HashStore()
    (one,) = stores(1, "doctor", shared)
    one.write("answer", 1)
    (other,) = stores(1, "resume", shared)
    assert other.values("answer") == {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (again,) = stores(1, "doctor", shared)
    assert again.values("answer") == {0: 1}  # the main process hosts it: launchers may have counted differently
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (again,) = stores(1, "doctor", shared)
    assert again.values("answer") == {}


# One value for all, and counters


def test_the_first_writer_wins(stores: Any) -> None:
    main, other = stores(2)
    assert other.value("stop") is None
    main.write_once("stop", [3, "SIGTERM"])
    other.write_once("stop", [4, "SIGINT"])
    assert main.value("stop") == other.value("stop") == other.wait_for_value("stop") == [3, "SIGTERM"]


def test_waiting_for_a_value_has_a_time_limit() -> None:
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(distributed.DistError):
        RunStore(store).wait_for_value("handle")


def test_counters(stores: Any) -> None:
    main, other = stores(2)
    assert main.count("failed", 0) == 0
    assert (main.count("failed"), other.count("failed"), main.count("failed", 0)) == (1, 2, 2)


# The store of a run


def test_without_a_run_there_is_no_store() -> None:
    assert run_store() is None
    assert query_store(pytest.fail, 7) == 7  # type: ignore[arg-type]


def slow_answer(store: RunStore) -> int:
    time.sleep(5.0)
    return 1


def ask() -> tuple[int, int, list[float], int]:
    """Return the sum of the processes' values, a counter, the seconds of two unanswered calls, and their result."""
    distributed.init_process_group("gloo")
    store = run_store()
    assert store is not None
    store.write("names", ranks().rank + 1)
    distributed.barrier()
    total = sum(query_store(lambda store: store.values("names"), {}).values())
    count = query_store(lambda store: store.count("answers", 3), 0)
    distributed.barrier()
    store_module.ANSWER_SECONDS = 0.3
    times, answer = [], 0
    for _ in range(2):
        begun = time.monotonic()
        answer = query_store(slow_answer, -1)
        times.append(time.monotonic() - begun)
    return total, count, times, answer


def test_a_store_without_an_answer_is_not_asked_again(on_processes: OnProcesses) -> None:
    returned = on_processes(2, ask)
    assert [total for total, *_ in returned] == [3, 3]
    assert sorted(count for _, count, *_ in returned) == [3, 6]
    for *_, (first, second), answer in returned:
        assert 0.3 <= first < 3.0
        assert second < 0.1
        assert answer == -1
