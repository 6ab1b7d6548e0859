"""Values that processes exchange; and that one process gets back what it gives."""

from __future__ import annotations

import torch
from torch import nn

from tests.conftest import OnProcesses
from utils.distributed.accelerator import start
from utils.distributed.collectives import Collectives
from utils.distributed.ranks import ranks


def exchange() -> dict[str, object]:
    collectives, rank = Collectives(start("cpu", "no", 60.0)), ranks().rank
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, rank + 1.0)
    collectives.align(model)
    return {
        "broadcast": collectives.broadcast({"rank": rank}),
        "gather": collectives.gather([f"{rank}a", f"{rank}b"]),
        "shard": collectives.shard([1, 2, 3, 4, 5]),
        "own": collectives.own_share(["x", "y"]),
        "others": collectives.own_share(["x", "y", "z"]),
        "weight": float(model.weight.detach()),
    }


def test_two_processes(on_processes: OnProcesses) -> None:
    first, second = on_processes(2, exchange)
    alike = {"broadcast": {"rank": 0}, "gather": ["0a", "0b", "1a", "1b"], "others": None, "weight": 1.0}
    assert first == {**alike, "shard": [1, 3, 5], "own": "x"}
    assert second == {**alike, "shard": [2, 4], "own": "y"}


def test_one_process(on_processes: OnProcesses) -> None:
    (alone,) = on_processes(1, exchange)
    assert alone == {
        "broadcast": {"rank": 0},
        "gather": ["0a", "0b"],
        "shard": [1, 2, 3, 4, 5],
        "own": None,
        "others": None,
        "weight": 1.0,
    }
    assert torch.distributed.is_initialized() is False
