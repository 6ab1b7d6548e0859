"""AutoAnchor: how anchors fit boxes, how they are computed, and when those of a model are replaced."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from models.heads import auto_anchor
from models.heads.auto_anchor import MIN_BOX_SIDE_PIXELS, SUFFICIENT_RECALL, adapt_anchors, find_anchors, fit
from models.yolo import YoloModel, build_model
from tests.making import tiny_detector

YOLOV5 = np.array([[10, 13], [16, 30], [33, 23], [30, 61], [62, 45], [59, 119], [116, 90], [156, 198], [373, 326.0]])


def tall_boxes(count: int = 300) -> np.ndarray:
    """Return boxes 3 to 9 pixels wide and 100 to 200 high: too slim for most of YOLOv5's anchors."""
    return np.random.default_rng(0).uniform([3, 100], [9, 200], (count, 2))


@pytest.mark.parametrize(
    ("threshold", "recall", "anchors_per_box"),
    [
        # Largest factors to the anchors 10 x 10 and 30 x 30: 1 and 3 of 10 x 10, 4 and 3 of 40 x 10, 10 and 10/3 of
        # 100 x 100.
        (4, 1, 4 / 3),
        (3.2, 2 / 3, 1),
        (2, 1 / 3, 1 / 3),
    ],
)
def test_fit(threshold: float, recall: float, anchors_per_box: float) -> None:
    sides = np.array([[10, 10], [40, 10], [100, 100.0]])
    result = fit(sides, np.array([[10, 10], [30, 30.0]]), threshold)
    assert result == pytest.approx((recall, anchors_per_box))


def test_fit_needs_less_than_the_threshold() -> None:
    assert fit(np.array([[8.0, 8]]), np.array([[2.0, 8]]), 4).recall == 0
    assert fit(np.array([[2.0, 8]]), np.array([[8.0, 8]]), 4).recall == 0


def test_anchors_are_reproducible_and_sorted_by_area() -> None:
    sides = np.random.default_rng(1).uniform(4, 200, (200, 2))
    anchors = find_anchors(sides, 9, 4.0)
    assert np.array_equal(anchors, find_anchors(sides, 9, 4.0))
    assert anchors.shape == (9, 2)
    assert (np.diff(anchors.prod(1)) >= 0).all()
    assert (anchors >= MIN_BOX_SIDE_PIXELS).all()


def test_new_anchors_recall_unusual_boxes() -> None:
    sides = tall_boxes()
    before = fit(sides, YOLOV5, 4.0)
    assert before.recall < 0.8
    assert fit(sides, find_anchors(sides, 9, 4.0), 4.0).recall == 1


def test_mutation_improves_the_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = np.random.default_rng(1).uniform(4, 90, (200, 2))

    def similarity() -> float:
        """Return the mean similarity of a box and its best anchor, by the worse side; 1 if equal."""
        result = find_anchors(sides, 2, 4.0)
        worse = [[min(min(w / a, a / w), min(h / b, b / h)) for a, b in result] for w, h in sides]
        return float(np.max(worse, axis=1).mean())

    mutated = similarity()
    monkeypatch.setattr(auto_anchor, "MUTATION_ROUNDS", 0)
    assert mutated > similarity() + 0.005


@pytest.mark.parametrize("sides", [[[10, 20]], [[10, 20], [40, 30]], [[16, 16]] * 50])
def test_fewer_kinds_of_boxes_than_anchors(sides: list[list[float]]) -> None:
    boxes = np.array(sides, dtype=float)
    result = find_anchors(boxes, 9, 4.0)
    assert result.shape == (9, 2)
    assert np.isfinite(result).all()
    assert fit(boxes, result, 4.0).recall == 1


def test_boxes_of_a_pixel_are_ignored() -> None:
    many = np.concatenate((np.ones((500, 2)), np.full((20, 2), 40.0)))
    result = find_anchors(many, 2, 4.0)
    assert fit(many[500:], result, 1.5).anchors_per_box == 2


# The anchors of a model


def pixels(model: YoloModel) -> np.ndarray:
    return (model.head.anchors * model.head.stride.view(-1, 1, 1)).numpy()


def test_anchors_that_fit_stay() -> None:
    model = build_model(tiny_detector())
    before = model.head.anchors.clone()
    message = adapt_anchors(model.head, model.yaml, np.array([[4, 4], [30, 20.0]]), 4.0)
    assert "100.0% of the boxes match an anchor" in message
    assert "new anchors" not in message
    assert torch.equal(model.head.anchors, before)
    assert model.yaml["anchors"] == tiny_detector()["anchors"]


def test_anchors_that_do_not_fit_are_replaced() -> None:
    model = build_model(tiny_detector())
    sides = tall_boxes()
    assert fit(sides, pixels(model).reshape(-1, 2), 4.0).recall < SUFFICIENT_RECALL
    message = adapt_anchors(model.head, model.yaml, sides, 4.0)
    assert "new anchors: 100.0%" in message
    assert fit(sides, pixels(model).reshape(-1, 2), 4.0).recall == 1
    areas = pixels(model).prod(2).flatten()
    assert (np.diff(areas) >= 0).all()  # small ones on the fine level
    np.testing.assert_allclose(np.array(model.yaml["anchors"]), pixels(model).reshape(2, -1), rtol=1e-6)


def test_a_model_rebuilt_from_its_yaml_has_the_new_anchors() -> None:
    model = build_model(tiny_detector())
    adapt_anchors(model.head, model.yaml, tall_boxes(), 4.0)
    again = build_model(model.yaml)
    assert torch.equal(again.head.anchors, model.head.anchors)
    assert torch.equal(again.head.stride, model.head.stride)


def test_levels_in_falling_order_of_stride() -> None:
    """A YAML may list the coarse level first; small anchors belong to small strides, also in a rebuilt model."""
    backwards = {**tiny_detector(), "head": [[[2, 1], 1, "Detect", ["nc", "anchors"]]]}
    model = build_model(backwards)
    assert model.head.stride.tolist() == [8, 4]
    message = adapt_anchors(model.head, model.yaml, np.random.default_rng(0).uniform([1, 20], [3, 200], (300, 2)), 4.0)
    assert "new anchors" in message
    areas = pixels(model).prod(2).mean(1)
    assert areas[0] > areas[1]
    assert torch.equal(build_model(model.yaml).head.anchors, model.head.anchors)


@pytest.mark.parametrize(
    ("sides", "message"),
    [(np.zeros((0, 2)), "no boxes; the anchors are unchanged"), (np.full((20, 2), 0.5), "no better anchors found")],
)
def test_anchors_stay_without_boxes_or_with_tiny_ones(sides: np.ndarray, message: str) -> None:
    model = build_model(tiny_detector())
    before = model.head.anchors.clone()
    assert message in adapt_anchors(model.head, model.yaml, sides, 4.0)
    assert torch.equal(model.head.anchors, before)


def test_anchors_that_are_only_a_number_are_found() -> None:
    model = build_model({**tiny_detector(), "anchors": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no division by anchors of zero
        message = adapt_anchors(model.head, model.yaml, np.random.default_rng(0).uniform(10, 60, (200, 2)), 4.0)
    assert "new anchors" in message
    assert fit(np.full((1, 2), 30.0), pixels(model).reshape(-1, 2), 4.0).recall == 1
