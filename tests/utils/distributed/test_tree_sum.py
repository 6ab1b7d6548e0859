"""Sums by the tree, against sums by hand, with numbers whose sum depends on the order in which they are added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed

from tests.conftest import OnProcesses
from utils.distributed.ranks import ranks
from utils.distributed.tree_sum import PartialSums, tree_sum, tree_sum_in_place, tree_sum_of_processes

LENGTH = 7  # which no number of processes divides


def addends(count: int, length: int = LENGTH) -> list[Tensor]:
    """Return vectors of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, generator=generator) * 10.0 ** (number % 5) for number in range(count)]


def by_hand(values: list[Tensor]) -> Tensor:
    (a, b, c, d), (e, f, g, h) = values[:4], values[4:]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def test_neighbours_are_added_first() -> None:
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert tree_sum([big, one, one, one]) == 2**24 + 2
    assert tree_sum([one, one, one, big]) == 2**24 + 2
    assert sum([big, one, one, one]) == 2**24  # one after another each is lost
    values = addends(8)
    assert torch.equal(tree_sum(values), by_hand(values))
    assert torch.equal(tree_sum(values[:1]), values[0])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_partial_sums_from_the_last_to_the_first(count: int) -> None:
    """Two parameters, twice: the sums of each are those of the tree."""
    values, partial = addends(count), PartialSums()
    for _ in range(2):
        for value in reversed(values):
            partial.add([value, -value])
        sums = partial.take()
        assert torch.equal(sums[0], tree_sum(values))
        assert torch.equal(sums[1], -tree_sum(values))
    assert torch.equal(values[0], addends(count)[0])


def of_processes(processes: int) -> tuple[Tensor, list[Tensor]]:
    distributed.init_process_group("gloo")
    small = tree_sum_of_processes(addends(processes)[ranks().rank])
    large = []
    for length in (1, LENGTH, 1000):
        large.append(addends(processes, length)[ranks().rank])
        tree_sum_in_place(large[-1])
    return small, large


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_add_by_the_same_tree(processes: int, on_processes: OnProcesses) -> None:
    for small, large in on_processes(processes, of_processes, processes):
        assert torch.equal(small, tree_sum(addends(processes)))
        for values in large:
            assert torch.equal(values, tree_sum(addends(processes, len(values))))
