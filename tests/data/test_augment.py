"""Each piece of the augmentation alone, its boxes worked out by hand, then the chain of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from data import augment
from data.augment import (
    PADDING_LEVEL,
    Augmenter,
    AugmentSettings,
    Placement,
    Sample,
    copy_paste,
    covered_shares,
    flip_left_right,
    flip_up_down,
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

NOTHING = AugmentSettings()


def plain(height: int, width: int, colour: int | tuple[int, int, int] = 0) -> np.ndarray:
    """An image of one colour (BGR)."""
    return np.full((height, width, 3), colour, np.uint8)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def sample(image: np.ndarray, *boxes: list[float], classes: list[float] | None = None) -> Sample:
    """An image with boxes, their classes 0, 1, ... unless given."""
    labels = range(len(boxes)) if classes is None else classes
    return Sample(image, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.float32))


def drawing(**values: object) -> Mock:
    """Stands in for a generator whose methods give these values."""
    rng = Mock(spec=np.random.Generator)
    for name, value in values.items():
        getattr(rng, name).return_value = value
    return rng


def moved(image: np.ndarray, left: int, top: int, height: int, width: int) -> np.ndarray:
    """Grey of this size with `image`'s corner at (left, top); all of the image must fit."""
    canvas = plain(height, width, PADDING_LEVEL)
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas


# letterbox


@pytest.mark.parametrize("enlarge", [False, True])
@pytest.mark.parametrize(
    ("height", "width", "left", "top"),
    [
        pytest.param(4, 8, 0, 2, id="landscape"),
        pytest.param(8, 4, 2, 0, id="portrait"),
        pytest.param(8, 8, 0, 0, id="square"),
        pytest.param(5, 8, 0, 1, id="odd: one row above, two below"),
        pytest.param(8, 7, 0, 0, id="odd: no column left, one right"),
    ],
)
def test_letterbox_centres_on_grey(height: int, width: int, left: int, top: int, enlarge: bool) -> None:
    image = noise(height, width)
    fitted, placement = letterbox(sample(image, [1, 0, 3, 4], [0, 2, 2, 3]), (8, 8), enlarge)
    assert np.array_equal(fitted.image, moved(image, left, top, 8, 8))
    assert fitted.boxes.tolist() == [[1 + left, top, 3 + left, 4 + top], [left, 2 + top, 2 + left, 3 + top]]
    assert fitted.boxes.dtype == np.float32
    assert fitted.classes.tolist() == [0, 1]
    assert placement == Placement((1, 1), (left, top))


def test_letterbox_fits_an_image_into_an_oblong() -> None:
    image = noise(3, 8)
    fitted, placement = letterbox(sample(image, [2, 1, 4, 3]), (6, 10), enlarge=False)
    assert np.array_equal(fitted.image, moved(image, 1, 1, 6, 10))  # rows to spare: 1 above, 2 below
    assert fitted.boxes.tolist() == [[3, 2, 5, 4]]
    assert placement == Placement((1, 1), (1, 1))


def test_letterbox_shrinks_at_one_scale() -> None:
    image = plain(8, 16)
    image[:, 8:] = 200
    fitted, placement = letterbox(sample(image, [4, 2, 12, 8]), (8, 8), enlarge=False)
    assert np.array_equal(fitted.image, moved(image[::2, ::2], 0, 2, 8, 8))
    assert fitted.boxes.tolist() == [[2, 3, 6, 6]]
    assert placement == Placement((0.5, 0.5), (0, 2))


def test_letterbox_enlarges_only_where_it_may() -> None:
    image = plain(2, 4)
    image[:, 2:] = 200
    small = sample(image, [1, 0, 3, 2])
    fitted, placement = letterbox(small, (8, 8), enlarge=True)
    assert (fitted.image[[0, 1, 6, 7]] == PADDING_LEVEL).all()
    assert (fitted.image[2:6, :3] == 0).all()
    assert (fitted.image[2:6, 5:] == 200).all()
    assert fitted.boxes.tolist() == [[2, 2, 6, 6]]
    assert placement == Placement((2, 2), (0, 2))
    fitted, placement = letterbox(small, (8, 8), enlarge=False)
    assert np.array_equal(fitted.image, moved(image, 2, 3, 8, 8))
    assert fitted.boxes.tolist() == [[3, 3, 5, 5]]
    assert placement == Placement((1, 1), (2, 3))


@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (64, 32), (33, 47)])
@pytest.mark.parametrize("enlarge", [False, True])
def test_letterbox_always_gives_the_shape_asked_for(shape: tuple[int, int], enlarge: bool) -> None:
    for height in range(10, 70, 7):
        for width in range(10, 70, 9):
            fitted, (scale, offset) = letterbox(sample(plain(height, width)), shape, enlarge)
            assert fitted.image.shape == (*shape, 3)
            inside = (fitted.image != PADDING_LEVEL).all(-1)
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            assert (columns[0], rows[0]) == offset
            assert abs(len(rows) - scale[1] * height) <= 0.5
            assert abs(len(columns) - scale[0] * width) <= 0.5
            assert abs(shape[0] - 1 - rows[-1] - rows[0]) <= 1  # centred
            assert abs(shape[1] - 1 - columns[-1] - columns[0]) <= 1


def test_letterbox_keeps_a_sliver_one_pixel_thick() -> None:
    fitted, _ = letterbox(sample(plain(8, 640)), (64, 32), enlarge=True)  # at its scale 0.4 pixels high
    assert (fitted.image == 0).all(-1).sum() == 32


