"""From logits to probabilities, and all forms of a prediction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from models.tasks.classify import (
    ClassificationPostprocess,
    ClassificationPrediction,
    ClassificationView,
)
from models.tasks.contract import Thresholds
from tests.making import CLASS_NAMES
from tests.models.tasks.classification.toy_batches import SEVEN, Identity, make, of_classes
from utils.plots.drawing import Style, draw_text_lines

# Probabilities 1/3 each, and 1/2, 1/4, 1/4.
LOGITS = torch.tensor([[5.0, 5.0, 5.0], [math.log(2), 0.0, 0.0]])


def postprocess(thresholds: Thresholds | None = None) -> ClassificationPostprocess:
    return make().postprocess(Identity(), thresholds or Thresholds())


def probabilities(views: list[ClassificationView], thresholds: Thresholds | None = None) -> Tensor:
    predictions = postprocess(thresholds)(views, of_classes(*range(len(views[0].outputs))))
    return torch.stack([prediction.probabilities for prediction in predictions])


def of(*shares: float, names: dict[int, str] = CLASS_NAMES) -> ClassificationPrediction:
    return ClassificationPrediction(3, "a/b.png", names, torch.tensor(shares))


def test_predictions_are_probabilities() -> None:
    predicted = probabilities([ClassificationView(LOGITS)])
    torch.testing.assert_close(predicted, torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25]]))
    thresholds = Thresholds(conf_thres=0.9, iou_thres=0.9, max_det=1)
    assert torch.equal(
        probabilities([ClassificationView(LOGITS)], thresholds), predicted
    )  # thresholds are for detectors


def test_predictions_name_their_images() -> None:
    first, second = postprocess()([ClassificationView(LOGITS)], of_classes(2, 0))
    assert (first.image, first.path) == (0, "0.png")
    assert (second.image, second.path) == (1, "1.png")


def test_views_are_averaged() -> None:
    """The mean of the probabilities, as [1/3, 1/3, 1/3] and [1/2, 1/4, 1/4]."""
    predicted = probabilities([ClassificationView(LOGITS), ClassificationView(LOGITS.flip(0))])
    torch.testing.assert_close(predicted, torch.tensor([[5 / 12, 7 / 24, 7 / 24]] * 2))


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_probabilities_are_in_fp32(precision: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 0.125, -2.0]], dtype=precision)
    assert torch.equal(probabilities([ClassificationView(logits)]), logits.float().softmax(1))


def test_augmented_views_are_of_the_mirror_image() -> None:
    images = torch.rand(2, 3, 4, 5)
    assert [view.outputs is images for view in postprocess().views(Identity(), images, False)] == [True]
    plain, mirrored = postprocess().views(Identity(), images, True)
    assert plain.outputs is images
    assert torch.equal(mirrored.outputs[..., 0], images[..., -1])


def test_array() -> None:
    array = of(0.125, 0.5, 0.375).array
    assert (array.dtype, array.tolist()) == (np.float32, [0.125, 0.5, 0.375])


def test_label_rows() -> None:
    assert of(0.125, 0.5, 0.375).label_rows(False) == ["traffic light", "bar", "disc"]
    assert of(1 / 3, 1 / 3, 1 / 3).label_rows(False) == ["disc", "traffic light", "bar"]
    assert of(0.125, 0.5, 0.375).label_rows(True) == ["0.5 traffic light", "0.375 bar", "0.125 disc"]
    assert of(1 / 3, 1 / 3, 1 / 3).label_rows(True, corners=True) == [
        "0.333333 disc",
        "0.333333 traffic light",
        "0.333333 bar",
    ]
    assert len(of(*torch.eye(7)[1].tolist(), names=SEVEN).label_rows(True)) == 5


def test_items_and_description() -> None:
    assert of(0.125, 0.5, 0.375).items == [("traffic light", 0.5), ("bar", 0.375), ("disc", 0.125)]
    assert of(0.125, 0.5, 0.375).describe() == "traffic light 0.50, bar 0.38, disc 0.12"


def test_the_crop_is_the_whole_image() -> None:
    image = np.zeros((4, 5, 3), np.uint8)
    ((name, crop),) = of(0.125, 0.5, 0.375).crops(image)
    assert name == "traffic light"
    assert crop is image


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        (Style(2, True, True), ["traffic light 0.50", "bar 0.38", "disc 0.12"]),
        (Style(2, True, False), ["traffic light", "bar", "disc"]),
        (Style(2, False, False), []),
    ],
)
def test_drawn_classes(style: Style, expected: list[str]) -> None:
    image = np.zeros((60, 160, 3), np.uint8)
    picture = of(0.125, 0.5, 0.375).draw(image, style)
    assert np.array_equal(picture, draw_text_lines(image, expected))
    assert not image.any()  # a copy is drawn on
