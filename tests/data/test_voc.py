"""Tests of VOC's layout as a data set: equal to the converter's label files, with sentences for what is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.convert import convert_voc
from data.data_yaml import read_spec
from data.dataset import DataOptions, data_source
from data.detect_layout import read_folder
from data.detection import DetectionSplit
from data.label_rows import label_name, parse_rows
from tests.data.test_convert import voc_xml
from tests.layouts import kaggle, roboflow_voc
from tests.making import noise, write_image, write_yaml
from utils.errors import UserError

OBJECTS = (
    (("dog", (20, 10, 120, 60)), ("cat", (1, 1, 20, 20), 1)),
    (),
    (("cat", (1, 1, 200, 100)), ("dog", (5, 5, 9, 9))),
)


def voc(folder: Path, database: str = "", lists: tuple[str, ...] = ("train", "val")) -> Path:
    """Write VOC's layout with three images in each list."""
    for split in lists:
        names = [f"{split}{k}" for k in range(3)]
        for name, objects in zip(names, OBJECTS, strict=True):
            write_image(folder / f"JPEGImages/{name}.jpg", noise(200, 100))
            file = folder / f"Annotations/{name}.xml"
            file.parent.mkdir(exist_ok=True)
            xml = voc_xml(*objects)
            file.write_text(
                xml.replace("<annotation>", f"<annotation><source><database>{database}</database></source>")
            )
        file = folder / f"ImageSets/Main/{split}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(names))
    return folder


def split_of(data: Path, name: str = "train") -> DetectionSplit:
    split = data_source(str(data), "data.detection:DetectionData").open(32, 32, DataOptions()).split(name)
    assert isinstance(split, DetectionSplit)
    return split


@pytest.mark.parametrize("one_based", [False, True])
def test_equals_the_converters_label_files(tmp_path: Path, one_based: bool) -> None:
    folder = voc(tmp_path / "voc", "The VOC2007 Database" if one_based else "mine")
    convert_voc(folder, tmp_path / "labels", one_based=one_based)
    for name in ("train", "val"):
        split = split_of(folder, name)
        assert [path.name for path in split.images] == [f"{name}{k}.jpg" for k in range(3)]
        files = [tmp_path / f"labels/{name}/{path.stem}.txt" for path in split.images]
        rows = [[list(row.box) for row in parse_rows(file.read_text(), file)[0]] for file in files]
        assert [split.labels.of(k).tolist() for k in range(3)] == [
            [[pytest.approx(value) for value in row] for row in each] for each in rows
        ]
        assert split.labels.counts.tolist() == [1, 0, 2]
        assert split.problems == ()
    assert not [path for path in folder.rglob("*.txt") if path.parent.name != "Main"]


def test_what_the_folder_is(tmp_path: Path) -> None:
    spec = read_folder(voc(tmp_path / "voc", lists=("train", "test")))
    assert "has VOC's layout (train: ImageSets/Main/train.txt, val: ImageSets/Main/test.txt," in spec.warnings[0]
    assert spec.names == {0: "cat", 1: "dog"}


