"""Hooks of your own: `python train.py --data my.yaml --hooks examples/own_hooks.py`.

Every process calls both functions, with the same numbers, so all may decide alike; one of them writes files.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from accelerate import PartialState
from torch import nn

GOOD_ENOUGH = 0.9  # precision and recall at which a detector needs no more training


def on_epoch(epoch: int, model: nn.Module, results: Mapping[str, float]) -> str | None:
    """Stop early by a rule of our own. `results` has the columns of results.csv, `model` is the EMA in eval mode.

    The rule needs this epoch's values alone: what an earlier call has counted is lost if the run is resumed.
    """
    good = min(results["metrics/precision"], results["metrics/recall"]) >= GOOD_ENOUGH
    return "stop" if good else None


def on_end(folder: Path, results: Mapping[str, float]) -> None:
    """Write the confusion matrix of the best epoch as shares of each class's objects: confusion/shares.csv."""
    if not PartialState().is_main_process:
        return
    with (folder / "confusion_matrix.csv").open(newline="", encoding="utf-8") as file:
        titles, *rows = csv.reader(file)
    (folder / "confusion").mkdir(exist_ok=True)
    with (folder / "confusion" / "shares.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(titles)
        for name, *counts in rows:
            total = sum(map(int, counts)) or 1
            writer.writerow([name, *(f"{int(count) / total:.3f}" for count in counts)])
