"""Masks in pixels of the files, and what scripts and Python users get of an image's instances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from faster_coco_eval import mask as coco
from torch import Tensor
from torch.nn import functional

from models.tasks.masks import DetectedMasks, MaskPart, SegmentationPrediction
from tests.making import CLASS_NAMES, NO_CHANGE
from utils.batch import Placement
from utils.coco import CocoIds, results
from utils.plots.drawing import COLOURS, Style

BOXES = torch.tensor([[3.2, 5.1, 40.7, 52.3], [-4.0, 10.0, 70.0, 44.0], [20.0, 20, 20, 20], [8, 30, 24, 61]])  # network


def masks_of(
    values: Tensor,
    boxes: Tensor,
    size: tuple[int, int],
    placement: Placement = NO_CHANGE,
    retina: bool = True,
) -> DetectedMasks:
    """Return masks of given probabilities (k, h, w). boxes: on the network's image; size: of the file."""
    in_file = (boxes - torch.tensor(placement.offset * 2)) / torch.tensor(placement.scale * 2)
    corners = in_file.clamp(min=torch.zeros(4), max=torch.tensor(size * 2)).numpy()
    logits = values.logit(1e-6)
    return DetectedMasks(lambda rows: logits[rows], values.shape[1:], boxes, corners, size, placement, retina)


def smooth(count: int, height: int, width: int) -> Tensor:
    """Return random maps with large shapes."""
    coarse = torch.rand(1, count, 4, 4, generator=torch.Generator().manual_seed(0))
    return functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]


def whole(size: tuple[int, int], part: MaskPart) -> np.ndarray:
    """Return the mask of a whole file. size: width and height."""
    mask = np.zeros(size[::-1], bool)
    part.window(mask)[:] = part.pixels
    return mask


def cut(values: Tensor, boxes: Tensor) -> Tensor:
    """Set the numbers outside of boxes to 0, pixel by pixel."""
    left, top, right, bottom = (boxes[:, k, None, None] for k in range(4))
    rows, columns = torch.arange(values.shape[1])[:, None], torch.arange(values.shape[2])
    return values * ((columns >= left) & (columns < right) & (rows >= top) & (rows < bottom))


@pytest.mark.parametrize("retina", [False, True])
def test_masks_of_a_file_of_the_networks_size(retina: bool) -> None:
    """By torch's bilinear interpolation: cut on the map before it, or in the file after it. 65 maps are two chunks."""
    values, boxes, size = smooth(65, 16, 16), BOXES.repeat(17, 1)[:65], (64, 64)
    given = values if retina else cut(values, boxes / 4)
    scaled = functional.interpolate(given[None], (64, 64), mode="bilinear", align_corners=False)[0]
    expected = (cut(scaled, boxes) if retina else scaled) > 0.5
    masks = [whole(size, part) for part in masks_of(values, boxes, size, retina=retina).parts(range(65))]
    assert np.array_equal(np.stack(masks), expected.numpy())
    assert expected.flatten(1).any(1).tolist()[:4] == [True, True, False, True]


@pytest.mark.parametrize("retina", [False, True])
def test_masks_of_a_letterboxed_file(retina: bool) -> None:
    """A file of 128 x 64 in the middle of 64 x 64: the padding is cut off, and every pixel appears twice."""
    values, size, boxes = smooth(1, 16, 16), (128, 64), torch.tensor([[0.0, 16, 64, 48]])
    image = values[None, :, 4:12]
    if retina:
        expected = functional.interpolate(image, (64, 128), mode="bilinear", align_corners=False)[0] > 0.5
    else:
        network = functional.interpolate(cut(values, boxes / 4)[None], (64, 64), mode="bilinear")[:, :, 16:48]
        expected = functional.interpolate((network > 0.5).float(), (64, 128), mode="nearest")[0] > 0.5
    (part,) = masks_of(values, boxes, size, Placement((0.5, 0.5), (0, 16)), retina).parts([0])
    assert np.array_equal(whole(size, part), expected[0].numpy())


def test_the_largest_contour() -> None:
    """By area, not by the number of its points."""
    pixels = np.zeros((6, 11), bool)
    pixels[1:4, 1:5] = pixels[(5, 4, 5, 4, 5), (6, 7, 8, 9, 10)] = True
    contour = MaskPart(10, 20, pixels).contour()
    assert {tuple(point) for point in contour.tolist()} == {(11, 21), (11, 23), (14, 23), (14, 21)}
    for side in (0, 3):
        assert MaskPart(0, 0, np.zeros((3, side), bool)).contour().shape == (0, 2)


def test_run_lengths() -> None:
    """Decoded by faster-coco-eval."""
    size = (33, 20)
    parts = [
        MaskPart(4, 3, smooth(1, 12, 20)[0].numpy() > 0.5),
        MaskPart(0, 0, np.ones((20, 33), bool)),
        MaskPart(0, 0, np.zeros((0, 0), bool)),
        MaskPart(32, 19, np.ones((1, 1), bool)),
    ]
    for part in parts:
        coded = part.run_lengths(size)
        assert (coded["size"], type(coded["counts"])) == ([20, 33], str)
        assert np.array_equal(coco.decode(coded).astype(bool), whole(size, part))


