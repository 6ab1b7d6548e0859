"""Annotations that are read in place: COCO, VOC, VisDrone; and folders as --data."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.data_yaml import read_data, read_spec
from data.dataset import DataOptions, data_source
from data.detection import DetectionData, DetectionSplit
from data.formats import box_row
from data.labels import OUTLINES
from data.segmentation import SegmentationData
from tests.layouts import kaggle, roboflow_voc
from tests.making import label_file, plain, write_image, write_yaml
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import ROOT, read_yaml

SQUARE = [4, 4, 12, 4, 12, 12, 4, 12]
CATEGORIES = [
    {"id": 0, "name": "pieces", "supercategory": "none"},
    {"id": 3, "name": "queen", "supercategory": "pieces"},
    {"id": 1, "name": "pawn", "supercategory": "pieces"},
]


@pytest.mark.parametrize(
    ("box", "row"),
    [
        ([-1, 95, 100 / 3, 9], "3 0.0808333 0.975 0.161667 0.05\n"),
        ([190, -5, 20, 10], "3 0.975 0.025 0.05 0.05\n"),
        *((box, "") for box in ([math.nan, 1, 2, 3], [0, 0, math.inf, 9], [200, 0, 9, 9], [1, 2, 3])),
    ],
)
def test_a_row_has_six_digits_and_is_clipped_to_the_image(box: list[float], row: str) -> None:
    assert box_row(3, box, (200, 100), defaultdict(list), "annotation 7") == row


# COCO


def objects(*rows: tuple[int, int, list[float]], **more: Any) -> list[dict[str, Any]]:
    """Return annotations. rows: image id, category id and box."""
    return [
        {"id": k, "image_id": image, "category_id": category, "bbox": box, "iscrowd": 0, **more}
        for k, (image, category, box) in enumerate(rows)
    ]


def images_of(*images: tuple[int, str]) -> list[dict[str, Any]]:
    """Return entries of 20 x 20 pixels. images: id and file name."""
    return [{"id": number, "file_name": name, "width": 20, "height": 20} for number, name in images]


def export(folder: Path, **content: Any) -> Path:
    """Write a split as Roboflow's COCO export has it: three images of 20 x 20 beside their annotations."""
    images = images_of(*((k, f"{k}.png") for k in range(3)))
    for image in images:
        write_image(folder / str(image["file_name"]))
    annotations = objects((0, 1, [4, 4, 8, 8]), (1, 3, [0, 0, 10, 20]), (1, 1, [15, 15, 10, 10]))
    file = folder / "_annotations.coco.json"
    file.write_text(json.dumps({"categories": CATEGORIES, "images": images, "annotations": annotations, **content}))
    return file


def split_of(folder: Path, kind: type[DetectionData] = DetectionData, **content: Any) -> DetectionSplit:
    """Return the training split of a data YAML that names the export in `folder`/train."""
    file = write_yaml(folder / "my.yaml", {"train": "train/_annotations.coco.json", **content})
    return kind(read_spec(file), 32, 32, DataOptions()).split("train", Hyperparameters())


def test_a_split_has_the_rows_of_its_annotations(tmp_path: Path) -> None:
    """Names select classes; without them, a supercategory counts once it has objects."""
    export(tmp_path / "train")
    split = split_of(tmp_path)
    assert [image.name for image in split.images] == ["0.png", "1.png", "2.png"]
    assert (split.labels.counts.tolist(), split.problems) == ([1, 2, 0], ())
    expected = [[0, 0.4, 0.4, 0.4, 0.4], [1, 0.25, 0.5, 0.5, 1], [0, 0.875, 0.875, 0.25, 0.25]]
    assert split.labels.rows.tolist() == np.array(expected, np.float32).tolist()
    assert read_spec(tmp_path / "my.yaml").names == {0: "pawn", 1: "queen"}
    split = split_of(tmp_path, names=["queen", "pieces"])
    assert split.labels.rows[:, 0].tolist() == [0]
    assert "annotation 0" in split.problems[0]
    assert "'pawns' (did you mean 'pawn'?)" in split_of(tmp_path, names=["queen", "pawns"]).problems[0]
    with pytest.raises(UserError, match="'rook'"):
        split_of(tmp_path, names=["rook"])
    own = {"id": 9, "name": "rook", "supercategory": "rook"}  # as labelme2coco writes it
    export(tmp_path / "train", annotations=objects((0, 0, [4, 4, 8, 8])), categories=[*CATEGORIES, own])
    file = write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json"})
    assert list(read_spec(file).names.values()) == ["pieces", "pawn", "queen", "rook"]


