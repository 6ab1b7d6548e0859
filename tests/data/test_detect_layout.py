"""Tests of folders as --data: what they are recognised as."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.classification import ClassificationData
from data.data_yaml import DataSpec
from data.dataset import DataOptions, data_source
from data.detect_layout import read_folder
from tests.data.test_coco_json import export
from tests.making import write_image, write_yaml
from utils.errors import UserError


def line_of(spec: DataSpec) -> str:
    """Return the line that says what the folder is."""
    return spec.warnings[0]


def test_a_data_yaml_in_the_folder_is_taken(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "data.yaml", {"train": "images", "names": ["a"]})
    export(tmp_path / "train")
    assert read_folder(tmp_path).file == file
    assert data_source(str(tmp_path), "data.detection:DetectionData").spec.file == file


def test_an_export_with_annotations_in_each_split(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        export(tmp_path / split)
    spec = read_folder(tmp_path)
    assert spec.entries == {"train": ("train/_annotations.coco.json",), "val": ("valid/_annotations.coco.json",)}
    assert (len(spec.images("train")), spec.names) == (3, {0: "pawn", 1: "queen"})
    assert f"{tmp_path} has COCO annotations in the folder of each split (train: train/_anno" in line_of(spec)


@pytest.mark.parametrize("images", ["train2017", "images/train2017", "images/train"])
def test_cocos_own_layout(tmp_path: Path, images: str) -> None:
    file = export(tmp_path / images)
    (tmp_path / "annotations").mkdir()
    file.rename(tmp_path / "annotations/instances_train2017.json")
    spec = read_folder(tmp_path)
    assert [path.parent for path in spec.images("train")] == [tmp_path / images] * 3
    assert "COCO's layout (train: annotations/instances_train2017.json)" in line_of(spec)


@pytest.mark.parametrize("splits", [("train", "val"), ("train", "valid", "test"), ("",)])
def test_a_folder_per_class(tmp_path: Path, splits: tuple[str, ...]) -> None:
    for split in splits:
        for label in ("cat", "dog"):
            for number in range(2):
                write_image(tmp_path / split / label / f"{number}.png")
    spec = read_folder(tmp_path)
    assert "a folder of images per class" in line_of(spec)
    assert ("test" in spec.entries, spec.split > 0) == (len(splits) == 3, splits == ("",))
    data = ClassificationData(spec, 32, 1, DataOptions())
    assert set(data.names.values()) == {"cat", "dog"}
    assert len(data.split("val").images) == (2 if splits == ("",) else 4)


def test_other_folders_are_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    write_image(tmp_path / "images/train/a.png")
    write_image(tmp_path / "labels/train/a.png")
    with pytest.raises(UserError, match=r"no data.yaml, no train/_annotations.coco.json, .* no folder of images per c"):
        data_source(str(tmp_path), "data.detection:DetectionData")
