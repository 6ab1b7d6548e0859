"""Tests of each augmentation with boxes worked out by hand, then of the whole chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from data.augment import (
    PADDING_LEVEL,
    Augmenter,
    Sample,
    copy_paste,
    covered_shares,
    flip,
    is_visible,
    letterbox,
    mixup,
    mosaic_positions,
    random_hsv,
    random_matrix,
    random_warp,
    warp_boxes,
    warp_mosaic,
)
from data.polygons import Polygons
from tests.making import noise, plain
from utils.batch import Placement
from utils.config.hyperparameters import Augmentation

NOTHING = Augmentation(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, mosaic=0)


def hyp_of(**values: Any) -> Augmentation:
    return replace(NOTHING, **values)


def sample(image: np.ndarray, *boxes: list[float], classes: list[float] | None = None) -> Sample:
    """Return an image with boxes, by default of the classes 0, 1, ..."""
    labels = range(len(boxes)) if classes is None else classes
    return Sample(image, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.float32))


def uniform(*draws: object) -> Mock:
    """Return a generator whose method `uniform` returns these values in turn."""
    rng = Mock(spec=np.random.Generator)
    rng.uniform.side_effect = draws
    return rng


def on_grey(image: np.ndarray, left: int, top: int, width: int, height: int) -> np.ndarray:
    """Return grey of this size with the image at (left, top)."""
    canvas = plain(width, height, PADDING_LEVEL)
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas


def same(a: Sample, b: Sample) -> bool:
    one, other = a.polygons or Polygons.of(()), b.polygons or Polygons.of(())
    arrays = zip((*a[:3], one.points, one.offsets), (*b[:3], other.points, other.offsets), strict=True)
    return all(np.array_equal(*pair) for pair in arrays)


# Letterbox


@pytest.mark.parametrize("enlarge", [False, True])
@pytest.mark.parametrize(
    ("width", "height", "shape", "left", "top"),
    [
        pytest.param(8, 4, (8, 8), 0, 2, id="landscape"),
        pytest.param(4, 8, (8, 8), 2, 0, id="portrait"),
        pytest.param(8, 8, (8, 8), 0, 0, id="square"),
        pytest.param(8, 5, (8, 8), 0, 1, id="odd: one row above, two below"),
        pytest.param(7, 8, (8, 8), 0, 0, id="odd: no column on the left, one on the right"),
        pytest.param(6, 8, (8, 13), 3, 0, id="into an oblong"),
    ],
)
def test_letterbox_centres_on_grey(
    width: int, height: int, shape: tuple[int, int], left: int, top: int, enlarge: bool
) -> None:
    image = noise(width, height)
    fitted, placement = letterbox(sample(image, [1, 0, 3, 4], [0, 2, 2, 3]), shape, enlarge)
    assert np.array_equal(fitted.image, on_grey(image, left, top, shape[1], shape[0]))
    assert fitted.boxes.tolist() == [[1 + left, top, 3 + left, 4 + top], [left, 2 + top, 2 + left, 3 + top]]
    assert fitted.boxes.dtype == np.float32
    assert fitted.classes.tolist() == [0, 1]
    assert placement == Placement((1, 1), (left, top))


# Mosaic


def mosaic(samples: list[Sample], size: int, rng: np.random.Generator) -> Sample:
    """Return the whole canvas without a warp."""
    positions = mosaic_positions([sample.image.shape[1::-1] for sample in samples], size, rng)
    return warp_mosaic(positions, samples.__getitem__, 2 * size, np.eye(3), 1.0, (2 * size, 2 * size))


def test_four_images_of_a_mosaic_meet_at_its_centre() -> None:
    first, second, third, fourth = plain(8, 8, 10), plain(8, 4, 20), plain(6, 8, 30), plain(5, 5, 40)
    first[0, 1], second[3, 0], third[0, 5], fourth[0, 0] = 11, 21, 31, 41
    joined = mosaic(
        [
            sample(first, [2, 1, 6, 5], [0, 0, 8, 8], classes=[1, 2]),
            sample(second, [0, 0, 4, 4], classes=[3]),
            sample(third, [0, 0, 6, 8], classes=[4]),
            sample(fourth, [1, 1, 4, 5], classes=[5]),
        ],
        8,
        uniform(np.array([7.0, 9.0])),
    )
    canvas = plain(16, 16, PADDING_LEVEL)
    canvas[1:9, 0:7] = 10  # ends at (7, 9): one column is beyond the edge
    canvas[5:9, 7:15] = 20
    canvas[9:16, 1:7] = 30  # one row is beyond the edge
    canvas[9:14, 7:12] = 40
    canvas[1, 0] = 11  # shifted by one row and minus one column
    canvas[8, 7], canvas[9, 6], canvas[9, 7] = 21, 31, 41  # at the centre
    assert np.array_equal(joined.image, canvas)
    assert joined.boxes.tolist() == [[1, 2, 5, 6], [0, 1, 7, 9], [7, 5, 11, 9], [1, 9, 7, 16], [8, 10, 11, 14]]
    assert joined.classes.tolist() == [1, 2, 3, 4, 5]


def smooth(width: int, height: int, number: int) -> np.ndarray:
    """Return an image that changes slowly, so that half a pixel matters little."""
    rows, columns = np.indices((height, width))
    waves = [np.sin(rows / 17 + number) + np.cos(columns / (23 + 5 * k)) for k in range(3)]
    return (np.stack(waves, -1) * 50 + 120).astype(np.uint8)


@pytest.mark.parametrize("strengths", [{}, {"degrees": 20.0, "shear": 5.0}, {"perspective": 0.0005, "degrees": 5.0}])
def test_a_warped_mosaic_equals_its_canvas_warped(strengths: dict[str, float]) -> None:
    rng, settings = np.random.default_rng(1), hyp_of(translate=0.1, scale=0.5, **strengths)
    sizes = [(128, 96), (80, 128), (128, 60), (128, 128)]
    boxes = [[10, 20, 60, 50], [0, 0, 30, 128], [50, 5, 128, 55], [30, 30, 90, 100]]
    samples = [sample(smooth(*sizes[k], k), boxes[k], classes=[k]) for k in range(4)]
    for _ in range(20):
        positions = mosaic_positions(sizes, 128, rng)
        warp, scale = random_matrix(settings, (256, 256), (120, 136), rng)
        warped = warp_mosaic(positions, samples.__getitem__, 256, warp, scale, (120, 136))
        canvas = warp_mosaic(positions, samples.__getitem__, 256, np.eye(3), 1.0, (256, 256))
        expected = cv2.warpPerspective(canvas.image, warp, (136, 120), borderValue=(PADDING_LEVEL,) * 3)
        wrong = (np.abs(warped.image.astype(int) - expected).max(-1) > 20).mean()
        assert wrong < 0.06  # seams, which are a pixel wide
        around = warp_boxes(canvas.boxes, warp, (120, 136))
        visible = is_visible(canvas.boxes * scale, around)
        actual = dict(zip(warped.classes.tolist(), warped.boxes, strict=True))
        for label, box in zip(canvas.classes[visible], around[visible], strict=True):
            if label in actual:  # one of the two may drop a box that is hardly visible
                assert np.abs(actual.pop(label) - box).max() <= 1.5
        assert len(actual) <= 1


def test_an_image_outside_of_the_result_is_not_loaded() -> None:
    loaded: list[int] = []

    def load(number: int) -> Sample:
        loaded.append(number)
        return sample(plain(8, 8, 10 * number), [1, 1, 7, 7])

    positions = mosaic_positions([(8, 8)] * 4, 8, uniform(np.array([4.0, 4.0])))
    corner = matrix([1, 0, -5], [0, 1, -5], [0, 0, 1])  # the result begins right of and below the centre
    warped = warp_mosaic(positions, load, 16, corner, 1.0, (6, 6))
    assert loaded == [3]
    assert (warped.image == 30).all()
    assert warped.boxes.tolist() == [[0, 0, 6, 6]]


def test_an_image_of_another_size_than_its_position_is_resized() -> None:
    half = sample(plain(4, 4, 50), [1, 1, 3, 3])
    positions = mosaic_positions([(8, 8)] * 4, 8, uniform(np.array([8.0, 8.0])))
    turn = matrix([0, -1, 16], [1, 0, 0], [0, 0, 1])  # a quarter, clockwise: (x, y) -> (16 - y, x)
    for warp, box in ((np.eye(3), [2, 2, 6, 6]), (turn, [10, 2, 14, 6])):
        warped = warp_mosaic(positions, lambda number: half, 16, warp, 1.0, (16, 16))
        assert (warped.image[2:6, box[0] : box[2]] == 50).all()
        assert warped.boxes.tolist()[0] == box


# Boxes


def matrix(*rows: list[float]) -> np.ndarray:
    return np.array(rows, float)


@pytest.mark.parametrize(
    ("warp", "box", "expected"),
    [
        pytest.param(matrix([1, 0, 3], [0, 1, -2], [0, 0, 1]), [4, 4, 6, 9], [7, 2, 9, 7], id="shift"),
        pytest.param(matrix([1, 0, 3], [0, 1, -2], [0, 0, 1]), [4, 1, 8, 9], [7, 0, 10, 7], id="shift, clipped"),
        pytest.param(matrix([1, 0, 0], [0, 1, 9], [0, 0, 1]), [4, 1, 8, 9], [4, 10, 8, 12], id="clipped below"),
        pytest.param(matrix([2, 0, 0], [0, 0.5, 0], [0, 0, 1]), [1, 2, 4, 8], [2, 1, 8, 4], id="scale"),
        # a quarter turn clockwise of an image 12 high: (x, y) -> (12 - y, x)
        pytest.param(matrix([0, -1, 12], [1, 0, 0], [0, 0, 1]), [2, 5, 6, 9], [3, 2, 7, 6], id="quarter turn"),
        # an eighth turn about (5, 5) of the square with half diagonal 2: corners come to (5 +- 2, 5) and (5, 5 +- 2)
        pytest.param(
            matrix([0.5**0.5, -(0.5**0.5), 5], [0.5**0.5, 0.5**0.5, 5 - 50**0.5], [0, 0, 1]),
            [5 - 2**0.5, 5 - 2**0.5, 5 + 2**0.5, 5 + 2**0.5],
            [3, 3, 7, 7],
            id="eighth turn",
        ),
        pytest.param(matrix([1, 0.5, 0], [0, 1, 0], [0, 0, 1]), [1, 2, 3, 6], [2, 2, 6, 6], id="shear"),
        # (0, 0), (8, 0), (8, 8), (0, 8) -> (0, 0), (4, 0), (4, 4), (0, 8)
        pytest.param(matrix([1, 0, 0], [0, 1, 0], [0.125, 0, 1]), [0, 0, 8, 8], [0, 0, 4, 8], id="perspective"),
        pytest.param(matrix([1, 0, 50], [0, 1, 0], [0, 0, 1]), [1, 2, 3, 4], [10, 2, 10, 4], id="outside"),
    ],
)
def test_a_warped_box_is_the_upright_box_around_its_corners(
    warp: np.ndarray, box: list[float], expected: list[float]
) -> None:
    boxes = warp_boxes(np.array([box, box], np.float32), warp, (12, 10))
    assert boxes.dtype == np.float32
    assert boxes == pytest.approx(np.array([expected, expected]), abs=1e-5)
    assert warp_boxes(np.zeros((0, 4), np.float32), warp, (12, 10)).shape == (0, 4)


@pytest.mark.parametrize(
    ("before", "after", "visible"),
    [
        pytest.param((10, 10), (10, 10), True, id="all of it"),
        pytest.param((10, 10), (2, 10), False, id="2 pixels wide"),
        pytest.param((10, 10), (10, 2), False, id="2 pixels high"),
        pytest.param((10, 10), (2.5, 10), True, id="over 2 pixels"),
        pytest.param((100, 100), (10, 100), False, id="a tenth"),
        pytest.param((100, 100), (10.5, 100), True, id="over a tenth"),
        pytest.param((3, 300), (3, 300), False, id="100 times as high as wide"),
        pytest.param((300, 3), (300, 3), False, id="100 times as wide as high"),
        pytest.param((3, 299), (3, 299), True, id="under 100 times"),
        pytest.param((0, 0), (0, 0), False, id="nothing"),
    ],
)
def test_a_warped_box_is_visible_by_its_sides_area_and_aspect(
    before: tuple[float, float], after: tuple[float, float], visible: bool
) -> None:
    boxes = [np.array([[5, 7, 5 + w, 7 + h], [0, 0, 9, 9]], np.float32) for w, h in (before, after)]
    assert is_visible(*boxes).tolist() == [visible, True]


# Random warp


def matrices(count: int, source: tuple[int, int] = (100, 200), **settings: float) -> np.ndarray:
    """Return random matrices to (100, 200), (count, 3, 3)."""
    rng = np.random.default_rng(0)
    return np.array([random_matrix(hyp_of(**settings), source, (100, 200), rng)[0] for _ in range(count)])


def fixed_warp(before: Sample, scale: float, shift: tuple[float, float]) -> Sample:
    """Warp into 8 rows of 10 pixels. shift: of the centre, as shares of the result."""
    rng = uniform(np.zeros(2), 0.0, scale, np.zeros(2), np.array(shift))
    return random_warp(before, NOTHING, (8, 10), rng)


def test_a_warp_moves_pixels_and_boxes_alike_and_drops_invisible_boxes() -> None:
    image = noise(12, 12)
    before = sample(image, [1, 0, 5, 4], [9, 1, 12, 5], [3, 2, 8, 5])
    after = fixed_warp(before, 1.0, (0.8, 9 / 8))  # the centre (6, 6) comes to (8, 9)
    assert np.array_equal(after.image, on_grey(image[:5, :8], 2, 3, 10, 8))
    # the second box would begin at 11, beyond the edge; the third touches two edges
    assert after.boxes.tolist() == [[3, 3, 7, 7], [5, 5, 10, 8]]
    assert after.classes.tolist() == [0, 2]


# Mixup


def test_mixup_is_a_weighted_mean_with_the_boxes_of_both() -> None:
    a = sample(plain(6, 4, 200), [0, 0, 3, 3], classes=[1])
    b = sample(plain(6, 4, 100), [1, 1, 4, 4], [2, 0, 6, 3], classes=[2, 3])
    mixed = mixup(a, b, Mock(beta=lambda *_: 0.25))
    assert np.array_equal(mixed.image, plain(6, 4, 125))
    assert mixed.boxes.tolist() == [[0, 0, 3, 3], [1, 1, 4, 4], [2, 0, 6, 3]]
    assert mixed.classes.tolist() == [1, 2, 3]
    assert (a.image == 200).all()  # unchanged


# Colours


def coloured(image: np.ndarray, draws: tuple[float, float, float], **gains: float) -> np.ndarray:
    """Change hue, saturation and value. draws: from -1 to 1, of the three factors."""
    before = sample(image.copy(), [0, 0, 3, 3], classes=[4])
    after = random_hsv(before, hyp_of(**gains), uniform(np.array(draws)))
    assert np.array_equal(before.image, image)
    assert np.array_equal(after.boxes, before.boxes)
    assert np.array_equal(after.classes, before.classes)
    assert after.image.dtype == np.uint8
    return after.image


BLUE, GREEN, RED = (255, 0, 0), (0, 255, 0), (0, 0, 255)  # BGR


@pytest.mark.parametrize("draws", [(0, 1, 1), (0, -1, 1), (0, 1, -1), (0, -0.3, -0.8)])
def test_linear_gains_equal_those_in_hsv_if_nothing_is_clipped(draws: tuple[float, float, float]) -> None:
    image = 80 + noise(60, 60) // 3
    changed = coloured(image, draws, hsv_s=0.4, hsv_v=0.4)
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_BGR2HSV) * np.float32(
        [1, 1 + 0.4 * draws[1], 1 + 0.4 * draws[2]]
    )
    assert np.abs(changed - cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)).max() <= 1.5  # two roundings


# Flips


@pytest.mark.parametrize(("axis", "boxes"), [(0, [[6, 2, 9, 3], [0, 0, 10, 6]]), (1, [[1, 3, 4, 4], [0, 0, 10, 6]])])
def test_a_flip_mirrors_pixels_and_boxes(axis: int, boxes: list[list[float]]) -> None:
    before = sample(noise(10, 6), [1, 2, 4, 3], [0, 0, 10, 6])
    unchanged = Sample(*(array.copy() for array in before[:3]))
    flipped = flip(before, axis)
    assert np.array_equal(flipped.image, np.flip(before.image, 1 - axis))
    assert flipped.boxes.tolist() == boxes
    assert flipped.boxes.dtype == np.float32
    assert flipped.classes.tolist() == [0, 1]
    assert same(flip(flipped, axis), unchanged)
    assert same(before, unchanged)


# The whole chain

SIZES = ((12, 16), (16, 16), (16, 9), (5, 16), (16, 13))  # width, height


class Images:
    """Five small images of different sizes with one box each. loaded: the indices of the images that were read."""

    def __init__(self) -> None:
        boxes = [[1, 1, width - 1, height - 1] for width, height in SIZES]
        self.samples = [sample(noise(*SIZES[k], seed=k), boxes[k], classes=[k]) for k in range(5)]
        self.loaded: list[int] = []

    def load(self, index: int) -> Sample:
        self.loaded.append(index)
        return self.samples[index]

    def augmenter(self, **settings: float) -> Augmenter:
        return Augmenter(hyp_of(**settings), 16, 5, self.load, SIZES.__getitem__)


def test_a_mosaic_consists_of_its_image_and_three_of_all_in_any_order() -> None:
    samples = [sample(plain(16, 16, 50 * k)) for k in range(5)]
    augmenter = Augmenter(hyp_of(mosaic=1.0), 16, 5, samples.__getitem__, lambda _: (16, 16))
    rng, missing, corners = np.random.default_rng(0), 0, np.zeros((4, 5), int)  # counts of each image in each corner
    for _ in range(400):
        image = augmenter(2, (16, 16), rng).image[..., 0]
        shown = [int(image[row, column]) // 50 for row in (0, -1) for column in (0, -1)]
        missing += 2 not in shown
        corners[range(4), shown] += 1
    assert missing < 50  # 1/16: its part of the canvas is outside of the item
    assert corners[:, 2] == pytest.approx(np.full(4, 160), abs=40)  # 1/4 + 3/4 * 1/5
    assert corners[:, [0, 1, 3, 4]] == pytest.approx(np.full((4, 4), 60), abs=30)


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_a_mosaic_and_the_one_mixed_with_it_use_the_given_partners(mix: float) -> None:
    images = Images()
    augmenter = images.augmenter(mosaic=1.0, mixup=mix)
    partners = np.random.default_rng(1).integers(5, size=(20, 7)).tolist()
    for seed, given in enumerate(partners):
        images.loaded.clear()
        augmenter(2, (16, 16), np.random.default_rng(seed), given)
        used = [2, *given[: 7 if mix else 3]]
        assert set(images.loaded) <= set(used)
        assert len(images.loaded) >= len(used) // 2  # images outside of the item are not loaded


@pytest.mark.parametrize(("settings", "fewer"), [({"mosaic": 0.3}, 1), ({"mosaic": 1.0, "mixup": 0.3}, 4)])
def test_the_shares_of_mosaics_and_of_mixed_mosaics(settings: dict[str, float], fewer: int) -> None:
    images = Images()
    augmenter, rng = images.augmenter(**settings), np.random.default_rng(0)
    counts = []
    for _ in range(500):
        images.loaded.clear()
        augmenter(0, (16, 16), rng)
        counts.append(len(images.loaded))
    assert sum(count > fewer for count in counts) / 500 == pytest.approx(0.3, abs=0.06)


# Copy-paste


def outlined(*polygons: list[list[float]], width: int = 40, height: int = 20) -> Sample:
    """Return noise with an object for each polygon, its box around it; without points, the box is 1, 1, 4, 4."""
    outlines = tuple(np.array(points, np.float32).reshape(-1, 2) for points in polygons)
    boxes = [[*points.min(0), *points.max(0)] if len(points) else [1, 1, 4, 4] for points in outlines]
    return sample(noise(width, height), *boxes)._replace(polygons=Polygons.of(outlines))


def rectangle(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


SQUARE, TRIANGLE = rectangle(2, 4, 8, 10), [[2, 2], [12, 2], [2, 12]]


def test_a_pasted_object_is_the_mirrored_one() -> None:
    before = outlined(SQUARE)
    expected = before.image.copy()
    expected[4:10, 32:38] = before.image[4:10, 2:8][:, ::-1]
    after = copy_paste(before, 1.0, np.random.default_rng(0))
    assert after.boxes.tolist() == [[2, 4, 8, 10], [32, 4, 38, 10]]
    assert (after.classes.tolist(), after.boxes.dtype) == ([0, 0], np.float32)
    assert [points.tolist() for points in after.polygons.outlines()] == [SQUARE, [[40 - x, y] for x, y in SQUARE]]
    assert np.array_equal(after.image, expected)


def test_an_object_is_cut_out_along_its_polygon() -> None:
    image = outlined(TRIANGLE).image
    after = copy_paste(outlined(TRIANGLE), 1.0, np.random.default_rng(0))
    changed = (after.image != image).any(2)
    assert np.array_equal(after.image[changed], image[:, ::-1][changed])
    assert changed[2:12, 28:38].sum() == pytest.approx(55, abs=6)  # half of the square, and its diagonal
    assert changed.sum() == changed[2:12, 28:38].sum()
    assert not changed[9:12, 28:31].any()
    assert after.boxes[1].tolist() == [28, 2, 38, 12]


@pytest.mark.parametrize(("right", "pasted"), [(34.9, True), (35.1, False)])
def test_an_object_is_not_pasted_over_another(right: float, pasted: bool) -> None:
    """The pasted object, from 32 to 38, covers 0.29 or 0.31 of a box that is ten pixels wide."""
    before = outlined(SQUARE, rectangle(right - 10, 4, right, 10))
    before = before._replace(polygons=Polygons.of((before.polygons.outline(0), np.zeros((0, 2), np.float32))))
    assert covered_shares(before.boxes, np.array([32, 4, 38, 10]))[1] == pytest.approx((right - 32) / 10, abs=1e-6)
    assert len(copy_paste(before, 1.0, np.random.default_rng(0)).boxes) == 2 + pasted


@pytest.mark.parametrize("settings", [{"scale": 0.5, "translate": 0.2}, {"degrees": 30.0, "perspective": 0.001}])
def test_polygons_of_a_mosaic_enclose_the_pixels_of_their_objects(settings: dict[str, float]) -> None:
    """White discs on black, which edges may clip."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    samples = []
    for centre in ((30, 30), (70, 20), (20, 80), (60, 60)):
        image = plain(96, 96, 0)
        cv2.circle(image, centre, 15, (255, 255, 255), -1)
        points = np.array(centre, np.float32) + 0.5 + 15.5 * np.stack((np.cos(angles), np.sin(angles)), 1)
        samples.append(outlined(points.tolist())._replace(image=image))
    augmenter = Augmenter(hyp_of(**settings, mosaic=1.0), 96, 4, samples.__getitem__, lambda _: (96, 96))
    discs = 0
    for seed in range(20):
        item = augmenter(0, (96, 96), np.random.default_rng(seed))
        assert len(item.polygons.counts) == len(item.boxes)
        mask, in_boxes = np.zeros((96, 96), np.uint8), np.zeros((96, 96), bool)
        for polygon, box in zip(item.polygons.outlines(), item.boxes, strict=True):
            left, top, right, bottom = box.round().astype(int)
            in_boxes[top:bottom, left:right] = True
            assert np.all((polygon > -1e-3) & (polygon < 96 + 1e-3))
            assert np.all(polygon.min(0) >= box[:2] - 0.51)
            assert np.all(polygon.max(0) <= box[2:] + 0.51)
            cv2.fillPoly(mask, [(polygon - 0.5).round().astype(np.int32)], 255)
        white = (item.image == 255).all(2) & in_boxes  # discs that are too small have no box
        assert (mask[white] > 0).sum() >= 0.97 * white.sum()
        inner = cv2.erode(mask, np.ones((7, 7)), borderValue=0) > 0
        assert item.image[inner].min(initial=255) > 200
        discs += len(item.boxes)
    assert discs > 30


