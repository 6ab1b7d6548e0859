"""The layouts of users' data sets: `--data FOLDER` reads the same images and boxes from each, and trains on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.data_yaml import read_data, read_spec
from data.dataset import DataOptions, DataSet, data_source
from data.segmentation import SegmentationData
from tests.conftest import CallMain
from tests.curves import untouched
from tests.layouts import (
    BOX_LAYOUTS,
    CLASS_LAYOUTS,
    COUNTS,
    NAMES,
    Layout,
    bare_yolo,
    class_folders,
    coco,
    coco_text,
    cvat_yolo,
    drawn,
    labelimg,
    write_labels,
    write_text,
)
from tests.making import plain, write_image, write_yaml
from utils.errors import UserError

HELD_OUT = 4  # of 20 training images, a fifth
KINDS = {"detect": "data.detection:DetectionData", "classify": "data.classification:ClassificationData"}
SHORT = ("--weights", "", "--imgsz", "64", "--epochs", "1", "--batch-size", "6", "--device", "cpu", "--workers", "0")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def opened(data: Path, task: str) -> DataSet[Any]:
    return data_source(str(data), KINDS[task]).open(64, 32, DataOptions())


@pytest.mark.parametrize("layout", BOX_LAYOUTS, ids=lambda layout: layout.__name__)
def test_boxes_are_the_same_from_every_layout(layout: Layout, tmp_path: Path) -> None:
    data = opened(layout(tmp_path / "my set"), "detect")
    assert data.spec.names == dict(enumerate(NAMES))
    splits = {name: data.split(name) for name in ("train", "val")}
    assert [split.problems for split in splits.values()] == [(), ()]
    counts = {name: len(split.images) for name, split in splits.items()}
    if BOX_LAYOUTS[layout]:
        assert counts == {"train": COUNTS["train"], "val": COUNTS["val"]}
    else:
        assert counts == {"train": COUNTS["train"] - HELD_OUT, "val": HELD_OUT}
    expected = {image.stem: image.label_rows() for name in ("train", "val") for image in drawn(name)}
    read = {path.stem: split.labels.image_rows(k) for split in splits.values() for k, path in enumerate(split.images)}
    assert len(read) == sum(counts.values())
    for stem, rows in read.items():
        wanted = np.array([list(map(float, row.split())) for row in expected[stem]], np.float32).reshape(-1, 5)
        assert rows == pytest.approx(wanted, abs=1e-5), stem


def test_circles_of_labelme_and_via(tmp_path: Path) -> None:
    shapes: list[dict[str, Any]] = [{"label": 7, "shape_type": "circle", "points": [[20, 20], [26, 28]]}]
    shapes += [{"label": "10", "shape_type": kind, "points": [[1, 1], [9, 9]]} for kind in ("rectangle", "line")]
    write_text(tmp_path / "a.json", json.dumps({"imagePath": "x.jpg", "shapes": shapes}))
    write_image(tmp_path / "a.jpg", plain(64, 48))
    data = SegmentationData(read_spec(write_yaml(tmp_path / "my.yaml", {"train": "."})), 64, 32, DataOptions())
    labels, names = data.split("train").labels, data.spec.names
    assert labels.polygons is not None
    assert (names, labels.polygons.counts.tolist()) == ({0: "7", 1: "10"}, [36, 4])
    assert labels.rows[0] == pytest.approx([0, 20 / 64, 20 / 48, 20 / 64, 20 / 48], abs=1e-5)
    assert [("a.json, shape 3" in problem) for problem in labels.problems] == [True]
    region = """{""name"": ""circle"", ""cx"": 9, ""cy"": 9, ""r"": 4}"""
    rows = f'a.jpg\t"{region}"\t{{}}\na.jpg\t{{}}\t{{}}\nb.jpg\t{{}}\t{{}}'
    write_text(tmp_path / "via.csv", f"#filename\tregion_shape_attributes\tregion_attributes\n{rows}")
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "via.csv"}))
    assert (spec.images("train"), spec.names) == ([tmp_path / "a.jpg"], {0: "object"})
    assert "1 image without a file" in spec.listing("train").problems[0]


@pytest.mark.parametrize("layout", CLASS_LAYOUTS, ids=lambda layout: layout.__name__)
def test_classes_are_the_same_from_every_layout(layout: Layout, tmp_path: Path) -> None:
    data = opened(layout(tmp_path / "my set"), "classify")
    assert data.names == dict(enumerate(NAMES))  # type: ignore[attr-defined]
    counts = [len(data.split(name).images) for name in ("train", "val")]
    held_out = [17, 3]  # one of six or seven per class
    assert counts == ([COUNTS["train"], COUNTS["val"]] if CLASS_LAYOUTS[layout] else held_out)
    for name in ("train", "val"):
        split = data.split(name)
        assert [path.parent.name for path in split.images] == [NAMES[k] for k in split.instances().classes]


HEADER = "filename,class,xmin,ymin,xmax,ymax"
LABELLED = {"images/a.jpg": "X", "labels/a.txt": "0 .5 .5 .1 .1", "classes.txt": "a"}
# The files of a folder that is no data set, and what its error names. X: an image.
REFUSED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "empty LabelMe": ({"a.jpg": "X", "a.json": '{"shapes": [], "imagePath": "a.jpg"}'}, ("set", "nothing to learn")),
    "damaged VIA": ({"images/a.jpg": "X", "via.json": '{"a.jpg9": {"filename": "a", "regions": [3]}}'}, ("via.json",)),
    "CSV of classes": (
        {"train/a.jpg": "X", "train/labels.csv": "id,breed"},
        ("labels.csv is CSV", "(id,breed)", "xmin"),
    ),
    "lists in CSV": ({"a.jpg": "X", "a.csv": "image_id,bbox\na,[1;2]", "b.csv": "a"}, ("a.csv, row 2: `bbox`", "xmin")),
    "a list in a row": ({"a.jpg": "X", "a.csv": f"{HEADER}\na.jpg,dog,1,1,[2],2"}, ("a.csv, row 2: ", "'[2]'")),
    "CreateML": ({"a/a.jpg": "X", "a/x.json": '[{"image": "a.jpg", "annotations": []}]'}, ("-if roboflow_create_ml",)),
    "Datumaro": ({"images/a.jpg": "X", "x/a.json": '{"categories": {}, "items": []}'}, ("set -if datumaro -f coco",)),
    "VoTT": ({"a/a.jpg": "X", "b/b.jpg": "X", "v.json": '{"assets": {"a": {}}, "tags": []}'}, ("-if vott_json",)),
    "Label Studio": (
        {"a/a.jpg": "X", "b/b.jpg": "X", "x.json": '[{"data": {}, "annotations": []}]'},
        ("Label Studio",),
    ),
    "Supervisely": (
        {f"{k}/img/a.jpg": "X" for k in "ab"} | {"a/ann/a.json": '{"size": {}, "objects": []}'},
        ("Superv",),
    ),
    "Hugging Face": ({f"{k}/a.jpg": "X" for k in "ab"} | {"m.jsonl": '{"file_name": "", "objects": {}}'}, ("Hugging",)),
    "KITTI": ({"training/x/a.jpg": "X", "training/y/a.txt": f"Car 0 0 -1.58{' 1.5' * 11}\n"}, ("1 image", "-if kitti")),
    "archive": ({"x.zip": "a"}, ("unpack",)),
    "no images": ({"labels/a.txt": "0 .5 .5 .1 .1", "classes.txt": "a"}, ("classes.txt", "1 .txt file", "no images")),
    "photos in splits": ({f"{split}/a.jpg": "X" for split in ("train", "valid", "test")}, ("no label files",)),
    "misplaced": ({"photos/a.jpg": "X", "txt/a.txt": "0 .5 .5 .1 .1"}, ("1 image", "photos/a.txt")),
    "two COCO files": ({"a.json": coco_text([]), "b.json": coco_text([])}, ("a.json, b.json",)),
    "two years of COCO": (
        {f"annotations/instances_train{year}.json": "{}" for year in (2014, 2017)},
        ("train2014.json, annotations/instances_train2017.json", "`train:`", "--data", "set/annotations/instances"),
    ),
    "two batches of COCO": (
        {f"batch{k}/{split}.json": coco_text([]) for k in (1, 2) for split in ("train", "val")},
        ("batch1/train.json, batch2/train.json", "--data", "set/batch1"),
    ),
    "two folders for validation": (
        {f"{name}/{file}": text for name in ("train", "val", "valid") for file, text in LABELLED.items()},
        ("`val` (val/images, valid/images)", "`val:`"),
    ),
    "an absent list": ({"a.data": "train=a.txt\nvalid = b.txt", "a.txt": "c.jpg"}, ("a.data: `valid = b.txt`",)),
    "two YAMLs": ({"a.yaml": "{train: a, nc: 1}", "b.yaml": "{train: a, names: [a]}"}, ("a.yaml, b.yaml",)),
    "two lists of classes": (
        {"a.jpg": "X", "a.txt": "0 .5 .5 .1 .1", "classes.txt": "a", "b/classes.txt": "b"},
        ("set/classes.txt", "b/classes.txt"),
    ),
    "CVAT's XML": ({"a/annotations.xml": "<annotations/>", "a/images/a.jpg": "X"}, ("a/annotations.xml", "-if cvat")),
    "two sets below": (
        {f"{name}/{file}": text for name in ("x/a", "x/b") for file, text in LABELLED.items()},
        ("`train` (x/a, x/b)", "--data", "set/x/a"),
    ),
    "two formats below": (
        {f"x/y/{file}": text for file, text in LABELLED.items()} | {"z/deep/a.csv": HEADER, "b.jpg": "X"},
        ("`train` (x/y, z)", "--data", "set/x"),
    ),
    "empty": ({".git/a.txt": "a"}, ("has no files",)),
}


@pytest.mark.parametrize(("files", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_recognised_is_named(files: dict[str, str], named: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, text in files.items():
        write_image(tmp_path / "set" / name) if text == "X" else write_text(tmp_path / "set" / name, text)
    with pytest.raises(UserError) as caught:
        read_data(str(tmp_path / "set"))
    assert [name for name in named if name not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        *(("x.zip", "", "archive"), ("x.csv", "", "CSV"), ("x.xml", "", "a single"), ("x.txt", "a.jpg\n", "list")),
        *(("x.json", '[{"image": "a", "annotations": []}]', "CreateML"), ("x.json", "{", "COCO")),
    ],
)
def test_a_file_of_another_format_is_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    write_text(tmp_path / name, text)
    with pytest.raises(UserError, match=f"{name}.* {named}"):
        read_data(str(tmp_path / name))


@pytest.mark.parametrize("task", KINDS)
def test_only_run_folders_are_left_out_and_counted(task: str, tmp_path: Path) -> None:
    """By their settings.yaml; neither a name nor a .lock makes one."""
    top = labelimg(tmp_path) if task == "detect" else class_folders(tmp_path)
    for name in ("runs/exp5", "runs/trainers", "runs/detect/exp"):
        write_image(top / "cow" / name / "a.jpg")
        write_text(top / "cow" / name / ".lock", "")
    runs = [top / "cow/runs/exp", top / "exp", top / "runs/train/exp2"]
    for run in runs:
        write_image(run / "train_batch0.jpg")
        write_text(run / "settings.yaml", "epochs: 3")
    data = opened(tmp_path, task)
    train, val = data.split("train"), data.split("val")
    assert len(train.images) + len(val.images) == COUNTS["train"] + 3
    counted = {f"{run} is a run folder, as its settings.yaml shows: 1 image; left out" for run in runs}
    assert ({*train.problems}, len(train.problems), val.problems) == (counted, 3, ())


@pytest.mark.parametrize("written", ["{}=data/{}", "  {} = {}", "{} ={folder}/{}", "{} = D:\\old\\{}"])
@pytest.mark.parametrize("name", ["obj.data", ""])
def test_a_darknet_file_is_followed(written: str, name: str, tmp_path: Path) -> None:
    """Whatever lies beside it, of any machine."""
    write_labels("val", cvat_yolo(tmp_path) / "v", tmp_path / "v")
    (tmp_path / "train.txt").rename(tmp_path / "valid.txt")
    write_text(tmp_path / "train.txt", "\n".join(f"v/{image.stem}.jpg" for image in drawn("val")))
    write_text(tmp_path / "classes.txt", "x\ny\nz")
    keys = {"classes": "3", "train": "valid.txt", "valid": "train.txt", "names": "obj.names", "backup": "b/"}
    lines = [written.format(key, value, folder=tmp_path) for key, value in keys.items()]
    (tmp_path / "obj.data").write_bytes("\r\n".join(["# mine", *lines]).encode())
    spec = read_data(str(tmp_path / name))
    assert spec.names == dict(enumerate(NAMES))
    assert [len(spec.images(split)) for split in ("train", "val")] == [COUNTS["train"], COUNTS["val"]]


def test_names_of_another_set_are_not_used(tmp_path: Path) -> None:
    bare_yolo(tmp_path / "images").rename(tmp_path / "other")
    images = write_labels("train", tmp_path / "images", tmp_path / "labels")
    write_text(tmp_path / "photos.txt", "\n".join(f"images/{image.stem}.jpg" for image in images))
    for data in (tmp_path, tmp_path / "photos.txt"):
        assert read_data(str(data)).names == {0: "0", 1: "1", 2: "2"}
    (tmp_path / "other/classes.txt").rename(tmp_path / "labels/classes.txt")
    assert read_data(str(tmp_path)).names == dict(enumerate(NAMES))


def test_two_lists_for_training(tmp_path: Path) -> None:
    """The one that is given counts, with the list for validation beside it."""
    folder = cvat_yolo(tmp_path)
    for name in ("train2017.txt", "valid.txt"):
        write_text(folder / name, (folder / "train.txt").read_text())
    assert read_data(str(folder / "train.txt")).entries == {"train": ("train.txt",), "val": ("valid.txt",)}


@pytest.mark.parametrize(
    ("layout", "cfg"), [(coco, "yolov5n.yaml"), (labelimg, "yolov5n.yaml"), (class_folders, "yolov5n-cls.yaml")]
)
def test_a_training(call_main: CallMain, layout: Layout, cfg: str, tmp_path: Path) -> None:
    data = layout(tmp_path / "data" / "set")
    with untouched(tmp_path / "data"):
        code, printed = call_main("train.py", "--data", str(data), "--cfg", cfg, *SHORT, "--project", str(tmp_path))
    assert code == 0, printed