def test_wrong_annotations_are_counted_by_kind_with_the_first_of_each(tmp_path: Path) -> None:
    boxes: list[Any] = [[4, 4, 8, 8], [0, 0, 0, 8], [4, 4, 8, 8], [0, 0, 8, 0], None, "text", [1, 2, 3], [1, 2, "x", 4]]
    twice = objects(*((0, 1, box) for box in boxes), (9, 1, [0, 0, 4, 4]), (0, 7, [0, 0, 4, 4]))
    file = export(tmp_path / "train", annotations=[{**item, "id": 70 + item["id"]} for item in twice])
    split = split_of(tmp_path)
    assert len(split.labels.rows) == 1
    named = {problem.partition("annotation ")[2][:2]: problem for problem in split.problems}
    assert set(named) == {"71", "72", "74", "78", "79"}
    assert [named[number].startswith(f"{file}: {count} ") for number, count in (("71", 2), ("74", 4))] == [True] * 2


@pytest.mark.parametrize("others", [1, 0])
def test_crowds_are_counted_and_are_objects_if_there_is_nothing_else(tmp_path: Path, others: int) -> None:
    """Neither is a fault for --strict."""
    crowds = objects((0, 1, [4, 4, 8, 8]), (1, 1, [0, 0, 10, 20]), iscrowd=1)
    file = export(tmp_path / "train", annotations=[*crowds, *objects((1, 1, [0, 0, 4, 4]))[:others]])
    split_of(tmp_path)
    split = DetectionData(read_spec(tmp_path / "my.yaml"), 32, 32, DataOptions(strict=True)).split("train")
    assert split.labels.counts.tolist() == ([0, 1, 0] if others else [1, 1, 0])
    what = "left out" if others else "read as objects: there are no others"
    assert split.problems == (f"{file}: 2 crowds, such as annotation 0; {what}",)


@pytest.mark.parametrize("boxes", [[0.1, 0.2, 0.1, 0.2], [12, 12, 18, 19]], ids=["shares", "corners"])
def test_boxes_that_are_not_in_cocos_form_are_an_error(tmp_path: Path, boxes: list[float]) -> None:
    file = export(tmp_path / "train", annotations=objects((0, 1, boxes), (1, 1, boxes)))
    with pytest.raises(UserError, match=rf"^{file}: .*`bbox`"):
        split_of(tmp_path)


@pytest.mark.parametrize("name", ["missing.png", "../secret.png", "a/../../secret.png", "{}/secret.png", "/etc/passwd"])
def test_images_that_are_missing_or_outside_of_the_data_set_are_left_out(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / "secret.png")
    name = name.format(tmp_path)
    file = export(tmp_path / "data/train", images=images_of((0, name), (1, f"{tmp_path}/data/train/../train/1.png")))
    split = split_of(tmp_path / "data")
    assert list(split.images) == [file.parent / "1.png"]
    assert str(file) in split.problems[0]
    assert name in split.problems[0]
    export(tmp_path / "data/train", images=images_of((0, name)))
    with pytest.raises(UserError, match="json"):
        split_of(tmp_path / "data")


@pytest.mark.parametrize("text", ["{", "[]", "", '{"id": "x", "name": "a"}'])
def test_a_damaged_file_is_an_error(text: str, tmp_path: Path) -> None:
    content = f'{{"images": [], "categories": [{text}], "annotations": []}}'
    (tmp_path / "a.json").write_text(text if text in ("{", "[]") else content)
    with pytest.raises(UserError, match=r"a\.json"):
        data_source(str(tmp_path / "a.json"), "data.detection:DetectionData")


