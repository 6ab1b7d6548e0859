"""Sums in one fixed order, a binary tree: the same bytes, however the addends are spread over processes.

Floating-point addition is commutative but not associative. Neighbours are added, then neighbouring sums, and so on. The
addends of each process are a whole subtree, so every process count that is a power of two adds in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed


def tree_sum(addends: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape; their number is a power of two."""
    while len(addends) > 1:
        addends = [left + right for left, right in zip(addends[::2], addends[1::2], strict=True)]
    return addends[0]


def tree_sum_of_processes(addend: Tensor) -> Tensor:
    """Return the sum of all processes' tensors. They should be small, because each is sent to all processes.

    All processes must call it together.
    """
    gathered = [torch.empty_like(addend) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, addend.contiguous())
    return tree_sum(gathered)


def tree_sum_in_place(flat: Tensor) -> None:
    """Replace a vector by the sum of all processes' vectors; each process sends and receives as much as in a ring.

    All processes must call it together: each adds up the chunk of its rank, then the sums are exchanged.
    """
    processes = distributed.get_world_size()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % processes))
    received = torch.empty_like(padded)
    distributed.all_to_all_single(received, padded)
    distributed.all_gather_into_tensor(padded, tree_sum(received.chunk(processes)).contiguous())
    flat.copy_(padded[: len(flat)])


class PartialSums:
    """Adds the gradients of a process's logical processes by the tree as they arrive, from the last to the first.

    At most one sum of each size is stored.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []  # falling numbers of addends, and their sums

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the next logical process, without changing them: two of them may be the same tensor."""
        count, sums = 1, list(gradients)
        while self._sums and self._sums[-1][0] == count:
            sums = list(torch._foreach_add(sums, self._sums.pop()[1]))
            count *= 2
        self._sums.append((count, sums))

    def take(self) -> list[Tensor]:
        """Return the sums of all gradients, whose number is a power of two, and forget them."""
        ((_, sums),) = self._sums
        self._sums.clear()
        return sums
