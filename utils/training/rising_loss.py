"""Detect that the first steps of a run destroy the weights that it starts from. Called by optimizer_steps.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FIRST = 2  # first batches, in which the learning rate has hardly changed the weights
WINDOW = 3  # batches whose mean loss is compared with the first ones'
CHECKS = (20, 50, 100)  # numbers of batches after which the losses are compared
RISE = 2.0  # one step at too high a rate exceeds it; in 100 batches of healthy runs the ratio was at most 1.1


class RisingLoss:
    """The loss of each of the first batches of a run.

    Args:
        sum_shares: adds up a tensor of each local logical process over all processes, which must call it together
    """

    def __init__(self, sum_shares: Callable[[Sequence[Tensor]], Tensor], enabled: bool) -> None:
        self._sum, self._enabled = sum_shares, enabled
        self._losses: list[Tensor] = []

    def add_batch(self, losses: Tensor) -> str:
        """Record the terms of a batch, (n, k) for n local logical processes; return how the loss has risen, or ''."""
        if not self._enabled:
            return ""
        self._losses.append(losses.sum(1))
        count = len(self._losses)
        if count not in CHECKS:
            return ""
        totals = self._sum(list(torch.stack(self._losses, 1)))
        first, highest = totals[:FIRST].mean().item(), totals.unfold(0, WINDOW, 1).mean(1).max().item()
        rose = highest > RISE * first
        self._enabled = not rose and count < CHECKS[-1]
        return f"from {first:.3g} to {highest:.3g} within the first {count} batches" if rose else ""