def test_annotations_and_label_files_in_one_split(tmp_path: Path) -> None:
    file = export(tmp_path / "train")
    image = write_image(tmp_path / "plain/images/a.png", None, "0 0.5 0.5 0.5 0.5")
    content = {"train": [str(file), str(image.parent)], "val": str(file)}
    spec = read_spec(write_yaml(tmp_path / "my.yaml", content))
    files = DetectionData.files(spec)
    assert files["labels of train"] == [file, tmp_path / "plain/labels/a.txt"]
    assert (len(files["train"]), files["labels of val"]) == (4, [file])
    assert [spec.annotation_file(name, [image]) for name in ("train", "val")] == [None, file]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_images.json").touch()
    assert spec.annotation_file("train", [image]) == tmp_path / "annotations/instances_images.json"
    split = DetectionData(spec, 32, 32, DataOptions()).split("train")
    assert split.labels.counts.tolist() == [1, 1, 2, 0]


def test_outlines_with_one_part_two_parts_a_hole_and_none(tmp_path: Path) -> None:
    ring = {"counts": [42, 6, 14, 6, 14, 2, 2, 2, 14, 2, 2, 2, 14, 6, 14, 6, 252], "size": [20, 20]}
    absent: list[Any] = [[], None, {"counts": "x"}, [[1, "a"] * 4]]
    segmentations: list[Any] = [[SQUARE], [SQUARE, [14, 14, 18, 14, 18, 18]], ring, *absent]
    items = [{**objects((0, 1, [k, 1, 8, 8]))[0], "id": k, "segmentation": one} for k, one in enumerate(segmentations)]
    export(tmp_path / "train", annotations=items)
    split = split_of(tmp_path, SegmentationData, kpt_shape=[2, 2])  # key points are in label files only
    assert split.labels.polygons is not None
    outlines = [np.round(outline * 20, 3).tolist() for outline in split.labels.polygons.outlines()]
    assert outlines[0] == np.reshape(SQUARE, (-1, 2)).tolist()
    assert list(map(len, outlines)) == [4, 9, 10, *[4] * 4]  # the last are boxes
    assert ("annotation 3" in split.problems[1], ": 4 " in split.problems[1]) == (True, True)


def test_a_detector_fits_outlines_to_the_boxes_of_the_annotations(tmp_path: Path) -> None:
    """Equal; nearly so; a mask; and, so that the box counts, those that are elsewhere, damaged or absent."""
    mask = {"counts": [84, 8, 12, 8, 12, 8, 12, 8, 12, 8, 12, 8, 12, 8, 12, 8, 168], "size": [20, 20]}
    near, far, damaged = np.array(SQUARE) * 1.05, np.array(SQUARE) + 4, [None, *SQUARE[1:]]
    segmentations: list[Any] = [[SQUARE], [near.tolist()], mask, [far.tolist()], [damaged], [], None, [[4, 4, 12, 12]]]
    items = [{**objects((0, 1, [4, 4, 8, 8 - k / 100]))[0], "id": k} for k in range(8)]
    export(
        tmp_path / "train", annotations=[{**i, "segmentation": s} for i, s in zip(items, segmentations, strict=True)]
    )
    split = split_of(tmp_path)
    bare = DetectionData(read_spec(tmp_path / "my.yaml"), 32, 32, DataOptions()).split("train")
    assert np.array_equal(split.labels.rows, bare.labels.rows)
    assert (split.problems, bare.problems, bare.labels.polygons) == ((), (), None)
    assert split.labels.polygons is not None
    assert split.labels.polygons.counts.tolist() == [4, 4, 4, 0, 0, 0, 0, 0]
    low, sides = 0.2, [[0.4, 0.4 - k / 2000] for k in range(3)]
    assert split.labels.polygons.extents()[:3] == pytest.approx(
        np.array([[low, low, low + w, low + h] for w, h in sides])
    )


