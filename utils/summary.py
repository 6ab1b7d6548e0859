"""What an evaluation found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Metrics by their column of results.csv, the one number that says what is best, and the table as lines of text."""

    metrics: dict[str, float]
    fitness: float
    overall: list[str]  # the table's head and its row of all classes
    details: list[str]  # a row per class, and per whatever else the task tells apart
    evidence: dict[str, Any] = field(default_factory=dict)  # plain values, of which the task makes pictures and tables
    losses: dict[str, float] = field(default_factory=dict)  # mean of each loss term over the batches
    rate: float = 0.0  # images per second
