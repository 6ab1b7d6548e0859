"""`ImageRecord`: the contribution of one image to the metrics of a validation, which processes exchange.

A task makes records with `unmatched`, then with `matched_by` and `paired_by` and its own overlap; scores.py reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from models.tasks.shared.metric_matching import Overlaps, match_by_overlap, pair_by_overlap

CONFIDENT_THRESHOLD = 0.25  # lowest confidence of detections that are drawn or in the confusion matrix
NO_PAIRS = np.zeros((0, 2), np.int32)


class ShownImage(NamedTuple):
    """Labels and confident detections of an image to draw, in pixels of the file, see `shown_image`.

    Outlines, (p, 2) each, are drawn instead of boxes, which then surround them.
    """

    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    labels: np.ndarray  # float32 (m, 5): class, xyxy
    predictions: np.ndarray  # float32 (k, 6): xyxy, confidence, class, in falling confidence
    label_outlines: Sequence[np.ndarray] = ()  # one for each row of `labels`, or none
    prediction_outlines: Sequence[np.ndarray] = ()  # one for each row of `predictions`, or none


class ImageRecord(NamedTuple):
    """The contribution of one image with k detections and m labels. A side is sqrt(area) in pixels of the file."""

    image: int  # index in the split; records are sorted by it, so that sums do not depend on the processes
    overlap: np.ndarray  # (k,) overlap with the label that the detection is matched to, 0 without one
    beaten: np.ndarray  # (k,) largest overlap of a more confident detection with that label
    partner_side: np.ndarray  # (k,) side of that label, 0 without one
    confidence: np.ndarray  # (k,)
    label: np.ndarray  # (k,) class of the detection
    side: np.ndarray  # (k,) side of the detection
    true_label: np.ndarray  # (m,) class of the label
    true_side: np.ndarray  # (m,) side of the label
    paired: np.ndarray = NO_PAIRS  # (p, 2) class of a label and of the detection paired with it
    shown: ShownImage | None = None  # None if the image is not drawn


# A record without detections and labels: concatenated with the others, so that there is at least one.
EMPTY_RECORD = ImageRecord._make((-1, *[np.zeros(0, np.float32)] * 8, NO_PAIRS, None))


def unmatched(
    image: int,
    confidence: np.ndarray,
    label: np.ndarray,
    side: np.ndarray,
    true_label: np.ndarray,
    true_side: np.ndarray,
    shown: ShownImage | None = None,
) -> ImageRecord:
    """Return the record of an image before `matched_by` and `paired_by`.

    Args:
        image: index of the image in the split
        confidence: confidence (k,) of each detection, falling
        label: class (k,) of each detection
        side: side (k,) of each detection, see `ImageRecord`
        true_label: class (m,) of each label
        true_side: side (m,) of each label
    """
    nothing = np.zeros(len(label), np.float32)
    return ImageRecord(
        image, nothing, nothing, nothing, confidence, label, side, true_label, true_side, NO_PAIRS, shown
    )


def matched_by(overlaps: Overlaps, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with matches, which precision and recall are computed from.

    Args:
        overlaps: function that returns the overlaps of detections and labels, both numbered over the whole batch
    """
    if not records:
        return []
    joined, image, true_image = _joined(records)
    overlap, partner, beaten = match_by_overlap(overlaps, *_groups(image, joined.label, true_image, joined.true_label))
    partner_side = _partner_side(joined.true_side, overlap, partner)
    counts = [len(record.label) for record in records]
    return [
        record._replace(overlap=one_overlap, beaten=one_beaten, partner_side=side)
        for record, (one_overlap, one_beaten, side) in zip(
            records, _split(counts, overlap, beaten, partner_side), strict=True
        )
    ]


def paired_by(overlaps: Overlaps, records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Return the records of a batch with the pairs of the confusion matrix, regardless of class; see `matched_by`."""
    if not records:
        return []
    joined, image, true_image = _joined(records)
    confident = np.flatnonzero(joined.confidence > CONFIDENT_THRESHOLD)
    detection, label = pair_by_overlap(lambda one, true: overlaps(confident[one], true), image[confident], true_image)
    pairs = np.stack((joined.true_label[label], joined.label[confident[detection]]), 1).astype(np.int32)
    split = _split(np.bincount(true_image[label], minlength=len(records)), pairs)
    return [record._replace(paired=paired) for record, (paired,) in zip(records, split, strict=True)]


def shown_image(
    path: str,
    size: tuple[int, int],
    labels: np.ndarray,
    predictions: np.ndarray,
    label_outlines: Sequence[np.ndarray] = (),
    prediction_outlines: Sequence[np.ndarray] = (),
) -> ShownImage:
    """Return an image's labels and confident predictions for drawing, see `ShownImage`.

    Args:
        labels: class and xyxy of each label, (m, 5)
        predictions: xyxy, confidence and class of all predictions, (k, 6), in any order
        label_outlines: outline of each label, or none
        prediction_outlines: outline of each prediction, or none
    """
    confident = np.flatnonzero(predictions[:, 4] >= CONFIDENT_THRESHOLD)
    order = confident[np.argsort(-predictions[confident, 4], kind="stable")]
    outlines = [prediction_outlines[k] for k in order] if prediction_outlines else ()
    return ShownImage(path, size, labels, predictions[order], label_outlines, outlines)


def _joined(records: Sequence[ImageRecord]) -> tuple[ImageRecord, np.ndarray, np.ndarray]:
    """Return the columns of all records as one record, and the number of each detection's and each label's record."""
    columns = list(zip(EMPTY_RECORD, *records, strict=True))[1:-1]
    numbers = np.arange(len(records))
    image = np.repeat(numbers, [len(record.label) for record in records])
    true_image = np.repeat(numbers, [len(record.true_label) for record in records])
    return ImageRecord._make((-1, *map(np.concatenate, columns), None)), image, true_image


def _groups(
    image: np.ndarray, label: np.ndarray, true_image: np.ndarray, true_label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Number the pairs of an image and a class; return the numbers of detections (k,) and of labels (m,)."""
    classes = int(max(label.max(initial=0), true_label.max(initial=0))) + 1
    return (image * classes + label).astype(np.int64), (true_image * classes + true_label).astype(np.int64)


def _partner_side(true_side: np.ndarray, overlap: np.ndarray, partner: np.ndarray) -> np.ndarray:
    """Return the side (k,) of the label that each detection is matched to, 0 without one."""
    return np.asarray(np.where(overlap > 0, np.append(true_side, np.float32(0))[partner], np.float32(0)))


def _split(counts: Sequence[int] | np.ndarray, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Split columns by image, given the number of rows of each image."""
    return zip(*(np.split(column, np.cumsum(counts)[:-1]) for column in columns), strict=True)
