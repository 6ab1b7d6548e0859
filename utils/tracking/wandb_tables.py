"""Tables and interactive charts of W&B, made of the text files of a run folder. Used by wandb_process.py."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from utils.summary import evenly_spaced

AS_TABLES = {"classes.csv", "operators.csv"}  # shown as they are
MAX_ROWS = 10_000  # W&B draws no more of a table
CURVE_TITLES = {"": "", "mask_": " of masks"}  # by the beginning of the file's name


def charts(wandb: Any, documents: Mapping[str, str]) -> dict[str, Any]:
    """Return what can be logged of CSV files by name, by key: W&B's tables and charts.

    wandb: the package. Files: `AS_TABLES`, confusion_matrix.csv, and with or without `mask_` PR_curve.csv, curves.csv.
    """
    made: dict[str, Any] = {}
    for name in AS_TABLES & set(documents):
        head, *rows = csv.reader(documents[name].splitlines())
        made[f"tables/{name.removesuffix('.csv')}"] = wandb.Table(
            columns=head, data=[[_value(cell) for cell in row] for row in rows]
        )
    for prefix, of in CURVE_TITLES.items():
        if text := documents.get(f"{prefix}PR_curve.csv"):
            points = thinned([(name, float(x), float(y)) for name, x, y in _body(text)])
            key = f"charts/{prefix}PR_curve"
            made[key] = line_chart(wandb, points, f"Precision over recall{of}", "recall", "precision")
        if text := documents.get(f"{prefix}curves.csv"):
            points = thinned(list(f1_rows(_body(text))))
            made[f"charts/{prefix}F1_curve"] = line_chart(wandb, points, f"F1 over confidence{of}", "confidence", "F1")
    if text := documents.get("confusion_matrix.csv"):
        made["charts/confusion_matrix"] = confusion_chart(wandb, text)
    return made


def f1_rows(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, float, float]]:
    """Iterate over class, confidence and F1 of the rows of curves.csv."""
    for name, confidence, precision, recall in rows:
        p, r = float(precision), float(recall)
        yield name, float(confidence), 2 * p * r / (p + r) if p + r else 0.0


def thinned(rows: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return at most `MAX_ROWS` rows, evenly spaced in each class, with four significant digits."""
    by_class: dict[str, list[tuple[str, float, float]]] = {}
    for name, x, y in rows:
        by_class.setdefault(name, []).append((name, float(f"{x:.4g}"), float(f"{y:.4g}")))
    most = max(MAX_ROWS // max(len(by_class), 1), 1)
    return [points[k] for points in by_class.values() for k in evenly_spaced(len(points), most)]


def line_chart(wandb: Any, rows: Sequence[Sequence[Any]], title: str, x: str, y: str) -> Any:
    """Return a chart with a line for each class. rows: class, x, y."""
    table = wandb.Table(columns=["class", x, y], data=[list(row) for row in rows])
    words = {"title": title, "x-axis-title": x, "y-axis-title": y}
    fields = {"x": x, "y": y, "class": "class"}
    return wandb.plot_table("wandb/area-under-curve/v0", table, fields, words)  # of wandb.plot.pr_curve


def confusion_chart(wandb: Any, text: str) -> Any:
    """Return W&B's confusion matrix of confusion_matrix.csv; with many classes its largest counts."""
    head, *rows = csv.reader(text.splitlines())
    cells = [(row[0], name, int(count)) for row in rows for name, count in zip(head[1:], row[1:], strict=True)]
    cells = sorted(cells, key=lambda cell: -cell[2])[:MAX_ROWS] if len(cells) > MAX_ROWS else cells
    table = wandb.Table(columns=["Actual", "Predicted", "nPredictions"], data=[list(cell) for cell in cells])
    fields = {name: name for name in table.columns}
    words = {"title": "Confusion matrix"}
    return wandb.plot_table("wandb/confusion_matrix/v1", table, fields, words)  # of wandb.plot.confusion_matrix


def _body(text: str) -> list[list[str]]:
    """Return the rows of a CSV file without its head."""
    return list(csv.reader(text.splitlines()))[1:]


def _value(cell: str) -> Any:
    """Return a cell as a number, None if it is empty, or as text."""
    try:
        return int(cell) if cell.isdigit() else float(cell)
    except ValueError:
        return cell or None
