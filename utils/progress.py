"""Where a run stands: what was best, and whether it still gets better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The best fitness so far and its epoch. Every process holds the same numbers and so decides alike."""

    epoch: int = 0  # the next to train
    best: float = float("-inf")
    best_epoch: int = -1

    def record(self, epoch: int, fitness: float) -> bool:
        """Note an epoch's fitness; true where it is the best so far."""
        self.epoch = epoch + 1
        if not fitness > self.best:
            return False
        self.best, self.best_epoch = fitness, epoch
        return True

    def stalled(self, patience: int) -> bool:
        """Have `patience` epochs passed without a better fitness? 0 never gives up."""
        return 0 < patience <= self.epoch - 1 - self.best_epoch