def test_letterbox_without_boxes() -> None:
    fitted, _ = letterbox(sample(plain(4, 8)), (8, 8), enlarge=True)
    assert (fitted.boxes.shape, fitted.classes.shape) == ((0, 4), (0,))


# mosaic


def mosaic(samples: list[Sample], size: int, rng: np.random.Generator) -> Sample:
    """The whole canvas, as it is before any warp."""
    places = mosaic_positions([sample.image.shape[1::-1] for sample in samples], size, rng)
    return warp_mosaic(places, samples.__getitem__, 2 * size, np.eye(3), 1.0, (2 * size, 2 * size))


def test_mosaic_puts_four_corners_at_its_centre() -> None:
    first, second, third, fourth = plain(8, 8, 10), plain(4, 8, 20), plain(8, 6, 30), plain(5, 5, 40)
    first[0, 1], second[3, 0], third[0, 5], fourth[0, 0] = 11, 21, 31, 41
    joined = mosaic(
        [
            sample(first, [2, 1, 6, 5], [0, 0, 8, 8], classes=[1, 2]),
            sample(second, [0, 0, 4, 4], classes=[3]),
            sample(third, [0, 0, 6, 8], classes=[4]),
            sample(fourth, [1, 1, 4, 5], classes=[5]),
        ],
        8,
        drawing(uniform=np.array([7.0, 9.0])),
    )
    canvas = plain(16, 16, PADDING_LEVEL)
    canvas[1:9, 0:7] = 10  # ends at (7, 9): one column is beyond the edge
    canvas[5:9, 7:15] = 20
    canvas[9:16, 1:7] = 30  # one row is beyond the edge
    canvas[9:14, 7:12] = 40
    canvas[1, 0] = 11  # one down, one to the left
    canvas[8, 7], canvas[9, 6], canvas[9, 7] = 21, 31, 41  # what meets at the centre
    assert np.array_equal(joined.image, canvas)
    assert joined.boxes.tolist() == [[1, 2, 5, 6], [0, 1, 7, 9], [7, 5, 11, 9], [1, 9, 7, 16], [8, 10, 11, 14]]
    assert joined.classes.tolist() == [1, 2, 3, 4, 5]


def test_mosaic_cuts_what_leaves_the_canvas_on_every_side() -> None:
    images = [noise(8, 8, seed) for seed in range(4)]
    top_left = mosaic([sample(image) for image in images], 8, drawing(uniform=np.array([4.0, 4.0]))).image
    assert np.array_equal(top_left[:4, :4], images[0][4:, 4:])
    assert np.array_equal(top_left[:4, 4:12], images[1][4:])
    assert np.array_equal(top_left[4:12, :4], images[2][:, 4:])
    assert np.array_equal(top_left[4:12, 4:12], images[3])
    assert (top_left[12:] == PADDING_LEVEL).all()
    assert (top_left[:, 12:] == PADDING_LEVEL).all()
    bottom_right = mosaic([sample(image) for image in images], 8, drawing(uniform=np.array([12.0, 12.0]))).image
    assert np.array_equal(bottom_right[4:12, 4:12], images[0])
    assert np.array_equal(bottom_right[4:12, 12:], images[1][:, :4])
    assert np.array_equal(bottom_right[12:, 4:12], images[2][:4])
    assert np.array_equal(bottom_right[12:, 12:], images[3][:4, :4])
    assert (bottom_right[:4] == PADDING_LEVEL).all()
    assert (bottom_right[:, :4] == PADDING_LEVEL).all()


def test_the_centre_of_a_mosaic_lies_anywhere_in_the_middle_half() -> None:
    rng = np.random.default_rng(0)
    samples = [sample(plain(40, 40, colour)) for colour in (1, 2, 3, 4)]
    fourths = [(mosaic(samples, 40, rng).image[..., 0] == 4).nonzero() for _ in range(300)]
    ys, xs = np.array([(rows.min(), columns.min()) for rows, columns in fourths]).T
    for centres in (ys, xs):
        assert 20 <= centres.min() <= 22
        assert 57 <= centres.max() <= 59  # below 60
        assert centres.mean() == pytest.approx(39.5, abs=2)
    assert abs(np.corrcoef(ys, xs)[0, 1]) < 0.2  # the two are drawn apart


def test_mosaic_of_images_without_boxes() -> None:
    joined = mosaic([sample(plain(4, 4))] * 4, 4, np.random.default_rng(0))
    assert (joined.boxes.shape, joined.classes.shape) == ((0, 4), (0,))


def smooth(height: int, width: int, number: int) -> np.ndarray:
    """An image that changes slowly, so that half a pixel matters little."""
    rows, columns = np.indices((height, width))
    waves = [np.sin(rows / 17 + number) + np.cos(columns / (23 + 5 * k)) for k in range(3)]
    return (np.stack(waves, -1) * 50 + 120).astype(np.uint8)