# Outlines


def outlines_of(after: Sample) -> list[list[list[float]]]:
    assert after.polygons is not None
    return [points.tolist() for points in after.polygons.outlines()]


def test_outlines_are_moved_with_the_image() -> None:
    before = outlined(SQUARE, TRIANGLE)
    fitted, _ = letterbox(before, (80, 80), enlarge=True)  # twice as large, 20 rows lower
    assert outlines_of(fitted) == [[[2 * x, 2 * y + 20] for x, y in points] for points in (SQUARE, TRIANGLE)]
    assert fitted.polygons.extents().tolist() == fitted.boxes.tolist()
    for axis, side in ((0, 40), (1, 20)):
        flipped = flip(before, axis)
        assert flipped.polygons.extents().tolist() == flipped.boxes.tolist()
        assert outlines_of(flipped)[0][0][axis] == side - SQUARE[0][axis]
        assert outlines_of(flip(flipped, axis)) == outlines_of(before) == [SQUARE, TRIANGLE]
    both = mixup(before, outlined(TRIANGLE), np.random.default_rng(0))
    assert outlines_of(both) == [SQUARE, TRIANGLE, TRIANGLE]
    assert outlines_of(random_hsv(before, hyp_of(hsv_h=0.1), np.random.default_rng(0))) == [SQUARE, TRIANGLE]


