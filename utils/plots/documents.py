"""Read the text files of a run folder, from which charts and pictures are drawn. Called by the modules of utils/plots.

Imports no torch. Errors are `MalformedFile`, which names the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.plots.charts import Columns, Curves, Labels


class MalformedFile(UserError):
    """A text file of a run folder has the wrong content."""


class Table:
    """A CSV file: its header, and rows of the same length. Raises `MalformedFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                rows = [row for row in csv.reader(file) if row]
        except OSError as error:
            raise self.malformed(f"cannot be read: {error.strerror}") from None
        except csv.Error as error:
            raise self.malformed(f"is not a CSV file: {error}") from None
        if not rows:
            raise self.malformed("is empty")
        self.head, self.rows = rows[0], rows[1:]
        self.columns = [name.strip() for name in self.head]  # YOLOv5 pads them with spaces
        for number, row in enumerate(self.rows, 2):
            if len(row) != len(self.head):
                raise self.malformed(f"has {len(row)} cells in row {number}, but {len(self.head)} in its header")

    def malformed(self, problem: str) -> MalformedFile:
        """Return the error for a problem of this file."""
        return MalformedFile(f"{self.path} {problem}")

    def texts(self, column: str) -> list[str]:
        """Return the cells of a column."""
        if column not in self.columns:
            raise self.malformed(f"has no column {column}")
        index = self.columns.index(column)
        return [row[index] for row in self.rows]

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as numbers (n,), nan for an empty cell."""
        return self._parse(column, self.texts(column))

    def finite_numbers(self, columns: Sequence[str], rows: Sequence[int] | None = None) -> np.ndarray:
        """Return columns as finite numbers (n, columns). rows: indices of the rows to read, all by default."""
        indices = range(len(self.rows)) if rows is None else rows
        values = np.empty((len(indices), len(columns)))
        for position, column in enumerate(columns):
            texts = self.texts(column)
            values[:, position] = self._parse(column, [texts[row] for row in indices])
            if not np.isfinite(values[:, position]).all():
                raise self.malformed(f"has a cell in column {column} that is not a finite number")
        return values

    def _parse(self, column: str, cells: Iterable[str]) -> np.ndarray:
        try:
            return np.array([float(cell.strip() or "nan") for cell in cells])
        except ValueError as error:
            raise self.malformed(f"has a cell in column {column} that is not a number ({error})") from None


class Documents:
    """The text files of a run folder, each read once. Raises `UserError` if `folder` is not a folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give a run folder such as runs/train/exp")
        self.folder = folder
        self.table = cache(lambda name: Table(folder / name))

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        return (self.folder / name).is_file()

    def classes(self) -> list[str]:
        """Return the names of all classes in order; empty without a classes.csv."""
        return self.table("classes.csv").texts("class") if self.has("classes.csv") else []

    def results(self) -> Columns:
        """Return the columns of results.csv, with epochs from 1, as people count them."""
        table = self.table("results.csv")
        if table.columns[0] != "epoch":
            raise table.malformed("does not begin with the column epoch")
        return {name: table.numbers(name) + (name == "epoch") for name in table.columns}


def read_confusion(table: Table) -> tuple[np.ndarray, list[str]]:
    """Return the counts of confusion_matrix.csv by true and predicted class, (c, c), and the classes."""
    names = table.head[1:]
    if [row[0] for row in table.rows] != names:
        raise table.malformed("has different names in its first column and in its header")
    try:
        rows = [[int(cell) for cell in row[1:]] for row in table.rows]
        counts = np.array(rows, np.int64).reshape(len(names), len(names))
    except (ValueError, OverflowError):
        raise table.malformed("has a count that is not a whole number") from None
    if (counts < 0).any():
        raise table.malformed("has a count below 0")
    return counts, names


def read_curves(table: Table, over: str, columns: Sequence[str]) -> list[Curves]:
    """Return the curves of all classes, for each of `columns`, over the column `over`, which rises within a class."""
    classes, x = np.array(table.texts("class")), table.finite_numbers([over])[:, 0]
    # Between two classes of the same name `over` starts again.
    starts = np.flatnonzero(np.append(True, (classes[1:] != classes[:-1]) | (x[1:] < x[:-1])))
    length = len(x) // len(starts)
    shape = (len(starts), length)
    if length * len(starts) != len(x) or (x.reshape(shape) != x[:length]).any():
        raise table.malformed(f"has a class whose values of {over} differ from those of the first class")
    return [Curves(classes[starts].tolist(), x[:length], table.numbers(name).reshape(shape)) for name in columns]


def read_labels(table: Table) -> Labels:
    """Return the number of labels of each class in each split, of labels.csv."""
    splits, names = (list(dict.fromkeys(table.texts(column))) for column in ("split", "class"))
    counts = np.zeros((len(splits), len(names)))
    cells = zip(table.texts("split"), table.texts("class"), table.finite_numbers(["instances"])[:, 0], strict=True)
    for split, name, count in cells:
        counts[splits.index(split), names.index(name)] += count
    return Labels(names, splits, counts)
