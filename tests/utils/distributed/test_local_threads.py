"""Threads that compute together, and what becomes of an error in one of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from utils.distributed.local_threads import LocalThreads, Meeting
from utils.distributed.tree_sum import tree_sum

NUMBERS = range(4)


def test_all_threads_get_the_same_results() -> None:
    """A thousand meetings: none takes a part of the next one, or of the one before."""
    meeting = Meeting(4)

    def work(number: int) -> list[float]:
        return [float(meeting.together(number, tree_sum, torch.tensor(0.1 * number + turn))) for turn in range(1000)]

    results = list(LocalThreads(4, meeting).map(work, NUMBERS))
    assert results == [results[0]] * 4
    addends = [[torch.tensor(0.1 * number + turn) for number in NUMBERS] for turn in range(1000)]
    assert results[0] == [float(tree_sum(each)) for each in addends]


def test_results_are_in_the_order_of_the_arguments() -> None:
    threads = LocalThreads(2)
    assert list(threads.map(pow, NUMBERS, (2, 2, 3, 3))) == [0, 1, 8, 27]
    assert set(threads.map(lambda _: torch.get_num_threads(), NUMBERS)) == {1}


def test_an_error_of_one_ends_all() -> None:
    meeting = Meeting(4)

    def work(number: int) -> Tensor:
        if number == 2:
            raise MemoryError("too large")
        return meeting.together(number, tree_sum, torch.ones(1))

    with pytest.raises(MemoryError, match="too large"):
        list(LocalThreads(4, meeting).map(work, NUMBERS))


def test_an_error_of_the_common_work_ends_all() -> None:
    def lost(addends: Sequence[Tensor]) -> Tensor:
        raise RuntimeError("Connection closed by peer")

    meeting = Meeting(4)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        list(LocalThreads(4, meeting).map(lambda number: meeting.together(number, lost, torch.ones(1)), NUMBERS))
