"""Ranks from a launcher's environment variables, a run's store, collective operations, and shared memory."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import psutil
import pytest
from torch import distributed

from tests.conftest import OnProcesses
from tests.making import launched as launch
from tests.making import without_launcher
from utils.distributed import ranks as ranks_module
from utils.distributed.launch import start
from utils.distributed.ranks import (
    Collectives,
    Ranks,
    RunStore,
    available_bytes,
    broadcast_from_main,
    check_launch,
    ranks,
    shared_memory,
)
from utils.errors import Stopped, UserError


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    assert ranks() == Ranks(0, 1, 0, 1)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK 2"),
        ({"RANK": "1"}, "RANK 1"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS 2, .*accelerate_configs/start.sh"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE 2, .*accelerate_configs/start.sh"),
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
    with pytest.raises(UserError, match=named) if named else nullcontext():
        check_launch()


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


def test_one_value_for_all(stores: list[RunStore]) -> None:
    main, other = stores
    assert other.value("stop") is None
    with pytest.raises(distributed.DistError):
        main.wait_for_value("stop")
    assert main.write_once("stop", [3, "SIGTERM"]) == other.write_once("stop", [4, "SIGINT"]) == [3, "SIGTERM"]
    assert main.value("stop") == other.value("stop") == other.wait_for_value("stop") == [3, "SIGTERM"]


def stop() -> NoReturn:
    raise Stopped(3)


def fail() -> NoReturn:
    raise UserError("no")


def exchange() -> dict[str, Any]:
    """Return the results of each operation on this process."""
    start("cpu", "no", 60.0)
    collectives, rank = Collectives(), ranks().rank
    decisions: list[Any] = []
    for decide in (lambda: {ranks().rank: ("a",)}, stop, fail):
        try:  # only the main process may decide
            decisions.append(broadcast_from_main(decide if rank == 0 else pytest.fail))
        except (Stopped, UserError) as error:
            decisions.append(str(error))
    return {
        "broadcast": collectives.broadcast({"rank": rank}),
        "gather": collectives.gather([f"{rank}a", f"{rank}b"]),
        "shard": collectives.shard([1, 2, 3, 4, 5]),
        "decisions": decisions,
    }


@pytest.mark.parametrize(
    ("gathered", "shards"), [(["0a", "0b"], [[1, 2, 3, 4, 5]]), (["0a", "0b", "1a", "1b"], [[1, 3, 5], [2, 4]])]
)
def test_collectives(gathered: list[str], shards: list[Any], on_processes: OnProcesses) -> None:
    decisions = [{0: ("a",)}, "3", "no"]
    alike = {"broadcast": {"rank": 0}, "gather": gathered, "decisions": decisions}
    assert on_processes(len(shards), exchange) == [{**alike, "shard": shard} for shard in shards]


def test_memory_of_an_earlier_run_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is part of a reference cycle; its file is closed."""
    monkeypatch.setattr(ranks_module, "in_use", WeakSet())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    loader = SimpleNamespace(memory=shared_memory(lambda free: 600))
    loader.itself, file = loader, loader.memory.fd
    del loader
    assert shared_memory(lambda free: free).size == 1000
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_handle_from_the_store_is_never_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody on the network may have written it."""
    store = RunStore(distributed.HashStore())
    monkeypatch.setattr(ranks_module, "run_store", lambda: store)
    launch(monkeypatch, 2, 2)
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(range(99)))
    theirs = os.memfd_create("other", 0)
    with precious.open("r+b") as file:
        handles = [[os.getpid(), file.fileno()], [os.getpid(), theirs], str(precious), f"/proc/self/fd/{file.fileno()}",
                   [os.getpid(), 10**9], [2**40, 3], {"a": 1}, None, ["x", "../.."]]  # fmt: skip
        for number, handle in enumerate(handles):
            monkeypatch.setattr(ranks_module, "_memory_calls", iter([number]))
            monkeypatch.setenv("LOCAL_RANK", "1")
            store.write_once(f"memory/{socket.gethostname()}/{number}", handle)
            memory = shared_memory(lambda free: 60)
            memory.buffer[:] = bytes(60)
            assert memory.size == 60
    assert precious.read_bytes() == bytes(range(99))
    assert os.fstat(theirs).st_size == 0


@pytest.mark.parametrize(("limit", "expected"), [("1000", 1000 - 700 + 300), ("max", 5000), ("9000", 5000), ("", 5000)])
def test_the_limit_of_a_container_counts(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached files, 300 bytes here, can be dropped."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    monkeypatch.setattr(ranks_module, "CGROUP", tmp_path)
    monkeypatch.setattr(ranks_module, "in_use", [])
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 300\n")
    assert available_bytes() == expected
