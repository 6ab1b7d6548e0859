"""Converters: what is in other formats comes out as label rows, and what does not is counted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.converters import (
    CONVERTERS,
    CUT_KEY,
    Tally,
    box_row,
    convert_coco,
    convert_visdrone,
    convert_voc,
    joined,
)
from data.sources import read_spec
from tests.data.test_archives import write_spec, zipped
from tests.web import sending, serving
from utils.errors import UserError
from utils.files import ROOT


def rows_below(folder: Path) -> dict[str, list[str]]:
    return {path.relative_to(folder).as_posix(): path.read_text().splitlines() for path in folder.rglob("*.txt")}


def voc_xml(*objects: tuple, size: tuple[int, int] = (200, 100)) -> str:
    """objects: name, four edges, and `difficult` where it is given."""
    found = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>"
        f"<ymax>{box[3]}</ymax></bndbox>{''.join(f'<difficult>{one}</difficult>' for one in more)}"
        "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
        for name, box, *more in objects
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{found}</annotation>"


# Rows


@pytest.mark.parametrize(
    ("box", "row"),
    [
        ((20, 10, 100, 50), "3 0.35 0.35 0.5 0.5\n"),
        ((0, 0, 200, 100), "3 0.5 0.5 1 1\n"),
        ((-20, -10, 40, 20), "3 0.05 0.05 0.1 0.1\n"),
        ((180, 90, 40, 20), "3 0.95 0.95 0.1 0.1\n"),
        ((1 / 3, 1 / 3, 1 / 3, 1 / 3), "3 0.0025 0.005 0.00166667 0.00333333\n"),
    ],
)
def test_a_row(box: tuple, row: str) -> None:
    tally = Tally()
    assert box_row(3, box, (200, 100), tally) == row
    inside = box[0] >= 0 and box[0] + box[2] <= 200
    assert (tally["boxes"], tally[CUT_KEY]) == (1, 0 if inside else 1)


@pytest.mark.parametrize(
    ("box", "why"),
    [
        ((5, 5, 0, 9), "boxes without an area"),
        ((5, 5, 9, -1), "boxes without an area"),
        ((-9, 5, 9, 9), "boxes outside of their image"),
        ((5, 100, 9, 9), "boxes outside of their image"),
        ((float("nan"), 5, 9, 9), "boxes that are not finite"),
    ],
)
def test_no_row(box: tuple, why: str) -> None:
    tally = Tally()
    assert box_row(3, box, (200, 100), tally) == ""
    assert {name: count for name, count in tally.items() if count} == {why: 1}
    assert tally.lines(Path("x")) == ["0 label files with 0 boxes in x", f"left out: 1 {why}"]


# Pascal VOC


def test_blood_cells(shared: Path, tmp_path: Path) -> None:
    """The labels beside the XML files, digit for digit as far as they have digits; two boxes have no area."""
    tally, names = convert_voc(shared / "data/bccd/voc", tmp_path / "labels", names=["RBC", "WBC", "Platelets"])
    made, published = rows_below(tmp_path / "labels"), rows_below(shared / "data/bccd/labels")
    published = {Path(name).name: rows for name, rows in published.items()}
    assert sorted(made) == sorted(published)
    for name, rows in published.items():
        own, theirs = (np.array([row.split() for row in file], float) for file in (made[name], rows))
        np.testing.assert_array_equal(own[:, 0], theirs[:, 0])
        np.testing.assert_allclose(own[:, 1:], theirs[:, 1:], rtol=0, atol=0.51e-6)
    assert (tally["files"], tally["boxes"], tally["boxes without an area"]) == (364, 4886, 2)
    assert names == ["RBC", "WBC", "Platelets"]


def test_a_folder_of_xml_files(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(voc_xml(("dog", (20, 10, 120, 60)), ("cat", (0, 0, 20, 20), 1)))
    (tmp_path / "b.xml").write_text(voc_xml())
    tally, names = convert_voc(tmp_path, tmp_path / "out/labels")
    assert names == ["cat", "dog"]  # by alphabet, the one that is left out too
    assert rows_below(tmp_path / "out") == {"labels/a.txt": ["1 0.35 0.35 0.5 0.5"], "labels/b.txt": []}
    assert (tally["difficult objects"], tally["files"], tally["boxes"]) == (1, 2, 1)
    convert_voc(tmp_path, tmp_path / "all", names=["dog", "x", "cat"], difficult=True, one_based=True)
    assert rows_below(tmp_path / "all")["a.txt"] == ["0 0.3475 0.345 0.505 0.51", "2 0.05 0.1 0.1 0.2"]


def devkit(folder: Path) -> Path:
    """Two years with lists; an image without an annotation, and one without a file."""
    for year, sets in {"2007": {"train": "a b", "test": "c d"}, "2012": {"val": "a", "trainval": "a"}}.items():
        place = folder / f"VOC{year}"
        for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (place / name).mkdir(parents=True)
        for name, images in sets.items():
            (place / f"ImageSets/Main/{name}.txt").write_text("".join(f"{image}\n" for image in images.split()))
            for image in images.split():
                (place / f"JPEGImages/{image}.jpg").write_text(f"{year} {image}")
                (place / f"Annotations/{image}.xml").write_text(voc_xml(("cat", (1, 1, 200, 100))))
        (place / "ImageSets/Main/cat_train.txt").write_text("a 1\n")
    (folder / "VOC2007/Annotations/d.xml").unlink()
    (folder / "VOC2007/JPEGImages/b.jpg").unlink()
    return folder


def test_a_devkit(tmp_path: Path) -> None:
    kit = devkit(tmp_path / "VOCdevkit")
    tally, _ = convert_voc(kit, tmp_path / "labels", tmp_path / "images", one_based=True)
    whole = ["0 0.5 0.5 1 1"]
    assert rows_below(tmp_path / "labels") == dict.fromkeys(
        ["train2007/a.txt", "train2007/b.txt", "test2007/c.txt", "val2012/a.txt"], whole
    )
    images = {path.relative_to(tmp_path / "images").as_posix(): path for path in (tmp_path / "images").rglob("*.jpg")}
    assert sorted(images) == ["test2007/c.jpg", "train2007/a.jpg", "val2012/a.jpg"]
    assert images["val2012/a.jpg"].read_text() == "2012 a"
    assert images["val2012/a.jpg"].samefile(kit / "VOC2012/JPEGImages/a.jpg")  # takes no room
    assert (tally["images without an annotation"], tally["annotations without an image"]) == (1, 1)
    convert_voc(kit / "VOC2012", tmp_path / "one")
    assert list(rows_below(tmp_path / "one")) == ["val/a.txt"]
    (kit / "VOC2012/ImageSets/Main/val.txt").unlink()
    convert_voc(kit / "VOC2012", tmp_path / "both")
    assert list(rows_below(tmp_path / "both")) == ["trainval/a.txt"]


def test_images_are_copied_where_links_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", no_link)
    convert_voc(devkit(tmp_path / "kit"), tmp_path / "labels", tmp_path / "images")
    assert (tmp_path / "images/val2012/a.jpg").read_text() == "2012 a"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<annotation>", r"a\.xml is no VOC annotation \("),
        ("<annotation/>", r"a\.xml is no VOC annotation \(<annotation> has no <size/width>\); fix it"),
        (voc_xml(size=(0, 0)), "its <size> is not that of an image"),
        (voc_xml(("cat", ("x", 0, 1, 1))), "could not convert"),
        (voc_xml(("cat", ("", 0, 1, 1))), "<object> has no <bndbox/xmin>"),
        (voc_xml(("", (0, 0, 1, 1))), "<object> has no <name>"),
        (voc_xml(("dgo", (0, 0, 1, 1))), r"the class 'dgo', which --names does not have \(did you mean 'dog'\?\)"),
    ],
)
def test_bad_xml(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(content)
    with pytest.raises(UserError, match=said):
        convert_voc(tmp_path, tmp_path / "labels", names=["dog", "cat"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xml"]


def test_labels_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(voc_xml(("cat", (0, 0, 200, 100))))
    labels = tmp_path / "labels"
    labels.mkdir()
    convert_voc(tmp_path, labels)  # empty: nothing is lost
    (labels / "mine.txt").write_text("mine")
    (labels / "a.txt").write_text("mine")
    with pytest.raises(UserError, match=r"labels is not empty; name another folder, or give --exist-ok"):
        convert_voc(tmp_path, labels)
    assert rows_below(labels) == {"a.txt": ["mine"], "mine.txt": ["mine"]}
    convert_voc(tmp_path, labels, exist_ok=True)
    assert rows_below(labels) == {"a.txt": ["0 0.5 0.5 1 1"], "mine.txt": ["mine"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xml", "labels"]


# COCO


def test_coco128(shared: Path, tmp_path: Path) -> None:
    """The published labels, byte for byte."""
    file = shared / "data/coco128/annotations/instances_train2017.json"
    tally, names = convert_coco(file, tmp_path / "labels")
    assert rows_below(tmp_path / "labels") == rows_below(shared / "data/coco128/labels/train")
    assert (tally["files"], tally["boxes"], tally["crowds"], tally[CUT_KEY]) == (126, 929, 10, 0)
    assert names == list(read_spec(ROOT / "data/coco128.yaml").names.values())
    tally, _ = convert_coco(file, tmp_path / "all", crowd=True)
    assert tally["boxes"] == 939


def test_outlines_of_coco128_are_about_its_boxes(shared: Path, tmp_path: Path) -> None:
    file = shared / "data/coco128/annotations/instances_train2017.json"
    convert_coco(file, tmp_path / "boxes")
    convert_coco(file, tmp_path / "outlines", polygons=True)
    boxes, outlines = rows_below(tmp_path / "boxes"), rows_below(tmp_path / "outlines")
    assert sorted(boxes) == sorted(outlines)
    off = []
    for name, rows in boxes.items():
        for row, outline in zip(rows, outlines[name], strict=True):
            label, x, y, width, height = map(float, row.split())
            points = np.array(outline.split()[1:], float).reshape(-1, 2)
            assert float(outline.split()[0]) == label
            edges = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            off.append(np.abs(np.concatenate([points.min(0), points.max(0)]) - edges).max())
    assert np.median(off) < 1e-4
    assert np.quantile(off, 0.99) < 0.01


def coco(folder: Path, **content: object) -> Path:
    """Two images; categories whose ids have gaps, in no order."""
    standing = {
        "categories": [{"id": 7, "name": "dog"}, {"id": 2, "name": "cat"}],
        "images": [
            {"id": 5, "file_name": "deep/a.jpg", "width": 200, "height": 100},
            {"id": 6, "file_name": "deep/b.jpg", "width": 200, "height": 100},
        ],
        "annotations": [
            {"id": 1, "image_id": 5, "category_id": 7, "bbox": [20, 10, 100, 50], "iscrowd": 0},
            {"id": 2, "image_id": 5, "category_id": 2, "bbox": [0, 0, 0, 50]},
            {"id": 3, "image_id": 6, "category_id": 2, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        ],
    }
    file = folder / "a.json"
    file.write_text(json.dumps({**standing, **content}))
    return file


def test_classes_are_numbered_by_the_categories_ids(tmp_path: Path) -> None:
    tally, names = convert_coco(coco(tmp_path), tmp_path / "labels")
    assert names == ["cat", "dog"]
    assert rows_below(tmp_path / "labels") == {"deep/a.txt": ["1 0.35 0.35 0.5 0.5"]}
    assert tally.lines(tmp_path)[1] == "left out: 1 boxes without an area, 1 crowds"
    convert_coco(coco(tmp_path), tmp_path / "flat", flat=True)
    assert list(rows_below(tmp_path / "flat")) == ["a.txt"]


def test_outlines(tmp_path: Path) -> None:
    """Of one part, of two, of none, and of a mask."""
    square, other = [0, 0, 20, 0, 20, 20, 0, 20], [60, 0, 80, 0, 80, 20]
    items = [
        {"id": 1, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20], "segmentation": [square]},
        {"id": 2, "image_id": 5, "category_id": 2, "bbox": [0, 0, 80, 20], "segmentation": [square, other]},
        {"id": 3, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20]},
        {"id": 4, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20], "segmentation": {"counts": []}},
    ]
    tally, _ = convert_coco(coco(tmp_path, annotations=items), tmp_path / "labels", polygons=True)
    one, two, *boxes = rows_below(tmp_path / "labels")["deep/a.txt"]
    assert one == "0 0 0 0.1 0 0.1 0.2 0 0.2"
    assert two == "0 0 0 0.1 0 0.3 0 0.4 0 0.4 0.2 0.3 0 0.1 0 0.1 0.2 0 0.2"
    assert boxes == [one] * 2
    assert tally["outlines, of which the box was taken"] == 2


def test_joined_outlines_enclose_what_their_parts_do() -> None:
    parts = [[(0, 0), (4, 0), (4, 4), (0, 4)], [(10, 1), (12, 1), (12, 3)], [(5, 9), (7, 9), (7, 11), (5, 11)]]

    def area(points: list) -> float:
        x, y = np.array(points, float).T
        return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2

    assert area(joined(parts)) == pytest.approx(sum(map(area, parts)))
    assert joined(parts[:1]) == parts[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"categories": None}, "is no COCO annotation file"),
        (
            {"images": [{"id": 5, "file_name": "../a.jpg", "width": 200, "height": 100}]},
            r"the file name '\.\./a\.jpg', which",
        ),
        (
            {"images": [{"id": 5, "file_name": "/a.jpg", "width": 200, "height": 100}]},
            r"the file name '/a\.jpg', which",
        ),
        (
            {"annotations": [{"id": 4, "image_id": 5, "category_id": 3, "bbox": [0, 0, 1, 1]}]},
            "annotation 4 is damaged",
        ),
        ({"annotations": [{"id": 4, "image_id": 5, "category_id": 2, "bbox": [0, 0, 1]}]}, "annotation 4 is damaged"),
    ],
)
def test_bad_json(content: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"a\.json.*{said}"):
        convert_coco(coco(tmp_path, **content), tmp_path / "labels")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]


def test_no_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.json is not JSON"):
        convert_coco(tmp_path / "a.json", tmp_path / "labels")
    with pytest.raises(UserError, match=r"b\.json cannot be read: No such file"):
        convert_coco(tmp_path / "b.json", tmp_path / "labels")


# VisDrone


def visdrone(folder: Path) -> Path:
    for name in ("images", "annotations"):
        (folder / name).mkdir(parents=True)
    for name in "ab":
        Image.new("RGB", (200, 100)).save(folder / f"images/{name}.jpg")
    (folder / "annotations/a.txt").write_text(
        "20,10,100,50,1,4,0,0\n20,10,100,50,0,4,0,0\n0,0,9,9,0,0,0,0\n0,0,9,9,1,11,0,0\n0,0,200,100,1,10,0,0,\n\n"
    )
    return folder


def test_visdrone(tmp_path: Path) -> None:
    folder = visdrone(tmp_path / "VisDrone2019-DET-val")
    tally = convert_visdrone(tmp_path)
    assert rows_below(folder / "labels") == {"a.txt": ["3 0.35 0.35 0.5 0.5", "9 0.5 0.5 1 1"]}
    assert tally["regions to be ignored"] == 2
    assert tally["boxes of the category others"] == 1
    assert tally["images without an annotation"] == 1
    (folder / "annotations/a.txt").write_text("1,2,3\n")
    with pytest.raises(UserError, match=r"a\.txt, line 1: '1,2,3' is no row of VisDrone's"):
        convert_visdrone(folder, exist_ok=True)
    with pytest.raises(UserError, match="has no `images` and `annotations`"):
        convert_visdrone(folder / "images")


# `convert:` of a data YAML


def test_what_a_yaml_may_ask_for(tmp_path: Path) -> None:
    assert tuple(CONVERTERS) == ("voc", "visdrone")
    with pytest.raises(UserError, match=r"`convert` must be one of voc, visdrone, not 'rm -rf'"):
        read_spec(write_spec(tmp_path, convert="rm -rf"))


@pytest.mark.parametrize("name", CONVERTERS)
def test_the_shipped_yamls_fetch_and_convert(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be seen without their archives: these have the same folders."""
    monkeypatch.setenv("no_proxy", "*")
    if name == "voc":
        shipped, place = ROOT / "data/VOC.yaml", devkit(tmp_path / "made/VOCdevkit").parent
        wanted = {"train": ["train2007"], "val": ["test2007"]}
    else:
        shipped, place = ROOT / "data/VisDrone.yaml", visdrone(tmp_path / "made/VisDrone2019-DET-train").parent
        wanted = {"train": ["VisDrone2019-DET-train/images"], "val": ["VisDrone2019-DET-train/images"]}
    spec = read_spec(shipped)
    assert (len(spec.names), spec.convert) == ({"voc": 20, "visdrone": 10}[name], name)
    files = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with serving() as server:
        address = server.give("x.zip", sending(zipped(files)))
        entries = wanted if name == "visdrone" else {k: [f"images/{one}" for one in v] for k, v in wanted.items()}
        names = list(spec.names.values())
        found = read_spec(write_spec(tmp_path, download=address, convert=name, names=names, **entries))
        assert found.images("train")
    labels = rows_below(tmp_path / "datasets/mine")
    if name == "voc":
        assert labels["labels/train2007/a.txt"] == ["7 0.5 0.5 1 1"]
    else:
        assert labels["VisDrone2019-DET-train/labels/a.txt"] == ["3 0.35 0.35 0.5 0.5", "9 0.5 0.5 1 1"]


@pytest.mark.parametrize("name", ["coco", "coco128", "VOC", "VisDrone", "Objects365"])
def test_shipped_addresses(name: str) -> None:
    spec = read_spec(ROOT / f"data/{name}.yaml")
    assert spec.has_path
    assert {"train", "val"} <= set(spec.entries)
    assert bool(spec.download) == (name != "Objects365")
