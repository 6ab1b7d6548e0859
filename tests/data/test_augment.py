"""Augmentation: pixels, boxes and outlines move alike under any matrix; choices depend on the generator alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from utils.config.hyperparameters import Augmentation

NOTHING = Augmentation(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, mosaic=0)
examples = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SIDES, SEEDS = st.integers(1, 24), st.integers(0, 2**32)


def hyp_of(**values: Any) -> Augmentation:
    return replace(NOTHING, **values)


def sample(image: np.ndarray, *boxes: list[float], classes: list[float] | None = None) -> Sample:
    """Return an image with boxes, by default of the classes 0, 1, ..."""
    labels = range(len(boxes)) if classes is None else classes
    return Sample(image, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.float32))


def outlined(*polygons: list[list[float]], width: int = 40, height: int = 20) -> Sample:
    """Return noise with an object for each polygon, its box around it; without points, the box is 1, 1, 4, 4."""
    outlines = tuple(np.array(points, np.float32).reshape(-1, 2) for points in polygons)
    boxes = [[*points.min(0), *points.max(0)] if len(points) else [1, 1, 4, 4] for points in outlines]
    return sample(noise(width, height), *boxes)._replace(polygons=Polygons.from_outlines(outlines))


def rectangle(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


SQUARE, TRIANGLE = rectangle(2, 4, 8, 10), [[2, 2], [12, 2], [2, 12]]


def any_sample(seed: int, width: int, height: int) -> Sample:
    """Return noise with two random outlines and the boxes around them."""
    rng = np.random.default_rng(seed)
    return outlined(*(rng.random((3, 2)) * (width, height) for _ in range(2)), width=width, height=height)


def outlines_of(after: Sample) -> list[list[list[float]]]:
    assert after.polygons is not None
    return [points.tolist() for points in after.polygons.outlines()]


def uniform(*draws: object) -> Mock:
    """Return a generator whose method `uniform` returns these values in turn."""
    rng = Mock(spec=np.random.Generator)
    rng.uniform.side_effect = draws
    return rng


def matrix(*rows: list[float]) -> np.ndarray:
    return np.array(rows, float)


def pasted(canvas: np.ndarray, image: np.ndarray, left: int, top: int) -> None:
    """Paste an image into a canvas, cut at its edges."""
    height, width = image.shape[:2]
    ys, xs = np.mgrid[top : top + height, left : left + width]
    inside = (ys >= 0) & (xs >= 0) & (ys < canvas.shape[0]) & (xs < canvas.shape[1])
    canvas[ys[inside], xs[inside]] = image[inside]


# Letterbox and flips


@examples
@given(SEEDS, SIDES, SIDES, SIDES, SIDES, st.booleans())
def test_letterbox_fits_and_centres_on_grey(
    seed: int, width: int, height: int, rows: int, columns: int, enlarge: bool
) -> None:
    before = any_sample(seed, width, height)
    fitted, placement = letterbox(before, (rows, columns), enlarge)
    ratio = min(rows / height, columns / width) if enlarge else min(rows / height, columns / width, 1)
    new = max(round(width * ratio), 1), max(round(height * ratio), 1)
    left, top = (columns - new[0]) // 2, (rows - new[1]) // 2  # an odd pixel goes to the right and the bottom
    assert placement == ((ratio, ratio), (left, top))
    wanted = plain(columns, rows, PADDING_LEVEL)
    pasted(wanted, cv2.resize(before.image, new), left, top)
    assert np.array_equal(fitted.image, wanted)
    assert fitted.boxes == pytest.approx(before.boxes * ratio + (left, top, left, top), abs=1e-3)
    assert fitted.polygons.extents() == pytest.approx(fitted.boxes, abs=0.51)
    assert (fitted.boxes.dtype, fitted.classes.tolist()) == (np.float32, [0, 1])


@examples
@given(SEEDS, SIDES, SIDES, st.sampled_from([0, 1]))
def test_a_flip_mirrors_pixels_boxes_and_outlines(seed: int, width: int, height: int, axis: int) -> None:
    before, side = any_sample(seed, width, height), (width, height)[axis]
    flipped = flip(before, axis)
    assert np.array_equal(flipped.image, np.flip(before.image, 1 - axis))
    assert flipped.boxes[:, axis] == pytest.approx(side - before.boxes[:, axis + 2], abs=1e-5)
    assert flipped.boxes[:, 1 - axis].tolist() == before.boxes[:, 1 - axis].tolist()
    assert flipped.polygons.extents() == pytest.approx(flipped.boxes, abs=1e-5)
    assert flipped.classes.tolist() == [0, 1]
    assert np.array_equal(flip(flipped, axis).image, before.image)


# Boxes and any matrix


@examples
@given(SEEDS, st.floats(-0.02, 0.02), st.booleans())
def test_a_warped_box_is_the_upright_box_around_its_corners(seed: int, tilt: float, is_shifted: bool) -> None:
    rng = np.random.default_rng(seed)
    warp, shape = rng.uniform(-2, 2, (3, 3)), (12, 10)
    warp[:2, 2] = rng.uniform(-9, 9, 2) * is_shifted
    warp[2] = tilt, -tilt, 1
    boxes = np.sort(rng.uniform(0, 12, (3, 2, 2)), 1).reshape(3, 4).astype(np.float32)
    warped = warp_boxes(boxes, warp, shape)
    for (left, top, right, bottom), box in zip(boxes.astype(float), warped, strict=True):
        points = [warp @ (x, y, 1) for x in (left, right) for y in (top, bottom)]
        xs, ys = ([point[axis] / point[2] for point in points] for axis in (0, 1))
        around = np.clip([min(xs), min(ys), max(xs), max(ys)], 0, (10, 12, 10, 12))
        assert box == pytest.approx(around, abs=1e-4)
    assert warped.dtype == np.float32
    assert warp_boxes(boxes[:0], warp, shape).shape == (0, 4)


@examples
@given(st.tuples(*[st.sampled_from([0, 1, 2, 2.5, 3, 10, 10.5, 100, 299, 300])] * 4))
def test_a_warped_box_is_visible_by_its_sides_area_and_aspect(sides: tuple[float, ...]) -> None:
    boxes = [np.array([[5, 7, 5 + w, 7 + h], [0, 0, 9, 9]], np.float32) for w, h in (sides[:2], sides[2:])]
    shorter, longer = sorted(sides[2:])
    visible = shorter > 2 and shorter * longer > 0.1 * sides[0] * sides[1] and longer < 100 * shorter
    assert is_visible(*boxes).tolist() == [visible, True]
    visible = shorter > 2 and shorter * longer > 0.01 * sides[0] * sides[1] and longer < 100 * shorter
    assert is_visible(*boxes, np.array([True, False])).tolist() == [visible, True]


def test_a_warp_moves_pixels_and_boxes_alike_and_drops_invisible_boxes() -> None:
    """The centre (6, 6) comes to (8, 9); the second box would begin at 11, beyond the edge."""
    before = sample(noise(12, 12), [1, 0, 5, 4], [9, 1, 12, 5], [3, 2, 8, 5])
    rng = uniform(np.zeros(2), 0.0, 1.0, np.zeros(2), np.array((0.8, 9 / 8)))
    after, wanted = random_warp(before, NOTHING, (8, 10), rng), plain(10, 8, PADDING_LEVEL)
    pasted(wanted, before.image, 2, 3)
    assert np.array_equal(after.image, wanted)
    assert after.boxes.tolist() == [[3, 3, 7, 7], [5, 5, 10, 8]]
    assert after.classes.tolist() == [0, 2]


# Mosaic


@examples
@given(SEEDS, st.lists(st.tuples(st.integers(3, 8), st.integers(3, 8)), min_size=4, max_size=4))
def test_four_images_of_a_mosaic_meet_at_its_centre(seed: int, sizes: list[tuple[int, int]]) -> None:
    x, y = np.random.default_rng(seed).integers(4, 13, 2).tolist()
    samples = [sample(noise(*size, seed=k), [0, 0, *size], classes=[k]) for k, size in enumerate(sizes)]
    positions = mosaic_positions(sizes, 8, uniform(np.array([x + 0.5, y + 0.5])))
    joined = warp_mosaic(positions, samples.__getitem__, 16, np.eye(3), 1.0, (16, 16))
    wanted, boxes = plain(16, 16, PADDING_LEVEL), {}
    for k, (width, height) in enumerate(sizes):
        left, top = x - width * (k in (0, 2)), y - height * (k in (0, 1))
        pasted(wanted, samples[k].image, left, top)
        boxes[float(k)] = np.clip([left, top, left + width, top + height], 0, 16).tolist()
    assert np.array_equal(joined.image, wanted)
    for label, box in zip(joined.classes.tolist(), joined.boxes.tolist(), strict=True):
        assert boxes.pop(label) == box
    assert all(min(box[2] - box[0], box[3] - box[1]) <= 2 for box in boxes.values())


def smooth(width: int, height: int, number: int) -> np.ndarray:
    """Return an image that changes slowly, so that half a pixel matters little."""
    rows, columns = np.indices((height, width))
    waves = [np.sin(rows / 17 + number) + np.cos(columns / (23 + 5 * k)) for k in range(3)]
    return (np.stack(waves, -1) * 50 + 120).astype(np.uint8)


@pytest.mark.parametrize("strengths", [{}, {"degrees": 20.0, "shear": 5.0}, {"perspective": 0.0005, "degrees": 5.0}])
def test_a_warped_mosaic_equals_its_canvas_warped(strengths: dict[str, float]) -> None:
    rng, augment = np.random.default_rng(1), hyp_of(translate=0.1, scale=0.5, **strengths)
    sizes = [(128, 96), (80, 128), (128, 60), (128, 128)]
    boxes = [[10, 20, 60, 50], [0, 0, 30, 128], [50, 5, 128, 55], [30, 30, 90, 100]]
    samples = [sample(smooth(*sizes[k], k), boxes[k], classes=[k]) for k in range(4)]
    for _ in range(20):
        positions = mosaic_positions(sizes, 128, rng)
        warp, scale = random_matrix(augment, (256, 256), (120, 136), rng)
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


def test_an_image_outside_of_the_result_is_not_loaded_and_one_of_another_size_is_resized() -> None:
    """The result begins right of and below the centre, or shows the whole canvas, upright and after a quarter turn."""
    half, corner = sample(plain(4, 4, 50), [1, 1, 3, 3]), matrix([1, 0, -5], [0, 1, -5], [0, 0, 1])
    load = Mock(return_value=half)
    warped = warp_mosaic(mosaic_positions([(8, 8)] * 4, 8, uniform(np.full(2, 4.0))), load, 16, corner, 1.0, (6, 6))
    assert [call.args for call in load.call_args_list] == [(3,)]
    assert (warped.image == 50).all()
    assert warped.boxes == pytest.approx(np.array([[1, 1, 5, 5]]), abs=0.5)  # half pixels are rounded
    positions = mosaic_positions([(8, 8)] * 4, 8, uniform(np.full(2, 8.0)))
    for warp, box in ((np.eye(3), [2, 2, 6, 6]), (matrix([0, -1, 16], [1, 0, 0], [0, 0, 1]), [10, 2, 14, 6])):
        warped = warp_mosaic(positions, load, 16, warp, 1.0, (16, 16))
        assert (warped.image[2:6, box[0] : box[2]] == 50).all()
        assert warped.boxes.tolist()[0] == box


# Colours


def test_mixup_is_a_weighted_mean_with_the_boxes_of_both() -> None:
    a = sample(plain(6, 4, 200), [0, 0, 3, 3], classes=[1])
    b = sample(plain(6, 4, 100), [1, 1, 4, 4], [2, 0, 6, 3], classes=[2, 3])
    mixed = mixup(a, b, Mock(beta=lambda *_: 0.25))
    assert np.array_equal(mixed.image, plain(6, 4, 125))
    assert mixed.boxes.tolist() == [[0, 0, 3, 3], [1, 1, 4, 4], [2, 0, 6, 3]]
    assert mixed.classes.tolist() == [1, 2, 3]
    empty = sample(plain(6, 4, 100))
    for pair in ((b, empty), (empty, b)):
        assert mixup(*pair, np.random.default_rng(0)).classes.tolist() == [2, 3]
    assert outlines_of(mixup(outlined(SQUARE), outlined(TRIANGLE), np.random.default_rng(0))) == [SQUARE, TRIANGLE]


@examples
@given(st.floats(-1, 1), st.floats(-1, 1))
def test_linear_gains_equal_those_in_hsv_if_nothing_is_clipped(saturation: float, value: float) -> None:
    image = 80 + noise(60, 60) // 3
    before = sample(image.copy(), [0, 0, 3, 3], classes=[4])
    after = random_hsv(before, hyp_of(hsv_s=0.4, hsv_v=0.4), uniform(np.array((0, saturation, value))))
    gains = np.float32([1, 1 + 0.4 * saturation, 1 + 0.4 * value])
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_BGR2HSV) * gains
    assert np.abs(after.image - cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)).max() <= 1.5  # two roundings
    assert np.array_equal(before.image, image)
    assert np.array_equal(after.boxes, before.boxes)


# The whole chain

SIZES = ((12, 16), (16, 16), (16, 9), (5, 16), (16, 13))  # width, height


def counting(loaded: list[int], **augment: float) -> Augmenter:
    """Return an augmenter of five small images, which notes the images that it loads."""
    samples = [sample(noise(*size, seed=k), [1, 1, size[0] - 1, size[1] - 1]) for k, size in enumerate(SIZES)]
    return Augmenter(hyp_of(**augment), 16, 5, lambda k: loaded.append(k) or samples[k], SIZES.__getitem__)


def test_a_mosaic_consists_of_its_image_and_three_of_all_in_any_order() -> None:
    samples = [sample(plain(16, 16, 50 * k)) for k in range(5)]
    augmenter = Augmenter(hyp_of(mosaic=1.0), 16, 5, samples.__getitem__, lambda _: (16, 16))
    rng, missing, corners = np.random.default_rng(0), 0, np.zeros((4, 5), int)  # counts of each image in each corner
    for _ in range(400):
        image = augmenter(2, (16, 16), rng).image[..., 0]
        drawn = [int(image[row, column]) // 50 for row in (0, -1) for column in (0, -1)]
        missing += 2 not in drawn
        corners[range(4), drawn] += 1
    assert missing < 50  # 1/16: its part of the canvas is outside of the item
    assert corners[:, 2] == pytest.approx(np.full(4, 160), abs=40)  # 1/4 + 3/4 * 1/5
    assert corners[:, [0, 1, 3, 4]] == pytest.approx(np.full((4, 4), 60), abs=30)


@pytest.mark.parametrize(("augment", "fewer"), [({"mosaic": 0.3}, 1), ({"mosaic": 1.0, "mixup": 0.3}, 4)])
def test_the_shares_of_mosaics_and_of_mixed_mosaics(augment: dict[str, float], fewer: int) -> None:
    loaded, rng, counts = [], np.random.default_rng(0), []
    augmenter = counting(loaded, **augment)
    for _ in range(500):
        loaded.clear()
        augmenter(0, (16, 16), rng)
        counts.append(len(loaded))
    assert sum(count > fewer for count in counts) / 500 == pytest.approx(0.3, abs=0.06)


# Copy-paste


def test_a_pasted_object_is_the_mirrored_one_cut_out_along_its_polygon() -> None:
    before, image = outlined(SQUARE), outlined(TRIANGLE).image
    expected = before.image.copy()
    expected[4:10, 32:38] = before.image[4:10, 2:8][:, ::-1]
    after = copy_paste(before, 1.0, np.random.default_rng(0))
    assert after.boxes.tolist() == [[2, 4, 8, 10], [32, 4, 38, 10]]
    assert (after.classes.tolist(), after.boxes.dtype) == ([0, 0], np.float32)
    assert outlines_of(after) == [SQUARE, [[40 - x, y] for x, y in SQUARE]]
    assert np.array_equal(after.image, expected)
    after = copy_paste(outlined(TRIANGLE), 1.0, np.random.default_rng(0))
    changed = (after.image != image).any(2)
    assert np.array_equal(after.image[changed], image[:, ::-1][changed])
    assert changed[2:12, 28:38].sum() == changed.sum() == pytest.approx(55, abs=6)  # half of a square, and its diagonal
    assert not changed[9:12, 28:31].any()


@pytest.mark.parametrize(("right", "is_pasted"), [(34.9, True), (35.1, False)])
def test_an_object_is_not_pasted_over_another(right: float, is_pasted: bool) -> None:
    """The pasted object, from 32 to 38, covers 0.29 or 0.31 of a box that is ten pixels wide."""
    before = outlined(SQUARE, rectangle(right - 10, 4, right, 10))
    outlines = before.polygons.outline(0), np.zeros((0, 2), np.float32)
    before = before._replace(polygons=Polygons.from_outlines(outlines))
    assert covered_shares(before.boxes, np.array([32, 4, 38, 10]))[1] == pytest.approx((right - 32) / 10, abs=1e-6)
    assert len(copy_paste(before, 1.0, np.random.default_rng(0)).boxes) == 2 + is_pasted


# Outlines


@pytest.mark.parametrize("augment", [{"scale": 0.5, "translate": 0.2}, {"degrees": 30.0, "perspective": 0.001}])
def test_polygons_of_a_mosaic_enclose_the_pixels_of_their_objects(augment: dict[str, float]) -> None:
    """White discs on black, which edges may clip."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    samples = []
    for centre in ((30, 30), (70, 20), (20, 80), (60, 60)):
        image = plain(96, 96, 0)
        cv2.circle(image, centre, 15, (255, 255, 255), -1)
        points = np.array(centre, np.float32) + 0.5 + 15.5 * np.stack((np.cos(angles), np.sin(angles)), 1)
        samples.append(outlined(points.tolist())._replace(image=image))
    augmenter = Augmenter(hyp_of(**augment, mosaic=1.0), 96, 4, samples.__getitem__, lambda _: (96, 96), masks=True)
    discs = 0
    for seed in range(20):
        item = augmenter(0, (96, 96), np.random.default_rng(seed))
        assert len(item.polygons.counts) == len(item.boxes)
        mask, in_boxes = np.zeros((96, 96), np.uint8), np.zeros((96, 96), bool)
        for polygon, box in zip(item.polygons.outlines(), item.boxes, strict=True):
            left, top, right, bottom = box.round().astype(int)
            in_boxes[top:bottom, left:right] = True
            assert np.all((polygon > -1e-3) & (polygon < 96 + 1e-3))
            assert np.all((polygon.min(0) >= box[:2] - 0.51) & (polygon.max(0) <= box[2:] + 0.51))
            cv2.fillPoly(mask, [(polygon - 0.5).round().astype(np.int32)], 255)
        white = (item.image == 255).all(2) & in_boxes  # discs that are too small have no box
        assert (mask[white] > 0).sum() >= 0.97 * white.sum()
        inner = cv2.erode(mask, np.ones((7, 7)), borderValue=0) > 0
        assert item.image[inner].min(initial=255) > 200
        discs += len(item.boxes)
    assert discs > 30


