"""Tests of the converters: annotations become label rows, and omitted ones are counted."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data.coco_json import CUT_KEY, Tally, box_row
from data.convert import convert_coco, convert_visdrone, convert_voc, main
from data.data_yaml import names_text, read_spec
from tests.data.test_archives import files_below, write_spec, zipped
from tests.making import label_file, plain, write_image
from tests.web import sending, serving
from utils.errors import UserError
from utils.files import ROOT


def rows_below(folder: Path) -> dict[str, list[str]]:
    return {path.relative_to(folder).as_posix(): path.read_text().splitlines() for path in folder.rglob("*.txt")}


def voc_xml(*objects: tuple, size: tuple[int, int] = (200, 100)) -> str:
    """Return a VOC annotation. objects: name, four edges, and `difficult` if given."""
    items = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>"
        f"<ymax>{box[3]}</ymax></bndbox>{''.join(f'<difficult>{one}</difficult>' for one in more)}"
        "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
        for name, box, *more in objects
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{items}</annotation>"


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
def test_a_row_has_six_digits_and_is_clipped_to_the_image(box: tuple, row: str) -> None:
    tally = Tally()
    assert box_row(3, box, (200, 100), tally) == row
    inside = box[0] >= 0 and box[0] + box[2] <= 200
    assert (tally["boxes"], tally[CUT_KEY]) == (1, 0 if inside else 1)


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ((5, 5, 0, 9), "boxes without an area"),
        ((5, 5, 9, -1), "boxes without an area"),
        ((-9, 5, 9, 9), "boxes outside of their image"),
        ((5, 100, 9, 9), "boxes outside of their image"),
        ((float("nan"), 5, 9, 9), "boxes that are not finite"),
    ],
)
def test_a_box_without_a_visible_part_is_left_out(box: tuple, reason: str) -> None:
    tally = Tally()
    assert box_row(3, box, (200, 100), tally) == ""
    assert {name: count for name, count in tally.items() if count} == {reason: 1}
    assert tally.lines(Path("x")) == ["0 label files with 0 boxes in x", f"left out: 1 {reason}"]


# Pascal VOC


def test_the_labels_of_blood_cells_equal_the_published_ones(shared: Path, tmp_path: Path) -> None:
    """Two boxes have no area."""
    tally, names = convert_voc(shared / "data/bccd/voc", tmp_path / "labels", names=["RBC", "WBC", "Platelets"])
    converted, published = rows_below(tmp_path / "labels"), rows_below(shared / "data/bccd/labels")
    published = {Path(name).name: rows for name, rows in published.items()}
    assert sorted(converted) == sorted(published)
    for name, rows in published.items():
        actual, expected = (np.array([row.split() for row in file], float) for file in (converted[name], rows))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=0.51e-6)
    assert (tally["files"], tally["boxes"], tally["boxes without an area"]) == (364, 4886, 2)
    assert names == ["RBC", "WBC", "Platelets"]


def test_a_folder_of_xml_files(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(voc_xml(("dog", (20, 10, 120, 60)), ("cat", (0, 0, 20, 20), 1)))
    (tmp_path / "b.xml").write_text(voc_xml())
    tally, names = convert_voc(tmp_path, tmp_path / "out/labels")
    assert names == ["cat", "dog"]  # alphabetically, with that of the difficult object
    assert rows_below(tmp_path / "out") == {"labels/a.txt": ["1 0.35 0.35 0.5 0.5"], "labels/b.txt": []}
    assert (tally["difficult objects"], tally["files"], tally["boxes"]) == (1, 2, 1)
    convert_voc(tmp_path, tmp_path / "all", names=["dog", "x", "cat"], difficult=True, one_based=True)
    assert rows_below(tmp_path / "all")["a.txt"] == ["0 0.3475 0.345 0.505 0.51", "2 0.05 0.1 0.1 0.2"]


def devkit(folder: Path) -> Path:
    """Make a VOCdevkit of two years. One listed image has no annotation, and one annotation has no image."""
    for year, sets in {"2007": {"train": "a b", "test": "c d"}, "2012": {"val": "a", "trainval": "a"}}.items():
        part = folder / f"VOC{year}"
        for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (part / name).mkdir(parents=True)
        for name, images in sets.items():
            (part / f"ImageSets/Main/{name}.txt").write_text("".join(f"{image}\n" for image in images.split()))
            for image in images.split():
                (part / f"JPEGImages/{image}.jpg").write_text(f"{year} {image}")
                (part / f"Annotations/{image}.xml").write_text(voc_xml(("cat", (1, 1, 200, 100))))
        (part / "ImageSets/Main/cat_train.txt").write_text("a 1\n")
    (folder / "VOC2007/Annotations/d.xml").unlink()
    (folder / "VOC2007/JPEGImages/b.jpg").unlink()
    return folder


def test_the_sets_of_a_vocdevkit_get_their_own_folders(tmp_path: Path) -> None:
    kit = devkit(tmp_path / "VOCdevkit")
    tally, _ = convert_voc(kit, tmp_path / "labels", tmp_path / "images", one_based=True)
    files = ["train2007/a.txt", "train2007/b.txt", "test2007/c.txt", "val2012/a.txt"]
    assert rows_below(tmp_path / "labels") == {name: ["0 0.5 0.5 1 1"] for name in files}
    images = {path.relative_to(tmp_path / "images").as_posix(): path for path in (tmp_path / "images").rglob("*.jpg")}
    assert sorted(images) == ["test2007/c.jpg", "train2007/a.jpg", "val2012/a.jpg"]
    assert images["val2012/a.jpg"].read_text() == "2012 a"
    assert images["val2012/a.jpg"].samefile(kit / "VOC2012/JPEGImages/a.jpg")
    assert (tally["images without an annotation"], tally["annotations without an image"]) == (1, 1)
    convert_voc(kit / "VOC2012", tmp_path / "one")
    assert list(rows_below(tmp_path / "one")) == ["val/a.txt"]
    (kit / "VOC2012/ImageSets/Main/val.txt").unlink()
    convert_voc(kit / "VOC2012", tmp_path / "both")
    assert list(rows_below(tmp_path / "both")) == ["trainval/a.txt"]


def test_images_are_copied_if_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    convert_voc(devkit(tmp_path / "kit"), tmp_path / "labels", tmp_path / "images")
    assert (tmp_path / "images/val2012/a.jpg").read_text() == "2012 a"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<annotation>", r"a\.xml is not a VOC annotation \("),
        ("<annotation/>", r"a\.xml is not a VOC annotation \(<annotation> has no <size/width>\); fix it"),
        (voc_xml(size=(0, 0)), "its <size> is not positive"),
        (voc_xml(("cat", ("x", 0, 1, 1))), "could not convert"),
        (voc_xml(("cat", ("", 0, 1, 1))), "<object> has no <bndbox/xmin>"),
        (voc_xml(("", (0, 0, 1, 1))), "<object> has no <name>"),
        (voc_xml(("dgo", (0, 0, 1, 1))), r"the class 'dgo', which --names lacks \(did you mean 'dog'\?\)"),
    ],
)
def test_a_damaged_xml_file_is_an_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(content)
    with pytest.raises(UserError, match=message):
        convert_voc(tmp_path, tmp_path / "labels", names=["dog", "cat"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xml"]


def test_existing_labels_are_replaced_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(voc_xml(("cat", (0, 0, 200, 100))))
    labels = tmp_path / "labels"
    labels.mkdir()
    convert_voc(tmp_path, labels)  # an empty folder
    (labels / "mine.txt").write_text("mine")
    (labels / "a.txt").write_text("mine")
    with pytest.raises(UserError, match=r"labels is not empty; name another folder, or give --exist-ok"):
        convert_voc(tmp_path, labels)
    assert rows_below(labels) == {"a.txt": ["mine"], "mine.txt": ["mine"]}
    convert_voc(tmp_path, labels, exist_ok=True)
    assert rows_below(labels) == {"a.txt": ["0 0.5 0.5 1 1"], "mine.txt": ["mine"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xml", "labels"]


# COCO


def test_the_labels_of_coco128_equal_the_published_ones(shared: Path, tmp_path: Path) -> None:
    file = shared / "data/coco128/annotations/instances_train2017.json"
    tally, names = convert_coco(file, tmp_path / "labels")
    assert rows_below(tmp_path / "labels") == rows_below(shared / "data/coco128/labels/train")
    assert (tally["files"], tally["boxes"], tally["crowds"], tally[CUT_KEY]) == (126, 929, 10, 0)
    assert names == list(read_spec(ROOT / "data/coco128.yaml").names.values())
    tally, _ = convert_coco(file, tmp_path / "all", crowd=True)
    assert tally["boxes"] == 939


def test_outlines_of_coco128_have_the_extent_of_its_boxes(shared: Path, tmp_path: Path) -> None:
    file = shared / "data/coco128/annotations/instances_train2017.json"
    convert_coco(file, tmp_path / "boxes")
    convert_coco(file, tmp_path / "outlines", polygons=True)
    boxes, outlines = rows_below(tmp_path / "boxes"), rows_below(tmp_path / "outlines")
    assert sorted(boxes) == sorted(outlines)
    errors = []
    for name, rows in boxes.items():
        for row, outline in zip(rows, outlines[name], strict=True):
            label, x, y, width, height = map(float, row.split())
            points = np.array(outline.split()[1:], float).reshape(-1, 2)
            assert float(outline.split()[0]) == label
            edges = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            errors.append(np.abs(np.concatenate([points.min(0), points.max(0)]) - edges).max())
    assert np.median(errors) < 1e-4
    assert np.quantile(errors, 0.99) < 0.01


def coco(folder: Path, **content: object) -> Path:
    """Write an annotation file of two images. The categories' ids have gaps and are unordered."""
    defaults = {
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
    file.write_text(json.dumps({**defaults, **content}))
    return file


def test_classes_are_numbered_by_the_categories_ids(tmp_path: Path) -> None:
    tally, names = convert_coco(coco(tmp_path), tmp_path / "labels")
    assert names == ["cat", "dog"]
    assert rows_below(tmp_path / "labels") == {"deep/a.txt": ["1 0.35 0.35 0.5 0.5"]}
    assert tally.lines(tmp_path)[1] == "left out: 1 boxes without an area, 1 crowds"
    convert_coco(coco(tmp_path), tmp_path / "flat", flat=True)
    assert list(rows_below(tmp_path / "flat")) == ["a.txt"]


def test_outlines_with_one_part_two_parts_none_and_an_empty_mask(tmp_path: Path) -> None:
    square, other = [0, 0, 20, 0, 20, 20, 0, 20], [60, 0, 80, 0, 80, 20]
    empty = {"counts": [20000], "size": [100, 200]}
    items = [
        {"id": 1, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20], "segmentation": [square]},
        {"id": 2, "image_id": 5, "category_id": 2, "bbox": [0, 0, 80, 20], "segmentation": [square, other]},
        {"id": 3, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20]},
        {"id": 4, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20], "segmentation": empty},
    ]
    tally, _ = convert_coco(coco(tmp_path, annotations=items), tmp_path / "labels", polygons=True)
    one, two, *boxes = rows_below(tmp_path / "labels")["deep/a.txt"]
    assert one == "0 0 0 0.1 0 0.1 0.2 0 0.2"
    assert two == "0 0 0 0.1 0 0.3 0 0.4 0 0.4 0.2 0.3 0 0.1 0 0.1 0.2 0 0.2"
    assert boxes == [one] * 2
    assert tally["outlines, replaced by the box"] == 2


