"""The built-in classification data set: one whole shape to an image, balanced classes, same seed same bytes, and a
folder that is complete or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.builtin import shapes, shapes_cls
from tests.data.builtin.test_shapes import contents
from utils.errors import UserError


def test_an_image_depends_on_seed_split_and_index_alone() -> None:
    image = shapes_cls.draw_image(3, 0, 5)
    assert (image.shape, image.dtype) == ((64, 64, 3), np.uint8)
    shapes_cls.draw_image(3, 0, 4)
    assert np.array_equal(image, shapes_cls.draw_image(3, 0, 5))
    for other in ((4, 0, 5), (3, 1, 5), (3, 0, 11)):
        assert not np.array_equal(image, shapes_cls.draw_image(*other))


def test_every_image_has_one_whole_shape_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    painted: list[tuple[int, int, int, int]] = []  # class, longer side, and distances of both far sides from 0

    def paint(rng: np.random.Generator, image: np.ndarray, stencil: shapes.Stencil, left: int, top: int) -> None:
        height, width = stencil.fill.shape
        assert min(left, top) >= 0
        painted.append((stencil.label, max(width, height), left + width, top + height))

    monkeypatch.setattr(shapes_cls, "paint", paint)
    for index in range(120):
        shapes_cls.draw_image(0, 0, index)
    labels, sizes, rights, bottoms = np.array(painted).T
    assert labels.tolist() == [index % 6 for index in range(120)]
    assert max(rights.max(), bottoms.max()) <= shapes_cls.CLS_SIDE_PIXELS
    assert sizes.min() >= 22
    assert sizes.max() <= 58  # a shape of 56 may touch one pixel more at either side
    assert (np.histogram(sizes, [22, 31, 42, 59])[0] >= 20).all()


def test_a_shape_stands_out_from_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [shapes_cls.draw_image(0, 0, index).astype(int) for index in range(6)]
    monkeypatch.setattr(shapes_cls, "paint", lambda *_: None)
    for index, image in enumerate(images):
        apart = np.abs(image - shapes_cls.draw_image(0, 0, index)).max(axis=2)
        assert 50 < (apart > 60).sum() < 0.9 * apart.size


def test_no_generator_is_shared_with_the_detection_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = np.random.default_rng
    states: list[str] = []

    def recorded(entropy: list[int]) -> np.random.Generator:
        rng = make(entropy)
        states.append(str(rng.bit_generator.state))
        return rng

    monkeypatch.setattr(np.random, "default_rng", recorded)
    for drawing in (shapes, shapes_cls):
        for seed in (0, 1, 2):
            drawing.draw_dataset(tmp_path / f"{drawing.__name__}-{seed}", seed, train=3, val=3)
    assert len(states) == 2 * 3 * 6 * 2  # drawings, seeds, images, image and encoding
    assert len(set(states)) == len(states)


def test_the_data_set_on_disk_is_what_draw_image_gives(tmp_path: Path) -> None:
    folder = shapes_cls.draw_dataset(tmp_path / "deep" / "shapes-cls", seed=7, train=14, val=6)
    files = {f"{split}/{shapes.NAMES[i % 6]}/{i:06d}.jpg" for split, n in (("train", 14), ("val", 6)) for i in range(n)}
    assert contents(folder).keys() == files | {shapes_cls.SHAPES_CLS_MARKER_FILE}
    stored = cv2.imread(str(folder / "val/square/000002.jpg"))
    assert stored.shape == (64, 64, 3)
    assert np.abs(stored.astype(int) - shapes_cls.draw_image(7, 1, 2)).mean() < 12  # JPEG at its worst on noise
    assert list((tmp_path / "deep").iterdir()) == [folder]


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    one, two, three = (
        contents(shapes_cls.draw_dataset(tmp_path / name, seed, train=6, val=2))
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    )
    assert one == two
    assert one.keys() == three.keys()
    assert not any(one[name] == three[name] for name in one)


def test_drawing_again_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shapes_cls.draw_dataset(tmp_path / "cls", train=3, val=1)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    monkeypatch.setattr(shapes_cls, "draw_image", lambda *_: pytest.fail("drawn again"))
    assert shapes_cls.draw_dataset(folder, train=3, val=1) == folder
    assert before == {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seed: int, split: int, index: int) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes_cls, "draw_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shapes_cls.draw_dataset(tmp_path / "cls")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("drawing", 0), ("val", 3)])
def test_another_drawing_is_refused_and_kept(tmp_path: Path, key: str, value: int) -> None:
    folder = shapes_cls.draw_dataset(tmp_path / "cls", train=1, val=1)
    marker = folder / "shapes-cls.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), key: value}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"another drawing of the shapes-cls .* differs in {key}\): remove it"):
        shapes_cls.draw_dataset(folder, train=1, val=1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("draw", "other", "marker"),
    [
        (shapes.draw_dataset, shapes_cls.draw_dataset, "shapes-cls.json"),
        (shapes_cls.draw_dataset, shapes.draw_dataset, "shapes.json"),
    ],
)
def test_neither_drawing_takes_the_other_for_its_own(
    tmp_path: Path, draw: Callable[..., Path], other: Callable[..., Path], marker: str
) -> None:
    folder = draw(tmp_path / "both", train=1, val=1)
    with pytest.raises(UserError, match=f"not a drawing of the .*it has no readable {marker}"):
        other(folder, train=1, val=1)


def test_a_drawing_that_lost_images_is_refused(tmp_path: Path) -> None:
    folder = shapes_cls.draw_dataset(tmp_path / "cls", train=8, val=1)
    (folder / "train/ring/000007.jpg").unlink()
    with pytest.raises(UserError, match=r"1 instead of 2 images in train/ring\): remove it"):
        shapes_cls.draw_dataset(folder, train=8, val=1)


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write the shapes-cls data set to .*file/cls"):
        shapes_cls.draw_dataset(tmp_path / "file" / "cls", train=1, val=0)
    with pytest.raises(UserError, match=r"seed -1 is negative: give the shapes-cls data set"):
        shapes_cls.draw_dataset(tmp_path / "cls", seed=-1)