@examples
@given(st.floats(-14, 30), st.floats(-14, 10))
def test_a_box_is_the_extent_of_the_visible_part_of_its_outline(x: float, y: float) -> None:
    """Of a triangle in an image of 40 x 20 pixels, shifted over its edges."""
    shift = uniform(np.zeros(2), 0.0, 1.0, np.zeros(2), 0.5 + np.array([x / 40, y / 20]))
    after = random_warp(outlined(TRIANGLE), NOTHING, (20, 40), shift)
    left, top = max(2 + x, 0), max(2 + y, 0)
    # The sides of the triangle are along x + y = 14 before the shift.
    right, bottom = min(14 + x + y - top, 40), min(14 + x + y - left, 20)
    if min(right - left, bottom - top) < 1.5:
        assert not len(after.boxes)
    elif min(right - left, bottom - top) > 2.1:
        assert after.boxes == pytest.approx(np.array([[left, top, right, bottom]]), abs=1e-3)
    assert after.polygons.extents().tolist() == after.boxes.tolist()
    assert len(after.classes) == len(after.boxes)


@pytest.mark.parametrize("augment", [{"scale": 0.5, "translate": 0.2}, {"degrees": 45.0, "shear": 10.0}])
def test_an_object_without_an_outline_is_warped_by_its_box(augment: dict[str, float]) -> None:
    """Beside a triangle with one."""
    both = outlined([[30, 10], [70, 30], [35, 60]], [], width=96, height=96)
    both.boxes[1] = 20, 50, 60, 80
    usual = Augmenter(hyp_of(**augment, mosaic=0.5), 96, 1, lambda _: both._replace(polygons=None), lambda _: (96, 96))
    count = 0
    for seed in range(40):
        items = [
            each(0, (96, 96), np.random.default_rng(seed)) for each in (usual, replace(usual, load=lambda _: both))
        ]
        assert [item.polygons for item in items] == [None, None]  # a user's augmentation may move the boxes
        bare, mixed = (item.boxes[item.classes == 1] for item in items)
        assert np.array_equal(mixed, bare)
        count += len(bare)
    assert count > 40