def shifted(x: float, y: float) -> Mock:
    """Return a generator for `random_matrix` that shifts an image of 40 x 20 pixels by x and y."""
    return uniform(np.zeros(2), 0.0, 1.0, np.zeros(2), 0.5 + np.array([x / 40, y / 20]))


@pytest.mark.parametrize(
    ("x", "outline", "box"),
    [
        pytest.param(0, TRIANGLE, [2, 2, 12, 12], id="whole"),
        # What is left of the edge x = 0 is gone; the other corners of the triangle are (12 - 7, 2) and (2 - 7, 12).
        pytest.param(-7, TRIANGLE, [0, 2, 5, 7], id="cut"),
        pytest.param(-9.5, TRIANGLE, [0, 2, 2.5, 4.5], id="a sixteenth of the box"),
        pytest.param(-11.5, TRIANGLE, None, id="too small"),
        pytest.param(-13, TRIANGLE, None, id="outside"),
    ],
)
def test_a_box_is_the_extent_of_the_visible_part_of_its_outline(
    x: float, outline: list[list[float]], box: list[float] | None
) -> None:
    after = random_warp(outlined(outline), NOTHING, (20, 40), shifted(x, 0), masks=True)
    assert after.boxes.tolist() == ([box] if box else [])
    assert after.polygons.extents().tolist() == after.boxes.tolist()
    assert len(after.classes) == len(after.boxes)


