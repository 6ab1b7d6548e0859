"""What scripts and Python users get of an image's instances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.tasks.masks import OutlineMasks, SegmentationPrediction
from tests.making import CLASS_NAMES
from utils.coco import CocoIds, results
from utils.plots.drawing import COLOURS, Style

SIZE = (100, 80)  # width and height of the file
LEFT = np.array([[0.1, 0.25], [0.4, 0.25], [0.4, 0.75], [0.1, 0.75]], np.float32)  # 10, 20, 40, 60
RIGHT = LEFT + np.array([0.5, 0], np.float32)
SQUARE = Style(thickness=1, names=False)


def prediction(*outlines: np.ndarray, labels: int = 0) -> SegmentationPrediction:
    """Return instances with given outlines; the first ones are labelled too."""
    shapes = [np.concatenate((one.min(0), one.max(0))) if len(one) else np.full(4, 0.5) for one in outlines]
    boxes = [[*(box * (*SIZE, *SIZE)), 0.9 - k / 10, k] for k, box in enumerate(shapes)]
    rows = [[k, *(box[:2] + box[2:]) / 2, *(box[2:] - box[:2])] for k, box in enumerate(shapes[:labels])]
    return SegmentationPrediction(
        *(3, "/data/a.jpg", CLASS_NAMES, SIZE, torch.tensor(boxes).double().reshape(-1, 6)),
        *(np.array(rows, np.float32).reshape(-1, 5), 0.6),
        *(OutlineMasks(outlines, SIZE), outlines[:labels]),
    )


def test_arrays() -> None:
    given = prediction(LEFT, RIGHT)
    assert (given.array.shape, given.scores.dtype, given.classes.tolist()) == ((2, 6), np.float32, [0, 1])
    assert given.scores.tolist() == pytest.approx([0.9, 0.8])
    masks = given.masks
    assert (masks.dtype, masks.shape) == (bool, (2, 80, 100))
    rows, columns = np.nonzero(masks[1])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 60, 60, 90)
    assert [one.tolist() for one in given.outlines] == [LEFT.tolist(), RIGHT.tolist()]
    assert given.describe() == "1 disc, 1 traffic light"


def test_without_instances() -> None:
    given = prediction()
    assert given.masks.shape == (0, 80, 100)
    assert (given.outlines, given.label_rows(True), given.coco_rows().masks) == ([], [], [])


def test_masks_are_drawn_in_the_colour_of_their_class() -> None:
    image = np.full((80, 100, 3), 100, np.uint8)
    drawn = prediction(LEFT, RIGHT).draw(image, SQUARE)
    assert (image == 100).all()
    for (x, y), label in (((25, 40), 0), ((75, 40), 1)):
        assert drawn[y, x].tolist() == [int(100 * 0.6 + value * 0.4) for value in COLOURS[label]]
    assert (drawn[40, 50] == 100).all()


def test_the_most_confident_mask_is_on_top() -> None:
    image = np.zeros((80, 100, 3), np.uint8)
    drawn = prediction(LEFT, LEFT).draw(image, SQUARE)
    below = [int(value * 0.4) for value in COLOURS[1]]
    expected = [int(low * 0.6 + value * 0.4) for low, value in zip(below, COLOURS[0], strict=True)]
    assert drawn[40, 25].tolist() == expected


def test_label_rows() -> None:
    given = prediction(LEFT, RIGHT)
    assert given.label_rows(False)[0] == "0 0.1 0.25 0.4 0.25 0.4 0.75 0.1 0.75"
    assert given.label_rows(True)[1].split()[-1] == "0.8"
    assert given.label_rows(True, corners=True)[0] == "0 10 20 40 60 0.9"


def test_a_mask_that_is_no_polygon_is_written_as_its_box() -> None:
    given = replace(prediction(LEFT), source=OutlineMasks([LEFT[:2]], SIZE))
    assert given.label_rows(False) == ["0 0.1 0.25 0.4 0.25 0.4 0.75 0.1 0.75"]


def test_labels_and_the_instances_that_match_none() -> None:
    given = prediction(LEFT, RIGHT, labels=1)
    joined = given.with_labels()
    assert joined.rows[:, 4:].tolist() == [[1, 0], [pytest.approx(0.8), 1]]
    assert np.array_equal(joined.masks, given.masks)
    assert joined.label_rows(True) == [given.label_rows(False)[0] + " 1", given.label_rows(True)[1]]
    unknown = replace(given, label_outlines=()).with_labels()  # then a label's mask is its box
    assert unknown.label_rows(False)[0] == given.label_rows(False)[0]


def test_rows_of_coco() -> None:
    rows = results([prediction(LEFT, RIGHT).coco_rows()], CocoIds((7, 8, 9), (0, 1, 2, 5), ""))
    assert [(row["image_id"], row["category_id"], row["bbox"]) for row in rows] == [
        *((5, 7, [10, 20, 30, 40]), (5, 8, [60, 20, 30, 40])),
    ]
    assert all(row["segmentation"]["size"] == [80, 100] for row in rows)
