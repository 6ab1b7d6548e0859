"""Masks in pixels of the files, instances, and the scores of boxes and masks: by hand and against whole maps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from faster_coco_eval import mask as coco
from torch import Tensor
from torch.nn import functional

from models.tasks import segment_metrics as module
from models.tasks.metrics import image_records
from models.tasks.segment_metrics import (
    SEGMENTATION_METRICS,
    DetectedMasks,
    MaskPart,
    SegmentationMetrics,
    SegmentationPrediction,
    known_masks,
    mask_pairs,
)
from tests.conftest import NOT_HERE
from tests.making import CLASS_NAMES, NO_CHANGE, image_info
from tests.models.tasks.mask_batches import MAP, SIDE, mask_batch
from utils.batch import Placement, SegmentationBatch
from utils.coco import CocoIds, results
from utils.console import TERMINAL
from utils.plots.drawing import COLOURS, Style
from utils.summary import Summary

BOXES = torch.tensor([[3.2, 5.1, 40.7, 52.3], [-4.0, 10.0, 70.0, 44.0], [20.0, 20, 20, 20], [8, 30, 24, 61]])  # network


def masks_of(
    values: Tensor, boxes: Tensor, size: tuple[int, int], placement: Placement = NO_CHANGE, retina: bool = True
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


def test_tracks() -> None:
    """As the last column of a label, and with the masks, in their order, in supervision.Detections."""
    given = replace(prediction(LEFT, RIGHT), ids=np.array([7, -1]))
    assert [line.rsplit(maxsplit=2)[1:] for line in given.label_rows(True)] == [["0.9", "7"], ["0.8", "-1"]]
    pytest.importorskip("supervision", reason=f"{NOT_HERE}requirements-track.txt")
    found = given.to_supervision()
    np.testing.assert_array_equal(found.mask, given.masks)
    assert ([*found.data["class_name"]], found.tracker_id.tolist()) == (["disc", "traffic light"], [7, -1])


def test_arrays() -> None:
    given = prediction(LEFT, RIGHT)
    assert (given.array.shape, given.scores.dtype, given.classes.tolist()) == ((2, 6), np.float32, [0, 1])
    assert (given.masks.dtype, given.masks.shape) == (bool, (2, 80, 100))
    assert (given.masks[1].sum(), given.masks[1, 20:60, 60:90].sum()) == (1200, 1200)
    assert given.outlines[0].ravel().tolist() == pytest.approx(LEFT_OUTLINE)
    nothing = prediction()
    assert nothing.masks.shape == (0, 80, 100)
    assert (nothing.outlines, nothing.label_rows(True), nothing.coco_rows().masks) == ([], [], [])


def test_masks_are_drawn_in_the_colour_of_their_class() -> None:
    """The most confident one is on top."""
    image = np.full((80, 100, 3), 100, np.uint8)
    drawn = prediction(LEFT, LEFT, RIGHT).draw(image, Style(thickness=1, names=False))
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
        *((5, 7, [10, 20, 30, 40]), (5, 8, [60, 20, 30, 40]))
    ]
    assert [int(coco.area(row["segmentation"])) for row in rows] == [1200, 1200]


# Scores

METRICS = SegmentationMetrics(CLASS_NAMES, frozenset({0, 1, 2}))
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the map


class Instance(NamedTuple):
    """A detection or a label: its class, its box, the part of it that its mask covers, and its confidence."""

    label: int
    box: Box
    mask: Box | np.ndarray | None = None  # None: the box
    confidence: float = 0.9

    def pixels(self, side: int = MAP) -> np.ndarray:
        """Return the mask, bool (side, side)."""
        if isinstance(self.mask, np.ndarray):
            return self.mask
        left, top, right, bottom = map(int, self.mask or self.box)
        pixels = np.zeros((side, side), bool)
        pixels[top:bottom, left:right] = True
        return pixels


class Case(NamedTuple):
    """An image: its labels and its detections."""

    labels: list[Instance]
    detections: list[Instance]


def made(*cases: Case, start: int = 0, side: int = MAP) -> tuple[list[SegmentationPrediction], SegmentationBatch]:
    """Return the predictions for images, and their batch as an evaluation has it. side: of the mask maps."""
    infos, predictions, targets = [], [], []
    for number, (labels, detections) in enumerate(cases):
        rows = np.array([(one.label, *center(one.box, side)) for one in labels], np.float32).reshape(-1, 5)
        shapes = tuple(outline(one) / np.float32(side) for one in labels)
        targets += [(number, *row) for row in rows.tolist()]
        boxes = torch.tensor([(*(4 * x for x in one.box), one.confidence, one.label) for one in detections])
        boxes = boxes.reshape(-1, 6).double()
        maps = np.stack([np.zeros((side, side), bool), *(one.pixels(side) for one in detections)])[1:]
        info = image_info(
            start + number, (4 * side, 4 * side), rows=rows, outlines=shapes, path=f"/data/{start + number}.jpg"
        )
        logits, corners = known_masks(torch.from_numpy(maps)), boxes[:, :4].numpy()
        source = DetectedMasks(logits, (side, side), boxes, corners, info.size, info.placement, retina=True)
        predictions.append(
            SegmentationPrediction(info.image, info.path, CLASS_NAMES, info.size, boxes, rows, 0.6, source, shapes)
        )
        infos.append(info)
    every = [one for case in cases for one in case.labels]
    windows = np.array([window(one, side) for one in every]).reshape(-1, 4)
    return predictions, mask_batch(targets, [one.pixels(side) for one in every], infos, windows=windows)


def outline(instance: Instance) -> np.ndarray:
    """Return the corners of the mask, or of the box."""
    left, top, right, bottom = instance.mask if isinstance(instance.mask, tuple) else instance.box
    return np.array(((left, top), (right, top), (right, bottom), (left, bottom)), np.float32)


def center(box: Box, side: int) -> tuple[float, ...]:
    left, top, right, bottom = (value / side for value in box)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def window(instance: Instance, side: int) -> tuple[int, ...]:
    """Return the union of the box and of the extent of the mask."""
    rows, columns = np.nonzero(instance.pixels(side))
    low, high = np.floor(instance.box[:2]), np.ceil(instance.box[2:])
    if len(rows):
        low = np.minimum(low, (columns.min(), rows.min()))
        high = np.maximum(high, (columns.max() + 1, rows.max() + 1))
    return (*low.clip(0, side).astype(int), *high.clip(0, side).astype(int))


def summary_of(*cases: Case, metrics: SegmentationMetrics = METRICS) -> Summary:
    return metrics.summarise(metrics.update(*made(*cases)))


HALF: Box = (2, 2, 6, 10)
WHOLE: Box = (2, 2, 10, 10)


def test_boxes_and_masks_are_scored_separately() -> None:
    """The box is exact. The overlap of the masks, 1/2 and then 0.8, equals a threshold, and reaches it."""
    summary = summary_of(Case([Instance(0, WHOLE)], [Instance(0, WHOLE, HALF)]))
    assert tuple(summary.metrics) == SEGMENTATION_METRICS
    assert list(summary.metrics.values()) == pytest.approx([1, 1, 0.995, 0.995, 1, 1, 0.995, 0.0995], abs=1e-6)
    summary = summary_of(Case([Instance(0, WHOLE, HALF)], [Instance(0, WHOLE, (2, 2, 7, 10))]))
    assert list(summary.metrics.values())[4:] == pytest.approx([1, 1, 0.995, 0.995 * 0.7], abs=1e-6)
    assert summary.fitness == pytest.approx(0.995 + 0.1 * 0.995 + 0.9 * 0.6965)
    assert list(summary.by_class) == ["AP50(B)", "AP(B)", "AP50(M)", "AP(M)"]
    assert summary.by_class["AP(M)"] == {"disc": pytest.approx(0.6965)}


def test_of_several_detections_of_a_label_the_best_masks_count() -> None:
    """The more confident detection has the better box, the other one the better mask."""
    better_box, better_mask = Instance(0, WHOLE, HALF, 0.9), Instance(0, (2, 2, 10, 9), (2, 2, 10, 9), 0.8)
    predictions, batch = made(Case([Instance(0, WHOLE)], [better_box, better_mask]))
    (record,) = METRICS.update(predictions, batch)
    overlaps = [(one.overlap.tolist(), one.rival_overlap.tolist()) for one in record]
    assert overlaps[0] == (pytest.approx([1, 7 / 8], abs=1e-6), pytest.approx([0, 1], abs=1e-6))
    assert overlaps[1] == (pytest.approx([0.5, 7 / 8], abs=1e-6), pytest.approx([0, 0.5], abs=1e-6))


def random_case(seed: int, labels: int = 6, detections: int = 12) -> Case:
    rng = np.random.default_rng(seed)

    def instance(confidence: float) -> Instance:
        low = rng.random(2) * 10
        high = low + 2 + rng.random(2) * 8
        mask = rng.random((MAP, MAP)) < 0.6
        rows, columns = np.mgrid[:MAP, :MAP]
        mask &= (columns > low[0] - 1) & (columns < high[0] + 1) & (rows > low[1] - 1) & (rows < high[1] + 1)
        return Instance(int(rng.integers(3)), (*low, *np.minimum(high, MAP)), mask, confidence)  # type: ignore[arg-type]

    confidences = -np.sort(-rng.random(detections))
    return Case([instance(1) for _ in range(labels)], [instance(float(one)) for one in confidences])


@pytest.mark.parametrize("most", [2**22, 600])  # pixels at once: 2 masks
def test_overlaps_are_those_of_whole_masks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MASK_VALUES", most)
    cases = [random_case(0), Case([], [Instance(0, WHOLE)]), random_case(1), Case([Instance(1, WHOLE)], [])]
    predictions, batch = made(*cases)
    records = image_records([prediction.rows for prediction in predictions], batch.infos)
    expected = {}
    d0 = l0 = 0
    for case in cases:
        for d, one in enumerate(case.detections):
            rows, columns = np.mgrid[:MAP, :MAP]
            left, top, right, bottom = one.box
            cut = one.pixels() & (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
            for k, true in enumerate(case.labels):
                both = (cut & true.pixels()).sum()
                if both and one.label == true.label:
                    expected[d0 + d, l0 + k] = both / (cut.sum() + true.pixels().sum() - both + 1e-7)
        d0, l0 = d0 + len(case.detections), l0 + len(case.labels)
    pairs = mask_pairs(predictions, batch, records)
    computed = {
        (d, k): overlap for d, k, overlap in zip(*(column.tolist() for column in pairs), strict=True) if overlap
    }
    assert list(computed) == list(expected)
    np.testing.assert_allclose(list(computed.values()), list(expected.values()), atol=1e-6)
    assert sum(overlap > 0.2 for overlap in expected.values()) > 2
    nothing = mask_pairs(predictions[1:2], made(cases[1])[1], records[1:2])
    assert [len(column) for column in nothing] == [0, 0, 0]


def test_tables_and_documents() -> None:
    """Box scores, then mask scores."""
    exact = Case([Instance(0, WHOLE), Instance(1, (12, 12, 15, 15))], [Instance(0, WHOLE, HALF)])
    lines = summary_of(exact).table()
    head, overall, *details = [line.split() for line in lines]
    scores = ["P", "R", "mAP50", "50-95"]
    assert head == ["Class", "Images", "Labels", "box", *scores, "mask", *scores]
    assert overall == ["all", "1", "2", "0.500", "0.500", "0.497", "0.497", "0.500", "0.500", "0.497", "0.050"]
    assert details[0] == ["disc", "1", "1", "1.000", "1.000", "0.995", "0.995", "1.000", "1.000", "0.995", "0.100"]
    assert details[1][:4] == ["traffic", "light", "1", "1"]
    assert max(map(len, lines)) <= TERMINAL[0]

    detections = [Instance(0, WHOLE, (2, 2, 7, 10)), Instance(2, WHOLE, None, 0.2)]
    summary = summary_of(Case([Instance(0, WHOLE, HALF)], detections), Case([], []))
    documents = METRICS.documents(summary)
    of_boxes = {"classes.csv", "confusion_matrix.csv", "curves.csv", "PR_curve.csv", "val_boxes.csv"}
    assert set(documents) == {*of_boxes, "mask_curves.csv", "mask_PR_curve.csv", "val_masks.csv"}
    assert "outline" not in documents["val_boxes.csv"]
    head, disc, light, *_ = (line.split(",") for line in documents["classes.csv"].splitlines())
    assert head[-4:] == ["mask_precision", "mask_recall", "mask_AP50", "mask_AP50-95"]
    assert [float(x) for x in disc[5:]] == pytest.approx([0.995, 0.995, 1, 1, 0.995, 0.6965])
    assert light == ["traffic light", "0", "0", *[""] * 8]
    rows = documents["val_masks.csv"].splitlines()
    assert rows[:2] == ["image,kind,class,confidence,outline", "/data/0.jpg,label,disc,,8 8 24 8 24 40 8 40"]
    (prediction,) = rows[2:]
    *cells, points = prediction.split(",")
    assert cells == ["/data/0.jpg", "prediction", "disc", "0.9"]
    x, y = np.array(points.split(), int).reshape(-1, 2).T
    assert (x.min(), x.max(), y.min(), y.max()) == (8, 27, 8, 39)

    example, _ = METRICS.examples(summary)
    assert [label.outline for label in example.labels] == [tuple(x / SIDE for x in (8, 8, 24, 8, 24, 40, 8, 40))]
    assert [len(one.outline) >= 8 for one in example.predictions] == [True]
