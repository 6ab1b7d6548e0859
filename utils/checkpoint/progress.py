"""How far a run is, which epoch was the best, and whether it still improves.

A part of `TrainingState`; train.py counts epochs in it, utils/training/optimizer_steps.py counts batches and steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from utils.summary import Summary


@dataclass
class Progress:
    """The counters of a run. Every process holds the same, so that all decide alike."""

    epoch: int = 0  # the one being trained, or the next
    batch: int = 0  # batches of this epoch that are trained; if all are, its validation comes next
    step: int = 0  # optimizer steps, those skipped included
    best: float = float("-inf")  # fitness
    best_epoch: int = -1
    validated: int = -1  # the last epoch that was
    summary: Summary | None = None  # of the best epoch
    skipped: int = 0  # optimizer steps without finite gradients
    taken: int = 0  # batches of this epoch whose step was taken
    finished: bool = False

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}" + (f", after batch {self.batch}" if self.batch else "")

    def record(self, epoch: int, fitness: float) -> bool:
        """Record the fitness of an epoch and return whether it is the best so far."""
        self.validated = epoch
        if not fitness > self.best:
            return False
        self.best, self.best_epoch = fitness, epoch
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

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        summary = saved["summary"]
        loaded = Progress(**{**saved, "summary": summary and Summary(**summary)})
        vars(self).update(vars(loaded))

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress of which `state` returned `saved`."""
        progress = cls()
        progress.load_state(saved)
        return progress
