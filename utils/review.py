"""val.py --review: rank contradictions between labels and predictions; their table and pictures.

A score compares the confidence in what contradicts a label with the confidence in the label: confident learning
(Northcutt et al., 2021), object by object, as in ObjectLab (Tkachenko et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from utils.plots.drawing import captioned, draw_boxes

MISSING, SPURIOUS = "missing label", "spurious label"
WRONG_CLASS, POOR_BOX, DUPLICATE = "wrong class", "poor box", "duplicate"
COLUMNS = ("image", "kind", "class", "predicted class", "confidence", "overlap", "box", "rank")
MAX_CONF_THRES = 0.01  # highest --conf-thres at which it means something that no prediction is near
PICTURE_PIXELS = 640  # longer side of a picture, without its caption
MIN_CONFIDENCE = 0.25  # least confidence of the predictions in a picture
GREEN, BLUE, RED, MARK_PIXELS = 2, 1, 0, 4  # colours of `draw_boxes`, and thickness of the contradicting box


class Contradiction(NamedTuple):
    """A contradiction between the labels and the predictions of an image."""

    kind: str
    score: float  # 0 to 1; not of a spurious label, see `ranked`
    label: int | None  # class of the label
    predicted: int | None  # class of the prediction
    confidence: float | None  # of the prediction
    overlap: float | None  # of the prediction and the label, of two labels if one is a duplicate
    box: tuple[float, ...] = ()  # xyxy in pixels of the file: the label's, or a missing label's prediction


class ImageReview(NamedTuple):
    """The contradictions of an image, with the boxes to draw."""

    image: int  # index in the split
    path: str
    found: Sequence[Contradiction]
    supports: Sequence[tuple[int, float]] = ()  # of each label: its class, and the best confidence that agrees with it
    size: tuple[int, int] = (1, 1)  # width and height of the file's image, pixels
    labels: np.ndarray = np.zeros((0, 6))  # xyxy in pixels of the file, 1, class
    predictions: np.ndarray = np.zeros((0, 6))  # xyxy in pixels of the file, confidence, class


def ranked(
    reviews: Iterable[ImageReview], names: Mapping[int, str]
) -> Iterator[tuple[ImageReview, Contradiction, list[str | int]]]:
    """Yield all contradictions in falling score, equal ones by image, each with its row of review.csv (`COLUMNS`).

    The score of a spurious label is the mean support of its class: how reliably the model finds such an object.
    """
    reviews = sorted(reviews, key=lambda review: review.image)
    supports: dict[int, list[float]] = {}
    for label, confidence in (support for review in reviews for support in review.supports):
        supports.setdefault(label, []).append(confidence)
    means = {label: sum(confidences) / len(confidences) for label, confidences in supports.items()}
    found = [(review, one) for review in reviews for one in review.found]
    found.sort(key=lambda row: -(means[row[1].label or 0] if row[1].kind == SPURIOUS else row[1].score))
    for rank, (review, one) in enumerate(found, 1):
        classes = ("" if label is None else names[label] for label in (one.label, one.predicted))
        values = ("" if value is None else f"{value:.6g}" for value in (one.confidence, one.overlap))
        box = " ".join(f"{value:.6g}" for value in one.box)
        yield review, one, [review.path, one.kind, *classes, *values, box, rank]


def draw_review(
    review: ImageReview, found: Contradiction, row: Sequence[str | int], image: np.ndarray, names: Mapping[int, str]
) -> np.ndarray:
    """Draw on an image of any size: labels green, predictions blue, the contradicting box thick red; add its `row`."""
    scale = np.tile(np.divide(image.shape[1::-1], review.size), 2)
    for boxes, colour in ((review.labels, GREEN), (review.predictions[::-1], BLUE)):
        texts = [names[int(label)] + f" {value:.2f}" * (colour == BLUE) for *_, value, label in boxes.tolist()]
        draw_boxes(image, boxes[:, :4] * scale, [colour] * len(boxes), texts)
    if found.box:
        draw_boxes(image, np.array([found.box]) * scale, [RED], [found.kind], MARK_PIXELS)
    cells = [str(cell) for cell in row[1:6] if cell]  # all but image, box and rank
    return captioned(image, [f"{row[-1]}: {', '.join(cells)}", str(row[0])], image.shape[1])
