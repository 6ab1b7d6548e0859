"""Boxes, texts and grids, and the files that pictures are written to."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.errors import UserError
from utils.plots.drawing import (
    COLOURS,
    GAP_PIXELS,
    MAX_GRID_IMAGES,
    MIN_CAPTION_PIXELS,
    draw_boxes,
    draw_captioned,
    draw_targets,
    draw_text_lines,
    write_picture,
)

NO_TARGETS = np.zeros((0, 6), np.float32)


@pytest.mark.parametrize(("images", "shape"), [(1, (32, 48)), (2, (32, 96)), (3, (64, 96)), (5, (64, 144))])
def test_size_of_the_grid(images: int, shape: tuple[int, int]) -> None:
    picture = draw_targets(np.zeros((images, 3, 32, 48), np.uint8), NO_TARGETS, {})
    assert picture.shape == (*shape, 3)
    assert picture.dtype == np.uint8


def test_at_most_sixteen_images() -> None:
    assert draw_targets(np.zeros((MAX_GRID_IMAGES + 9, 3, 8, 8), np.uint8), NO_TARGETS, {}).shape == (32, 32, 3)


def test_positions_and_colours_of_images() -> None:
    images = np.zeros((3, 3, 8, 8), np.uint8)
    images[0, 0] = 200  # red, and blue comes first in the picture
    images[1] = 50
    picture = draw_targets(images, NO_TARGETS, {})
    assert picture[4, 4].tolist() == [0, 0, 200]
    assert picture[4, 12].tolist() == [50, 50, 50]
    assert picture[12, 4].tolist() == [0, 0, 0]
    assert picture[12, 12].tolist() == [255, 255, 255]  # no image


def test_a_box_is_drawn_on_its_own_image_alone() -> None:
    images = np.zeros((2, 3, 64, 64), np.uint8)
    target = np.array([[1, 3, 0.5, 0.5, 0.5, 0.25]], np.float32)  # 16, 24, 48, 40
    picture = draw_targets(images, target, {3: "x"})
    assert not picture[:, :64].any()
    second = picture[:, 64:]
    for row, column in ((30, 16), (30, 48), (24, 30), (40, 30)):
        assert second[row, column].any()
    assert not second[27:38, 19:46].any()  # lines have soft edges
    assert not images.any()  # copies are drawn on


@pytest.mark.parametrize(
    ("images", "size", "shape"),
    [(4, (1200, 1000), (1920, 1600)), (1, (500, 3840), (250, 1920)), (1, (1920, 900), (1920, 900))],
)
def test_no_side_of_the_grid_is_too_long(images: int, size: tuple[int, int], shape: tuple[int, int]) -> None:
    """Boxes are drawn on the shrunk images."""
    target = np.array([[0, 0, 0.5, 0.5, 0.5, 0.5]], np.float32)
    picture = draw_targets(np.zeros((images, 3, *size), np.uint8), target, {0: ""})
    assert picture.shape == (*shape, 3)
    across = 2 if images > 1 else 1
    height, width = shape[0] // across, shape[1] // across
    assert picture[height // 2, width // 4].tolist() == pytest.approx(COLOURS[0], abs=3)
    assert picture[height // 4, width // 2].tolist() == pytest.approx(COLOURS[0], abs=3)
    assert not picture[height // 2, width // 2].any()


def test_names_are_readable_on_the_colour_of_their_class() -> None:
    """Dark letters on a light colour and light ones on a dark colour."""
    for label, ink in ((8, 0), (7, 255)):
        target = np.array([[0, label, 0.5, 0.5, 0.5, 0.5]], np.float32)
        picture = draw_targets(np.full((1, 3, 200, 200), 128, np.uint8), target, {label: "mmmm"})
        tag = picture[36:49, 52:80].reshape(-1, 3)
        assert (tag == COLOURS[label]).all(1).sum() > 100
        assert abs(tag.mean(1) - ink).min() < 60


def label_height(side: int, thickness: int) -> int:
    """Return the height of the background of a box's text, in pixels, on an image of `side` x `side`."""
    picture = np.zeros((side, side, 3), np.uint8)
    draw_boxes(picture, np.array([[0.25, 0.75, 0.9, 0.9]]) * side, [0], ["m"], thickness)
    column = (picture[: int(0.75 * side) - thickness, side // 4 + 1] == COLOURS[0]).all(1)
    return int(column.sum())


def test_text_grows_with_the_image_and_the_lines() -> None:
    heights = [label_height(side, 3) for side in (500, 1000, 4000)]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 8], rel=0.25)
    assert label_height(1000, 12) == pytest.approx(2 * label_height(1000, 3), rel=0.2)
    assert label_height(100, 1) > 8  # never too small to read


def test_lines_of_text_grow_with_the_image() -> None:
    small, large = (draw_text_lines(np.zeros((side, side, 3), np.uint8), ["a", "b"]) for side in (500, 2000))
    assert (cv2.resize(large, (500, 500)) > 128).mean() == pytest.approx((small > 128).mean(), rel=0.3)
    assert draw_text_lines(np.zeros((500, 500, 3), np.uint8), ["a", "b"], 12).sum() > 2 * small.sum()


