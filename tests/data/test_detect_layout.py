"""Tests of folders as --data: what they are recognised as."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.classification import ClassificationData
from data.data_yaml import DataSpec, read_spec
from data.dataset import DataOptions, data_source
from data.detect_layout import read_folder
from tests.data.test_coco_json import export
from tests.layouts import class_folders, coco_file, roboflow_voc
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


@pytest.mark.parametrize("images", ["train2017", "images/train2017", "images/train", "train", "images", ""])
def test_cocos_own_layout(tmp_path: Path, images: str) -> None:
    file = export(tmp_path / images)
    (tmp_path / "annotations").mkdir()
    file.rename(tmp_path / "annotations/instances_train2017.json")
    spec = read_folder(tmp_path)
    assert [path.parent for name in ("train", "val") for path in spec.images(name)] == [tmp_path / images] * 3
    assert "COCO's layout (train: annotations/instances_train2017.json, split: 0.2)" in line_of(spec)


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
    with pytest.raises(
        UserError,
        match=r"no data.yaml, no COCO annotations \(train/_ann.* no VOC annotations .* no folder of images per class.* "
        r"or make label files by `python -m data\.convert voc`",
    ):
        data_source(str(tmp_path), "data.detection:DetectionData")


def test_folders_of_splits_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        write_image(tmp_path / split / "a.png")
    with pytest.raises(UserError, match="is not recognised as a data set"):
        read_folder(tmp_path)


def test_the_folder_inside_is_proposed(tmp_path: Path) -> None:
    roboflow_voc(tmp_path / "animals-1")
    with pytest.raises(UserError, match=rf"is not recognised as a data set \(did you mean {tmp_path}/animals-1\?\):"):
        read_folder(tmp_path)


def test_classes_with_weights_of_a_detector(tmp_path: Path) -> None:
    source = data_source(str(class_folders(tmp_path)), "data.detection:DetectionData")
    with pytest.raises(
        UserError, match=r"has a folder of images per class .*: add --weights yolov5s-cls\.pt, or .* --cfg"
    ):
        source.names()
    file = write_yaml(tmp_path / "my.yaml", {"path": ".", "split": 0.2})
    with pytest.raises(UserError, match=r"`names` must list the classes.* give a classifier's --weights, such as"):
        data_source(str(file), "data.detection:DetectionData").names()


def test_a_file_that_is_no_coco_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UserError, match=r"a\.json is not a COCO annotation file of objects"):
        data_source(str(tmp_path / "a.json"), "data.detection:DetectionData")


def test_a_coco_file_alone(tmp_path: Path) -> None:
    file = coco_file(tmp_path)
    spec = data_source(str(file), "data.detection:DetectionData").spec
    assert line_of(spec) == f"{file} is a data set of one file (train: export.json, split: 0.2)"
    (tmp_path / "images").rename(tmp_path / "photos")
    with pytest.raises(
        UserError,
        match=rf"export\.json: none of its 20 images exists, such as train_0\.jpg, looked for in {tmp_path}; give "
        r"their folder as `images:` of a data YAML",
    ):
        spec.images("train")
    content = {"train": "export.json", "split": 0.2, "images": "photos"}
    assert len(read_spec(write_yaml(tmp_path / "my.yaml", content)).images("train")) == 16
