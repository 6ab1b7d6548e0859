"""The grid of images with their targets."""

from __future__ import annotations

import numpy as np
import pytest

from utils.plots import MOST_IMAGES, draw_targets

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