@pytest.mark.parametrize("size", [[40_000, 40_000], [0, 0], [20, 21], [10, 10]])
def test_a_mask_of_another_size_than_its_image_takes_no_memory(tmp_path: Path, size: list[int]) -> None:
    mask = {"counts": [size[0] * size[1]], "size": size}
    export(tmp_path / "train", annotations=objects((0, 1, [4, 4, 8, 8]), segmentation=mask))
    (images,) = (
        read_spec(write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json"}))
        .listing("train")
        .annotated
    )
    images.rows(OUTLINES)
    tracemalloc.start()
    rows, problems = images.rows(OUTLINES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(next(iter(rows.values())).text.split()) == 5  # the box
    assert "annotation 0" in problems[0]
    assert peak < 2**22


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"images": images_of((7, "0.png"), (7, "1.png"))}, ["7", "0.png", "1.png"]),
        ({"images": images_of((5, "0.png"), (6, "0.png"))}, ["0.png", "5", "6"]),
        ({"images": images_of((5, "./0.png"), (6, "0.png"))}, ["train/0.png", "'./0.png'", "'0.png'"]),
        ({"categories": [{"id": 4, "name": "pawn"}, {"id": 4, "name": "rook"}]}, ["4", "pawn", "rook"]),
    ],
    ids=["image id", "file name", "two names of a file", "category id"],
)
def test_an_id_of_two_names_is_an_error(tmp_path: Path, content: dict[str, Any], named: list[str]) -> None:
    file = export(tmp_path / "train", **content)
    with pytest.raises(UserError) as caught:
        split_of(tmp_path, names=["pawn"])
    message = str(caught.value).removeprefix(f"{file}: ")
    assert [name for name in named if name not in message] == []


def test_an_image_of_another_shape_than_its_annotation_says_is_left_out(tmp_path: Path) -> None:
    images = [{"id": k, "file_name": f"{k}.png", "width": (20, 40, 40)[k], "height": (20, 40, 20)[k]} for k in range(3)]
    export(tmp_path / "train", images=images)
    split = split_of(tmp_path)
    assert [image.name for image in split.images] == ["0.png", "1.png"]  # 1.png is only smaller
    assert "2.png: 20x20" in split.problems[0]


# VOC

OBJECTS = (
    (("dog", (20, 10, 120, 60)), ("cat", (1, 1, 20, 20), 1)),
    (),
    (("cat", (1, 1, 200, 100)), ("dog", (5, 5, 9, 9))),
)


def voc_xml(*objects: tuple, size: tuple[int, int] = (200, 100), database: str = "mine") -> str:
    """Return a VOC annotation. objects: name, four edges, and `difficult` if given."""
    items = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>"
        f"<ymax>{box[3]}</ymax></bndbox>{''.join(f'<difficult>{one}</difficult>' for one in more)}"
        "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
        for name, box, *more in objects
    )
    source = f"<source><database>{database}</database></source>"
    return f"<annotation>{source}<size><width>{size[0]}</width><height>{size[1]}</height></size>{items}</annotation>"


def voc(folder: Path, database: str = "mine", lists: tuple[str, ...] = ("train", "val")) -> Path:
    """Write VOC's layout with three images in each list."""
    for split in lists:
        names = [f"{split}{k}" for k in range(3)]
        for name, items in zip(names, OBJECTS, strict=True):
            write_image(folder / f"JPEGImages/{name}.jpg", plain(200, 100))
            file = folder / f"Annotations/{name}.xml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(voc_xml(*items, database=database))
        file = folder / f"ImageSets/Main/{split}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(names))
    return folder


def of_data(data: Path, name: str = "train") -> DetectionSplit:
    split = data_source(str(data), "data.detection:DetectionData").open(32, 32, DataOptions()).split(name)
    assert isinstance(split, DetectionSplit)
    return split


