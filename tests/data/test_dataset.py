"""The data sets of all tasks by name, and what is logged about them."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.data_yaml import read_spec
from data.dataset import DataOptions, data_source, log_split, split_identity
from data.detection import DetectionData
from tests.making import write_image, write_yaml
from utils.batch import Instances
from utils.config.flags import TrainOptions


def test_options_are_flags() -> None:
    assert {field.name for field in fields(DataOptions)} <= {field.name for field in fields(TrainOptions)}


@pytest.mark.parametrize("name", ["val", "valid", "test"])
def test_a_folder_with_a_folder_per_split_needs_no_yaml(tmp_path: Path, name: str) -> None:
    """As YOLOv5's classifiers take it, and as Roboflow exports it."""
    images = [write_image(tmp_path / split / text / "a.png") for split in ("train", name) for text in ("cat", "dog")]
    source = data_source(str(tmp_path), "data.classification:ClassificationData")
    assert source.names() == {0: "cat", 1: "dog"}
    assert source.files() == {"train": images[:2], "val": images[2:]}
    assert source.spec.entries["val"] == (name,)


def test_the_identity_of_a_split_takes_any_name(tmp_path: Path) -> None:
    names = {"größe.jpg": "288047", os.fsdecode(b"\xff.jpg"): "e6f527"}
    for name, digest in names.items():
        (tmp_path / name).touch()
        assert split_identity([tmp_path / name], b"labels")["files"].startswith(digest)


def split_of(images: list[Path], counts: list[int], side: int = 64) -> Any:
    """Return a split with `counts` labels by class, and square images of `side` pixels."""
    classes = np.repeat(np.arange(len(counts)), counts)
    instances = Instances(np.zeros(len(classes), int), classes)
    report, labels = lambda title: log_split(title, "", ()), SimpleNamespace(sizes=np.full((len(images), 2), side))
    return SimpleNamespace(images=images, instances=lambda: instances, report=report, labels=labels)


def test_a_report_names_rare_classes_and_images_of_both_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links to a folder are resolved."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    spec = read_spec(write_yaml(tmp_path / "data.yaml", {"train": "real", "names": ["cat", "dog", "pig"]}))
    data = DetectionData(spec, 192, 64, DataOptions(multi_scale=True))
    train, again = [tmp_path / "real/a.jpg", tmp_path / "real/b.jpg"], [tmp_path / f"link/{name}.jpg" for name in "bc"]
    data.report(split_of(train, [10, 500, 60], side=192), split_of(again[1:], [1, 2, 3]))
    scales = "--multi-scale: each batch at one of the sizes 128, 192, 256 pixels"
    assert capsys.readouterr().out.splitlines()[2:] == ["3 classes: cat, dog, pig", scales]
    data = DetectionData(spec, 64, 32, DataOptions())
    data.report(split_of(train, [9, 500, 0]), split_of(again, [1, 0, 0]))
    *_, rare, absent, both = capsys.readouterr().out.splitlines()
    assert rare.endswith(": pig (0), cat (9)")
    assert absent.endswith(": dog, pig")
    assert both.startswith("warning: 1 of the 2 ")
    assert f"{train[1]};" in both
    data.report(split_of(train, [10, 500, 60], side=30), split_of(again[1:], [1, 2, 3]))
    assert "--imgsz 32 " in capsys.readouterr().out


def test_the_first_five_of_many_problems_are_logged_and_the_others_counted(capsys: pytest.CaptureFixture[str]) -> None:
    for count in (5, 7):
        log_split("val", "x", [f"{number}.png: torn; left out" for number in range(count)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[:6] == ["val: x", *(f"warning: {number}.png: torn; left out" for number in range(5))]
        assert [line.split()[1] for line in lines[6:]] == ["2"] * (count == 7)
