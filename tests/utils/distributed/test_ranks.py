"""Ranks from the environment variables of a launcher, the store of a run, and collective operations."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from torch import distributed

from tests.conftest import OnProcesses
from tests.making import without_launcher
from utils.distributed import ranks as ranks_module
from utils.distributed.launch import start
from utils.distributed.ranks import (
    SPAWNED,
    Collectives,
    Ranks,
    RunStore,
    broadcast_from_main,
    check_launch,
    launched,
    query_store,
    ranks,
    run_store,
)
from utils.errors import Stopped, UserError


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    assert (ranks(), launched()) == (Ranks(0, 1, 0, 1), False)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert (ranks(), launched()) == (Ranks(5, 8, 1, 4), True)
    monkeypatch.setenv(SPAWNED, "1")
    assert not launched()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"LOCAL_WORLD_SIZE": "1.5"}, "LOCAL_WORLD_SIZE is '1.5'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK 2"),
        ({"RANK": "1"}, "RANK 1"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS 2 .*accelerate_configs/start.sh"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE 4 .*accelerate_configs/start.sh"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE 2 .*accelerate_configs/start.sh"),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, ""),  # accelerate launch, started by srun
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, ""),
        ({"WANDB_SWEEP_ID": "s", "SLURM_STEP_NUM_TASKS": "2"}, ""),
        ({"SLURM_NTASKS": "4"}, ""),  # in a batch file
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}, ""),
    ],
)
def test_a_wrong_launch_is_refused(variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = ""
    try:
        check_launch()
    except UserError as error:
        refused = str(error)
    assert bool(refused) == bool(named)
    assert re.search(named, refused)


# The store


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[RunStore]:
    """A store of each of two processes."""
    store, made = distributed.HashStore(), []
    store.set_timeout(timedelta(seconds=0.1))
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        for rank in range(2):
            patch.setenv("RANK", str(rank))
            made.append(RunStore(store))
    return made


@pytest.mark.parametrize("value", [False, 0, "", [], {"a": [1, 2.5, None]}, "ä"])
def test_all_processes_read_the_last_value_of_each(value: Any, stores: list[RunStore]) -> None:
    main, other = stores
    main.write("answer", "before")
    main.write("answer", value)
    assert main.values("answer") == other.values("answer") == {0: value}
    other.write("answer", [value])
    assert main.values("answer") == other.values("answer") == {0: value, 1: [value]}


def test_one_value_for_all_and_counters(stores: list[RunStore]) -> None:
    main, other = stores
    assert other.value("stop") is None
    with pytest.raises(distributed.DistError):
        main.wait_for_value("stop")
    main.write_once("stop", [3, "SIGTERM"])
    other.write_once("stop", [4, "SIGINT"])
    assert main.value("stop") == other.value("stop") == other.wait_for_value("stop") == [3, "SIGTERM"]
    assert (main.count("failed", 0), main.count("failed"), other.count("failed"), main.count("failed", 0)) == (
        0,
        1,
        2,
        2,
    )


def test_without_a_run_there_is_no_store() -> None:
    assert run_store() is None
    assert query_store(pytest.fail, 7) == 7  # type: ignore[arg-type]


# Collective operations


def stop() -> NoReturn:
    raise Stopped(3)


def fail() -> NoReturn:
    raise UserError("no")


def exchange() -> dict[str, Any]:
    """Return the results of each operation on this process, and the time of a question that the store is slow at."""
    collectives, rank = Collectives(start("cpu", "no", 60.0)[0]), ranks().rank
    decisions: list[Any] = []
    for decide in (lambda: {ranks().rank: ("a",)}, stop, fail):
        try:  # only the main process may decide
            decisions.append(broadcast_from_main(decide if rank == 0 else pytest.fail))
        except (Stopped, UserError) as error:
            decisions.append(str(error))
    ranks_module.ANSWER_SECONDS, begun = 0.3, time.monotonic()
    unanswered = query_store(lambda store: time.sleep(5), -1)
    return {
        "broadcast": collectives.broadcast({"rank": rank}),
        "gather": collectives.gather([f"{rank}a", f"{rank}b"]),
        "shard": collectives.shard([1, 2, 3, 4, 5]),
        "part of four": collectives.local_part(["w", "x", "y", "z"], 2),
        "part of five": collectives.local_part(["v", "w", "x", "y", "z"], 2),
        "decisions": decisions,
        "unanswered": (unanswered, 0.3 <= time.monotonic() - begun < 3.0) if run_store() else (-1, True),
    }


@pytest.mark.parametrize(
    ("gathered", "shards", "parts"),
    [
        (["0a", "0b"], [[1, 2, 3, 4, 5]], [()]),
        (["0a", "0b", "1a", "1b"], [[1, 3, 5], [2, 4]], [["w", "x"], ["y", "z"]]),
    ],
)
def test_collectives(gathered: list[str], shards: list[Any], parts: list[Any], on_processes: OnProcesses) -> None:
    decisions = [{0: ("a",)}, "3", "no"]
    alike = {"broadcast": {"rank": 0}, "part of five": (), "decisions": decisions, "unanswered": (-1, True)}
    assert on_processes(len(shards), exchange) == [
        {**alike, "gather": gathered, "shard": shard, "part of four": part}
        for shard, part in zip(shards, parts, strict=True)
    ]
