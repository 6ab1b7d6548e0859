"""`DetectionMetrics`: from predictions to the numbers, tables and documents of a validation.

Made by `DetectionTask.metrics`; called by val.py and train.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from models.tasks.contract import Batch, Metrics, Prediction
from models.tasks.detection.prediction import DetectionPrediction
from models.tasks.detection.records import ImageRecord, image_records
from models.tasks.detection.report import documents, evidence_of, examples, score_table
from models.tasks.detection.scores import join, score_classes, score_sizes
from utils.summary import Example, Summary

DETECTION_METRICS = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
FITNESS_WEIGHTS = {"mAP50": 0.1, "mAP50-95": 0.9}  # YOLOv5's


class DetectionMetrics(Metrics):
    """Precision, recall and mean average precision. names: of the classes. shown: indices of the images to be drawn."""

    def __init__(self, names: Mapping[int, str], shown: frozenset[int] = frozenset()) -> None:
        self.names, self.shown = dict(names), shown

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        """Return a record for each image."""
        boxes = [prediction.boxes for prediction in cast("Sequence[DetectionPrediction]", predictions)]
        return image_records(boxes, batch.infos, self.shown)

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """Return the metrics of a whole split, a table by class and by object size, and the values of the documents."""
        joined = join(records)
        scores = score_classes(joined)
        means = scores.means()
        metrics = dict(zip(DETECTION_METRICS, means.values(), strict=True))
        fitness = sum(weight * means[name] for name, weight in FITNESS_WEIGHTS.items())
        overall, details = score_table(self.names, len(records), scores, score_sizes(joined))
        by_class = {
            name: {self.names[int(k)]: float(value) for k, value in zip(scores.classes, values, strict=True)}
            for name, values in (("AP50", scores.ap[:, 0]), ("AP", scores.ap.mean(1)))
        }
        evidence = evidence_of(records, scores, len(self.names))
        return Summary(metrics, fitness, overall, details, evidence, by_class=by_class)

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return scores and counts by class, curves, and the boxes of the images that are drawn, as CSV."""
        return documents(summary.evidence, list(self.names.values()))

    def examples(self, summary: Summary) -> list[Example]:
        """Return the images that are drawn, with their boxes, in the order of their indices."""
        return examples(summary.evidence)
