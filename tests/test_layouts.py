"""The layouts of users' data sets: `--data FOLDER` reads the same images and boxes from each, and trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dataset import DataOptions, DataSet, data_source
from tests.conftest import CallMain
from tests.curves import untouched
from tests.layouts import (
    BOX_LAYOUTS,
    CLASS_LAYOUTS,
    COUNTS,
    NAMES,
    Layout,
    class_folders,
    coco,
    drawn,
    roboflow_voc,
)

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


@pytest.mark.parametrize(
    ("layout", "cfg"),
    [(coco, "yolov5n.yaml"), (roboflow_voc, "yolov5n.yaml"), (class_folders, "yolov5n-cls.yaml")],
)
def test_a_training(call_main: CallMain, layout: Layout, cfg: str, tmp_path: Path) -> None:
    data = layout(tmp_path / "data" / "set")
    with untouched(tmp_path / "data"):
        code, printed = call_main("train.py", "--data", str(data), "--cfg", cfg, *SHORT, "--project", str(tmp_path))
    assert code == 0, printed
