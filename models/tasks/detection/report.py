"""Tables, documents and examples of a validation's scores. Called by `DetectionMetrics`.

`evidence_of` returns plain values, which a `Summary` carries and a run's state keeps; `documents` and `examples` read
them. The keys are part of the state's format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.tasks.detection.records import ImageRecord
from models.tasks.detection.scores import CURVE_POINTS, ClassScores, SizeScores, confusion_matrix
from utils.files import csv_text
from utils.summary import Box, Example, confusion_text, dense_counts, sparse_counts

Row = Sequence[float]  # of a table of plain numbers


def score_table(
    names: Mapping[int, str], images: int, scores: ClassScores, sizes: Sequence[SizeScores]
) -> tuple[list[str], list[str]]:
    """Return two lines, the table's head and the row of all classes, and a line per class and per object size."""
    row = "{:>22} {:>9} {:>9} {:>10} {:>10} {:>10} {:>10}"
    number = "{:.4f}".format
    means = [number(value) for value in scores.means().values()]
    head = row.format("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")
    overall = row.format("all", images, int(scores.instances.sum()), *means)
    columns = (scores.classes, scores.images, scores.instances, scores.precision, scores.recall, scores.ap)
    details = [
        row.format(names[int(k)][:22], of_class, count, *map(number, (precision, recall, ap[0], ap.mean())))
        for k, of_class, count, precision, recall, ap in zip(*columns, strict=True)
    ]
    for size in sizes:
        span = f"{size.low:g}-{size.high:g} px" if size.high < float("inf") else f"{size.low:g}+ px"
        details.append(row.format(span, images, size.instances, "-", "-", number(size.ap50), number(size.ap)))
    return [head, overall], details


def evidence_of(records: Sequence[ImageRecord], scores: ClassScores, classes: int) -> dict[str, Any]:
    """Return the plain values that documents and examples are made of, the same in whatever order the records come."""
    columns = (scores.precision, scores.recall, scores.ap[:, 0], scores.ap.mean(1))
    counts = (scores.classes, scores.images, scores.instances)
    shown = sorted(((record.image, record.shown) for record in records if record.shown), key=lambda pair: pair[0])
    return {
        "classes": [list(row) for row in zip(*(values.tolist() for values in (*counts, *columns)), strict=True)],
        "confusion": sparse_counts(confusion_matrix(records, classes)),
        "curves": {
            name: torch.from_numpy(values.astype(np.float32)) for name, values in scores.curves._asdict().items()
        },
        "shown": [
            {
                "image": image,
                "path": boxes.path,
                "size": list(boxes.size),
                "labels": boxes.labels.tolist(),
                "predictions": boxes.predictions.tolist(),
            }
            for image, boxes in shown
        ],
    }


def documents(evidence: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return CSV files by name; none if a run that an older version began has no evidence. names: of the classes."""
    if not evidence:
        return {}
    classes, curves = evidence["classes"], evidence["curves"]
    confusion = dense_counts(evidence["confusion"], len(names) + 1)
    by_confidence = _curve_rows(names, classes, curves["precision"], curves["recall"])
    head = ("class", "images", "instances", "precision", "recall", "AP50", "AP50-95")
    return {
        "classes.csv": csv_text(head, _class_rows(names, classes)),
        "confusion_matrix.csv": confusion_text(confusion, [*names, "background"]),
        "curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
        "PR_curve.csv": csv_text(("class", "recall", "precision"), _curve_rows(names, classes, curves["envelope"])),
        "val_boxes.csv": csv_text(
            ("image", "kind", "class", "confidence", "x1", "y1", "x2", "y2"), _box_rows(names, evidence["shown"])
        ),
    }


def examples(evidence: Mapping[str, Any]) -> list[Example]:
    """Return the images that are drawn, with their boxes, in the order of their indices."""
    return [
        Example(
            Path(image["path"]).name,
            image["image"],
            tuple(image["size"]),
            [_normalised(int(label), None, xyxy, image["size"]) for label, *xyxy in image["labels"]],
            [_normalised(int(label), score, xyxy, image["size"]) for *xyxy, score, label in image["predictions"]],
        )
        for image in evidence.get("shown", [])
    ]


def _class_rows(names: Sequence[str], classes: Sequence[Row]) -> Iterator[list[Any]]:
    """Iterate over the rows of classes.csv, one for every class. classes: number, images, labels and scores of those
    that have labels."""
    by_number = {row[0]: row for row in classes}
    for number, name in enumerate(names):
        if number in by_number:
            _, images, instances, *scores = by_number[number]
            yield [name, images, instances, *(f"{score:.9g}" for score in scores)]
        else:
            yield [name, 0, 0, *[""] * 4]


def _curve_rows(names: Sequence[str], classes: Sequence[Row], *curves: Tensor) -> Iterator[list[str]]:
    """Iterate over the rows of a curve's file: class, point and values, for every class that has labels.

    curves: (c, 201) each.
    """
    points = [f"{point:.4g}" for point in CURVE_POINTS]
    for (number, *_), *values in zip(classes, *(curve.tolist() for curve in curves), strict=True):
        for point, *row in zip(points, *values, strict=True):
            yield [names[int(number)], point, *(f"{value:.6g}" for value in row)]


def _box_rows(names: Sequence[str], shown: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Iterate over the rows of val_boxes.csv: labels and predictions of each image, or one row if it has neither."""
    for image in shown:
        for label, *xyxy in image["labels"]:
            yield [image["path"], "label", names[int(label)], "", *(f"{value:.6g}" for value in xyxy)]
        for *xyxy, confidence, label in image["predictions"]:
            row = (f"{value:.6g}" for value in (confidence, *xyxy))
            yield [image["path"], "prediction", names[int(label)], *row]
        if not image["labels"] and not image["predictions"]:
            yield [image["path"], "image", *[""] * 6]


def _normalised(label: int, confidence: float | None, xyxy: Sequence[float], size: Sequence[int]) -> Box:
    """Return a box in pixels of the file as shares of its width and height."""
    (left, top, right, bottom), (width, height) = xyxy, size
    return Box(label, confidence, (left / width, top / height, right / width, bottom / height))
