"""The metrics of keypoints: the mean distance, and the share of correct keypoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import cv2
import numpy as np

from models.tasks.contract import Image, Metrics, Prediction
from utils.batch import Batch, Split
from utils.files import csv_text
from utils.plots.drawing import draw_captioned
from utils.summary import Row, Summary

from .prediction import HeatmapPrediction

METRIC_NAMES = ("distance", "PCK")
NEAR = 0.1  # distance, in units of the image's width and height, up to which a keypoint is correct
MISSED = 1.0  # distance of a keypoint that is not predicted


class ImageRecord(NamedTuple):
    image: int
    distances: list[tuple[int, float]]  # class and distance of each labelled keypoint
    drawn: list[tuple[float, float]] | None  # predicted keypoints, normalised, of an image to draw


class HeatmapMetrics(Metrics):
    def __init__(self, names: Mapping[int, str], drawn: frozenset[int]) -> None:
        self.names, self.drawn = names, drawn

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[ImageRecord]:
        return [self._record(prediction) for prediction in cast(Sequence[HeatmapPrediction], predictions)]

    def _record(self, prediction: HeatmapPrediction) -> ImageRecord:
        points = {
            int(label): (x / prediction.size[0], y / prediction.size[1])
            for x, y, _, label in prediction.points.tolist()
        }
        distances = []
        for label, x, y in prediction.labels.tolist():
            point = points.get(int(label))
            distances.append((int(label), MISSED if point is None else float(np.hypot(point[0] - x, point[1] - y))))
        drawn = list(points.values()) if prediction.image in self.drawn else None
        return ImageRecord(prediction.image, distances, drawn)

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        records = sorted(records, key=lambda record: record.image)
        pairs = [pair for record in records for pair in record.distances]
        distance = sum(value for _, value in pairs) / max(len(pairs), 1)
        near = sum(value < NEAR for _, value in pairs) / max(len(pairs), 1)
        by_class = {name: [value for label, value in pairs if label == number] for number, name in self.names.items()}
        rows = [(name, len(values), sum(values)) for name, values in by_class.items()]
        evidence = {
            "classes": [list(row) for row in rows],
            "drawn": [[record.image, [list(point) for point in record.drawn]] for record in records if record.drawn],
        }
        overall: list[Row] = [("Class", "Points", *METRIC_NAMES), ("all", len(pairs), distance, near)]
        details: list[Row] = [(name, count, total / max(count, 1), "-") for name, count, total in rows]
        metrics = dict(zip(METRIC_NAMES, (distance, near), strict=True))
        return Summary(metrics, near, overall, details, evidence)

    def documents(self, summary: Summary) -> dict[str, str]:
        rows = [(name, count, f"{total:.6g}") for name, count, total in summary.evidence["classes"]]
        return {"points.csv": csv_text(("class", "points", "distance"), rows)}

    def pictures(self, summary: Summary, split: Split, side: int) -> dict[str, Image]:
        images, captions = [], []
        for index, points in summary.evidence["drawn"][:4]:
            image = cv2.resize(split.display_image(index, side), (side, side))
            for x, y in points:
                cv2.circle(image, (int(x * side), int(y * side)), 3, (255, 255, 255))
            images.append(image)
            captions.append(f"image {index}")
        return {"keypoints.jpg": draw_captioned(images, captions)} if images else {}
