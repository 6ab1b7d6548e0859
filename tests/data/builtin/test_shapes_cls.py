"""Tests of the built-in classification data set: one whole shape per image, balanced classes, its own generators."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from data.builtin import shapes, shapes_cls, shapes_seg
from tests.making import contents


def test_every_image_has_one_whole_shape_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    painted: list[tuple[int, int, int, int]] = []  # class, longer side, right and bottom edge

    def paint(rng: np.random.Generator, image: np.ndarray, stencil: shapes.Stencil, left: int, top: int) -> None:
        height, width = stencil.fill.shape
        assert min(left, top) >= 0
        painted.append((stencil.label, max(width, height), left + width, top + height))

    images = [shapes_cls.draw_image(0, 0, index).astype(int) for index in range(6)]
    monkeypatch.setattr(shapes, "paint", paint)
    backgrounds = [shapes_cls.draw_image(0, 0, index).astype(int) for index in range(120)]
    for image, background in zip(images, backgrounds[:6], strict=True):
        changed = np.abs(image - background).max(axis=2) > 60
        assert 50 < changed.sum() < 0.9 * changed.size  # the shape stands out
    labels, sizes, rights, bottoms = np.array(painted).T
    assert labels.tolist() == [index % 6 for index in range(120)]
    assert max(rights.max(), bottoms.max()) <= shapes_cls.CLS_SIDE_PIXELS
    assert sizes.min() >= 22
    assert sizes.max() <= 58  # a shape of 56 may touch one more pixel on each side
    assert (np.histogram(sizes, [22, 31, 42, 59])[0] >= 20).all()


def test_no_two_images_of_the_built_in_data_sets_share_a_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = np.random.default_rng
    states: list[str] = []

    def recorded(entropy: list[int]) -> np.random.Generator:
        rng = make(entropy)
        states.append(str(rng.bit_generator.state))
        return rng

    monkeypatch.setattr(np.random, "default_rng", recorded)
    for drawing in (shapes, shapes_cls, shapes_seg):
        for seed in (0, 1, 2):
            drawing.draw_dataset(tmp_path / f"{drawing.__name__}-{seed}", seed, train=2, val=2)
    assert len(states) == 3 * 3 * 4 * 2  # data sets, seeds, images, drawing and encoding
    assert len(set(states)) == len(states)


def test_the_files_contain_the_drawn_images(tmp_path: Path) -> None:
    files = contents(shapes_cls.draw_dataset(tmp_path / "one", seed=7, train=14, val=6))
    images = {
        f"{split}/{shapes.NAMES[i % 6]}/{i:06d}.jpg" for split, n in (("train", 14), ("val", 6)) for i in range(n)
    }
    assert files.keys() == {*images, "shapes-cls.json"}
    stored = cv2.imdecode(np.frombuffer(files["val/square/000002.jpg"], np.uint8), cv2.IMREAD_COLOR)
    assert stored.shape == (64, 64, 3)
    assert np.abs(stored.astype(int) - shapes_cls.draw_image(7, 1, 2)).mean() < 12  # JPEG at its worst on noise
    assert files == contents(shapes_cls.draw_dataset(tmp_path / "two", seed=7, train=14, val=6))
