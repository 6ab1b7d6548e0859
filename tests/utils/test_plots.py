"""Grids of images with targets or captions, and the confusion matrix."""

from __future__ import annotations

import numpy as np
import pytest

from utils import plots
from utils.plots import CAPTION_WIDTH, MOST_IMAGES, draw_captioned, draw_confusion, draw_targets

NONE = np.zeros((0, 6), np.float32)


@pytest.mark.parametrize(("images", "shape"), [(1, (32, 48)), (2, (32, 96)), (3, (64, 96)), (5, (64, 144))])
def test_size_of_the_grid(images: int, shape: tuple[int, int]) -> None:
    picture = draw_targets(np.zeros((images, 3, 32, 48), np.uint8), NONE, {})
    assert picture.shape == (*shape, 3)
    assert picture.dtype == np.uint8


def test_at_most_sixteen_images() -> None:
    assert draw_targets(np.zeros((MOST_IMAGES + 9, 3, 8, 8), np.uint8), NONE, {}).shape == (32, 32, 3)


def test_places_and_colours() -> None:
    images = np.zeros((3, 3, 8, 8), np.uint8)
    images[0, 0] = 200  # red, and blue comes first in the picture
    images[1] = 50
    picture = draw_targets(images, NONE, {})
    assert picture[4, 4].tolist() == [0, 0, 200]
    assert picture[4, 12].tolist() == [50, 50, 50]
    assert picture[12, 4].tolist() == [0, 0, 0]
    assert picture[12, 12].tolist() == [255, 255, 255]  # no image


def test_a_box_is_drawn_on_its_own_image_alone() -> None:
    images = np.zeros((2, 3, 64, 64), np.uint8)
    target = np.array([[1, 3, 0.5, 0.5, 0.5, 0.25]], np.float32)  # 16, 24, 48, 40
    picture = draw_targets(images, target, {3: "x"})
    assert not picture[:, :64].any()
    own = picture[:, 64:]
    for row, column in ((30, 16), (30, 48), (24, 30), (40, 30)):
        assert own[row, column].any()
    assert not own[27:38, 19:46].any()  # lines are soft at their edges
    assert not images.any()  # what was given is not drawn on


# Captions: two lines of 16 pixels below each image


def grey(*values: int, height: int = 40, width: int = 200) -> list[np.ndarray]:
    return [np.full((height, width, 3), value, np.uint8) for value in values]


@pytest.mark.parametrize(("images", "shape"), [(1, (72, 200)), (2, (72, 400)), (5, (144, 600)), (20, (288, 800))])
def test_size_of_the_captioned_grid(images: int, shape: tuple[int, int]) -> None:
    picture = draw_captioned(grey(*range(images)), ["x"] * images)
    assert picture.shape == (*shape, 3)
    assert picture.dtype == np.uint8


def test_each_image_is_above_its_caption() -> None:
    images = grey(10, 20, 30)
    images[0][:, :, 2] = 200
    picture = draw_captioned(images, ["one line", "two\nlines", ""])
    assert (picture[:40, :200] == (10, 10, 200)).all()
    assert (picture[:40, 200:] == 20).all()
    assert (picture[72:112, :200] == 30).all()
    dark = picture < 128
    assert dark[40:56, :200].any()
    assert not dark[56:72, :200].any()
    assert dark[40:56, 200:].any()
    assert dark[56:72, 200:].any()
    assert (picture[112:, :200] == 255).all()
    assert (picture[72:, 200:] == 255).all()  # no image


def test_a_small_image_stands_in_the_middle_of_its_caption() -> None:
    picture = draw_captioned(grey(0, height=10, width=50), ["", "of no image"])
    assert picture.shape == (42, CAPTION_WIDTH, 3)
    assert (picture[:10, 50:100] == 0).all()
    assert (picture[:10, :50] == 255).all()
    assert (picture[:10, 100:] == 255).all()


