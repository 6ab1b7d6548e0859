"""AutoAnchor: how anchors fit boxes, how they are computed, and when those of a model are replaced."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from models.heads import auto_anchor
from models.heads.auto_anchor import MIN_BOX_SIDE_PIXELS, adapt_anchors, find_anchors, fit
from models.yolo import YoloModel, build_model
from tests.making import tiny_detector


@pytest.mark.parametrize(
    ("threshold", "recall", "anchors_per_box"),
    [
        # Largest factors to the anchors 10 x 10 and 30 x 30: 1 and 3 of 10 x 10, 4 and 3 of 40 x 10, 10 and 10/3 of
        # 100 x 100. A factor that equals the threshold is too large.
        (4, 1, 4 / 3),
        (3.2, 2 / 3, 1),
        (3, 1 / 3, 1 / 3),
    ],
)
def test_fit(threshold: float, recall: float, anchors_per_box: float) -> None:
    sides = np.array([[10, 10], [40, 10], [100, 100.0]])
    result = fit(sides, np.array([[10, 10], [30, 30.0]]), threshold)
    assert result == pytest.approx((recall, anchors_per_box))


def test_anchors_are_reproducible_sorted_and_improved_by_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = np.random.default_rng(1).uniform(4, 90, (200, 2))
    anchors = find_anchors(sides, 9, 4.0)
    assert np.array_equal(anchors, find_anchors(sides, 9, 4.0))
    assert anchors.shape == (9, 2)
    assert (np.diff(anchors.prod(1)) >= 0).all()
    assert (anchors >= MIN_BOX_SIDE_PIXELS).all()

    similarities = []
    for rounds in (1000, 0):
        monkeypatch.setattr(auto_anchor, "MUTATION_ROUNDS", rounds)
        ratio = sides[:, None] / find_anchors(sides, 2, 4.0)
        similarities.append(np.minimum(ratio, 1 / ratio).min(2).max(1).mean())  # of a box and its best anchor
    assert similarities[0] > similarities[1] + 0.005


@pytest.mark.parametrize("sides", [[[10, 20]], [[10, 20], [40, 30]], [[16, 16]] * 50])
def test_fewer_kinds_of_boxes_than_anchors(sides: list[list[float]]) -> None:
    boxes = np.array(sides, dtype=float)
    result = find_anchors(boxes, 9, 4.0)
    assert np.isfinite(result).all()
    assert fit(boxes, result, 4.0)[0] == 1


def test_boxes_of_a_pixel_are_ignored() -> None:
    many = np.concatenate((np.ones((500, 2)), np.full((20, 2), 40.0)))
    assert fit(many[500:], find_anchors(many, 2, 4.0), 1.5)[1] == 2


def pixels(model: YoloModel) -> np.ndarray:
    return (model.head.anchors * model.head.stride.view(-1, 1, 1)).numpy()


@pytest.mark.parametrize("sides", [[[4, 4], [30, 20.0]], np.zeros((0, 2)), np.full((20, 2), 0.5)])
def test_anchors_stay_if_they_fit_or_none_are_better(sides: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(tiny_detector())
    before = model.head.anchors.clone()
    adapt_anchors(model.head, model.yaml, np.array(sides), 4.0, 0.98)
    assert "AutoAnchor" in capsys.readouterr().out
    assert torch.equal(model.head.anchors, before)
    assert model.yaml["anchors"] == tiny_detector()["anchors"]


@pytest.mark.parametrize("order", [[1, 2], [2, 1]])  # a YAML may list the coarse level first
def test_anchors_that_do_not_fit_are_replaced(order: list[int]) -> None:
    """Small anchors belong to small strides, also in a model rebuilt from its YAML."""
    model = build_model({**tiny_detector(), "head": [[order, 1, "Detect", ["nc", "anchors"]]]})
    sides = np.random.default_rng(0).uniform([3, 100], [9, 200], (300, 2))  # too slim for most anchors
    assert fit(sides, pixels(model).reshape(-1, 2), 4.0)[0] < 0.8
    adapt_anchors(model.head, model.yaml, sides, 4.0, 0.98)
    assert fit(sides, pixels(model).reshape(-1, 2), 4.0)[0] == 1
    areas = pixels(model).prod(2).mean(1)
    assert (areas[0] < areas[1]) == (order == [1, 2])
    assert torch.equal(build_model(model.yaml).head.anchors, model.head.anchors)


def test_anchors_that_are_only_a_number_are_found() -> None:
    model = build_model({**tiny_detector(), "anchors": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no division by anchors of zero
        adapt_anchors(model.head, model.yaml, np.random.default_rng(0).uniform(10, 60, (200, 2)), 4.0, 0.98)
    assert fit(np.full((1, 2), 30.0), pixels(model).reshape(-1, 2), 4.0)[0] == 1
