"""Collectives on two processes and on one."""

from __future__ import annotations

import pytest
from torch import nn

from tests.conftest import OnProcesses
from utils.distributed.accelerator import start
from utils.distributed.collectives import Collectives
from utils.distributed.ranks import ranks

ALIKE = {"broadcast": {"rank": 0}, "share of three": None, "weight": 1.0}


def exchange() -> dict[str, object]:
    collectives, rank = Collectives(start("cpu", "no", 60.0)[0]), ranks().rank
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, rank + 1.0)
    collectives.broadcast_model(model)
    return {
        "broadcast": collectives.broadcast({"rank": rank}),
        "gather": collectives.gather([f"{rank}a", f"{rank}b"]),
        "shard": collectives.shard([1, 2, 3, 4, 5]),
        "share of two": collectives.local_share(["x", "y"]),
        "share of three": collectives.local_share(["x", "y", "z"]),
        "weight": float(model.weight.detach()),
    }


@pytest.mark.parametrize(
    ("gathered", "shards", "shares"),
    [
        (["0a", "0b"], [[1, 2, 3, 4, 5]], [None]),
        (["0a", "0b", "1a", "1b"], [[1, 3, 5], [2, 4]], ["x", "y"]),
    ],
)
def test_collectives(
    gathered: list[str], shards: list[list[int]], shares: list[str | None], on_processes: OnProcesses
) -> None:
    assert on_processes(len(shards), exchange) == [
        {**ALIKE, "gather": gathered, "shard": shard, "share of two": share}
        for shard, share in zip(shards, shares, strict=True)
    ]
