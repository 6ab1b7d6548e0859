"""Which logical processes this process computes, what contradicts them, and what they share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.curves import refused
from utils.distributed.logical_processes import CollateShares, LogicalProcesses, SyncOptions, check_logical_processes
from utils.errors import UserError

CPU = torch.device("cpu")


def accelerator(processes: int, rank: int = 0, device: str = "cpu") -> Any:
    return SimpleNamespace(num_processes=processes, process_index=rank, device=torch.device(device))


def flags(count: int, **other: Any) -> SyncOptions:
    return SyncOptions(**{"batch_size": 16, "sync_bn": False, "comm_hook": "", "logical_processes": count, **other})


def test_each_process_is_one_without_the_flag() -> None:
    logical = LogicalProcesses.of(flags(0), accelerator(3, 1))
    assert (logical.count, logical.local, logical.first, logical.exact) == (3, 1, 1, False)
    assert logical.messages(flags(0), CPU) == []


@pytest.mark.parametrize(
    ("processes", "rank", "first", "local"), [(1, 0, 0, 4), (2, 0, 0, 2), (2, 1, 2, 2), (4, 3, 3, 1)]
)
def test_each_process_has_neighbours(processes: int, rank: int, first: int, local: int) -> None:
    logical = LogicalProcesses.of(flags(4), accelerator(processes, rank))
    assert (logical.count, logical.local, logical.first, logical.exact) == (4, local, first, True)
    (line,) = logical.messages(flags(4), CPU)
    assert line.startswith(f"logical processes: 4, {local} on each process; the same bytes on 1, 2 or 4 processes ")


@pytest.mark.parametrize(("count", "processes", "shared"), [(0, 1, False), (0, 2, True), (1, 1, False), (4, 1, True)])
def test_statistics_are_shared_by_several_only(count: int, processes: int, shared: bool) -> None:
    assert not LogicalProcesses.of(flags(count), accelerator(processes)).sync_bn
    assert LogicalProcesses.of(flags(count, sync_bn=True), accelerator(processes)).sync_bn == shared


def test_with_sync_bn_on_gpus_they_are_the_processes_and_a_warning_says_so() -> None:
    options = flags(4, sync_bn=True)
    assert LogicalProcesses.of(options, accelerator(2, 1)).exact
    logical = LogicalProcesses.of(options, accelerator(2, 1, "cuda"))
    assert (logical.count, logical.local, logical.first, logical.exact) == (2, 1, 1, False)
    (line,) = logical.messages(options, torch.device("cuda"))
    assert line.startswith("warning: ")
    assert "up to rounding only" in line


@pytest.mark.parametrize(
    ("count", "processes", "other", "message"),
    [
        (6, 2, {}, "--logical-processes 6: it must be a power of two; give 4 or 8"),
        (2, 4, {}, "--logical-processes 2: there are 4 processes; start 2, or fewer"),
        (4, 3, {}, "--logical-processes 4 cannot be shared evenly by 3 processes; start 2 or 4"),
        (16, 6, {}, "cannot be shared evenly by 6 processes; start 4 or 8"),
        (4, 2, {"comm_hook": "bf16"}, "cannot be used with --comm-hook"),
        (4, 2, {"batch_size": -1}, "--batch-size -1 depends on the memory of this machine; give a number"),
    ],
)
def test_what_cannot_be(count: int, processes: int, other: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        LogicalProcesses.of(flags(count, **other), accelerator(processes))
    refused(f"error: {caught.value}", message)


def test_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match="cannot be used with DeepSpeed"):
        LogicalProcesses.of(flags(4), accelerator(2))


def test_the_doctor_checks_the_processes_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    check_logical_processes(flags(0))
    with pytest.raises(UserError, match="cannot be shared evenly by 3 processes"):
        check_logical_processes(flags(4))


def test_replicas_share_the_parameters_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    replicas = LogicalProcesses(count=8, local=3, first=2, exact=True).replicate(model)
    assert replicas[0] is model
    numbers = [[id(parameter) for parameter in replica.parameters()] for replica in replicas]
    assert numbers == numbers[:1] * 3
    replicas[1].get_buffer("1.running_mean").fill_(7.0)
    assert [float(replica.get_buffer("1.running_mean")[0]) for replica in replicas] == [0.0, 7.0, 0.0]


def test_a_batch_is_collated_in_equal_parts() -> None:
    assert CollateShares(list, 3)([*"abcdef"]) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert CollateShares(list, 1)([*"ab"]) == [["a", "b"]]
