"""Which classes of the data the weights know."""

from __future__ import annotations

import pytest

from models.loading import known_share
from models.weights import Weights, same_names
from models.yolo import build_model

NAMES = {0: "person", 1: "Traffic light ", 2: "dog", 3: "dog"}


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({0: "dog", 1: "cell", 2: "PERSON"}, {0: 2, 2: 0}),  # the first of two with one name
        ({0: "traffic light"}, {0: 1}),
        ({0: "cell"}, {}),
        ({5: "person", 7: "person"}, {5: 0, 7: 0}),
    ],
)
def test_same_names(new: dict[int, str], expected: dict[int, int]) -> None:
    assert same_names(NAMES, new) == expected


def test_known_share() -> None:
    model, other = build_model("yolov5n.yaml", nc=4), build_model("yolov5s.yaml", nc=4)
    weights = Weights(model.state_dict(), None, NAMES, "detect", {}, "lockstep")
    assert known_share(model, weights, {0: "dog", 1: "cell"}) == 0.5
    assert known_share(model, weights, NAMES) == 1
    assert known_share(build_model("yolov5n.yaml", nc=2), weights, {0: "cell"}) == 0
    assert known_share(other, weights, NAMES) is None
