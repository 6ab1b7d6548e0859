"""Where a run stands: how far it is, what was best, and whether it still gets better."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from utils.summary import Summary


@dataclass
class Progress:
    """All that a run knows of its way beside tensors. Every process holds the same and so decides alike."""

    epoch: int = 0  # the one being trained, or the next
    batch: int = 0  # so many of its batches are trained; where it is all of them, the validation is missing
    step: int = 0  # optimizer steps, those skipped included
    best: float = float("-inf")
    best_epoch: int = -1
    validated: int = -1  # the last epoch that was
    summary: Summary | None = None  # of the best epoch
    skipped: int = 0  # optimizer steps without finite gradients
    taken: int = 0  # batches of this epoch whose step was taken
    finished: bool = False

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}" + (f", after batch {self.batch}" if self.batch else "")

    def record(self, epoch: int, fitness: float) -> bool:
        """Note an epoch's fitness; true where it is the best so far."""
        self.validated = epoch
        if not fitness > self.best:
            return False
        self.best, self.best_epoch = fitness, epoch
        return True

    def stalled(self, patience: int) -> bool:
        """Have `patience` epochs passed without a better fitness? 0 never gives up."""
        return 0 < patience <= self.validated - self.best_epoch

    def next_epoch(self) -> None:
        """This epoch is over."""
        self.epoch, self.batch, self.taken = self.epoch + 1, 0, 0

    @staticmethod
    def of(saved: dict[str, Any]) -> Progress:
        """What `asdict` made of one."""
        summary = saved["summary"]
        return Progress(**{**saved, "summary": summary and Summary(**summary)})

    def plain(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return asdict(self)
