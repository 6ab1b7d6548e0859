"""`SegmentationMetrics`: the numbers, tables, documents and examples of a validation, for boxes and for masks.

Made by `SegmentationTask.metrics`; called by val.py and train.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from models.tasks.contract import Prediction
from models.tasks.detection.metrics import DetectionMetrics, detection_evidence
from models.tasks.segmentation.prediction import SegmentationPrediction
from models.tasks.segmentation.records import SegmentationRecord, segmentation_records
from models.tasks.shared.score_tables import (
    CLASS_COLUMNS,
    FITNESS_WEIGHTS,
    ap_by_class,
    class_rows,
    curve_rows,
    score_evidence,
    score_tables,
)
from models.tasks.shared.scores import (
    DETECTION_METRICS,
    join,
    score_classes,
    score_sizes,
)
from utils.batch import Batch, SegmentationBatch
from utils.files import csv_text
from utils.summary import Example, Summary

KINDS = ("B", "M")  # YOLOv5's suffixes for boxes and masks
SEGMENTATION_METRICS = tuple(f"{name}({kind})" for kind in KINDS for name in DETECTION_METRICS)
TITLES = ("Class", "Images", "Labels", "box P", "R", "mAP50", "50-95", "mask P", "R", "mAP50", "50-95")


class SegmentationMetrics(DetectionMetrics):
    """The detector's metrics, for boxes and for masks."""

    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[Any]:
        """Return a `SegmentationRecord` for each image."""
        return segmentation_records(
            cast("Sequence[SegmentationPrediction]", predictions), cast("SegmentationBatch", batch), self.shown
        )

    def summarise(self, records: Sequence[Any]) -> Summary:
        """Return the metrics of a split, tables by class and by object size, and the evidence for `documents`."""
        ordered: list[SegmentationRecord] = sorted(records, key=lambda record: record.boxes.image)
        of_boxes = [record.boxes for record in ordered]
        joined = [join(of_boxes), join([record.masks for record in ordered])]
        boxes, masks = scores = [score_classes(one) for one in joined]
        metrics = dict(zip(SEGMENTATION_METRICS, [*boxes.means().values(), *masks.means().values()], strict=True))
        fitness = sum(weight * metrics[f"{name}({kind})"] for kind in KINDS for name, weight in FITNESS_WEIGHTS.items())
        sizes = [score_sizes(one) for one in joined]
        overall, details = score_tables(TITLES, self.names, len(ordered), scores, sizes)
        outlines = [
            {kind: [points.ravel().tolist() for points in shapes] for kind, shapes in record.outlines._asdict().items()}
            for record in ordered
            if record.outlines
        ]
        evidence = {
            **detection_evidence(of_boxes, boxes, len(self.names)),
            "masks": {**score_evidence(masks), "outlines": outlines},
        }
        by_class = {
            f"{name}({kind})": values
            for kind, one in zip(KINDS, scores, strict=True)
            for name, values in ap_by_class(one, self.names).items()
        }
        headline = {"mAP box": metrics["mAP_0.5:0.95(B)"], "mask": metrics["mAP_0.5:0.95(M)"]}
        return Summary(
            *(metrics, fitness, overall, details, evidence),
            by_class=by_class,
            headline=headline,
            highest_fitness=float(len(KINDS)),
        )

    def documents(self, summary: Summary) -> dict[str, str]:
        """Return the detector's CSV files, with mask columns in classes.csv, and the masks' curves and outlines."""
        documents = super().documents(summary)
        if not documents:
            return {}
        evidence, names = summary.evidence, list(self.names.values())
        classes, masks = evidence["classes"], evidence["masks"]
        curves = masks["curves"]
        by_class = [
            [*of_boxes, *of_masks[3:]]
            for of_boxes, of_masks in zip(class_rows(names, classes), class_rows(names, masks["classes"]), strict=True)
        ]
        by_confidence = curve_rows(names, classes, curves["precision"], curves["recall"])
        by_recall = curve_rows(names, classes, curves["envelope"])
        outlines_head = ("image", "kind", "class", "confidence", "outline")
        return {
            **documents,
            "classes.csv": csv_text((*CLASS_COLUMNS, *(f"mask_{name}" for name in CLASS_COLUMNS[3:])), by_class),
            "mask_curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
            "mask_PR_curve.csv": csv_text(("class", "recall", "precision"), by_recall),
            "val_masks.csv": csv_text(outlines_head, _outline_rows(names, evidence["shown"], masks["outlines"])),
        }

    def examples(self, summary: Summary) -> list[Example]:
        """Return the images to draw, with their boxes and outlines, ordered by index."""
        masks = summary.evidence.get("masks", {"outlines": []})
        return [
            example._replace(
                label_outlines=_shares(outlines["labels"], example.size),
                prediction_outlines=_shares(outlines["predictions"], example.size),
            )
            for example, outlines in zip(super().examples(summary), masks["outlines"], strict=True)
        ]


def _shares(outlines: Sequence[Sequence[int]], size: tuple[int, int]) -> list[tuple[float, ...]]:
    """Convert outlines x y x y ... from pixels of the file to their centres as shares of its width and height."""
    return [tuple((value + 0.5) / size[number % 2] for number, value in enumerate(outline)) for outline in outlines]


def _outline_rows(
    names: Sequence[str], shown: Sequence[Mapping[str, Any]], outlines: Sequence[Mapping[str, Sequence[Sequence[int]]]]
) -> Iterator[list[str]]:
    """Iterate over the rows of val_masks.csv, one for each label and prediction with an outline.

    Args:
        names: class names, in the order of their numbers
        shown: images to draw, see `detection_evidence`
        outlines: for each of these images the outlines of its labels and predictions, x y x y ... in pixels of the file
    """
    for image, of_image in zip(shown, outlines, strict=True):
        for (label, *_), outline in zip(image["labels"], of_image["labels"], strict=True):
            yield [image["path"], "label", names[int(label)], "", " ".join(map(str, outline))]
        for (*_, confidence, label), outline in zip(image["predictions"], of_image["predictions"], strict=True):
            row = [names[int(label)], f"{confidence:.6g}", " ".join(map(str, outline))]
            yield [image["path"], "prediction", *row]
