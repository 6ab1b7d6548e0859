"""Tests of writing a drawn data set: complete or absent, never overwritten. Its images are empty files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data.builtin.dataset import BuiltinDataset, draw_builtin
from utils.errors import UserError

MARKER = {"drawing": 3, "seed": 0, "train": 5, "val": 2, "names": ["a", "b"]}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


class Drawing:
    """Draws a toy data set whose images are in two folders per split. fails_at: the index of an image that fails."""

    def __init__(self) -> None:
        self.drawn, self.fails_at, self.error = 0, -1, RuntimeError

    def write(self, folder: Path, seed: int, split: int, index: int) -> None:
        if index == self.fails_at:
            raise self.error
        self.drawn += 1
        name = f"{('train', 'val')[split]}/{index % 2}/{index}.jpg"
        (folder / name).write_text(f"{seed}")

    def __call__(self, folder: Path, seed: int = 0, counts: tuple[int, int] = (5, 2), marker: str = "toy.json") -> Path:
        dataset = BuiltinDataset("toy", 3, marker, ("a", "b"), ("{}/0", "{}/1"), ("labels/{}",), self.write)
        return draw_builtin(dataset, folder, seed, counts)


@pytest.fixture
def draw() -> Drawing:
    return Drawing()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "toy"


def test_all_images_and_the_marker_are_written_once(draw: Drawing, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "toy"
    assert draw(folder) == folder
    files = [*(f"train/{k % 2}/{k}.jpg" for k in range(5)), *(f"val/{k}/{k}.jpg" for k in range(2)), "toy.json"]
    assert contents(folder).keys() == set(files)
    assert json.loads((folder / "toy.json").read_text()) == MARKER
    assert sorted(path.name for path in (folder / "labels").iterdir()) == ["train", "val"]
    assert list((tmp_path / "deep").iterdir()) == [folder]
    before = times(tmp_path)
    draw(folder)
    assert times(tmp_path) == before
    assert draw.drawn == 7


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_drawing_leaves_no_files(draw: Drawing, folder: Path, error: type[BaseException]) -> None:
    draw.fails_at, draw.error = 3, error
    with pytest.raises(error):
        draw(folder)
    assert list(folder.parent.iterdir()) == []
    draw.fails_at = -1
    (folder.parent / ".toy-1-00000000/train").mkdir(parents=True)  # of a killed process
    draw(folder)
    assert len(contents(folder)) == 8


def test_the_slower_of_two_processes_uses_the_other_drawing(
    draw: Drawing, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    before: dict[Path, int] = {}

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        draw(folder)
        before.update(times(folder))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert draw(folder) == folder
    assert draw.drawn == 14
    assert times(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_without_the_marker_is_refused(draw: Drawing, folder: Path) -> None:
    draw(folder, marker="other.json")
    before = contents(folder)
    with pytest.raises(
        UserError, match=r"exists but is not a drawing of the toy .* no readable toy\.json\): remove it"
    ):
        draw(folder)
    assert contents(folder) == before


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("drawing", 0), ("train", 3)])
def test_another_drawing_is_refused(draw: Drawing, folder: Path, key: str, value: int) -> None:
    draw(folder)
    (folder / "toy.json").write_text(json.dumps({**MARKER, key: value}))
    before = contents(folder)
    with pytest.raises(
        UserError, match=rf"another drawing of the toy .* \(its toy\.json differs in {key}\): remove it"
    ):
        draw(folder)
    assert contents(folder) == before


def test_a_drawing_that_lost_images_is_refused(draw: Drawing, folder: Path) -> None:
    (draw(folder) / "train/1/3.jpg").unlink()
    with pytest.raises(UserError, match=r"is damaged \(1 instead of 2 images in train/1\): remove it"):
        draw(folder)


def test_a_negative_seed_and_a_folder_that_cannot_be_written_are_refused(draw: Drawing, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seed -1 is negative: give the toy data set a seed of 0 or more"):
        draw(tmp_path / "toy", seed=-1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the toy data set to .*file/toy' \(Not a directory\): free disk"):
        draw(tmp_path / "file" / "toy")
