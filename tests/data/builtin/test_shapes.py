"""The built-in data set: same seed same bytes, tight labels, a spread of sizes and classes, and a folder that is
complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.builtin import shapes
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def hundred() -> list[tuple[np.ndarray, np.ndarray]]:
    return [shapes.draw_image(0, 0, index) for index in range(100)]


def test_an_image_depends_on_seed_split_and_index_alone() -> None:
    image, labels = shapes.draw_image(3, 0, 5)
    shapes.draw_image(3, 0, 4)
    again, labels_again = shapes.draw_image(3, 0, 5)
    assert np.array_equal(image, again)
    assert np.array_equal(labels, labels_again)
    for other in ((4, 0, 5), (3, 1, 5), (3, 0, 6)):
        assert not np.array_equal(image, shapes.draw_image(*other)[0])


def test_images_and_labels_have_the_documented_form(hundred: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for image, labels in hundred:
        assert (image.shape, image.dtype) == ((160, 160, 3), np.uint8)
        assert labels.dtype == np.float32
        assert labels.shape == (len(labels), 5)
        assert np.isin(labels[:, 0], range(len(shapes.NAMES))).all()
        low, high = labels[:, 1:3] - labels[:, 3:] / 2, labels[:, 1:3] + labels[:, 3:] / 2
        assert (low >= -1e-6).all()
        assert (high <= 1 + 1e-6).all()


def test_sizes_classes_and_counts_are_spread(hundred: list[tuple[np.ndarray, np.ndarray]]) -> None:
    labels = np.concatenate([rows for _, rows in hundred])
    sizes = labels[:, 3:].max(axis=1) * shapes.SIDE_PIXELS
    assert sizes.min() >= 8
    assert sizes.max() <= 100
    assert (np.histogram(sizes, [8, 16, 32, 64, 100.01])[0] >= 0.1 * len(sizes)).all()
    assert (np.bincount(labels[:, 0].astype(int), minlength=len(shapes.NAMES)) >= 50).all()
    counts = [len(rows) for _, rows in hundred]
    assert max(counts) == 12
    assert 1 <= counts.count(0) <= 6
    assert 5 < np.mean(counts) < 9


@pytest.mark.parametrize("label", range(len(shapes.NAMES)))
@pytest.mark.parametrize("size", [9.0, 40.0, 90.0])
def test_a_box_is_the_extent_of_the_painted_pixels(label: int, size: float) -> None:
    rng = np.random.default_rng([label, int(size)])
    stencil = shapes.draw_stencil(rng, label, size)
    placed = shapes._place_at(stencil, 40, 30)
    assert placed is not None
    assert max(placed.box[2] - placed.box[0], placed.box[3] - placed.box[1]) == pytest.approx(size, abs=0.6)
    check_extent(rng, placed)


@pytest.mark.parametrize("label", range(len(shapes.NAMES)))
def test_a_box_ends_at_the_image_border_and_fits_what_is_seen(label: int) -> None:
    rng = np.random.default_rng(label)
    stencil = shapes.draw_stencil(rng, label, 60.0)
    placed = shapes._place_at(stencil, -3, shapes.SIDE_PIXELS - stencil.fill.shape[0] + 3)
    assert placed is not None
    assert placed.box[0] == 0
    assert placed.box[3] == shapes.SIDE_PIXELS
    check_extent(rng, placed)
    assert shapes._place_at(stencil, -30, 50) is None  # too little of it would be seen


def check_extent(rng: np.random.Generator, placed: shapes._Object) -> None:
    """Paint `placed` on plain grey; its box and the extent of the pixels that changed must agree to one pixel.

    The box ends somewhere in the outermost changed pixels: a pixel that is hardly covered changes by less than 1.
    """
    image = np.full((shapes.SIDE_PIXELS, shapes.SIDE_PIXELS, 3), 128, np.float32)
    shapes.paint(rng, image, placed.stencil, placed.left, placed.top)
    rows, cols = np.nonzero((np.abs(image - 128) > 1e-3).any(axis=2))
    x1, y1, x2, y2 = placed.box
    assert cols.min() <= x1 < cols.min() + 1
    assert rows.min() <= y1 < rows.min() + 1
    assert cols.max() < x2 <= cols.max() + 1
    assert rows.max() < y2 <= rows.max() + 1


def test_every_object_can_be_seen() -> None:
    for index in range(30):
        objects = shapes._objects(np.random.default_rng([1, 0, index]))
        crowd = np.sum([new.mask for new in objects] or [np.zeros((160, 160))], axis=0)
        for i, new in enumerate(objects):
            assert (crowd[new.mask] > 1).mean() <= 0.35
            assert all(shapes._iou(new.box, old.box) <= 0.35 for old in objects[:i])


def test_fill_colours_stand_out_and_differ_within_a_class() -> None:
    rng = np.random.default_rng(0)
    around = shapes.background(rng)[:40, :40]
    colours = np.stack([shapes._fill_colour(rng, around) for _ in range(20)])
    contrast = shapes._contrast(colours, around.reshape(-1, 3))
    assert (np.median(contrast, axis=1) > 50).all()
    assert colours.std(axis=0).min() > 25


def test_the_data_set_on_disk_is_what_draw_image_gives(tmp_path: Path) -> None:
    folder = shapes.draw_dataset(tmp_path / "deep" / "shapes", seed=7, train=6, val=2)
    assert sorted(p.name for p in (folder / "images/train").iterdir()) == [f"{i:06d}.jpg" for i in range(6)]
    assert sorted(p.name for p in (folder / "labels/val").iterdir()) == ["000000.txt", "000001.txt"]
    image, labels = shapes.draw_image(7, 1, 1)
    stored = cv2.imread(str(folder / "images/val/000001.jpg"))
    assert np.abs(stored.astype(int) - image).mean() < 12  # JPEG at its worst on noise
    rows = [line.split() for line in (folder / "labels/val/000001.txt").read_text().splitlines()]
    assert np.allclose(np.array(rows, float).reshape(-1, 5), labels, atol=1e-6)
    assert all(len(value) == 8 for row in rows for value in row[1:])
    assert list((tmp_path / "deep").iterdir()) == [folder]


def test_an_image_without_objects_has_an_empty_label_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_objects", lambda rng: [])
    folder = shapes.draw_dataset(tmp_path / "shapes", train=1, val=0)
    assert (folder / "labels/train/000000.txt").read_bytes() == b""


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    one, two, three = (
        contents(shapes.draw_dataset(tmp_path / name, seed, train=3, val=1))
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    )
    assert one == two
    assert one.keys() == three.keys()
    assert not any(one[name] == three[name] for name in one if name.endswith(".jpg"))


def test_drawing_again_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shapes.draw_dataset(tmp_path / "shapes", train=3, val=1)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    monkeypatch.setattr(shapes, "draw_image", lambda *_: pytest.fail("drawn again"))
    assert shapes.draw_dataset(folder, train=3, val=1) == folder
    assert before == {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_drawing_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, folder = shapes.draw_image, tmp_path / "shapes"

    def interrupted(seed: int, split: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 2:
            raise error
        return draw(seed, split, index)

    with monkeypatch.context() as patch:
        patch.setattr(shapes, "draw_image", interrupted)
        with pytest.raises(error):
            shapes.draw_dataset(folder, train=6, val=2)
    assert list(tmp_path.iterdir()) == []
    shapes.draw_dataset(folder, train=6, val=2)
    assert len(contents(folder)) == 2 * (6 + 2) + 1


def test_the_remains_of_a_killed_drawing_do_not_matter(tmp_path: Path) -> None:
    stale = tmp_path / ".shapes-1-00000000"
    (stale / "images/train").mkdir(parents=True)
    shapes.draw_dataset(tmp_path / "shapes", train=1, val=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [stale.name, "shapes"]


def test_the_slower_of_two_processes_uses_the_others_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, folder = os.rename, tmp_path / "shapes"
    winner: dict[Path, int] = {}

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        shapes.draw_dataset(folder, train=2, val=1)
        winner.update({path: path.stat().st_mtime_ns for path in folder.rglob("*")})
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert shapes.draw_dataset(folder, train=2, val=1) == folder
    assert winner == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_foreign_folder_is_refused_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "mine.jpg").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"shapes' exists but is not a drawing .*: remove it or name another folder"):
        shapes.draw_dataset(folder)
    assert contents(tmp_path) == {"shapes/images/mine.jpg": b"mine"}


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("drawing", 0), ("train", 3)])
def test_another_drawing_is_refused_and_kept(tmp_path: Path, key: str, value: int) -> None:
    folder = shapes.draw_dataset(tmp_path / "shapes", train=1, val=1)
    marker = folder / shapes.SHAPES_MARKER_FILE
    marker.write_text(json.dumps({**json.loads(marker.read_text()), key: value}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"another drawing .* differs in {key}\): remove it"):
        shapes.draw_dataset(folder, train=1, val=1)
    assert contents(tmp_path) == before


def test_a_drawing_that_lost_images_is_refused(tmp_path: Path) -> None:
    folder = shapes.draw_dataset(tmp_path / "shapes", train=2, val=1)
    (folder / "images/train/000001.jpg").unlink()
    with pytest.raises(UserError, match=r"1 instead of 2 images in images/train\): remove it"):
        shapes.draw_dataset(folder, train=2, val=1)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write the shapes data set to .*file/shapes"):
        shapes.draw_dataset(tmp_path / "file" / "shapes", train=1, val=0)


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seed -1 is negative"):
        shapes.draw_dataset(tmp_path / "shapes", seed=-1)


def test_the_command_line_draws_and_prints_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Path, int]] = []
    monkeypatch.setattr(shapes, "draw_dataset", lambda folder, seed: calls.append((folder, seed)) or folder)
    monkeypatch.setattr("sys.argv", ["shapes", "--folder", str(tmp_path), "--seed", "4"])
    shapes.main()
    assert calls == [(tmp_path, 4)]
    assert capsys.readouterr() == (f"{tmp_path}\n", "")


def test_the_data_yaml_names_the_classes() -> None:
    content = yaml.safe_load((ROOT / "data" / "shapes.yaml").read_text(encoding="utf-8"))
    assert list(content)[-1] == "names"
    assert (content["train"], content["val"]) == ("images/train", "images/val")
    assert content["names"] == dict(enumerate(shapes.NAMES))
    assert (ROOT / "data" / content["path"]).resolve() == ROOT / "datasets" / "shapes"