# Captions: two lines of 16 pixels and a gap of 4 below each image, a gap to its right


def grey_images(*values: int, height: int = 40, width: int = 200) -> list[np.ndarray]:
    return [np.full((height, width, 3), value, np.uint8) for value in values]


@pytest.mark.parametrize(("images", "shape"), [(1, (76, 204)), (2, (76, 408)), (5, (152, 612)), (20, (304, 816))])
def test_size_of_the_captioned_grid(images: int, shape: tuple[int, int]) -> None:
    picture = draw_captioned(grey_images(*range(images)), ["x"] * images)
    assert picture.shape == (*shape, 3)
    assert picture.dtype == np.uint8


def test_each_image_is_above_its_caption() -> None:
    images = grey_images(10, 20, 30)
    images[0][:, :, 2] = 200
    picture = draw_captioned(images, ["one line", "two\nlines", ""])
    assert (picture[:40, :200] == (10, 10, 200)).all()
    assert (picture[:40, 204:404] == 20).all()
    assert (picture[76:116, :200] == 30).all()
    dark = picture < 128
    assert dark[40:56, :200].any()
    assert not dark[57:76, :200].any()
    assert dark[40:56, 204:].any()
    assert dark[57:76, 204:].any()
    assert (picture[116:, :200] == 255).all()
    assert (picture[76:, 204:] == 255).all()  # no image


def test_captions_grow_with_wide_images() -> None:
    assert draw_captioned(grey_images(0, width=480), [""]).shape[0] == 40 + 2 * 16 + GAP_PIXELS
    assert draw_captioned(grey_images(0, width=960), [""]).shape[0] == 40 + 2 * 32 + GAP_PIXELS


def test_a_small_image_is_above_the_middle_of_its_caption() -> None:
    picture = draw_captioned(grey_images(0, height=10, width=50), ["", "of no image"])
    assert picture.shape == (42 + GAP_PIXELS, MIN_CAPTION_PIXELS + GAP_PIXELS, 3)
    assert (picture[:10, 50:100] == 0).all()
    assert (picture[:10, :50] == 255).all()
    assert (picture[:10, 100:] == 255).all()


def test_captions_are_cut_to_two_lines_and_to_the_width() -> None:
    images = grey_images(0)
    assert np.array_equal(draw_captioned(images, ["a\nb\nc"]), draw_captioned(images, ["a\nb"]))
    assert not np.array_equal(draw_captioned(images, ["a\nb"]), draw_captioned(images, ["a\nc"]))
    assert (draw_captioned(images, ["long " * 50])[:, 200:] == 255).all()
    assert not images[0].any()  # a copy is drawn on


# Files


@pytest.fixture
def picture() -> np.ndarray:
    smooth = np.linspace(0, 255, 64).astype(np.uint8)
    return np.dstack([np.tile(smooth, (64, 1))] * 3)


def test_a_picture_is_written_in_the_format_of_its_name(picture: np.ndarray, tmp_path: Path) -> None:
    write_picture(tmp_path / "folder" / "a.png", picture)
    write_picture(tmp_path / "folder" / "a.bmp", picture)
    for name in ("a.png", "a.bmp"):
        assert np.array_equal(cv2.imread(str(tmp_path / "folder" / name)), picture)
    assert len(list((tmp_path / "folder").iterdir())) == 2  # no temporary file


def test_the_bytes_are_those_of_opencv(picture: np.ndarray, tmp_path: Path) -> None:
    """With its default quality of 95."""
    for name in ("a.jpg", "a.png"):
        write_picture(tmp_path / name, picture)
        assert (tmp_path / name).read_bytes() == cv2.imencode(name[1:], picture)[1].tobytes()
    write_picture(tmp_path / "a.jpg", picture, 85)
    expected = cv2.imencode(".jpg", picture, (cv2.IMWRITE_JPEG_QUALITY, 85))[1].tobytes()
    assert (tmp_path / "a.jpg").read_bytes() == expected


def test_a_compact_png_has_the_same_pixels(picture: np.ndarray, tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", picture, compact_png=True)
    assert np.array_equal(cv2.imread(str(tmp_path / "a.png")), picture)


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("a.nothing", (4, 4), "unknown format; give a name that ends with .png or .jpg"),
        ("a.jpg", (0, 4), "the picture is empty"),
        ("a.jpg", (70_000, 4), "OpenCV cannot make a picture of 4x70000"),
        ("file/a.jpg", (4, 4), "File exists"),
    ],
)
def test_a_picture_that_cannot_be_written(name: str, shape: tuple[int, int], problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        write_picture(tmp_path / name, np.zeros((*shape, 3), np.uint8))
    assert str(caught.value) == f"{tmp_path / name} cannot be written: {problem}"
