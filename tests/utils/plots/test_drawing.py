"""Boxes, texts and grids, and the files that pictures are written to."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.errors import UserError
from utils.plots.drawing import draw_captioned, draw_targets, printable, write_picture


def test_boxes_are_drawn_on_their_own_image_alone() -> None:
    images = np.zeros((3, 3, 64, 64), np.uint8)
    images[0, 0] = 200  # red, and blue comes first in the picture
    target = np.array([[1, 3, 0.5, 0.5, 0.5, 0.25]], np.float32)  # 16, 24, 48, 40
    picture = draw_targets(images, target, {3: "x"})
    assert (picture[:64, :64] == (0, 0, 200)).all()
    assert not picture[64:, :64].any()
    assert (picture[64:, 64:] == 255).all()  # no image
    second = picture[:64, 64:]
    for row, column in ((30, 16), (30, 48), (24, 30), (40, 30)):
        assert second[row, column].any()
    assert not second[27:38, 19:46].any()  # lines have soft edges
    assert not images[1].any()  # copies are drawn on


# Captions: two lines of 16 pixels and a gap of 4 below each image, a gap to its right


def grey_images(*values: int) -> list[np.ndarray]:
    return [np.full((40, 200, 3), value, np.uint8) for value in values]


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


def test_captions_are_cut_to_two_lines_and_to_the_width() -> None:
    images = grey_images(0)
    assert np.array_equal(draw_captioned(images, ["a\nb\nc"]), draw_captioned(images, ["a\nb"]))
    assert not np.array_equal(draw_captioned(images, ["a\nb"]), draw_captioned(images, ["a\nc"]))
    assert (draw_captioned(images, ["long " * 50])[:, 200:] == 255).all()
    assert not images[0].any()  # a copy is drawn on
    assert printable("a\nb\udcff\x00猫$") == "a?b??猫$"


# Files


def test_a_picture_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    picture = np.dstack([np.tile(np.linspace(0, 255, 64).astype(np.uint8), (64, 1))] * 3)
    write_picture(tmp_path / "folder" / "a.png", picture)
    write_picture(tmp_path / "folder" / "a.bmp", picture)
    write_picture(tmp_path / "folder" / "b.png", picture, compact_png=True)
    for name in ("a.png", "a.bmp", "b.png"):
        assert np.array_equal(cv2.imread(str(tmp_path / "folder" / name)), picture)
    assert len(list((tmp_path / "folder").iterdir())) == 3  # no temporary file


@pytest.mark.parametrize(
    ("name", "shape"), [("a.nothing", (4, 4)), ("a.jpg", (0, 4)), ("a.jpg", (70_000, 4)), ("file/a.jpg", (4, 4))]
)
def test_a_picture_that_cannot_be_written(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        write_picture(tmp_path / name, np.zeros((*shape, 3), np.uint8))
    assert str(tmp_path / name) in str(caught.value)
    assert not (tmp_path / name).exists()