@pytest.mark.parametrize("first", [0, 1])
def test_the_lists_of_voc(tmp_path: Path, first: int) -> None:
    """The challenge counts pixels from 1, and its difficult objects are left out."""
    folder = voc(tmp_path / "voc", "The VOC2007 Database" if first else "mine")
    label_file(folder / "JPEGImages/train1.jpg").write_text("0 .5 .5 .1 .1")  # is not looked for
    split = of_data(folder)
    assert [path.name for path in split.images] == [f"train{k}.jpg" for k in range(3)]
    assert (split.labels.counts.tolist(), split.problems) == ([1, 0, 2], ())
    pixels = [[20 - first, 10 - first, 120, 60], [1 - first, 1 - first, 200, 100], [5 - first, 5 - first, 9, 9]]
    low, high = np.array(pixels)[:, :2], np.array(pixels)[:, 2:]
    boxes = np.concatenate(((low + high) / 2, high - low), 1) / [200, 100, 200, 100]
    assert split.labels.rows[:, 0].tolist() == [1, 0, 1]
    assert np.allclose(split.labels.rows[:, 1:], boxes, atol=1e-6)
    content = {"train": "ImageSets/Main/train.txt", "val": "ImageSets/Main/val.txt", "names": ["dog"]}
    split = of_data(write_yaml(folder / "my.yaml", content))
    assert split.labels.counts.tolist() == [1, 0, 1]
    assert "train2.xml: object 1" in split.problems[0]
    with pytest.raises(UserError, match=r"my\.yaml"):
        of_data(write_yaml(folder / "my.yaml", {**content, "names": ["dig"]}))