@pytest.mark.parametrize("strengths", [{}, {"degrees": 20.0, "shear": 5.0}, {"perspective": 0.0005, "degrees": 5.0}])
def test_a_warped_mosaic_is_the_canvas_warped(strengths: dict[str, float]) -> None:
    """Each image goes straight into the result, and comes out where the painted and warped canvas has it."""
    rng, settings = np.random.default_rng(1), AugmentSettings(translate=0.1, scale=0.5, **strengths)
    shapes = [(96, 128), (128, 80), (60, 128), (128, 128)]
    boxes = [[10, 20, 60, 50], [0, 0, 30, 128], [50, 5, 128, 55], [30, 30, 90, 100]]
    samples = [
        sample(smooth(*shape, k), box, classes=[k]) for k, (shape, box) in enumerate(zip(shapes, boxes, strict=True))
    ]
    for _ in range(20):
        places = mosaic_positions([one.image.shape[1::-1] for one in samples], 128, rng)
        warp, scale = random_matrix(settings, (256, 256), (120, 136), rng)
        drawn = warp_mosaic(places, samples.__getitem__, 256, warp, scale, (120, 136))
        canvas = warp_mosaic(places, samples.__getitem__, 256, np.eye(3), 1.0, (256, 256))
        expected = cv2.warpPerspective(canvas.image, warp, (136, 120), borderValue=(PADDING_LEVEL,) * 3)
        wrong = (np.abs(drawn.image.astype(int) - expected).max(-1) > 20).mean()
        assert wrong < 0.06  # seams, which are a pixel wide
        around = warp_boxes(canvas.boxes, warp, (120, 136))
        kept = is_visible(canvas.boxes * scale, around)
        found = dict(zip(drawn.classes.tolist(), drawn.boxes, strict=True))
        for label, box in zip(canvas.classes[kept], around[kept], strict=True):
            if label in found:  # the smallest part of a box may be kept by one and not by the other
                assert np.abs(found.pop(label) - box).max() <= 1.5
        assert not found or len(found) == 1


def test_an_image_that_is_not_seen_is_not_loaded() -> None:
    loaded: list[int] = []

    def load(number: int) -> Sample:
        loaded.append(number)
        return sample(plain(8, 8, 10 * number), [1, 1, 7, 7])

    places = mosaic_positions([(8, 8)] * 4, 8, drawing(uniform=np.array([4.0, 4.0])))
    corner = matrix([1, 0, -5], [0, 1, -5], [0, 0, 1])  # the result begins right of and below the centre
    drawn = warp_mosaic(places, load, 16, corner, 1.0, (6, 6))
    assert loaded == [3]
    assert (drawn.image == 30).all()
    assert drawn.boxes.tolist() == [[0, 0, 6, 6]]


def test_an_image_of_another_size_than_its_place_is_resized() -> None:
    """Where the scan and the file disagree."""
    half = sample(plain(4, 4, 50), [1, 1, 3, 3])
    places = mosaic_positions([(8, 8)] * 4, 8, drawing(uniform=np.array([8.0, 8.0])))
    drawn = warp_mosaic(places, lambda number: half, 16, np.eye(3), 1.0, (16, 16))
    assert (drawn.image == 50).all()
    assert drawn.boxes.tolist()[0] == [2, 2, 6, 6]


# boxes through a matrix


def matrix(*rows: list[float]) -> np.ndarray:
    return np.array(rows, float)


