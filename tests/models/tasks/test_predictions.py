"""The detections of one image in all their forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.tasks.metrics import DetectionMetrics
from tests.making import CLASS_NAMES, grey_batch, image_info
from tests.models.tasks.batches import labels, predictions
from utils.plots.drawing import Style


def test_label_rows() -> None:
    infos = (image_info(size=(100, 200)), image_info(size=(30, 30)), image_info())
    boxes = [
        torch.tensor([[10, 20, 30, 60, 0.5, 2], [0, 0, 100, 200, 0.25, 0]]),
        torch.tensor([[0, 0, 10, 20, 0.875, 1.0]]),
        torch.zeros(0, 6),
    ]
    predicted = predictions(boxes, infos)
    assert [one.label_rows(False) for one in predicted] == [
        ["2 0.2 0.2 0.2 0.2", "0 0.5 0.5 1 1"],
        ["1 0.166667 0.333333 0.333333 0.666667"],
        [],
    ]
    assert predicted[0].label_rows(True) == ["2 0.2 0.2 0.2 0.2 0.5", "0 0.5 0.5 1 1 0.25"]
    assert predicted[0].label_rows(True, corners=True) == ["2 10 20 30 60 0.5", "0 0 0 100 200 0.25"]


def test_with_labels() -> None:
    """Detections that overlap a label of their class by more than the threshold are dropped.

    The label is 20, 20, 60, 60.
    """
    infos = (image_info(size=(100, 200), rows=labels((1, 0.4, 0.2, 0.4, 0.2))), image_info())
    boxes = torch.tensor(
        [
            [20, 20, 60, 60, 0.9, 1],
            [20, 20, 60, 60, 0.8, 0],  # another class
            [20, 20, 60, 44, 0.7, 1],  # IoU 0.6
            [20, 20, 60, 48, 0.6, 1],  # IoU 0.7
            [0, 0, 10, 20, 0.5, 1],
        ]
    ).double()
    predicted = predictions([boxes, boxes[-1:]], infos)
    first, second = (one.with_labels().label_rows(True) for one in predicted)
    assert first == [
        "1 0.4 0.2 0.4 0.2 1",
        "0 0.4 0.2 0.4 0.2 0.8",
        "1 0.4 0.16 0.4 0.12 0.7",
        "1 0.05 0.05 0.1 0.1 0.5",
    ]
    assert second == ["1 0.05 0.05 0.1 0.1 0.5"]
    none = predictions([boxes[:0]] * 2, infos)
    assert [one.with_labels().label_rows(False) for one in none] == [["1 0.4 0.2 0.4 0.2"], []]
    records = DetectionMetrics(CLASS_NAMES).update(predicted, grey_batch(*infos))
    assert len(records[0].confidence) == 5  # metrics do not see the labels


def test_coco_rows_are_in_pixels_of_the_file() -> None:
    boxes = [torch.tensor([[1, 2, 3, 4, 0.5, 2.0]]), torch.zeros(0, 6)]
    infos = [image_info(image=3, path="/data/b.jpg"), image_info(image=1)]
    first, second = (one.coco_rows() for one in predictions(boxes, infos))
    assert (first.image, first.path, first.rows.tolist()) == (3, "/data/b.jpg", [[1, 2, 3, 4, 0.5, 2]])
    assert (second.image, second.rows.shape) == (1, (0, 6))


def test_array_items_and_description() -> None:
    boxes = torch.tensor([[1, 2, 3, 4, 0.75, 2], [5, 6, 7, 8, 0.5, 0], [1, 1, 2, 2, 0.25, 2]]).double()
    predicted, nothing = predictions([boxes, boxes[:0]], [image_info(), image_info()])
    assert predicted.array.dtype == np.float32
    assert predicted.array.tolist() == boxes.tolist()
    assert nothing.array.shape == (0, 6)
    assert predicted.items == [("bar", 0.75), ("disc", 0.5), ("bar", 0.25)]
    assert predicted.describe() == "1 disc, 2 bars"
    assert (nothing.items, nothing.describe()) == ([], "nothing")


def test_crops() -> None:
    image = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    boxes = torch.tensor([[2.5, 3.5, 10, 8, 0.75, 1], [5, 5, 5, 5, 0.5, 0]]).double()
    (predicted,) = predictions([boxes], [image_info()])
    ((name, crop),) = predicted.crops(image)  # the second box has no pixels
    assert name == "traffic light"
    assert np.array_equal(crop, image[3:8, 2:10])


@pytest.mark.parametrize("names", [True, False])
def test_drawing_copies_the_image_and_puts_the_most_confident_on_top(names: bool) -> None:
    image = np.zeros((100, 100, 3), np.uint8)
    boxes = torch.tensor([[20, 40, 80, 80, 0.75, 1], [20, 40, 80, 80, 0.5, 0]]).double()
    both, first = predictions([boxes, boxes[:1]], [image_info(), image_info()])
    style = Style(2, names, True)
    drawn = both.draw(image, style)
    assert not image.any()
    assert (drawn[80, 50] == first.draw(image, style)[80, 50]).all()
    assert drawn[80, 50].any()