def test_several_years_and_splits(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        voc(tmp_path / year, lists=("train", "test"))
    assert len(of_data(tmp_path).images) == 6
    folder, lists = str(tmp_path / "VOC2007"), tmp_path / "VOC2007/ImageSets/Main"
    assert read_data(folder).entries["val"] == ("ImageSets/Main/test.txt",)
    assert read_data(folder).names == {0: "cat", 1: "dog"}
    (lists / "train.txt").rename(lists / "trainval.txt")
    assert read_data(folder).entries["train"] == ("ImageSets/Main/trainval.txt",)
    (lists / "trainval.txt").unlink()
    with pytest.raises(UserError, match="VOC2007"):
        read_data(folder)
    (lists / "test.txt").unlink()
    assert (read_data(folder).entries, read_data(folder).split) == ({"train": ("Annotations",)}, 0.2)


def test_absent_images_and_annotations_are_left_out(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    for name in ("Annotations/train2.xml", "JPEGImages/train2.jpg"):
        (folder / name).rename(folder / name.replace("train2", "train 2"))
    (folder / "ImageSets/Main/train.txt").write_text("train0  1\ntrain1 -1\ntrain 2")
    (folder / "Annotations/train0.xml").unlink()
    (folder / "JPEGImages/train1.jpg").unlink()
    split = of_data(folder)
    assert [path.stem for path in split.images] == ["train 2"]
    assert "2 images without" in split.problems[0]
    animals = kaggle(tmp_path / "kaggle")
    (animals / "annotations/train_1.xml").unlink()
    (animals / "images/train_2.png").unlink()
    listing = read_spec(write_yaml(animals / "my.yaml", {"train": "annotations"})).listing("train")
    assert "train_2" in listing.problems[0]
    (animals / "images").rename(animals / "photos")
    assert len(read_spec(animals / "my.yaml").images("train")) == len(listing.images)  # the only folder with images
    write_image(animals / "more/a.png")
    with pytest.raises(UserError, match="`images:`"):
        read_spec(animals / "my.yaml").images("train")


def test_a_changed_annotation_is_read_again_and_its_problems_named(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    assert of_data(folder).labels.counts.sum() == 3
    file = folder / "Annotations/train1.xml"
    file.write_text(voc_xml(("bird", (1, 1, 20, 20)), ("bird", (1, 1, 20, 20)), ("bird", (5, 5, 5, 9))))
    split = of_data(folder)
    assert split.labels.counts.sum() == 4
    assert split.labels.rows[1, 0] == 0  # bird, the first of bird, cat, dog
    assert f"{file}: object 3" in split.problems[0]
    assert split.problems[1].startswith(f"{file}: object 2: ")
    for text in ("<annotation/>", "<x", voc_xml(("dog", ("a", 1, 2, 3))), voc_xml(size=(0, 1))):
        file.write_text(text)
        with pytest.raises(UserError, match=r"train1\.xml"):
            of_data(folder)


@pytest.mark.parametrize(
    ("annotations", "images"),
    [
        *(("train", "train"), ("annotations/train", "images/train"), ("annotations/train", "images")),
        *(("annotations/train", "annotations/train"), ("Annotations", "Images"), ("annotations", "")),
        *(("train/annotations", "train/images"), ("annotations/xmls", "images"), ("xml", "photos")),  # `images:`
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
    content = {"train": annotations, "val": "v", **({"images": "photos"} if images == "photos" else {})}
    split = of_data(write_yaml(tmp_path / "my.yaml", content))
    assert split.images == [tmp_path / images / file.name for file in files]
    assert (split.labels.counts.tolist(), split.problems) == ([1, 0, 2], ())


def test_label_files_count_more_than_xml_files(tmp_path: Path) -> None:
    folder = roboflow_voc(tmp_path)
    files = data_source(str(folder), "data.detection:DetectionData").files()
    assert all(file.is_file() for file in files["labels of train"])  # which machines compare
    (folder / "train/train_1.txt").write_text("0 .5 .5 .5 .5")
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "train", "names": ["a"]}))
    assert spec.listing("train").annotated == ()


# VisDrone, and what is shipped


def test_visdrone_is_read_in_place(tmp_path: Path) -> None:
    """Regions to ignore (score 0 or category 0) and the category 11 are left out."""
    folder = tmp_path / "VisDrone2019-DET-train"
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        write_image(folder / "images" / name, plain(200, 100))
    rows = ["20,10,100,50,1,4,0,0", "0,0,9,9,0,4,0,0", "0,0,9,9,1,0,0,0", "0,0,9,9,1,11,0,0", "", "1,2,3"]
    (folder / "annotations").mkdir()
    (folder / "annotations/a.txt").write_text("\n".join([*rows, "5,5,0,9,1,1,0,0", "text"]))
    (folder / "annotations/b.txt").write_text("180,90,40,20,1,10,0,1,\n")
    content = {**read_yaml(ROOT / "data/VisDrone.yaml"), "path": str(tmp_path)}
    split = of_data(write_yaml(tmp_path / "my.yaml", content))
    assert [image.name for image in split.images] == ["a.jpg", "b.jpg"]
    expected = [[3, 0.35, 0.35, 0.5, 0.5], [9, 0.95, 0.95, 0.1, 0.1]]
    assert split.labels.rows.tolist() == np.array(expected, np.float32).tolist()
    named = (": 2 boxes", "line 6", "line 8", "1 image")
    assert [place for place in named if place not in "".join(split.problems)] == []
    write_image(folder / "images/c.jpg", plain(200, 100), "0 .5 .5 .5 .5")  # label files count more
    assert of_data(tmp_path / "my.yaml").labels.counts.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["coco", "coco128", "coco-seg", "coco128-seg", "VOC", "VisDrone", "Objects365"])
def test_the_shipped_yamls_have_splits_and_names(name: str) -> None:
    spec = read_spec(ROOT / f"data/{name}.yaml")
    assert {"train", "val"} <= set(spec.entries)
    assert (len(spec.names) in (10, 20, 80, 365), spec.warnings) == (True, ())
    assert bool(spec.download) == (name != "Objects365")


# Folders


@pytest.mark.parametrize("images", ["train2017", "images/train2017", "images/train", "train", "images", "", "pictures"])
def test_cocos_own_layout(tmp_path: Path, images: str) -> None:
    """Images are searched for in the usual folders, and in that of `images:`."""
    for split in ("train", "val"):
        file = export(tmp_path / images.replace("train", split))
        (tmp_path / "annotations").mkdir(exist_ok=True)
        file.rename(tmp_path / f"annotations/instances_{split}2017.json")
    if images == "pictures":
        content = {"train": "annotations/instances_train2017.json", "images": {"train": images}}
        spec = read_spec(write_yaml(tmp_path / "my.yaml", content))
    else:
        spec = read_data(str(tmp_path))
        assert spec.entries["val"] == ("annotations/instances_val2017.json",)
    assert spec.images("train") == [tmp_path / images / f"{k}.png" for k in range(3)]
    assert spec.annotation_file("train", []) == tmp_path / "annotations/instances_train2017.json"
