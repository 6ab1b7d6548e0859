"""Tests of data.split: its lists and data YAML, equal shares of the classes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data.dataset import DataOptions, data_source
from data.detection import DetectionSplit
from data.split import split
from tests.layouts import COUNTS, class_folders, coco_file, drawn, roboflow_yolo
from tests.making import write_image, write_yaml
from utils.errors import UserError
from utils.files import read_yaml


def splits_of(file: Path) -> tuple[DetectionSplit, DetectionSplit]:
    data = data_source(str(file), "data.detection:DetectionData").open(64, 32, DataOptions(strict=True))
    train, val = data.split("train"), data.split("val")
    assert isinstance(train, DetectionSplit)
    assert isinstance(val, DetectionSplit)
    return train, val


def photos(folder: Path, *classes: tuple[int, ...]) -> Path:
    """Write a data set in YOLO's format without a validation: an image for each of `classes`. Return its YAML."""
    for number, labels in enumerate(classes):
        rows = [f"{label} 0.5 0.5 0.{k + 1} 0.5" for k, label in enumerate(labels)]
        write_image(folder / f"images/{number:03}.png", None, *rows)
    return write_yaml(folder / "my.yaml", {"train": "images", "names": ["a", "b", "c"]})


def split_in(folder: Path, monkeypatch: pytest.MonkeyPatch, file: Path, *args: float, **kwargs: int) -> Path:
    """Split the data set of `file` with a new `folder` as the working folder, and return that folder."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    split(str(file), *args, **kwargs)
    return folder


def test_training_and_validation_are_split_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the data set is changed."""
    data = roboflow_yolo(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    out = split_in(tmp_path / "here", monkeypatch, data, 0.25) / "set-split"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before
    assert sorted(path.name for path in out.iterdir()) == ["data.yaml", "train.txt", "val.txt"]
    parts = splits_of(out / "data.yaml")
    total = COUNTS["train"] + COUNTS["val"]
    images = {image.stem: image.label_rows() for name in ("train", "val") for image in drawn(name)}
    assert sorted(path.stem for part in parts for path in part.images) == sorted(images)
    assert abs(len(parts[1].images) - 0.25 * total) <= 2
    for part in parts:
        for k, path in enumerate(part.images):
            rows = np.array([list(map(float, row.split())) for row in images[path.stem]]).reshape(-1, 5)
            assert part.labels.image_rows(k) == pytest.approx(rows, abs=1e-5)


def test_the_test_images_defaults_and_key_points_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = roboflow_yolo(tmp_path / "set") / "data.yaml"
    write_yaml(file, {**read_yaml(file), "defaults": {"imgsz": 64}, "kpt_shape": [17, 3]})
    split(str(file))
    content = read_yaml(tmp_path / "data-split/data.yaml")
    shutil.rmtree(tmp_path / "set/test")
    again = split_in(tmp_path / "without", monkeypatch, file) / "data-split/data.yaml"
    assert set(content) - set(read_yaml(again)) == {"test"}
    assert content == {
        "train": str(tmp_path / "data-split/train.txt"),
        "val": str(tmp_path / "data-split/val.txt"),
        "test": [str(tmp_path / "set/test/images")],
        "kpt_shape": [17, 3],
        "defaults": {"imgsz": 64},
        "names": {"0": "cat", "1": "cow", "2": "dog"},
    }


@pytest.mark.parametrize("folds", [0, 5])
def test_the_shares_of_classes_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folds: int) -> None:
    """40 images with class a, of which 10 have b too and 5 have c; 20 without labels. Another seed, another split."""
    file = photos(tmp_path / "set", *[(0, 1)] * 10, *[(0, 2)] * 5, *[(0,)] * 25, *[()] * 20)
    choices = set()
    for seed in range(3):
        out, every = split_in(tmp_path / f"{seed}", monkeypatch, file, folds=folds, seed=seed), []
        for part in [f"my-folds/fold{number}" for number in range(1, folds + 1)] or ["my-split"]:
            train, val = splits_of(out / part / "data.yaml")
            every += val.images
            assert (len(val.images), (val.labels.counts == 0).sum()) == (12, 4)
            assert np.bincount(val.instances().classes, minlength=3).tolist() == [8, 2, 1]
            assert not {*train.images} & {*val.images}
        assert sorted(every) == sorted((tmp_path / "set/images").glob("*.png")) or not folds
        choices.add(tuple(every))
    assert len(choices) == 3


def test_what_cannot_be_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(photos(tmp_path / "set", (0,), (1,)))
    for share in (0, 1, -0.1, float("nan"), 0.01):
        with pytest.raises(UserError, match="--val"):
            split(file, share)
    for folds in (-1, 1, 10**9):
        with pytest.raises(UserError, match=f"--folds {folds}"):
            split(file, folds=folds)
    with pytest.raises(UserError, match="classes"):
        split(str(class_folders(tmp_path / "classes")))
    with pytest.raises(UserError, match="annotations"):
        split(str(coco_file(tmp_path / "coco")))
    assert not (tmp_path / "my-split").exists()
    split(file, 0.5)
    with pytest.raises(UserError, match="my-split"):
        split(file, 0.5)
