"""The metrics of a classifier: accuracy, precision and recall by class, and the most confident mistakes.

Made by `ClassificationTask.metrics`; called by val.py and train.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from models.tasks.classification.prediction import TOP_CLASSES, ClassificationPrediction, most_probable
from models.tasks.contract import Image, Metrics, Prediction
from utils.batch import Batch, ClassInfo, Split
from utils.files import csv_text
from utils.plots.drawing import draw_captioned
from utils.summary import Row, Summary, confusion_text, dense_counts, sparse_counts

CLASSIFICATION_METRICS = ("accuracy_top1", "accuracy_top5")
CLASS_METRICS = ("precision", "recall")
DRAWN_MISTAKES = 16
MIN_PICTURE_SIDE_PIXELS = 160  # smallest side that a caption fits below


class ImageRecord(NamedTuple):
    """The contribution of one image to the metrics."""

    image: int  # index in the split
    label: int
    best: tuple[int, ...]  # the most probable classes, at most 5, most probable first
    confidence: float  # probability of the most probable class


class ClassificationMetrics(Metrics):
    """Top-1 and top-5 accuracy, and precision and recall of each class; top-1 accuracy is the fitness."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        """Return a record for each image."""
        infos: Sequence[ClassInfo] = batch.infos
        records = []
        for prediction, info in zip(cast(Sequence[ClassificationPrediction], predictions), infos, strict=True):
            best = most_probable(prediction.probabilities)
            records.append(ImageRecord(info.image, info.label, best, float(prediction.probabilities[best[0]])))
        return records

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """Return the metrics of a split; fitness is the share of images whose most probable class is correct."""
        confusion = np.zeros((len(self.names), len(self.names)), np.int64)
        for record in records:
            confusion[record.label, record.best[0]] += 1
        top1 = float(np.trace(confusion)) / len(records)
        top5 = sum(record.label in record.best for record in records) / len(records)
        mistakes = [record for record in records if record.label != record.best[0]]
        mistakes = sorted(mistakes, key=lambda record: (-record.confidence, record.image))[:DRAWN_MISTAKES]
        drawn = [[record.image, record.label, record.best[0], record.confidence] for record in mistakes]
        evidence = {"confusion": sparse_counts(confusion), "mistakes": drawn}
        precision, recall = precision_and_recall(confusion)
        labelled = {k: name for k, name in self.names.items() if confusion[k].any()}
        by_class = {
            metric: {name: float(values[k]) for k, name in labelled.items()}
            for metric, values in zip(CLASS_METRICS, (precision, recall), strict=True)
        }
        top = {"top-1": top1, "top-5": top5} if len(self.names) > TOP_CLASSES else {"top-1": top1}
        overall, details = self._table(confusion.sum(1), precision, recall, top)
        metrics = dict(zip(CLASSIFICATION_METRICS, (top1, top5), strict=True))
        headline = dict(reversed(top.items()))
        return Summary(metrics, top1, overall, details, evidence, by_class=by_class, headline=headline)

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return classes.csv, with images, precision and recall of each class, and confusion_matrix.csv."""
        confusion = dense_counts(summary.evidence["confusion"], len(self.names))
        precision, recall = precision_and_recall(confusion)
        names = list(self.names.values())
        by_class = [
            (name, int(confusion[k].sum()), f"{precision[k]:.9g}", f"{recall[k]:.9g}") for k, name in enumerate(names)
        ]
        return {
            "classes.csv": csv_text(("class", "images", "precision", "recall"), by_class),
            "confusion_matrix.csv": confusion_text(confusion, names),
        }

    def pictures(self, summary: Summary, split: Split, side: int) -> dict[str, Image]:
        """Return mistakes.jpg, the most confident mistakes, if there are any."""
        mistakes = summary.evidence["mistakes"]
        if not mistakes:
            return {}
        images = [split.shown(image, max(side, MIN_PICTURE_SIDE_PIXELS)) for image, *_ in mistakes]
        captions = [
            f"{self.names[predicted]} {confidence:.2f}\nis {self.names[label]}"
            for _, label, predicted, confidence in mistakes
        ]
        return {"mistakes.jpg": draw_captioned(images, captions)}

    def _table(
        self, images: np.ndarray, precision: np.ndarray, recall: np.ndarray, top: Mapping[str, float]
    ) -> tuple[list[Row | str], list[Row | str]]:
        """Return the table's titles with the row of all classes, and a row per class.

        Args:
            images: number of images of each class, (c,)
            precision: precision of each class, (c,)
            recall: recall of each class, (c,)
            top: accuracies, by title
        """
        titles = ("Class", "Images", "P", "R", *top)
        overall: Row = ("all", int(images.sum()), float(precision.mean()), float(recall.mean()), *top.values())
        columns = (self.names.values(), images.tolist(), precision.tolist(), recall.tolist())
        return [titles, overall], [(*row, *"-" * len(top)) for row in zip(*columns, strict=True)]


def precision_and_recall(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return precision and recall by class, (c,) each, from counts (c, c) by true and predicted class; 0 for 0 / 0."""
    right = np.diag(confusion).astype(np.float64)
    predicted, true = confusion.sum(0), confusion.sum(1)
    return right / np.maximum(predicted, 1), right / np.maximum(true, 1)
