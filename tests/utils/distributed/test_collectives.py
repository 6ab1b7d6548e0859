"""Collectives on two processes and on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from tests.conftest import OnProcesses
from utils.distributed.failure import Stopped
from utils.distributed.launch import start
from utils.distributed.ranks import Collectives, broadcast_from_main, ranks
from utils.errors import UserError

ALIKE = {"broadcast": {"rank": 0}, "part of five": ()}


def exchange() -> dict[str, object]:
    collectives, rank = Collectives(start("cpu", "no", 60.0)[0]), ranks().rank
    return {
        "broadcast": collectives.broadcast({"rank": rank}),
        "gather": collectives.gather([f"{rank}a", f"{rank}b"]),
        "shard": collectives.shard([1, 2, 3, 4, 5]),
        "part of four": collectives.local_part(["w", "x", "y", "z"], 2),
        "part of five": collectives.local_part(["v", "w", "x", "y", "z"], 2),
    }


@pytest.mark.parametrize(
    ("gathered", "shards", "parts"),
    [
        (["0a", "0b"], [[1, 2, 3, 4, 5]], [()]),
        (["0a", "0b", "1a", "1b"], [[1, 3, 5], [2, 4]], [["w", "x"], ["y", "z"]]),
    ],
)
def test_collectives(
    gathered: list[str], shards: list[list[int]], parts: list[Sequence[str]], on_processes: OnProcesses
) -> None:
    assert on_processes(len(shards), exchange) == [
        {**ALIKE, "gather": gathered, "shard": shard, "part of four": part}
        for shard, part in zip(shards, parts, strict=True)
    ]


# Decisions of the main process


def give() -> dict[int, tuple[str]]:
    return {ranks().rank: ("a",)}


def stop() -> NoReturn:
    raise Stopped(3)


def fail() -> NoReturn:
    raise UserError("no")


def outcomes() -> list[Any]:
    """Return the outcome of each decision on this process; only the main process may make it."""
    start("cpu", "no", 60.0)
    results: list[Any] = []
    for decide in (give, stop, fail):
        try:
            results.append(broadcast_from_main(decide if ranks().rank == 0 else pytest.fail))
        except Stopped as stopped:
            results.append(stopped.code)
        except UserError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("processes", [1, 2])
def test_all_processes_get_the_decision_of_the_main_one(processes: int, on_processes: OnProcesses) -> None:
    assert on_processes(processes, outcomes) == [[{0: ("a",)}, 3, "no"]] * processes
