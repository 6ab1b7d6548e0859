"""The progress of a run: its epoch, batch and step, its best epoch, and whether it still improves.

A part of `TrainingState`. train.py counts epochs in it, utils/training/steps.py batches and steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from utils.summary import Summary


@dataclass
class Progress:
    """The counters of a run. They are equal on all processes, so that all decide alike."""

    epoch: int = 0  # the current epoch, or the next
    batch: int = 0  # trained batches of this epoch; after the last one comes the validation
    step: int = 0  # optimizer steps, including skipped ones
    best: float = float("-inf")  # highest fitness so far
    best_epoch: int = -1
    validated: int = -1  # the last validated epoch
    summary: Summary | None = None  # the best epoch's metrics
    skipped: int = 0  # optimizer steps whose gradients were not finite
    taken: int = 0  # batches of this epoch whose optimizer step was taken
    finished: bool = False

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}" + (f", after batch {self.batch}" if self.batch else "")

    def record(self, summary: Summary | None) -> bool:
        """Record the metrics of the current epoch, if it is validated; return whether it is the best so far."""
        if summary is None:
            return False
        self.validated = self.epoch
        first = self.best_epoch < 0 and summary.fitness == self.best  # -inf, for NaN, is better than none
        if not (summary.fitness > self.best or first):
            return False
        self.best, self.best_epoch, self.summary = summary.fitness, self.epoch, summary
        return True

    def stalled(self, patience: int) -> bool:
        """Return whether `patience` epochs have passed without a better fitness; never if it is 0."""
        return 0 < patience <= self.validated - self.best_epoch

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.epoch, self.batch, self.taken = self.epoch + 1, 0, 0

    def state(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress whose `state` is `saved`."""
        return cls(**{**saved, "summary": saved["summary"] and Summary(**saved["summary"])})
