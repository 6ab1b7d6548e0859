"""Boxes, texts and grids, and the files that pictures are written to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from utils.errors import UserError
from utils.plots.drawing import draw_targets, write_picture


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


@pytest.mark.parametrize(
    ("name", "shape"), [("a.nothing", (4, 4)), ("a.jpg", (0, 4)), ("a.jpg", (70_000, 4)), ("file/a.jpg", (4, 4))]
)
def test_a_picture_that_cannot_be_written(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        write_picture(tmp_path / name, np.zeros((*shape, 3), np.uint8))
    assert str(tmp_path / name) in str(caught.value)
    assert not (tmp_path / name).exists()
