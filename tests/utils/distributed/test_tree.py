"""Logical processes: which ones a process computes, and their sums."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from tests.conftest import OnProcesses
from tests.making import without_launcher
from utils.distributed.ranks import ranks
from utils.distributed.tree import LogicalProcesses, Subtree, add_siblings, check_logical_processes
from utils.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


# Which logical processes


@pytest.mark.parametrize(
    ("count", "processes", "batch_size", "sync_bn", "by_zero", "fits"),
    [
        (6, 2, 16, False, False, False),
        (2, 4, 16, False, False, False),
        (4, 3, 16, False, False, True),
        (4, 2, 16, True, False, False),
        (4, 2, 16, False, True, False),
        (4, 2, -1, False, False, False),
        (0, 3, -1, True, True, True),
        (4, 4, 16, True, False, True),
    ],
)
def test_what_can_be(
    count: int, processes: int, batch_size: int, sync_bn: bool, by_zero: bool, fits: bool, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(by_zero).lower())
    with nullcontext() if fits else pytest.raises(UserError, match=f"--logical-processes {count}"):
        check_logical_processes(count, batch_size, sync_bn)


# Sums by the tree, with numbers whose sum depends on the order in which they are added

LENGTH = 7  # which no number of processes divides


def addends(count: int, length: int = LENGTH) -> list[Tensor]:
    """Return vectors of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, generator=generator) * 10.0 ** (number % 5) for number in range(count)]


def by_hand(values: list[Tensor]) -> Tensor:
    (a, b, c, d), (e, f, g, h) = values[:4], values[4:]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def tree_sum(values: list[Tensor]) -> Tensor:
    return LogicalProcesses(len(values)).sum(values)


def test_neighbours_are_added_first() -> None:
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert tree_sum([big, one, one, one]) == 2**24 + 2
    assert tree_sum([one, one, one, big]) == 2**24 + 2
    assert sum([big, one, one, one]) == 2**24  # one after another each is lost
    values = addends(8)
    assert torch.equal(tree_sum(values), by_hand(values))
    assert torch.equal(tree_sum(values[:1]), values[0])


def test_any_number_of_processes_has_whole_subtrees() -> None:
    """They are at most 2 log2 V, the ranges follow one another, and a sum that needs all of them is at the root."""
    for count in (1, 2, 8, 32):
        for processes in range(1, count + 1):
            logical = LogicalProcesses(count, processes)
            ranges = [logical.rank_range(rank) for rank in range(processes)]
            assert [*chain(*ranges)] == [*range(count)]
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
            assert max(map(len, logical.subtrees)) <= max(2 * (count.bit_length() - 1), 1)
            assert add_siblings(chain(*logical.subtrees), lambda *_: None) == [Subtree(0, count)]
    assert LogicalProcesses(8, 3).plan(64) == "3 processes: 3, 3 and 2 of 8 logical processes, 24 + 24 + 16 images"


def of_processes(count: int) -> list[Tensor]:
    """Return the sums of `count` small vectors, and of longer ones, as a process gets them."""
    distributed.init_process_group("gloo")
    logical = LogicalProcesses(count, *reversed(ranks()[:2]))
    sums = [logical.sum(addends(count)[logical.local.start : logical.local.stop])]
    for length in (1, LENGTH, 1000):
        local = addends(count, length)[logical.local.start : logical.local.stop]
        rows = torch.stack(logical.local_sums(local))
        logical.sum_in_place(rows)
        sums.append(rows[0])
    return sums


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_several_processes_add_by_the_same_tree(processes: int, on_processes: OnProcesses) -> None:
    for small, *large in on_processes(processes, of_processes, 8):
        assert torch.equal(small, tree_sum(addends(8)))
        for values in large:
            assert torch.equal(values, tree_sum(addends(8, len(values))))