def test_a_mask_becomes_an_outline_with_its_hole(tmp_path: Path) -> None:
    """A square of 10 x 10 pixels with a hole of 2 x 2, and a pixel apart from it."""
    mask = np.zeros((100, 200), np.uint8)
    mask[20:30, 40:50] = mask[50, 60] = 1
    mask[24:26, 44:46] = 0
    runs = np.diff(np.flatnonzero(np.diff(mask.T.ravel(), prepend=2, append=2))).tolist()
    coded = {"counts": runs, "size": [100, 200]}
    item = {"id": 1, "image_id": 5, "category_id": 2, "bbox": [40, 20, 21, 31], "segmentation": coded, "iscrowd": 1}
    tally, _ = convert_coco(coco(tmp_path, annotations=[item]), tmp_path / "labels", polygons=True, crowd=True)
    (row,) = rows_below(tmp_path / "labels")["deep/a.txt"]
    points = np.array(row.split()[1:], float).reshape(-1, 2) * (200, 100)
    (x, y), (next_x, next_y) = points.T, np.roll(points, -1, 0).T
    assert abs((x * next_y - y * next_x).sum()) / 2 == pytest.approx(100 - 4 + 1, abs=1e-3)
    assert [*points.min(0), *points.max(0)] == pytest.approx([40, 20, 61, 51], abs=1e-3)
    assert tally["outlines, replaced by the box"] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"categories": None}, "is not a COCO annotation file"),
        *(
            (
                {"images": [{"id": 5, "file_name": name, "width": 200, "height": 100}]},
                f"the file name '{name}'; it must",
            )
            for name in ("../a.jpg", "/a.jpg", "C:/a.jpg", "a\0.jpg")
        ),
        *(
            ({"annotations": [{"id": 4, "image_id": 5, **wrong}]}, "annotation 4 is damaged")
            for wrong in ({"category_id": 3, "bbox": [0, 0, 1, 1]}, {"category_id": 2, "bbox": [0, 0, 1]})
        ),
    ],
)
def test_damaged_json_is_an_error(content: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"a\.json.*{re.escape(message)}"):
        convert_coco(coco(tmp_path, **content), tmp_path / "labels")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]


