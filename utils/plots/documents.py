"""Read the text files of a run folder, from which charts and pictures are drawn. Called by the modules of utils/plots.

Imports no torch. A file that differs from what this program writes raises one of `READ_ERRORS`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.files import read_regular
from utils.plots.charts import Columns, Curves, Labels


class Table:
    """A CSV file: its header, and rows of the same length."""

    def __init__(self, path: Path) -> None:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            self.head, *self.rows = [row for row in csv.reader(file) if row]
        self.columns = [name.strip() for name in self.head]  # YOLOv5 pads the names with spaces
        for number, row in enumerate(self.rows, 2):
            if len(row) != len(self.head):
                raise ValueError(f"{len(row)} cells in row {number}, but {len(self.head)} in the header")

    def texts(self, column: str) -> list[str]:
        """Return the cells of a column."""
        if column not in self.columns:
            raise ValueError(f"no column {column}")
        index = self.columns.index(column)
        return [row[index] for row in self.rows]

    def numbers(self, *columns: str) -> np.ndarray:
        """Return columns as numbers, (n,) for one and (n, columns) for several; nan for an empty cell."""
        values = [[float(cell.strip() or "nan") for cell in self.texts(column)] for column in columns]
        return np.array(values[0] if len(columns) == 1 else values).T


class Documents:
    """The text files of a run folder, each read once. Raises `UserError` if `folder` is not a folder.

    Args:
        read: returns the content of an image file by the path in a text file
    """

    def __init__(self, folder: Path, read: Callable[[str], bytes] = read_regular) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give a run folder such as runs/train/exp")
        self.folder, self.read = folder, read
        self.table = cache(lambda name: Table(folder / name))

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        return (self.folder / name).is_file()

    def classes(self) -> list[str]:
        """Return the names of all classes in order; empty if there is no classes.csv."""
        return self.table("classes.csv").texts("class") if self.has("classes.csv") else []

    def results(self) -> Columns:
        """Return the columns of results.csv, with epochs counted from 1."""
        table = self.table("results.csv")
        return {"epoch": table.numbers("epoch") + 1, **{name: table.numbers(name) for name in table.columns[1:]}}


def points(text: str) -> np.ndarray:
    """Return the points (p, 2) in the cell of an outline, `x y x y ...`; no points if the cell is empty."""
    return np.array(text.split(), float).reshape(-1, 2)


def read_confusion(table: Table) -> tuple[np.ndarray, list[str]]:
    """Return the counts of confusion_matrix.csv by true and predicted class, (c, c), and the classes."""
    names = table.head[1:]
    counts = np.array([[int(cell) for cell in row[1:]] for row in table.rows], np.int64)
    return counts.reshape(len(names), len(names)), names


def read_curves(table: Table, over: str, columns: Sequence[str]) -> list[Curves]:
    """Return the curves of all classes over the column `over`, for each of `columns`.

    All classes share the values of `over`, which rise within a class.
    """
    classes, x = np.array(table.texts("class")), table.numbers(over)
    # `over` also starts again between two classes of the same name.
    starts = np.flatnonzero(np.append(True, (classes[1:] != classes[:-1]) | (x[1:] < x[:-1])))
    x = x.reshape(len(starts), -1)[0]
    values = [table.numbers(name).reshape(len(starts), len(x)) for name in columns]
    return [Curves(classes[starts].tolist(), x, of_column) for of_column in values]


def read_labels(table: Table) -> Labels:
    """Return the number of labels of each class in each split from labels.csv."""
    splits, names = (list(dict.fromkeys(table.texts(column))) for column in ("split", "class"))
    counts = np.zeros((len(splits), len(names)))
    for split, name, count in zip(table.texts("split"), table.texts("class"), table.numbers("instances"), strict=True):
        counts[splits.index(split), names.index(name)] += count
    return Labels(names, splits, counts)
