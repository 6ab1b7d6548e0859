"""The layouts of users' data sets: `--data FOLDER` reads the same images and boxes from each, and trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.data_yaml import read_data
from data.dataset import DataOptions, DataSet, data_source
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
    drawn,
    labelimg,
    write_text,
)
from tests.making import write_image
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
    read = {path.stem: split.labels.of(k) for split in splits.values() for k, path in enumerate(split.images)}
    assert len(read) == sum(counts.values())
    for stem, rows in read.items():
        wanted = np.array([list(map(float, row.split())) for row in expected[stem]], np.float32).reshape(-1, 5)
        assert rows == pytest.approx(wanted, abs=1e-5), stem


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


# The files of a folder that is no data set, and what its error names. X: an image.
REFUSED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "LabelMe": ({"a.jpg": "X", "a.json": '{"shapes": [], "imagePath": "a.jpg"}'}, ("1 image", "LabelMe")),
    "VIA": ({"images/a.jpg": "X", "via.json": '{"a.jpg9": {"filename": "a", "regions": []}}'}, ("VIA",)),
    "VIA project": ({"images/a.jpg": "X", "via.json": '{"_via_img_metadata": {}}'}, ("VIA",)),
    "CSV": ({"train/a.jpg": "X", "train/_annotations.csv": "a"}, ("CSV",)),
    "archive": ({"x.zip": "a"}, ("unpack",)),
    "no images": ({"labels/a.txt": "0 .5 .5 .1 .1", "classes.txt": "a"}, ("classes.txt", "1 .txt file", "no images")),
    "misplaced": ({"photos/a.jpg": "X", "txt/a.txt": "0 .5 .5 .1 .1"}, ("1 image", "photos/a.txt")),
    "two COCO files": ({"a.json": coco_text([]), "b.json": coco_text([])}, ("a.json, b.json",)),
    "two YAMLs": ({"a.yaml": "{train: a, nc: 1}", "b.yaml": "{train: a, names: [a]}"}, ("a.yaml, b.yaml",)),
    "two lists of classes": (
        {"a.jpg": "X", "a.txt": "0 .5 .5 .1 .1", "classes.txt": "a", "b/classes.txt": "b"},
        ("set/classes.txt", "b/classes.txt"),
    ),
    "CVAT's XML": ({"annotations.xml": "<annotations/>", "images/a.jpg": "X"}, ("annotations.xml", "CVAT")),
    "empty": ({}, ("set",)),
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
        *(("x.json", REFUSED["LabelMe"][0]["a.json"], "LabelMe"), ("x.json", "{", "COCO")),
    ],
)
def test_a_file_of_another_format_is_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    write_text(tmp_path / name, text)
    with pytest.raises(UserError, match=f"{name}.* {named}"):
        read_data(str(tmp_path / name))


def test_classes_without_names_are_numbered(tmp_path: Path) -> None:
    (bare_yolo(tmp_path) / "classes.txt").unlink()
    assert read_data(str(tmp_path)).names == {0: "0", 1: "1", 2: "2"}


def test_a_class_is_not_made_of_the_results_of_runs(tmp_path: Path) -> None:
    write_image(class_folders(tmp_path) / "runs/train-cls/exp/a.jpg")
    assert opened(tmp_path, "classify").names == dict(enumerate(NAMES))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "cfg"), [(coco, "yolov5n.yaml"), (labelimg, "yolov5n.yaml"), (class_folders, "yolov5n-cls.yaml")]
)
def test_a_training(call_main: CallMain, layout: Layout, cfg: str, tmp_path: Path) -> None:
    data = layout(tmp_path / "data" / "set")
    with untouched(tmp_path / "data"):
        code, printed = call_main("train.py", "--data", str(data), "--cfg", cfg, *SHORT, "--project", str(tmp_path))
    assert code == 0, printed
