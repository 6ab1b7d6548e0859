"""What an evaluation found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from utils.files import csv_text

SHOWN = 48  # validation images that are drawn


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
    by_class: dict[str, dict[str, float]] = field(default_factory=dict)  # metric -> class -> value, where it has labels


class Box(NamedTuple):
    """A box of an image that is shown."""

    label: int  # class
    confidence: float | None  # of a label none
    xyxy: tuple[float, float, float, float]  # corners, as shares of the image's width and height


class Example(NamedTuple):
    """An image of a split with what is there and what was found."""

    name: str  # of the file
    image: int  # its index in the split
    size: tuple[int, int]  # width and height of the file's image, pixels
    truth: list[Box]
    found: list[Box]  # the most confident first


def evenly(images: int, count: int) -> list[int]:
    """`count` evenly spaced indices below `images`, rising, or all where there are fewer; always the same."""
    return [k * images // count for k in range(count)] if count < images else list(range(images))


def cells(matrix: np.ndarray) -> list[list[int]]:
    """Row, column and count of whatever is not 0 in a matrix of counts: `dense` makes it again."""
    places = np.argwhere(matrix)
    return np.column_stack((places, matrix[tuple(places.T)])).tolist()


def dense(found: Sequence[Sequence[int]], side: int) -> np.ndarray:
    """The counts, int64 (side, side), of which `found` are the `cells`."""
    matrix = np.zeros((side, side), np.int64)
    for row, column, count in found:
        matrix[row, column] = count
    return matrix


def confusion_text(matrix: np.ndarray, names: Sequence[str]) -> str:
    """confusion_matrix.csv: counts by true class, a row each, and predicted class; `names` of both."""
    rows = ((name, *row) for name, row in zip(names, matrix.tolist(), strict=True))
    return csv_text(("true \\ predicted", *names), rows)
