"""Make rows of tables and files, and the evidence behind them, from the scores of classes and of object sizes.

Called by the metrics of tasks whose predictions are matched to labels by an overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.tasks.shared.scores import CLASS_METRICS, CURVE_POINTS, ClassScores, SizeScores
from utils.summary import Row

FITNESS_WEIGHTS = {"mAP_0.5": 0.1, "mAP_0.5:0.95": 0.9}  # YOLOv5's weights
CLASS_COLUMNS = ("class", "images", "instances", "precision", "recall", "AP50", "AP50-95")  # columns of classes.csv
SIZES_TITLE = "  by size, the square root of an object's area in pixels of the image's file:"


def score_tables(
    titles: Row,
    names: Mapping[int, str],
    images: int,
    scores: Sequence[ClassScores],
    sizes: Sequence[Sequence[SizeScores]],
) -> tuple[list[Row | str], list[Row | str]]:
    """Return the table in two parts: titles and the row for all classes; rows per class and per object size.

    Args:
        titles: titles of the columns: name, images, labels, and four scores for each set
        names: class names, by number
        images: number of images
        scores: scores by class, a set for boxes or one each for boxes and masks
        sizes: scores by object size of each set
    """
    means = [value for one in scores for value in one.means().values()]
    overall: Row = ("all", images, int(scores[0].instances.sum()), *means)
    details: list[Row | str] = []
    for first, *others in zip(*map(class_values, scores), strict=True):
        details.append((names[first[0]], *first[1:], *(score for values in others for score in values[3:])))
    if sizes[0]:
        details.append(SIZES_TITLE)
    for of_sets in zip(*sizes, strict=True):
        values = [value for one in of_sets for value in ("-", "-", one.ap50, one.ap)]
        details.append((of_sets[0].title, images, of_sets[0].instances, *values))
    return [titles, overall], details


def ap_by_class(scores: ClassScores, names: Mapping[int, str]) -> dict[str, dict[str, float]]:
    """Return AP50 and AP of each class that has labels, by class name."""
    return {
        name: {names[int(k)]: float(value) for k, value in zip(scores.classes, values, strict=True)}
        for name, values in zip(CLASS_METRICS, (scores.ap[:, 0], scores.ap.mean(1)), strict=True)
    }


def class_values(scores: ClassScores) -> list[list[Any]]:
    """Return the number, images, labels and scores of each class that has labels, as plain values."""
    columns = (scores.precision, scores.recall, scores.ap[:, 0], scores.ap.mean(1))
    counts = (scores.classes, scores.images, scores.instances)
    return [list(row) for row in zip(*(values.tolist() for values in (*counts, *columns)), strict=True)]


def score_evidence(scores: ClassScores) -> dict[str, Any]:
    """Return the input of `class_rows` and the curves, as plain values and tensors."""
    return {
        "classes": class_values(scores),
        "curves": {
            name: torch.from_numpy(values.astype(np.float32)) for name, values in scores.curves._asdict().items()
        },
    }


def class_rows(names: Sequence[str], classes: Sequence[Sequence[float]]) -> Iterator[list[Any]]:
    """Iterate over the rows of classes.csv, one for every class.

    Args:
        names: class names, in the order of their numbers
        classes: number, images, labels and scores of each class that has labels
    """
    by_number = {row[0]: row for row in classes}
    for number, name in enumerate(names):
        if number in by_number:
            _, images, instances, *scores = by_number[number]
            yield [name, images, instances, *(f"{score:.9g}" for score in scores)]
        else:
            yield [name, 0, 0, *[""] * 4]


def curve_rows(names: Sequence[str], classes: Sequence[Sequence[float]], *curves: Tensor) -> Iterator[list[str]]:
    """Iterate over the rows of a curve's file: class, point and values, for every class that has labels.

    Args:
        names: class names, in the order of their numbers
        classes: rows that begin with the number of a class that has labels
        curves: values (c, 201) of each class at `CURVE_POINTS`
    """
    points = [f"{point:.4g}" for point in CURVE_POINTS]
    for (number, *_), *values in zip(classes, *(curve.tolist() for curve in curves), strict=True):
        for point, *row in zip(points, *values, strict=True):
            yield [names[int(number)], point, *(f"{value:.6g}" for value in row)]