def test_a_file_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.json is not JSON"):
        convert_coco(tmp_path / "a.json", tmp_path / "labels")
    with pytest.raises(UserError, match=r"b\.json cannot be read: No such file"):
        convert_coco(tmp_path / "b.json", tmp_path / "labels")


# VisDrone


def visdrone(folder: Path) -> Path:
    for name in "ab":
        write_image(folder / f"images/{name}.jpg", plain(200, 100))
    (folder / "annotations").mkdir()
    (folder / "annotations/a.txt").write_text(
        "20,10,100,50,1,4,0,0\n20,10,100,50,0,4,0,0\n0,0,9,9,0,0,0,0\n0,0,9,9,1,11,0,0\n0,0,200,100,1,10,0,0,\n\n"
    )
    return folder


def test_visdrone_labels_are_written_beside_the_images(tmp_path: Path) -> None:
    folder = visdrone(tmp_path / "VisDrone2019-DET-val")
    tally = convert_visdrone(tmp_path)
    assert rows_below(folder / "labels") == {"a.txt": ["3 0.35 0.35 0.5 0.5", "9 0.5 0.5 1 1"]}
    assert tally["regions to ignore"] == 2
    assert tally["boxes of the category others"] == 1
    assert tally["images without an annotation"] == 1
    (folder / "annotations/a.txt").write_text("1,2,3\n")
    with pytest.raises(UserError, match=r"a\.txt, line 1: '1,2,3' is not a VisDrone row"):
        convert_visdrone(folder, exist_ok=True)
    with pytest.raises(UserError, match="nor a folder in it has `images` and `annotations`"):
        convert_visdrone(folder / "images")


