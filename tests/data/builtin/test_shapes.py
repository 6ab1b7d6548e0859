"""Tests of the built-in detection data set: pixels, tight labels, a spread of sizes and classes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.builtin import shapes
from tests.making import contents
from utils.errors import UserError

Drawing = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    return [shapes.draw_image(0, 0, index) for index in range(100)]


def test_sizes_classes_and_counts_vary(drawing: Drawing) -> None:
    labels = np.concatenate([rows for _, rows in drawing])
    sizes = labels[:, 3:].max(axis=1) * shapes.SIDE_PIXELS
    assert sizes.min() >= 8
    assert sizes.max() <= 100
    assert (np.histogram(sizes, [8, 16, 32, 64, 100.01])[0] >= 0.1 * len(sizes)).all()
    assert (np.bincount(labels[:, 0].astype(int), minlength=len(shapes.NAMES)) >= 50).all()
    counts = [len(rows) for _, rows in drawing]
    assert max(counts) == 12
    assert 1 <= counts.count(0) <= 6
    assert 5 < np.mean(counts) < 9


@pytest.mark.parametrize("label", range(len(shapes.NAMES)))
@pytest.mark.parametrize("size", [9.0, 40.0, 90.0])
def test_a_box_is_the_extent_of_the_painted_pixels(label: int, size: float) -> None:
    rng = np.random.default_rng([label, int(size)])
    placed = shapes.place_at(shapes.draw_stencil(rng, label, size), 40, 30)
    assert placed is not None
    assert max(placed.box[2] - placed.box[0], placed.box[3] - placed.box[1]) == pytest.approx(size, abs=0.6)
    check_extent(rng, placed)


def check_extent(rng: np.random.Generator, placed: shapes.PlacedShape) -> None:
    """Paint a shape on grey, and check that its box and the extent of the changed pixels agree within one pixel.

    The box ends somewhere in the outermost changed pixels: a pixel that is hardly covered changes by less than 1.
    """
    image = np.full((shapes.SIDE_PIXELS, shapes.SIDE_PIXELS, 3), 128, np.float32)
    shapes.paint(rng, image, placed.stencil, placed.left, placed.top)
    rows, columns = np.nonzero((np.abs(image - 128) > 1e-3).any(axis=2))
    x1, y1, x2, y2 = placed.box
    assert columns.min() <= x1 < columns.min() + 1
    assert rows.min() <= y1 < rows.min() + 1
    assert columns.max() < x2 <= columns.max() + 1
    assert rows.max() < y2 <= rows.max() + 1


def test_the_files_contain_the_drawn_images_and_labels(tmp_path: Path) -> None:
    files = contents(shapes.draw_dataset(tmp_path / "one", seed=7, train=2, val=2))
    names = [f"{split}/00000{index}" for split in ("train", "val") for index in range(2)]
    expected = {*(f"images/{name}.jpg" for name in names), *(f"labels/{name}.txt" for name in names)}
    assert files.keys() == {*expected, "shapes.json"}
    image, labels = shapes.draw_image(7, 1, 1)
    stored = cv2.imdecode(np.frombuffer(files["images/val/000001.jpg"], np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(stored.astype(int) - image).mean() < 12  # JPEG at its worst on noise
    rows = [line.split() for line in files["labels/val/000001.txt"].decode().splitlines()]
    assert np.allclose(np.array(rows, float).reshape(-1, 5), labels, atol=1e-6)
    assert all(len(value) == 8 for row in rows for value in row[1:])
    assert files == contents(shapes.draw_dataset(tmp_path / "two", seed=7, train=2, val=2))


# Writing a data set: complete or absent, never overwritten


def draw(folder: Path, seed: int = 0) -> Path:
    return shapes.draw_dataset(folder, seed, train=3, val=1)


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_a_data_set_is_drawn_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "toy"
    assert draw(folder) == folder
    assert list((tmp_path / "deep").iterdir()) == [folder]
    before = times(tmp_path)
    draw(folder)
    assert times(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_drawing_leaves_no_files(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(shapes, "photograph", fail)
        with pytest.raises(error):
            draw(tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".toy-1-00000000/train").mkdir(parents=True)  # of a killed process
    assert len(contents(draw(tmp_path / "toy"))) == 2 * 4 + 1


def test_the_slower_of_two_processes_uses_the_other_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename
    before: dict[Path, int] = {}

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        before.update(times(draw(target)))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert times(draw(tmp_path / "toy")) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "toy"]


@pytest.mark.parametrize("content", [None, {"seed": 1}, {"drawing": 0}, {"train": 9}])
def test_another_folder_or_drawing_is_refused(tmp_path: Path, content: dict[str, int] | None) -> None:
    marker = draw(tmp_path / "toy") / "shapes.json"
    if content is None:
        marker.unlink()
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), **content}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"^'{tmp_path}/toy' exists, .* remove it"):
        draw(tmp_path / "toy")
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the shapes data set to .*file/toy' \(Not a directory\)"):
        draw(tmp_path / "file" / "toy")
