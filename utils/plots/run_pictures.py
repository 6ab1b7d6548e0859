"""Draw the pictures of a run folder from its text files.

Called by `python -m utils.plots` (__main__.py), which training starts as a process. Imports no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.errors import UserError, first_line
from utils.files import read_regular
from utils.plots.charts import (
    confidence_figure,
    confusion_figure,
    f1,
    labels_figure,
    mean_curve,
    recall_figure,
    render,
    results_figure,
)
from utils.plots.documents import Documents, points, read_confusion, read_curves, read_labels
from utils.plots.drawing import MAX_GRID_IMAGES, printable, write_picture
from utils.plots.validation_images import ValidationImage, draw_validation_images, read_validation_images
from utils.summary import DRAWN_IMAGES

JPEG_QUALITY = 85
Print = Callable[[str], object]


# Pictures, uint8 (h, w, 3) BGR, or None if the documents contain nothing to draw


def _draw_results(documents: Documents) -> np.ndarray | None:
    columns = documents.results()
    return render(results_figure, columns) if len(columns["epoch"]) else None


def _draw_confusion(documents: Documents, by_share: bool) -> np.ndarray | None:
    counts, names = read_confusion(documents.table("confusion_matrix.csv"))
    by_share = by_share and names[1:] != ["background"]  # the share of a single class is just its recall
    return render(confusion_figure, counts, names, by_share) if names else None


def _draw_confidence(documents: Documents, file: str, metric: str) -> np.ndarray | None:
    """Draw the curves of a metric over the confidence: precision, recall or F1."""
    table = documents.table(file)
    if not table.rows:
        return None
    precision, recall = read_curves(table, "confidence", ("precision", "recall"))
    f1_curves = precision._replace(values=f1(precision.values, recall.values))
    operating_point = int(np.argmax(mean_curve(f1_curves.values)))
    curves = {"precision": precision, "recall": recall, "F1": f1_curves}[metric]
    return render(confidence_figure, metric, curves, operating_point)


def _draw_precision_recall(documents: Documents, file: str, column: str) -> np.ndarray | None:
    """Draw precision over recall, with the AP50 in a column of classes.csv.

    A class without an AP50 gets its mean precision instead.
    """
    table = documents.table(file)
    if not table.rows:
        return None
    (curves,) = read_curves(table, "recall", ["precision"])
    ap50 = np.where(np.isfinite(curves.values), curves.values, 0).mean(1)
    if documents.has("classes.csv"):
        classes = documents.table("classes.csv")
        if column in classes.columns:
            by_class = dict(zip(classes.texts("class"), classes.numbers(column), strict=True))
            exact = np.array([by_class.get(name, math.nan) for name in curves.names])
            ap50 = np.where(np.isfinite(exact), exact, ap50)
    return render(recall_figure, curves, ap50)


def _draw_labels(documents: Documents) -> np.ndarray | None:
    labels = read_labels(documents.table("labels.csv"))
    if not labels.names:
        return None
    if not documents.has("boxes.csv"):
        return render(labels_figure, labels, np.zeros(0, int), np.zeros((0, 4)))
    table = documents.table("boxes.csv")
    number = {name: k for k, name in enumerate(labels.names)}
    classes = np.array([number[name] for name in table.texts("class")], int)
    outlines = [points(text) for text in table.texts("outline")] if "outline" in table.columns else []
    return render(labels_figure, labels, classes, table.numbers("x", "y", "width", "height"), outlines)


@lru_cache(1)  # images are read once for two pictures: labels and predictions
def _validation_images(documents: Documents, batch: int) -> list[ValidationImage]:
    masks = documents.table("val_masks.csv") if documents.has("val_masks.csv") else None
    return read_validation_images(documents.table("val_boxes.csv"), batch, documents.classes(), masks, documents.read)


def _draw_validation_images(documents: Documents, batch: int, kind: str) -> np.ndarray | None:
    images = _validation_images(documents, batch)
    return draw_validation_images(images, kind) if images else None


class Picture(NamedTuple):
    """The text files that a picture needs, and the function that draws it."""

    files: tuple[str, ...]
    draw: Callable[[Documents], np.ndarray | None]


PICTURES: dict[str, Picture] = {
    "results.png": Picture(("results.csv",), _draw_results),
    "confusion_matrix.png": Picture(("confusion_matrix.csv",), partial(_draw_confusion, by_share=True)),
    "confusion_matrix_counts.png": Picture(("confusion_matrix.csv",), partial(_draw_confusion, by_share=False)),
    **{
        f"{prefix}{letter}_curve.png": Picture(
            (f"{prefix}curves.csv",), partial(_draw_confidence, file=f"{prefix}curves.csv", metric=metric)
        )
        for prefix in ("", "mask_")
        for letter, metric in (("P", "precision"), ("R", "recall"), ("F1", "F1"))
    },
    **{
        f"{prefix}PR_curve.png": Picture(
            (f"{prefix}PR_curve.csv",),
            partial(_draw_precision_recall, file=f"{prefix}PR_curve.csv", column=f"{prefix}AP50"),
        )
        for prefix in ("", "mask_")
    },
    "labels.jpg": Picture(("labels.csv",), _draw_labels),
    **{
        f"val_batch{batch}_{suffix}.jpg": Picture(
            ("val_boxes.csv",), partial(_draw_validation_images, batch=batch, kind=kind)
        )
        for batch in range(DRAWN_IMAGES // MAX_GRID_IMAGES)
        for suffix, kind in (("labels", "label"), ("pred", "prediction"))
    },
}


def draw_run(
    folder: Path, names: Sequence[str], print_line: Print, read: Callable[[str], bytes] = read_regular
) -> bool:
    """Draw the pictures of `names` whose text files are in `folder`, and print their names.

    Returns whether there was no warning. Raises `UserError` if no picture can be drawn.

    Args:
        read: returns the content of an image file by its path
    """
    documents = Documents(folder, read)
    possible = [name for name in names if all(map(documents.has, PICTURES[name].files))]
    if not possible:
        files = dict.fromkeys(file for name in names for file in PICTURES[name].files)
        raise UserError(f"{folder} has nothing to draw from; it needs {' or '.join(files)}")
    failed = []
    for name in possible:
        try:
            picture = PICTURES[name].draw(documents)
            if picture is not None:
                write_picture(folder / name, picture, JPEG_QUALITY, compact_png=True)
                print_line(name)
        except Exception as error:  # draw the other pictures
            failed.append(name)
            sources = " and ".join(PICTURES[name].files)
            reason = f"{folder / name} cannot be drawn from {sources} ({type(error).__name__}: {first_line(error)})"
            reason = str(error) if isinstance(error, UserError) else reason
            print(f"warning: {printable(reason)}", file=sys.stderr)
    return not failed
