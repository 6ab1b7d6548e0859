"""Ranks from the environment variables of a launcher, and the store of a run."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from tests.conftest import OnProcesses
from tests.making import without_launcher
from utils.distributed import ranks as ranks_module
from utils.distributed.ranks import (
    SPAWNED,
    Ranks,
    RunStore,
    check_launch,
    launched,
    query_store,
    ranks,
    run_store,
    world_size,
)
from utils.errors import UserError


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    assert ranks() == Ranks(0, 1, 0, 1)
    assert world_size() == 1
    assert not launched()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(5, 8, 1, 4)
    assert world_size() == 8
    assert launched()
    monkeypatch.setenv(SPAWNED, "1")
    assert not launched()


@pytest.mark.parametrize("text", ["two", "-1", "1.5"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=rf"^the environment variable {name} is '{text}' instead of a number"):
        check_launch()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 and no RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "WORLD_SIZE 2 and RANK 2"),
        ({"RANK": "1"}, "WORLD_SIZE 1 and RANK 1"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS 2 and no RANK; .*accelerate_configs/start.sh"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE 4 and no RANK; .*accelerate_configs/start.sh"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE 2 and no RANK; .*accelerate_configs/start.sh"),
    ],
)
def test_an_incomplete_launch(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    check_launch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^the environment has {message}"):
        check_launch()


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"},  # accelerate launch, started by srun
        {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"WANDB_SWEEP_ID": "s", "SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_NTASKS": "4"},  # in a batch file
        {"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"},
    ],
)
def test_a_launch_by_an_engine(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_launch()


# The store


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns a `RunStore` for each of several processes."""

    def make(processes: int) -> list[RunStore]:
        store, made = distributed.HashStore(), []
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(processes))
            for rank in range(processes):
                patch.setenv("RANK", str(rank))
                made.append(RunStore(store))
        return made

    return make


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
    ranks_module.ANSWER_SECONDS = 0.3
    times, answer = [], 0
    for _ in range(2):
        begun = time.monotonic()
        answer = query_store(slow_answer, -1)
        times.append(time.monotonic() - begun)
    return total, count, times, answer


def test_a_store_without_an_answer_is_not_waited_for(on_processes: OnProcesses) -> None:
    returned = on_processes(2, ask)
    assert [total for total, *_ in returned] == [3, 3]
    assert sorted(count for _, count, *_ in returned) == [3, 6]
    for *_, times, answer in returned:
        assert all(0.3 <= each < 3.0 for each in times)
        assert answer == -1