# `convert:` of a data YAML


@pytest.mark.parametrize(
    ("shipped", "make", "train", "rows"),
    [
        ("VOC", lambda folder: devkit(folder / "VOCdevkit"), "images/train2007", ["7 0.5 0.5 1 1"]),
        (
            "VisDrone",
            lambda folder: visdrone(folder / "VisDrone2019-DET-train"),
            "VisDrone2019-DET-train/images",
            ["3 0.35 0.35 0.5 0.5", "9 0.5 0.5 1 1"],
        ),
    ],
)
def test_the_shipped_yamls_convert_their_download(
    shipped: str, make: Callable[[Path], Path], train: str, rows: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With an archive of the same folders as the published ones."""
    monkeypatch.setenv("no_proxy", "*")
    make(tmp_path / "source")
    spec = read_spec(ROOT / f"data/{shipped}.yaml")
    assert (len(spec.names), spec.convert) == {"VOC": (20, "voc"), "VisDrone": (10, "visdrone")}[shipped]
    with serving() as server:
        address = server.give("x.zip", sending(zipped(files_below(tmp_path / "source"))))
        names = list(spec.names.values())
        file = write_spec(tmp_path, download=address, convert=spec.convert, names=names, train=train, val=train)
        image = read_spec(file).images("train")[0]
    assert label_file(image).read_text().splitlines() == rows


@pytest.mark.parametrize("name", ["coco", "coco128", "coco-seg", "coco128-seg", "VOC", "VisDrone", "Objects365"])
def test_the_shipped_yamls_have_splits_and_addresses(name: str) -> None:
    spec = read_spec(ROOT / f"data/{name}.yaml")
    assert spec.has_path
    assert {"train", "val"} <= set(spec.entries)
    assert bool(spec.download) == (name != "Objects365")


# The command line


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, words)])
    main()


def test_the_command_line_converts_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.xml").write_text(voc_xml(("cat", (0, 0, 200, 100))))
    command(monkeypatch, "voc", tmp_path, "--labels", tmp_path / "v", "--names", "dog, cat")
    assert capsys.readouterr().out == f"1 label file with 1 box in {tmp_path / 'v'}\nclasses: 0 dog, 1 cat\n"
    (tmp_path / "names.yaml").write_text("names: [a, cat]\n")
    command(monkeypatch, "voc", tmp_path, "--labels", tmp_path / "w", "--names", tmp_path / "names.yaml")
    assert rows_below(tmp_path / "w") == {"a.txt": ["1 0.5 0.5 1 1"]}
    names = tmp_path / "new.yaml"
    command(monkeypatch, "coco", coco(tmp_path), "--labels", tmp_path / "c", "--names-to", names)
    assert list(read_spec(names).names.values()) == ["cat", "dog"]
    command(monkeypatch, "coco", coco(tmp_path), "--labels", tmp_path / "e", "--names", "dog,cat")
    assert rows_below(tmp_path / "e") == {"deep/a.txt": ["0 0.35 0.35 0.5 0.5"]}
    with pytest.raises(UserError, match=r"new\.yaml exists already; add --exist-ok"):
        command(monkeypatch, "coco", coco(tmp_path), "--labels", tmp_path / "d", "--names-to", names)
    visdrone(tmp_path / "drone")
    command(monkeypatch, "visdrone", tmp_path / "drone")
    assert "2 boxes" in capsys.readouterr().out
    with pytest.raises(UserError, match="--names a,a repeats a class"):
        command(monkeypatch, "voc", tmp_path, "--labels", tmp_path / "x", "--names", "a,a")
    for wrong in ((), ("xml",), ("voc", tmp_path), ("coco", "a.json", "--labels", "b", "--difficult")):
        with pytest.raises(SystemExit) as caught:
            command(monkeypatch, *wrong)
        assert caught.value.code == 2


def test_names_are_yaml(tmp_path: Path) -> None:
    names = ["no", "7", "a: b", "Größe", "'"]
    (tmp_path / "a.yaml").write_text(names_text(names), encoding="utf-8")
    assert list(read_spec(tmp_path / "a.yaml").names.values()) == names
