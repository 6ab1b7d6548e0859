"""The order of contradictions, and their rows and pictures."""

from __future__ import annotations

import numpy as np

from tests.making import CLASS_NAMES
from utils.plots.drawing import COLOURS
from utils.review import Contradiction, ImageReview, draw_review, ranked

BOX = (10.0, 20.0, 30.5, 40.0)
WRONG, SPURIOUS = Contradiction("wrong class", 0.5, 0, 1, 0.75, 0.9, BOX), ("spurious label", 0.0, 1, None, None, None)
REVIEWS = [
    ImageReview(2, "c.jpg", [WRONG, Contradiction(*SPURIOUS)], [(1, 0.9), (0, 0.0)]),
    ImageReview(0, "a.jpg", [WRONG], [(1, 0.3)]),
]


def test_rows_by_score_then_image() -> None:
    """A spurious label has the mean support of its class as its score, here 0.6."""
    rows = [row for *_, row in ranked(REVIEWS, CLASS_NAMES)]
    assert rows == [row for *_, row in ranked(REVIEWS[::-1], CLASS_NAMES)]
    assert rows == [
        ["c.jpg", "spurious label", CLASS_NAMES[1], "", "", "", "", 1],
        ["a.jpg", "wrong class", CLASS_NAMES[0], CLASS_NAMES[1], "0.75", "0.9", "10 20 30.5 40", 2],
        ["c.jpg", "wrong class", CLASS_NAMES[0], CLASS_NAMES[1], "0.75", "0.9", "10 20 30.5 40", 3],
    ]


def test_the_contradicting_box_is_marked() -> None:
    """In an image of half the file's size."""
    review, found, row = next(ranked([REVIEWS[1]._replace(size=(200, 200))], CLASS_NAMES))
    picture = draw_review(review, found, row, np.zeros((100, 100, 3), np.uint8), CLASS_NAMES)
    assert picture[20, 10].tolist() == COLOURS[0]
    assert picture.shape[0] > 100