# Predictions, of a file of 100 x 80 pixels whose masks fill their boxes

SIZE = (100, 80)
LEFT, RIGHT = (10.0, 20.0, 40.0, 60.0), (60.0, 20.0, 90.0, 60.0)
LEFT_OUTLINE = [0.105, 0.25625, 0.105, 0.74375, 0.395, 0.74375, 0.395, 0.25625]  # centres of the corners' pixels
SQUARE = Style(thickness=1, names=False)


def prediction(*boxes: tuple[float, ...], labels: int = 0) -> SegmentationPrediction:
    """Return instances of given boxes; the first ones are labelled too."""
    xyxy = torch.tensor(boxes).reshape(-1, 4)
    rows = torch.tensor([[*box, 0.9 - k / 10, k] for k, box in enumerate(boxes)]).double().reshape(-1, 6)
    shares = xyxy[:labels] / torch.tensor(SIZE * 2)
    xywh = torch.cat(((shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]), 1)
    label_rows = torch.cat((torch.arange(labels)[:, None].float(), xywh), 1).numpy()
    outlines = [np.array([[a, b], [c, b], [c, d], [a, d]], np.float32) for a, b, c, d in shares.tolist()]
    source = masks_of(torch.ones(len(boxes), 20, 25), xyxy, SIZE)
    return SegmentationPrediction(3, "/data/a.jpg", CLASS_NAMES, SIZE, rows, label_rows, 0.6, source, outlines)


def test_arrays() -> None:
    given = prediction(LEFT, RIGHT)
    assert (given.array.shape, given.scores.dtype, given.classes.tolist()) == ((2, 6), np.float32, [0, 1])
    assert (given.masks.dtype, given.masks.shape) == (bool, (2, 80, 100))
    rows, columns = np.nonzero(given.masks[1])
    assert (rows.min(), rows.max(), columns.min(), columns.max(), len(rows)) == (20, 59, 60, 89, 1200)
    assert given.outlines[0].ravel().tolist() == pytest.approx(LEFT_OUTLINE)
    assert given.describe() == "1 disc, 1 traffic light"


def test_without_instances() -> None:
    given = prediction()
    assert given.masks.shape == (0, 80, 100)
    assert (given.outlines, given.label_rows(True), given.coco_rows().masks) == ([], [], [])


def test_masks_are_drawn_in_the_colour_of_their_class() -> None:
    """The most confident one is on top."""
    image = np.full((80, 100, 3), 100, np.uint8)
    drawn = prediction(LEFT, LEFT, RIGHT).draw(image, SQUARE)
    assert (image == 100).all()
    assert drawn[40, 75].tolist() == [int(100 * 0.6 + value * 0.4) for value in COLOURS[2]]
    below = [int(100 * 0.6 + value * 0.4) for value in COLOURS[1]]
    assert drawn[40, 25].tolist() == [int(low * 0.6 + high * 0.4) for low, high in zip(below, COLOURS[0], strict=True)]
    assert (drawn[40, 50] == 100).all()


def test_label_rows() -> None:
    given = prediction(LEFT, RIGHT)
    first, second = given.label_rows(True)
    assert first == f"0 {' '.join(f'{value:g}' for value in LEFT_OUTLINE)} 0.9"
    assert second.split()[-1] == "0.8"
    assert given.label_rows(True, corners=True)[0] == "0 10 20 40 60 0.9"
    (no_polygon,) = prediction((10.0, 20.0, 12.0, 21.0)).label_rows(False)  # then it is the box
    assert no_polygon == "0 0.1 0.25 0.12 0.25 0.12 0.2625 0.1 0.2625"


def test_labels_and_the_instances_that_match_none() -> None:
    given = prediction(LEFT, RIGHT, labels=1)
    joined = given.with_labels()
    assert joined.rows[:, 4:].tolist() == [[1, 0], [pytest.approx(0.8), 1]]
    label = "0 0.1 0.25 0.4 0.25 0.4 0.75 0.1 0.75 1"
    assert joined.label_rows(True) == [label, given.label_rows(True)[1]]
    unknown = replace(given, label_outlines=()).with_labels()  # then a label's outline is its box
    assert unknown.label_rows(True)[0] == label


def test_rows_of_coco() -> None:
    rows = results([prediction(LEFT, RIGHT).coco_rows()], CocoIds((7, 8, 9), (0, 1, 2, 5), ""))
    assert [(row["image_id"], row["category_id"], row["bbox"]) for row in rows] == [
        *((5, 7, [10, 20, 30, 40]), (5, 8, [60, 20, 30, 40])),
    ]
    assert [int(coco.area(row["segmentation"])) for row in rows] == [1200, 1200]
