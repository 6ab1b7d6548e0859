"""Drawn data sets: tight labels, a spread of sizes and classes, the same files by the same seed, whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from data import builtin
from data.builtin import NAMES, SIDE_PIXELS, DrawnSet, shapes, shapes_cls, shapes_seg
from tests.making import contents
from utils.errors import UserError

SETS = [shapes, shapes_cls, shapes_seg]


def rows_of(lines: list[str]) -> list[np.ndarray]:
    return [np.array(line.split(), float) for line in lines]


def drawn(data: DrawnSet, folder: Path, seed: int = 0) -> Path:
    return data.draw_dataset(folder, seed, train=8, val=2)


@pytest.mark.parametrize(("data", "digest"), [(shapes, "28265922"), (shapes_cls, "bbf25a71"), (shapes_seg, "10950516")])
def test_labels_are_those_of_the_first_version(data: DrawnSet, digest: str, tmp_path: Path) -> None:
    """And images are what a generator of their own draws; two drawings have the same bytes."""
    files = contents(drawn(data, tmp_path / "one", 7))
    assert files == contents(drawn(data, tmp_path / "two", 7))
    suffixes = [Path(name).suffix for name in files]
    assert [suffixes.count(suffix) for suffix in (".jpg", ".txt", ".json")] == [10, 10 * (data is not shapes_cls), 1]
    labels = "".join(f"{name}{files[name].decode()}" for name in sorted(files) if not name.endswith(".jpg"))
    assert hashlib.sha256(labels.encode()).hexdigest()[:8] == digest
    name = "val/square/000001.jpg" if data is shapes_cls else "images/val/000001.jpg"
    name = name.replace("square", NAMES[1])
    stored = cv2.imdecode(np.frombuffer(files[name], np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(stored.astype(int) - data.draw_image(7, 1, 1)[0]).mean() < 12  # JPEG at its worst on noise


def test_no_two_images_share_a_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, states = np.random.default_rng, []

    def recorded(entropy: list[int]) -> np.random.Generator:
        states.append(str(make(entropy).bit_generator.state))
        return make(entropy)

    monkeypatch.setattr(np.random, "default_rng", recorded)
    for data in SETS:
        for seed in (0, 1, 2):
            data.draw_dataset(tmp_path / f"{data.title}-{seed}", seed, train=2, val=2)
    assert len(set(states)) == len(states) == 3 * 3 * 4 * 2  # data sets, seeds, images, drawing and encoding


def test_sizes_classes_and_counts_vary() -> None:
    images = [rows_of(shapes.draw_image(0, 0, index)[1]) for index in range(100)]
    labels, counts = np.concatenate([rows for rows in images if rows]), [len(rows) for rows in images]
    sizes = labels[:, 3:].max(axis=1) * SIDE_PIXELS
    assert 8 <= sizes.min() < sizes.max() <= 100
    assert (np.histogram(sizes, [8, 16, 32, 64, 100.01])[0] >= 0.1 * len(sizes)).all()
    assert (np.bincount(labels[:, 0].astype(int), minlength=len(NAMES)) >= 50).all()
    assert max(counts) == 12
    assert 1 <= counts.count(0) <= 6


@pytest.mark.parametrize("label", range(len(NAMES)))
@pytest.mark.parametrize("size", [9.0, 40.0, 90.0])
def test_a_box_is_the_extent_of_the_painted_pixels(label: int, size: float) -> None:
    """It ends somewhere in the outermost changed pixels: a pixel that is hardly covered changes by less than 1."""
    rng = np.random.default_rng([label, int(size)])
    placed = builtin.place_at(builtin.draw_stencil(rng, label, size), 40, 30)
    assert placed is not None
    image = np.full((SIDE_PIXELS, SIDE_PIXELS, 3), 128, np.float32)
    builtin.paint(rng, image, placed.stencil, placed.left, placed.top)
    y, x = np.nonzero((np.abs(image - 128) > 1e-3).any(axis=2))
    low, high = np.array(placed.box[:2]), np.array(placed.box[2:])
    assert (high - low).max() == pytest.approx(size, abs=0.6)
    assert (np.floor(low) == (x.min(), y.min())).all()
    assert (np.ceil(high) == (x.max() + 1, y.max() + 1)).all()


class Painted(list[tuple[int, np.ndarray]]):
    """Class and covered shares of each shape, in the image with a border of 100 pixels, in the place of colours."""

    def __call__(self, rng: Any, image: np.ndarray, stencil: builtin.Stencil, left: int, top: int) -> None:
        canvas, (height, width) = np.zeros([len(image) + 200] * 2, np.float32), stencil.fill.shape
        canvas[top + 100 : top + 100 + height, left + 100 : left + 100 + width] = stencil.fill
        self.append((stencil.label, canvas))


@pytest.fixture
def painted(monkeypatch: pytest.MonkeyPatch) -> Painted:
    record = Painted()
    monkeypatch.setattr(builtin, "paint", record)
    return record


def test_an_image_of_a_class_has_one_whole_shape(painted: Painted) -> None:
    for index in range(60):
        shapes_cls.draw_image(0, 0, index)
    assert [label for label, _ in painted] == [index % 6 for index in range(60)]
    extents = np.array([[np.ptp(axis) + 1 for axis in np.nonzero(canvas)] for _, canvas in painted]).max(1)
    assert all(canvas[100:-100, 100:-100].sum() == canvas.sum() for _, canvas in painted)
    assert (np.histogram(extents, [22, 31, 42, 59])[0] >= 10).all()
    assert len(extents) == np.histogram(extents, [22, 59])[0]  # a shape of 56 may touch one more pixel on each side


def test_outlines_go_around_the_visible_pixels(painted: Painted) -> None:
    covered = 0
    for index in range(12):
        painted.clear()
        rows = rows_of(shapes_seg.draw_image(0, 0, index)[1])
        inside = [canvas[100:-100, 100:-100] for _, canvas in painted]
        assert [row[0] for row in rows] == [label for label, _ in painted]
        for number, (row, shape) in enumerate(zip(rows, inside, strict=True)):
            above = np.max([np.zeros_like(shape), *inside[number + 1 :]], axis=0)
            large = np.zeros((SIDE_PIXELS * 8, SIDE_PIXELS * 8), np.uint8)
            points = row[1:].reshape(-1, 2) * SIDE_PIXELS
            cv2.fillPoly(large, [(points * 8).round().astype(np.int32)], 255)
            mask = cv2.resize(large, shape.shape, interpolation=cv2.INTER_AREA) / 255
            assert 0 <= row[1:].min() < row[1:].max() <= 1
            assert (mask[(shape == 1) & (above == 0)] > 0.5).mean() > 0.98
            assert (mask[(above == 1) | (shape == 0)] < 0.5).mean() > 0.995
            covered += bool((above * shape).sum() > 10)
    assert covered > 8


# Writing: complete or absent, never overwritten


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_drawing_leaves_no_files(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(builtin, "photograph", fail)
        with pytest.raises(error):
            drawn(shapes, tmp_path / "deep/toy")
    assert list((tmp_path / "deep").iterdir()) == []
    assert drawn(shapes, tmp_path / "deep/toy") == tmp_path / "deep/toy"


def test_the_slower_of_two_processes_uses_the_other_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, times = os.rename, []

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        times.append(drawn(shapes, target).stat().st_mtime_ns)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert drawn(shapes, tmp_path / "toy").stat().st_mtime_ns == times[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "toy"]


@pytest.mark.parametrize("content", [None, {"seed": 1}, {"drawing": 0}, {"train": 9}])
def test_another_folder_or_drawing_is_refused(tmp_path: Path, content: dict[str, int] | None) -> None:
    marker = drawn(shapes, tmp_path / "toy") / "shapes.json"
    if content is None:
        marker.unlink()
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), **content}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"'{tmp_path}/toy'"):
        drawn(shapes, tmp_path / "toy")
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/toy"):
        drawn(shapes, tmp_path / "file" / "toy")