def test_outlines_are_cut_at_the_edge_of_the_canvas() -> None:
    """Half of a mosaic's canvas in size, so that its edge is visible; the first image ends 12 pixels beyond it."""
    image = outlined(TRIANGLE, rectangle(10, 4, 40, 10))
    sizes = [(40, 20)] * 4
    for angle in (0.0, 0.001):
        positions = mosaic_positions(sizes, 40, uniform(np.array([28.0, 30.0])))
        matrix = np.diag([0.5, 0.5, 1])
        matrix[:2, 2] = 4, 6
        matrix[0, 1] = angle
        load = Mock(side_effect=[image, *[outlined(width=40, height=20)] * 3])
        after = warp_mosaic(positions, load, 80, matrix, 0.5, (60, 60), masks=True)
        # The corner of the first image is at (-12, 10) of the canvas: the triangle ends at its edge, with a point.
        assert after.boxes == pytest.approx(np.array([[4, 13, 18, 16]]), abs=0.1)
        assert after.polygons.extents() == pytest.approx(after.boxes, abs=1e-6)
        assert after.classes.tolist() == [1]


@pytest.mark.parametrize("settings", [{"scale": 0.5, "translate": 0.2}, {"degrees": 30.0, "perspective": 0.0005}])
def test_masks_change_no_pixel_and_no_random_choice(settings: dict[str, float]) -> None:
    strengths = hyp_of(**settings, mosaic=0.7, mixup=0.5, fliplr=0.5, flipud=0.5, hsv_v=0.3)
    samples = [
        outlined(rectangle(20, 30, 50, 70), width=96, height=96)._replace(image=noise(96, 96, k)) for k in range(4)
    ]
    usual = Augmenter(strengths, 96, 4, samples.__getitem__, lambda _: (96, 96))
    masked = replace(usual, masks=True)
    for seed in range(12):
        one, other = (each(0, (96, 96), np.random.default_rng(seed)) for each in (usual, masked))
        assert np.array_equal(one.image, other.image)
        assert len(other.polygons.counts) == len(other.boxes)