def test_several_years(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        voc(tmp_path / year)
    assert len(split_of(tmp_path).images) == 6


def test_names_of_a_data_yaml(tmp_path: Path) -> None:
    voc(tmp_path)
    content = {"train": "ImageSets/Main/train.txt", "val": "ImageSets/Main/val.txt", "names": ["dog"]}
    split = split_of(write_yaml(tmp_path / "my.yaml", content))
    assert split.labels.counts.tolist() == [1, 0, 1]
    assert "2 boxes of classes that are not in `names`" in split.problems[0]
    with pytest.raises(UserError, match=r"has no objects of the class 'dig' \(did you mean 'dog'\?\)"):
        split_of(write_yaml(tmp_path / "my.yaml", {**content, "names": ["dig"]}))


def test_absent_images_and_annotations_are_left_out(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    (folder / "Annotations/train0.xml").unlink()
    (folder / "JPEGImages/train1.jpg").unlink()
    split = split_of(folder)
    assert [path.stem for path in split.images] == ["train2"]
    assert "1 name without an image, such as train1; left out" in split.problems[0]
    assert "1 name without an annotation, such as train0; left out" in split.problems[1]


def test_a_problem_names_the_object(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    file = folder / "Annotations/train1.xml"
    file.write_text(voc_xml(("dog", (5, 5, 9, 9), 1), ("cat", (1, 1, 20, 20)), ("cat", (1, 1, 20, 20))))
    assert split_of(folder).problems == (f"{file}: object 3: the same box again; row left out",)


def test_a_changed_annotation_is_read_again(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    assert split_of(folder).labels.counts.sum() == 3
    (folder / "Annotations/train1.xml").write_text(voc_xml(("bird", (1, 1, 20, 20))))
    split = split_of(folder)
    assert split.labels.counts.sum() == 4
    assert split.labels.rows[1, 0] == 0  # bird, the first of bird, cat, dog


def test_lists_without_one_for_training(tmp_path: Path) -> None:
    folder = voc(tmp_path, lists=("train", "test"))
    (folder / "ImageSets/Main/train.txt").rename(folder / "ImageSets/Main/trainval.txt")
    assert read_folder(folder).entries["train"] == ("ImageSets/Main/trainval.txt",)
    (folder / "ImageSets/Main/trainval.txt").unlink()
    with pytest.raises(UserError, match=r"has VOC's lists test.txt, but no train.txt in ImageSets/Main, so it is not"):
        read_folder(folder)
    (folder / "ImageSets/Main/test.txt").unlink()
    spec = read_folder(folder)
    assert (spec.entries, spec.split) == ({"train": ("Annotations",)}, 0.2)


@pytest.mark.parametrize(
    ("annotations", "images"),
    [
        ("train", "train"),
        ("annotations/train", "images/train"),
        ("annotations/train", "images"),
        ("annotations/train", "annotations/train"),
        ("Annotations", "Images"),
        ("annotations", ""),
        ("train/annotations", "train/images"),
        ("xml", "photos"),  # `images:`
    ],
)
def test_a_folder_of_xml_files(tmp_path: Path, annotations: str, images: str) -> None:
    files = [voc(tmp_path / "voc", lists=("train",)) / f"JPEGImages/train{k}.jpg" for k in range(3)]
    for folder in (annotations, images):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for file in files:
        file.rename(tmp_path / images / file.name)
        xml = tmp_path / f"voc/Annotations/{file.stem}.xml"
        xml.rename(tmp_path / annotations / xml.name)
    content = {"train": annotations, **({"images": "photos"} if images == "photos" else {})}
    split = split_of(write_yaml(tmp_path / "my.yaml", content))
    assert split.images == [tmp_path / images / file.name for file in files]
    assert (split.labels.counts.tolist(), split.problems) == ([1, 0, 2], ())


def test_images_and_xml_files_without_each_other(tmp_path: Path) -> None:
    folder = kaggle(tmp_path)
    (folder / "annotations/train_1.xml").unlink()
    (folder / "images/train_2.png").unlink()
    listing = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "annotations"})).listing("train")
    assert [problem.partition(": ")[2] for problem in listing.problems] == [
        "1 annotation without an image, such as train_2; left out",
        "1 image without an annotation, such as train_1; left out",
    ]
    (folder / "images").rename(folder / "photos")
    with pytest.raises(
        UserError, match=r"none of 19 annotations has an image of the same name, .* give their folder as `imag"
    ):
        read_folder(folder).images("train")


def test_a_split_without_objects(tmp_path: Path) -> None:
    folder = roboflow_voc(tmp_path)
    for file in (folder / "valid").glob("*.xml"):
        file.write_text(voc_xml(size=(64, 48)))
    split = split_of(folder, "val")
    assert split.labels.counts.tolist() == [0] * len(split.images)
    assert "no image of `val:` has a label" in split.problems[0]


def test_problems_are_those_of_the_images_that_are_held_out(tmp_path: Path) -> None:
    folder = kaggle(tmp_path)
    for file in (folder / "annotations").glob("*.xml"):
        file.write_text(voc_xml(("cat", (1, 1, 20, 20)), ("cat", (5, 5, 5, 9)), size=(64, 48)))
    for name, count in (("train", 16), ("val", 4)):
        split = split_of(folder, name)
        assert (len(split.images), split.labels.counts.tolist()) == (count, [1] * count)
        assert split.problems == (f"{folder}/annotations: left out: {count} boxes without an area",)


def test_label_files_count_more_than_xml_files(tmp_path: Path) -> None:
    folder = roboflow_voc(tmp_path)
    (folder / "train/train_1.txt").write_text("0 .5 .5 .5 .5")
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "train", "names": ["a"]}))
    assert spec.listing("train").annotated == ()


def test_the_files_that_machines_compare(tmp_path: Path) -> None:
    for folder, more in ((roboflow_voc(tmp_path / "one"), 0), (voc(tmp_path / "two"), 1)):
        source = data_source(str(folder), "data.detection:DetectionData")
        files = source.files()
        assert len(files["labels of train"]) == len(files["train"]) + more  # the list
        assert all(file.is_file() for file in files["labels of train"])


def test_no_label_files_are_looked_for(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    image = folder / "JPEGImages/train1.jpg"
    Path(label_name(str(image))).write_text("0 .5 .5 .1 .1")
    assert split_of(folder).labels.counts.tolist() == [1, 0, 2]