@pytest.mark.parametrize(
    ("warp", "box", "after"),
    [
        pytest.param(matrix([1, 0, 3], [0, 1, -2], [0, 0, 1]), [4, 4, 6, 9], [7, 2, 9, 7], id="shift"),
        pytest.param(matrix([1, 0, 3], [0, 1, -2], [0, 0, 1]), [4, 1, 8, 9], [7, 0, 10, 7], id="shift, cut"),
        pytest.param(matrix([1, 0, 0], [0, 1, 9], [0, 0, 1]), [4, 1, 8, 9], [4, 10, 8, 12], id="shift, cut below"),
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
    warp: np.ndarray, box: list[float], after: list[float]
) -> None:
    boxes = warp_boxes(np.array([box, box], np.float32), warp, (12, 10))
    assert boxes.dtype == np.float32
    assert boxes == pytest.approx(np.array([after, after]), abs=1e-5)


def test_no_boxes_are_warped_to_no_boxes() -> None:
    assert warp_boxes(np.zeros((0, 4), np.float32), np.eye(3), (8, 8)).shape == (0, 4)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
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
def test_which_boxes_are_worth_keeping(before: tuple[float, float], after: tuple[float, float], kept: bool) -> None:
    # the place of a box does not matter
    boxes = [np.array([[5, 7, 5 + width, 7 + height]], np.float32) for width, height in (before, after)]
    assert is_visible(*boxes).tolist() == [kept]


def test_boxes_are_judged_one_by_one() -> None:
    before = np.array([[0, 0, 10, 10]] * 3, np.float32)
    after = np.array([[0, 0, 10, 10], [0, 0, 1, 10], [4, 4, 9, 9]], np.float32)
    assert is_visible(before, after).tolist() == [True, False, True]
    assert is_visible(np.zeros((0, 4)), np.zeros((0, 4))).tolist() == []


# random warp


def matrices(source: tuple[int, int], target: tuple[int, int], count: int, **settings: float) -> np.ndarray:
    """That many random matrices, (count, 3, 3)."""
    rng = np.random.default_rng(0)
    return np.array([random_matrix(AugmentSettings(**settings), source, target, rng)[0] for _ in range(count)])


def check_uniform(values: np.ndarray, low: float, high: float) -> None:
    """All in [low, high], reaching near both ends, with the mean and spread of a uniform distribution."""
    width = high - low
    assert low - 1e-9 <= values.min() <= low + 0.02 * width
    assert high - 0.02 * width <= values.max() <= high + 1e-9
    assert values.mean() == pytest.approx((low + high) / 2, abs=0.03 * width)
    assert values.std() == pytest.approx(width / 12**0.5, rel=0.06)


def test_without_strengths_the_matrix_is_the_identity() -> None:
    warp, scale = random_matrix(NOTHING, (60, 80), (60, 80), np.random.default_rng(0))
    assert np.array_equal(warp, np.eye(3))
    assert scale == 1


def test_without_strengths_the_centre_comes_to_the_centre() -> None:
    warp, _ = random_matrix(NOTHING, (60, 80), (30, 50), np.random.default_rng(0))
    assert np.array_equal(warp, matrix([1, 0, -15], [0, 1, -15], [0, 0, 1]))  # (40, 30) -> (25, 15)


def test_translation_is_a_share_of_the_target() -> None:
    warps = matrices((200, 400), (100, 200), 1000, translate=0.1)
    # the centre, (200, 100), comes to (100, 50) give or take a tenth of 200 and of 100 pixels
    check_uniform(200 + warps[:, 0, 2], 80, 120)
    check_uniform(100 + warps[:, 1, 2], 40, 60)
    assert abs(np.corrcoef(warps[:, 0, 2], warps[:, 1, 2])[0, 1]) < 0.1
    warps[:, :2, 2] = 0
    assert (warps == np.eye(3)).all()


def test_scale_is_uniform_about_one_and_keeps_the_centre() -> None:
    warps = matrices((100, 200), (100, 200), 1000, scale=0.5)
    check_uniform(warps[:, 0, 0], 0.5, 1.5)
    assert np.array_equal(warps[:, 0, 0], warps[:, 1, 1])
    assert warps @ [100, 50, 1] == pytest.approx(np.tile([100, 50, 1], (1000, 1)))
    assert np.all(warps[:, [0, 1], [1, 0]] == 0)


def test_the_scale_told_is_that_of_the_matrix() -> None:
    settings = AugmentSettings(scale=0.5, degrees=30, translate=0.2)
    for seed in range(20):
        warp, scale = random_matrix(settings, (100, 200), (50, 60), np.random.default_rng(seed))
        assert np.linalg.det(warp[:2, :2]) == pytest.approx(scale**2)


def test_rotation_is_uniform_either_way_and_keeps_the_centre_and_size() -> None:
    warps = matrices((100, 200), (100, 200), 1000, degrees=30.0)
    check_uniform(np.degrees(np.arctan2(warps[:, 1, 0], warps[:, 0, 0])), -30, 30)
    assert warps[:, :2, :2] @ warps[:, :2, :2].transpose(0, 2, 1) == pytest.approx(np.tile(np.eye(2), (1000, 1, 1)))
    assert warps @ [100, 50, 1] == pytest.approx(np.tile([100, 50, 1], (1000, 1)))


def test_shear_is_an_angle_along_either_axis() -> None:
    warps = matrices((100, 200), (100, 200), 1000, shear=10.0)
    for row, column in ((0, 1), (1, 0)):
        check_uniform(np.degrees(np.arctan(warps[:, row, column])), -10, 10)
    assert np.all(warps[:, [0, 1], [0, 1]] == 1)
    assert warps @ [100, 50, 1] == pytest.approx(np.tile([100, 50, 1], (1000, 1)))


def test_perspective_is_drawn_for_either_axis_and_keeps_the_centre() -> None:
    warps = matrices((100, 200), (100, 200), 1000, perspective=0.001)
    for column in (0, 1):
        check_uniform(warps[:, 2, column], -0.001, 0.001)
    middles = warps @ [100, 50, 1]
    assert middles[:, :2] / middles[:, 2:] == pytest.approx(np.tile([100, 50], (1000, 1)))


def test_a_warp_without_strengths_changes_nothing() -> None:
    before = sample(noise(40, 60), [1, 2, 30, 40], [5, 6, 9, 9])
    after = random_warp(before, NOTHING, (40, 60), np.random.default_rng(0))
    assert np.array_equal(after.image, before.image)
    assert np.array_equal(after.boxes, before.boxes)
    assert np.array_equal(after.classes, before.classes)


def test_a_warp_without_strengths_cuts_the_middle_out_of_a_mosaic() -> None:
    image = noise(16, 16)
    warped = random_warp(sample(image, [2, 6, 8, 10]), NOTHING, (8, 8), np.random.default_rng(0))
    assert np.array_equal(warped.image, image[4:12, 4:12])
    assert warped.boxes.tolist() == [[0, 2, 4, 6]]


def warped_by(monkeypatch: pytest.MonkeyPatch, warp: np.ndarray, scale: float, before: Sample, **more: float) -> Sample:
    """`before` after this matrix, in 8 rows of 10 pixels."""
    monkeypatch.setattr(augment, "random_matrix", lambda *_: (warp, scale))
    return random_warp(before, AugmentSettings(**more), (8, 10), np.random.default_rng(0))


@pytest.mark.parametrize("perspective", [0.0, 0.0005])
def test_a_warp_moves_pixels_and_boxes_alike_and_drops_what_is_gone(
    monkeypatch: pytest.MonkeyPatch, perspective: float
) -> None:
    image = noise(12, 12)
    before = sample(image, [1, 0, 5, 4], [9, 1, 12, 5], [3, 2, 8, 5])
    warp = matrix([1, 0, 2], [0, 1, 3], [0, 0, 1])
    after = warped_by(monkeypatch, warp, 1.0, before, perspective=perspective)
    assert np.array_equal(after.image, moved(image[:5, :8], 2, 3, 8, 10))
    # the second box would begin at 11, beyond the edge; the third just touches both edges
    assert after.boxes.tolist() == [[3, 3, 7, 7], [5, 5, 10, 8]]
    assert after.classes.tolist() == [0, 2]


def test_a_box_is_judged_beside_its_size_after_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sample(noise(12, 12), [1, 1, 11, 11])
    after = warped_by(monkeypatch, np.diag([0.3, 0.3, 1]), 0.3, before)  # 3x3 of 10x10 is less than a tenth
    assert after.boxes == pytest.approx(np.array([[0.3, 0.3, 3.3, 3.3]]))


@pytest.mark.parametrize("perspective", [0.0, 0.001])
def test_the_pixels_of_a_thing_lie_where_its_warped_box_says(perspective: float) -> None:
    settings = AugmentSettings(degrees=20, translate=0.1, scale=0.3, shear=5, perspective=perspective)
    image = plain(120, 120)
    image[40:70, 50:90] = 255
    seen = set()
    for seed in range(20):
        warped = random_warp(sample(image, [50, 40, 90, 70]), settings, (100, 140), np.random.default_rng(seed))
        assert warped.image.shape == (100, 140, 3)
        rows, columns = (warped.image[..., 0] > 160).nonzero()  # brighter than what is outside
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert warped.boxes[0] == pytest.approx(np.array(found), abs=2)
        seen.add(tuple(found))
    assert len(seen) == 20


# mixup


def test_mixup_is_a_weighted_mean_with_the_boxes_of_both() -> None:
    a = sample(plain(4, 6, (200, 100, 0)), [0, 0, 3, 3], classes=[1])
    b = sample(plain(4, 6, (100, 0, 240)), [1, 1, 4, 4], [2, 0, 6, 3], classes=[2, 3])
    mixed = mixup(a, b, drawing(beta=0.25))
    assert np.array_equal(mixed.image, plain(4, 6, (125, 25, 180)))
    assert mixed.boxes.tolist() == [[0, 0, 3, 3], [1, 1, 4, 4], [2, 0, 6, 3]]
    assert mixed.classes.tolist() == [1, 2, 3]
    assert (a.image == (200, 100, 0)).all()  # the images mixed stay as they are


def test_the_weight_of_mixup_is_near_one_half() -> None:
    rng = np.random.default_rng(0)
    a, b = sample(plain(1, 1, 250)), sample(plain(1, 1, 0))
    weights = np.array([mixup(a, b, rng).image[0, 0, 0] / 250 for _ in range(2000)])
    assert weights.mean() == pytest.approx(0.5, abs=0.01)
    assert weights.std() == pytest.approx((1 / (4 * 65)) ** 0.5, rel=0.1)  # of Beta(32, 32)


# colours


def coloured(image: np.ndarray, draws: tuple[float, float, float], **gains: float) -> np.ndarray:
    """The image after the relative changes of hue, saturation and value that these draws from [-1, 1] mean."""
    before = sample(image, [0, 0, 3, 3], classes=[4])
    after = random_hsv(before, AugmentSettings(**gains), drawing(uniform=np.array(draws)))
    assert np.array_equal(after.boxes, before.boxes)
    assert np.array_equal(after.classes, before.classes)
    assert after.image.dtype == np.uint8
    return after.image


def test_without_gains_colours_change_by_rounding_alone() -> None:
    image = noise(30, 30)
    changed = coloured(image, (1, -1, 1))
    # OpenCV keeps hue in steps of 2 degrees: half a step is 255 / 60 grey levels at full saturation
    assert np.abs(changed.astype(int) - image).max() <= 6
    grey = np.repeat(noise(30, 30)[..., :1], 3, axis=2)
    assert np.array_equal(coloured(grey, (1, -1, 1)), grey)


@pytest.mark.parametrize(("draw", "after"), [(1.0, 150), (-1.0, 50), (0.5, 125), (0.0, 100)])
def test_the_value_gain_scales_grey(draw: float, after: int) -> None:
    assert np.array_equal(coloured(plain(4, 4, 100), (1, 1, draw), hsv_v=0.5), plain(4, 4, after))


def test_value_ends_at_255() -> None:
    assert np.array_equal(coloured(plain(4, 4, 200), (0, 0, 1), hsv_v=0.5), plain(4, 4, 255))


@pytest.mark.parametrize(
    ("draw", "before", "after"),
    [
        pytest.param(1.0, (0, 255, 0), (255, 255, 0), id="green, 120 degrees, becomes cyan, 180"),
        pytest.param(-1.0, (0, 255, 0), (0, 255, 255), id="green becomes yellow, 60 degrees"),
        pytest.param(1.0, (255, 0, 0), (0, 0, 255), id="blue, 240 degrees, turns around to red"),
        pytest.param(1.0, (0, 0, 255), (0, 0, 255), id="red is 0 degrees"),
    ],
)
def test_the_hue_gain_turns_the_hue(draw: float, before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    assert np.array_equal(coloured(plain(4, 4, before), (draw, 0, 0), hsv_h=0.5), plain(4, 4, after))


def test_the_saturation_gain_scales_saturation() -> None:
    red = plain(4, 4, (0, 0, 255))
    assert np.array_equal(coloured(red, (0, -1, 0), hsv_s=1.0), plain(4, 4, 255))
    half = coloured(red, (0, -1, 0), hsv_s=0.5)  # saturation 127 of 255
    assert np.array_equal(half, plain(4, 4, (128, 128, 255)))
    assert np.array_equal(coloured(red, (0, 1, 0), hsv_s=0.5), red)  # ends at 255


def test_the_value_factor_is_uniform_about_one() -> None:
    rng, before = np.random.default_rng(0), sample(plain(1, 1, 100))
    values = [random_hsv(before, AugmentSettings(hsv_v=0.4), rng).image[0, 0, 0] for _ in range(2000)]
    check_uniform(np.array(values, float), 60, 140)


# flips


def test_flip_left_right() -> None:
    image = noise(6, 10)
    flipped = flip_left_right(sample(image, [1, 2, 4, 3], [0, 0, 10, 6]))
    assert np.array_equal(flipped.image, image[:, ::-1])
    assert flipped.boxes.tolist() == [[6, 2, 9, 3], [0, 0, 10, 6]]
    assert flipped.classes.tolist() == [0, 1]


def test_flip_up_down() -> None:
    image = noise(6, 10)
    flipped = flip_up_down(sample(image, [1, 2, 4, 3], [0, 0, 10, 6]))
    assert np.array_equal(flipped.image, image[::-1])
    assert flipped.boxes.tolist() == [[1, 3, 4, 4], [0, 0, 10, 6]]
    assert flipped.classes.tolist() == [0, 1]


@pytest.mark.parametrize("flip", [flip_left_right, flip_up_down])
def test_a_flip_undoes_itself_and_writes_to_nobodys_pixels(flip: Callable[[Sample], Sample]) -> None:
    before = sample(noise(5, 7), [1, 2, 4, 5])
    image, boxes = before.image.copy(), before.boxes.copy()
    again = flip(flip(before))
    assert np.array_equal(before.image, image)
    assert np.array_equal(again.image, image)
    assert np.array_equal(again.boxes, boxes)


# the chain

SHAPES = ((16, 12), (16, 16), (9, 16), (16, 5), (13, 16))


class Store:
    """Five small images of unlike shapes and plain colours, with one box each; remembers what was loaded."""

    def __init__(self) -> None:
        self.samples = [
            sample(noise(*shape, seed=number), [1, 1, shape[1] - 1, shape[0] - 1], classes=[number])
            for number, shape in enumerate(SHAPES)
        ]
        self.loaded: list[int] = []

    def __call__(self, index: int) -> Sample:
        self.loaded.append(index)
        return self.samples[index]

    def augmenter(self, **settings: float) -> Augmenter:
        return Augmenter(AugmentSettings(**settings), 16, len(self.samples), self, lambda index: SHAPES[index][::-1])


def same(a: Sample, b: Sample) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", [(16, 16), (16, 24), (32, 16)])
def test_with_every_strength_zero_an_item_is_letterboxed(shape: tuple[int, int]) -> None:
    store = Store()
    for index in range(5):
        item = store.augmenter()(index, shape, np.random.default_rng(index))
        assert same(item, letterbox(store.samples[index], shape, enlarge=True)[0])
        assert len(item.boxes) == 1
    assert store.loaded == [0, 1, 2, 3, 4]


def test_flips_come_after_all_else() -> None:
    store = Store()
    item = store.augmenter(flipud=1.0, fliplr=1.0)(3, (16, 16), np.random.default_rng(0))
    assert same(item, flip_up_down(flip_left_right(letterbox(store.samples[3], (16, 16), enlarge=True)[0])))


def test_an_item_depends_on_its_generator_alone_and_leaves_its_images_alone() -> None:
    settings = {"hsv_h": 0.1, "hsv_s": 0.5, "hsv_v": 0.4, "degrees": 10.0, "scale": 0.5, "translate": 0.1}
    augmenter = Store().augmenter(**settings, mosaic=0.7, mixup=0.5, flipud=0.5, fliplr=0.5, perspective=0.0005)
    first = [augmenter(k % 5, (16, 16), np.random.default_rng(k)) for k in range(20)]
    np.random.seed(1)  # noqa: NPY002 - the old global generator must not matter
    again = [augmenter(k % 5, (16, 16), np.random.default_rng(k)) for k in reversed(range(20))]
    assert all(same(a, b) for a, b in zip(first, again[::-1], strict=True))
    others = [augmenter(k % 5, (16, 16), np.random.default_rng(k + 100)) for k in range(20)]
    assert not any(np.array_equal(a.image, b.image) for a, b in zip(first, others, strict=True))
    assert all(same(a, b) for a, b in zip(augmenter.load.samples, Store().samples, strict=True))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mosaics are shown whole, so that each of their images is loaded."""
    monkeypatch.setattr(augment, "random_matrix", lambda *_: (np.diag([0.5, 0.5, 1.0]), 0.5))


@pytest.mark.usefixtures("whole")
def test_a_mosaic_holds_its_own_image_and_its_partners() -> None:
    store = Store()
    augmenter = store.augmenter(mosaic=1.0)
    for seed in range(20):
        store.loaded.clear()
        augmenter(2, (16, 16), np.random.default_rng(seed), (0, 1, 4))
        assert sorted(store.loaded) == [0, 1, 2, 4]


@pytest.mark.usefixtures("whole")
def test_a_mosaic_holds_its_own_image_and_three_of_all() -> None:
    store = Store()
    augmenter, rng = store.augmenter(mosaic=1.0), np.random.default_rng(0)
    places, partners = set(), []
    for _ in range(200):
        store.loaded.clear()
        item = augmenter(2, (16, 16), rng)
        assert item.image.shape == (16, 16, 3)
        assert len(store.loaded) == 4
        assert 2 in store.loaded
        if store.loaded.count(2) == 1:
            places.add(store.loaded.index(2))
        store.loaded.remove(2)
        partners += store.loaded
    assert places == {0, 1, 2, 3}
    assert np.bincount(partners, minlength=5) == pytest.approx(np.full(5, 120), abs=35)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(("settings", "loads"), [({"mosaic": 0.3}, (1, 4)), ({"mosaic": 1.0, "mixup": 0.3}, (4, 8))])
def test_mosaic_and_mixup_happen_as_often_as_they_should(settings: dict[str, float], loads: tuple[int, int]) -> None:
    store = Store()
    augmenter, rng = store.augmenter(**settings), np.random.default_rng(0)
    counts = []
    for _ in range(500):
        store.loaded.clear()
        augmenter(0, (16, 16), rng)
        counts.append(len(store.loaded))
    assert set(counts) == set(loads)
    assert counts.count(loads[1]) / 500 == pytest.approx(0.3, abs=0.06)


def test_mixup_joins_mosaics_only() -> None:
    store = Store()
    augmenter = store.augmenter(mosaic=0.0, mixup=1.0)
    assert same(augmenter(1, (16, 16), np.random.default_rng(0)), store.samples[1])
    assert store.loaded == [1]


@pytest.mark.parametrize(("name", "flip"), [("fliplr", flip_left_right), ("flipud", flip_up_down)])
def test_flips_happen_as_often_as_they_should(name: str, flip: Callable[[Sample], Sample]) -> None:
    store = Store()
    augmenter, rng = store.augmenter(**{name: 0.25}), np.random.default_rng(0)
    as_is, flipped = store.samples[1].image, flip(store.samples[1]).image
    images = [augmenter(1, (16, 16), rng).image for _ in range(500)]
    share = sum(np.array_equal(image, flipped) for image in images) / 500
    assert all(np.array_equal(image, as_is) or np.array_equal(image, flipped) for image in images)
    assert share == pytest.approx(0.25, abs=0.06)


def test_any_colour_strength_alone_is_enough() -> None:
    store = Store()
    for name in ("hsv_h", "hsv_s", "hsv_v"):
        augmenter = store.augmenter(**{name: 0.5})
        item = augmenter(1, (16, 16), np.random.default_rng(0))
        assert np.abs(item.image.astype(int) - store.samples[1].image).max() > 20


# another scale


@pytest.mark.parametrize("size", [48, 72, 144])
@pytest.mark.parametrize(
    ("settings", "close"),
    [
        pytest.param({"scale": 0.5, "translate": 0.2, "mosaic": 1.0}, 1.5, id="upright"),
        pytest.param({"degrees": 20.0, "shear": 5.0, "perspective": 0.001, "mosaic": 1.0}, 0.01, id="tilted"),
        pytest.param({"degrees": 20.0, "scale": 0.5, "perspective": 0.001, "fliplr": 0.5}, 0.01, id="one image"),
        pytest.param({"mosaic": 1.0, "mixup": 1.0, "flipud": 0.5}, 1.5, id="mixed"),
    ],
)
def test_at_another_size_the_picture_is_the_same(size: int, settings: dict[str, float], close: float) -> None:
    """Boxes in proportion (upright ones to the pixel that an image's edge comes to lie on), and so the pixels."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(4):
        soft = cv2.resize(rng.integers(0, 256, (5, 5, 3), np.uint8), (96, 96), interpolation=cv2.INTER_CUBIC)
        samples.append(sample(soft, [8, 8, 88, 80], [0, 40, 60, 96]))
    augmenter = Augmenter(AugmentSettings(**settings), 96, 4, samples.__getitem__, lambda _: (96, 96))
    for seed in range(5):
        usual, other = (augmenter(0, (side, side), np.random.default_rng(seed)) for side in (96, size))
        assert other.classes.tolist() == usual.classes.tolist()
        assert other.boxes == pytest.approx(usual.boxes * size / 96, abs=close * max(size / 96, 1))
        shrunk = [cv2.resize(one.image, (24, 24), interpolation=cv2.INTER_AREA).astype(int) for one in (usual, other)]
        assert np.abs(shrunk[0] - shrunk[1]).mean() < 8


# objects along polygons


def outlined(image: np.ndarray, *polygons: list[list[float]]) -> Sample:
    """An image with an object of each polygon, its box about it; one without points has the box 1, 1, 4, 4."""
    outlines = tuple(np.array(points, np.float32).reshape(-1, 2) for points in polygons)
    boxes = [[*points.min(0), *points.max(0)] if len(points) else [1, 1, 4, 4] for points in outlines]
    return sample(image, *boxes)._replace(polygons=outlines)


SQUARE, TRIANGLE = [[2, 4], [8, 4], [8, 10], [2, 10]], [[2, 2], [12, 2], [2, 12]]


def test_a_pasted_object_is_the_mirrored_one() -> None:
    before = outlined(noise(20, 40), SQUARE)
    image = before.image.copy()
    after = copy_paste(before, 1.0, np.random.default_rng(0))
    assert after.boxes.tolist() == [[2, 4, 8, 10], [32, 4, 38, 10]]
    assert (after.classes.tolist(), after.boxes.dtype, after.polygons) == ([0, 0], np.float32, ())
    wanted = image.copy()
    wanted[4:10, 32:38] = image[4:10, 2:8][:, ::-1]
    assert np.array_equal(after.image, wanted)


def test_an_object_is_cut_out_along_its_polygon() -> None:
    image = noise(20, 40)
    after = copy_paste(outlined(image.copy(), TRIANGLE), 1.0, np.random.default_rng(0))
    changed = (after.image != image).any(2)
    assert np.array_equal(after.image[changed], image[:, ::-1][changed])
    assert changed[2:12, 28:38].sum() == pytest.approx(55, abs=6)  # half of the square, and its diagonal
    assert changed.sum() == changed[2:12, 28:38].sum()
    assert not changed[9:12, 28:31].any()
    assert after.boxes[1].tolist() == [28, 2, 38, 12]


@pytest.mark.parametrize(("right", "pasted"), [(34.9, True), (35.1, False)])
def test_an_object_is_not_pasted_where_it_hides_another(right: float, pasted: bool) -> None:
    """The box of ten pixels ends where 29 or 31 hundredths of it are covered by the pasted one, from 32 to 38."""
    other = [[right - 10, 4], [right, 4], [right, 10], [right - 10, 10]]
    before = outlined(noise(20, 40), SQUARE, other)._replace(
        polygons=(np.float32(SQUARE), np.zeros((0, 2), np.float32))
    )
    assert covered_shares(before.boxes, np.array([32, 4, 38, 10]))[1] == pytest.approx((right - 32) / 10, abs=1e-6)
    assert len(copy_paste(before, 1.0, np.random.default_rng(0)).boxes) == 2 + pasted


def test_pasted_objects_count_for_the_next() -> None:
    before = outlined(noise(20, 40), SQUARE, SQUARE)
    assert len(copy_paste(before, 1.0, np.random.default_rng(0)).boxes) == 3


def test_an_object_in_the_middle_would_hide_itself() -> None:
    middle = [[15, 4], [25, 4], [25, 10], [15, 10]]
    before = outlined(noise(20, 40), middle)
    image = before.image.copy()
    after = copy_paste(before, 1.0, np.random.default_rng(0))
    assert np.array_equal(after.image, image)
    assert len(after.boxes) == 1


def test_boxes_are_not_pasted_and_ask_for_no_chance() -> None:
    before, rng = outlined(noise(20, 40), []), np.random.default_rng(0)
    assert same(copy_paste(before, 1.0, rng), before)
    assert same(copy_paste(sample(noise(20, 40), [1, 1, 4, 4]), 1.0, rng), sample(noise(20, 40), [1, 1, 4, 4]))
    assert rng.random() == np.random.default_rng(0).random()
    both = outlined(noise(20, 40), [], SQUARE)
    assert copy_paste(both, 1.0, rng).classes.tolist() == [0, 1, 1]


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_each_object_is_pasted_with_a_chance_of_its_own(chance: float) -> None:
    polygons = [[[2, top], [8, top], [8, top + 6], [2, top + 6]] for top in (0, 10, 20)]
    image, rng = noise(30, 40), np.random.default_rng(0)
    counts = [len(copy_paste(outlined(image.copy(), *polygons), chance, rng).boxes) - 3 for _ in range(300)]
    assert sum(counts) == pytest.approx(900 * chance, abs=6 * 15 if chance else 0)
    assert len(set(counts)) == (4 if chance else 1)


@pytest.mark.parametrize("settings", [{"scale": 0.5, "translate": 0.2}, {"degrees": 30.0, "perspective": 0.001}])
def test_polygons_go_where_the_mosaic_takes_their_pixels(settings: dict[str, float]) -> None:
    """White discs on black: what is white in the result is what lies in the polygons, also where an edge cuts them."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    samples = []
    for centre in ((30, 30), (70, 20), (20, 80), (60, 60)):
        image = plain(96, 96)
        cv2.circle(image, centre, 15, (255, 255, 255), -1)
        points = np.array(centre, np.float32) + 0.5 + 15.5 * np.stack((np.cos(angles), np.sin(angles)), 1)
        samples.append(outlined(image, points.tolist()))
    augmenter = Augmenter(AugmentSettings(**settings, mosaic=1.0), 96, 4, samples.__getitem__, lambda _: (96, 96))
    discs = 0
    for seed in range(20):
        mosaic = augmenter(0, (96, 96), np.random.default_rng(seed))
        assert len(mosaic.polygons) == len(mosaic.boxes)
        mask, kept = np.zeros((96, 96), np.uint8), np.zeros((96, 96), bool)  # objects may be too small to be kept
        for polygon, box in zip(mosaic.polygons, mosaic.boxes, strict=True):
            left, top, right, bottom = box.round().astype(int)
            kept[top:bottom, left:right] = True
            assert np.all((polygon > -1e-3) & (polygon < 96 + 1e-3))
            assert np.all(polygon.min(0) >= box[:2] - 0.51)
            assert np.all(polygon.max(0) <= box[2:] + 0.51)
            cv2.fillPoly(mask, [(polygon - 0.5).round().astype(np.int32)], 255)
        white = (mosaic.image == 255).all(2) & kept
        assert (mask[white] > 0).sum() >= 0.97 * white.sum()
        inner = cv2.erode(mask, np.ones((7, 7)), borderValue=0) > 0
        assert mosaic.image[inner].min(initial=255) > 200
        discs += len(mosaic.polygons)
    assert discs > 30


def test_a_mosaic_and_the_one_mixed_with_it_have_the_partners_given() -> None:
    store = Store()
    augmenter = store.augmenter(mosaic=1.0, mixup=1.0, scale=0.5)
    given = np.random.default_rng(1).integers(5, size=(20, 7)).tolist()
    for seed, partners in enumerate(given):
        store.loaded.clear()
        augmenter(2, (16, 16), np.random.default_rng(seed), partners)
        assert set(store.loaded) <= {2, *partners}