def test_more_lines_than_there_is_room_for() -> None:
    images = grey(0)
    assert np.array_equal(draw_captioned(images, ["a\nb\nc"]), draw_captioned(images, ["a\nb"]))
    assert not np.array_equal(draw_captioned(images, ["a\nb"]), draw_captioned(images, ["a\nc"]))
    assert draw_captioned(images, ["long " * 50]).shape == (72, 200, 3)
    assert not images[0].any()  # what was given is not drawn on


# The confusion matrix


@pytest.mark.parametrize("classes", [2, 90])
def test_size_of_the_confusion_matrix(classes: int) -> None:
    counts = np.diag(np.full(classes, 1234))
    counts[0, 1] = 1
    picture = draw_confusion(counts, [f"class {number}" for number in range(classes)])
    assert picture.dtype == np.uint8
    assert picture.flags["C_CONTIGUOUS"]
    side = round(max(5, 1.5 + 0.32 * classes) * 100)  # pixels: there is room for each class
    assert picture.shape == (side, picture.shape[1], 3)
    assert picture.shape[1] == pytest.approx(side * 1.15, abs=1)


def test_colours_are_shares_of_the_true_class() -> None:
    """One image of 100 counts as much as 100 of 10000; a class without images has no colour."""
    few = draw_confusion(np.array([[1, 1], [0, 0]]), ["", ""])
    many = draw_confusion(np.array([[100, 100], [0, 0]]), ["", ""])
    half, none = np.median(few[60:220, 60:220], (0, 1)), np.median(few[290:430, 60:220], (0, 1))
    assert np.array_equal(half, np.median(many[60:220, 60:220], (0, 1)))
    assert half[0] > half[2] + 50  # blue comes first
    whole = np.median(draw_confusion(np.array([[1, 0], [0, 0]]), ["", ""])[60:220, 60:220], (0, 1))
    assert half[2] > whole[2] + 30
    assert none.min() > 240


def test_rows_are_true_and_columns_predicted() -> None:
    picture = draw_confusion(np.array([[0, 7], [0, 0]]), ["", ""])
    blue = picture[:, :430, 2] < 30  # to the left of the scale; its darkest blue has a red of 8
    row, column = np.argwhere(blue).mean(0)
    assert row < 200
    assert column > 240


def test_counts_stand_in_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    written = set()
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda axes, x, y, text, **_: written.add((x, y, text)))
    draw_confusion(np.array([[5, 7], [0, 12345]]), ["disc", "bar"])
    assert written == {(0, 0, "5"), (1, 0, "7"), (1, 1, "12345")}  # column, row: where there is nothing, nothing


def test_the_same_counts_give_the_same_picture() -> None:
    counts, names = np.array([[3, 1], [0, 12345]]), ["disc", "traffic light"]
    first = draw_confusion(counts, names)
    assert np.array_equal(draw_confusion(counts, names), first)
    assert not np.array_equal(draw_confusion(counts, ["disc", "traffic lights"]), first)
    assert not np.array_equal(draw_confusion(counts + 1, names), first)  # the numbers are written in


def test_many_classes_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.eye(4, dtype=int)

    def named() -> bool:
        return not np.array_equal(draw_confusion(counts, ["a"] * 4), draw_confusion(counts, ["b"] * 4))

    assert named()
    monkeypatch.setattr(plots, "MOST_NAMES", 4)
    assert named()
    monkeypatch.setattr(plots, "MOST_NAMES", 3)
    assert not named()


def test_all_is_inside_of_the_picture() -> None:
    names = ["disc", "ring", "square", "triangle", "bar", "a long class name"]
    picture = draw_confusion(np.eye(6, dtype=int), names)
    for edge in (picture[:2], picture[-2:], picture[:, :2], picture[:, -2:]):
        assert (edge == 255).all()


@pytest.mark.parametrize("name", ["$x_$", "$$"])
def test_names_are_no_formulas(name: str) -> None:
    assert draw_confusion(np.eye(2, dtype=int), [name, "x"]).any()
