"""`DetectionMetrics`: the numbers, tables, documents and examples of a validation.

Made by `DetectionTask.metrics`; called by val.py and train.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from models.tasks.contract import Metrics, Prediction, Thresholds
from models.tasks.detection.prediction import DetectionPrediction
from models.tasks.detection.records import image_records
from models.tasks.shared.records import ImageRecord, ShownImage
from models.tasks.shared.score_tables import (
    CLASS_COLUMNS,
    FITNESS_WEIGHTS,
    ap_by_class,
    class_rows,
    curve_rows,
    score_evidence,
    score_tables,
)
from models.tasks.shared.scores import ClassScores, confusion_matrix, join, score_classes, score_sizes
from utils.batch import Batch
from utils.files import csv_text
from utils.summary import Box, Example, Summary, confusion_text, dense_counts, sparse_counts

MAX_MAP_CONFIDENCE = 0.01  # highest threshold at which mAP is comparable, see docs/validation.md
TITLES = ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")


class DetectionMetrics(Metrics):
    """Precision, recall and mean average precision.

    Args:
        names: class names, by number
        shown: indices of the images to draw
    """

    def __init__(self, names: Mapping[int, str], shown: frozenset[int] = frozenset()) -> None:
        self.names, self.shown = dict(names), shown

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        """Return a record for each image."""
        boxes = [prediction.rows for prediction in cast("Sequence[DetectionPrediction]", predictions)]
        return image_records(boxes, batch.infos, self.shown)

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """Return the metrics of a split, tables by class and by object size, and the evidence for `documents`."""
        joined = join(records)
        scores = score_classes(joined)
        metrics = scores.means()
        fitness = sum(weight * metrics[name] for name, weight in FITNESS_WEIGHTS.items())
        overall, details = score_tables(TITLES, self.names, len(records), [scores], [score_sizes(joined)])
        evidence = detection_evidence(records, scores, len(self.names))
        headline = {"mAP50": metrics["mAP_0.5"], "mAP": metrics["mAP_0.5:0.95"]}
        by_class = ap_by_class(scores, self.names)
        return Summary(metrics, fitness, overall, details, evidence, by_class=by_class, headline=headline)

    def threshold_warnings(self, thresholds: Thresholds) -> list[str]:
        """Return a warning if `conf_thres` ends the precision-recall curves so early that mAP changes."""
        if thresholds.conf_thres <= MAX_MAP_CONFIDENCE:
            return []
        return [
            f"warning: --conf-thres {thresholds.conf_thres:g} cuts the precision-recall curves, so mAP is not "
            f"comparable with other runs'; give {MAX_MAP_CONFIDENCE:g} or less, such as 0.001, the default"
        ]

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return CSV files: scores and counts by class, curves, and the boxes of the images to draw.

        Returns {} if the summary lacks evidence, as in a run that an older version began.
        """
        evidence, names = summary.evidence, list(self.names.values())
        if not evidence:
            return {}
        classes, curves = evidence["classes"], evidence["curves"]
        confusion = dense_counts(evidence["confusion"], len(names) + 1)
        by_confidence = curve_rows(names, classes, curves["precision"], curves["recall"])
        boxes_head = ["image", "kind", "class", "confidence", "x1", "y1", "x2", "y2"]
        outlined = any(f"{kind}_outlines" in image for image in evidence["shown"] for kind in ("label", "prediction"))
        return {
            "classes.csv": csv_text(CLASS_COLUMNS, class_rows(names, classes)),
            "confusion_matrix.csv": confusion_text(confusion, [*names, "background"]),
            "curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
            "PR_curve.csv": csv_text(("class", "recall", "precision"), curve_rows(names, classes, curves["envelope"])),
            "val_boxes.csv": csv_text(
                boxes_head + ["outline"] * outlined, _box_rows(names, evidence["shown"], outlined)
            ),
        }

    def examples(self, summary: Summary) -> list[Example]:
        """Return the images to draw, with their boxes, ordered by index."""
        return [
            Example(
                Path(image["path"]).name,
                image["image"],
                tuple(image["size"]),
                [
                    _normalised(int(label), None, xyxy, outline, image["size"])
                    for (label, *xyxy), outline in _with_outlines(image, "label")
                ],
                [
                    _normalised(int(label), score, xyxy, outline, image["size"])
                    for (*xyxy, score, label), outline in _with_outlines(image, "prediction")
                ],
            )
            for image in summary.evidence.get("shown", [])
        ]


def detection_evidence(records: Sequence[ImageRecord], scores: ClassScores, classes: int) -> dict[str, Any]:
    """Return the plain values that documents and examples are made from, regardless of the order of the records.

    The keys are part of the format of a run's saved state.
    """
    shown = sorted(((record.image, record.shown) for record in records if record.shown), key=lambda pair: pair[0])
    return {
        **score_evidence(scores),
        "confusion": sparse_counts(confusion_matrix(records, classes)),
        "shown": [
            {
                "image": image,
                "path": boxes.path,
                "size": list(boxes.size),
                "labels": boxes.labels.tolist(),
                "predictions": boxes.predictions.tolist(),
                **_plain_outlines(boxes),
            }
            for image, boxes in shown
        ],
    }


def _plain_outlines(shown: ShownImage) -> dict[str, list[list[float]]]:
    """Return the outlines of labels and of predictions, if there are any, as lists x y x y ..."""
    of_kinds = {"label_outlines": shown.label_outlines, "prediction_outlines": shown.prediction_outlines}
    return {kind: [points.ravel().tolist() for points in outlines] for kind, outlines in of_kinds.items() if outlines}


def _with_outlines(image: Mapping[str, Any], kind: str) -> Iterator[tuple[list[float], list[float]]]:
    """Iterate over an image's labels or predictions, each with its outline x y x y ..., empty if there is none."""
    rows = image[f"{kind}s"]
    return zip(rows, image.get(f"{kind}_outlines") or [[]] * len(rows), strict=True)


def _box_rows(names: Sequence[str], shown: Sequence[Mapping[str, Any]], outlined: bool) -> Iterator[list[str]]:
    """Iterate over the rows of val_boxes.csv: labels and predictions of each image, or one row if it has neither.

    Args:
        names: class names, in the order of their numbers
        shown: images to draw, see `detection_evidence`
        outlined: whether the rows end with a column of outlines
    """
    for image in shown:
        for kind in ("label", "prediction"):
            for row, outline in _with_outlines(image, kind):
                label, *numbers = row if kind == "label" else (row[5], row[4], *row[:4])
                cells = [image["path"], kind, names[int(label)], *[""] * (kind == "label")]
                cells += [f"{value:.6g}" for value in numbers]
                yield cells + [" ".join(f"{value:.6g}" for value in outline)] * outlined
        if not image["labels"] and not image["predictions"]:
            yield [image["path"], "image", *[""] * (6 + outlined)]


def _normalised(
    label: int, confidence: float | None, xyxy: Sequence[float], outline: Sequence[float], size: Sequence[int]
) -> Box:
    """Convert a box and its outline from pixels of the file to shares of the file's width and height."""
    left, top, right, bottom = (value / size[number % 2] for number, value in enumerate(xyxy))
    points = tuple(value / size[number % 2] for number, value in enumerate(outline))
    return Box(label, confidence, (left, top, right, bottom), points)
