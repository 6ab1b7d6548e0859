"""Packing: the same data set from shards as from loose files, and shards that tar can unpack."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from data.data_yaml import read_spec
from data.dataset import DataOptions, DataSet, data_source
from data.images import read_image
from data.pack import pack, size_in_bytes
from models.tasks import TASKS
from models.tasks.classification.task import ClassificationRecipe
from tests.making import noise, write_image, write_yaml
from utils.batch import Batch
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import csv_text
from utils.plots import __main__ as plots

CLASSES = {name: entry.data for name, entry in TASKS.items()}
HYP = replace(Hyperparameters(), mixup=0.3, copy_paste=0.3)


def loose(folder: Path, accented: str = os.fsdecode(b"caf\xe9.jpg")) -> Path:
    """Write a data set with all kinds of images and label files, and return its YAML. accented: an image's name."""
    box, outline = "0 .5 .5 .4 .4", "1 .1 .1 .6 .2 .5 .7"
    for k in range(7):
        rows = ([box], [box, outline], [outline])[k % 3]
        write_image(folder / f"images/train/{k % 2}/{k}.png", noise(40 + k, 60, k), *rows)
    write_image(folder / "images/train/background.png", noise(30, 30))
    write_image(folder / "images/train/empty.png", noise(30, 30), "")
    odd = write_image(folder / "images/train/odd.png", noise(30, 30), box)
    (folder / "labels/train/odd.txt").write_bytes(b"\xff\xfe0 .5 .5 .1 .1")
    (odd.parent / "no image.jpg").write_bytes(b"text")
    write_image(folder / "images/train" / accented, noise(50, 40), box)
    write_image(folder / "images/val/a.jpg", noise(50, 40), box, outline)
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": ["disc", "bar"]}
    return write_yaml(folder / "my.yaml", content)


def opened(data: Path, task: str) -> DataSet[Any]:
    return data_source(str(data), CLASSES[task]).open(32, 32, DataOptions())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return all(map(same, one, other)) if isinstance(one, (tuple, list)) else one == other or not isinstance(one, str)


def batches(data: DataSet[Any], hyp: Any) -> list[tuple[Batch, ...]]:
    """Return the batches of a training epoch and of a validation."""
    train, val = data.split("train", hyp), data.split("val")
    evaluation = data.evaluation_loader(val, data.evaluation_batches(val, 4, square=False))
    return [tuple(data.train_loader(train, 4, hyp, seed=3)), tuple(evaluation)]


def check_equal(loose: Path, packed: Path, task: str, hyp: Any) -> None:
    one, other = opened(loose, task), opened(packed, task)
    for name in ("train", "val"):
        first, second = one.split(name, hyp), other.split(name, hyp)
        assert first.identity() == second.identity()
        assert len(first.problems) == len(second.problems)
        assert [path.name for path in first.images] == [path.name for path in second.images]
    for first, second in zip(batches(one, hyp), batches(other, hyp), strict=True):
        assert len(first) == len(second) > 0
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.targets, b.targets)
            if task == "segment":
                assert torch.equal(a.mask_pixels, b.mask_pixels)  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", ["detect", "segment"])
@pytest.mark.parametrize("shard_size", ["4K", "1G"])
def test_equals_the_loose_files(tmp_path: Path, task: str, shard_size: str) -> None:
    data = loose(tmp_path / "loose")
    lines = pack(str(data), str(tmp_path / "pack"), shard_size, task)
    assert lines[-1] == f"train with --data {tmp_path}/pack/data.yaml"
    assert "train: 12 images in " in lines[-3]
    shards = list((tmp_path / "pack").glob("train-*.tar"))
    assert len(shards) == 1 if shard_size == "1G" else len(shards) > 5
    check_equal(data, tmp_path / "pack/data.yaml", task, HYP)
    assert data_source(str(tmp_path / "pack"), CLASSES[task]).spec.names == {0: "disc", 1: "bar"}


def test_packed_images_are_in_the_pictures_of_a_run(tmp_path: Path) -> None:
    pack(str(loose(tmp_path / "loose")), str(tmp_path / "pack"), "1G", "detect")
    val = opened(tmp_path / "pack/data.yaml", "detect").split("val")
    run = tmp_path / "run"
    run.mkdir()
    heads = ("image", "kind", "class", "confidence", "x1", "y1", "x2", "y2")
    (run / "val_boxes.csv").write_text(csv_text(heads, [(str(val.images[0]), "image", *[""] * 6)]))
    assert plots.run([str(run), "--only", "val_batch0_labels.jpg"]) == 0
    drawn, whole = read_image(run / "val_batch0_labels.jpg"), val.shown(0, 640)
    assert np.abs(cv2.resize(drawn[:256, :320], (50, 40)).astype(int) - whole).mean() < 20


@pytest.mark.parametrize("split", [{"train": "train", "val": "val"}, {"train": "train", "split": 0.5}])
def test_classes_equal_those_of_the_folders(tmp_path: Path, split: dict[str, Any]) -> None:
    for k in range(12):
        write_image(tmp_path / f"loose/{('train', 'val')[k % 2]}/{'abc'[k // 4]}/{k}.png", noise(40, 40, k))
    data = write_yaml(tmp_path / "loose/my.yaml", {"path": ".", **split})
    pack(str(data), str(tmp_path / "pack"), "8K", "classify")
    check_equal(data, tmp_path / "pack/data.yaml", "classify", ClassificationRecipe())


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_equals_an_annotation_file(tmp_path: Path, task: str) -> None:
    images = [{"id": k, "file_name": f"{k}.png", "width": 40, "height": 40} for k in range(5)]
    for image in images:
        write_image(tmp_path / f"loose/train/{image['file_name']}", noise(40, 40, int(str(image["id"]))))
    outline = [[4.0, 4.0, 30.0, 6.0, 20.0, 28.0]]
    objects = [
        {"id": k, "image_id": k % 4, "category_id": 2, "bbox": [4, 4, 26, 25], "segmentation": outline, "iscrowd": 0}
        for k in range(6)
    ]
    content = {"categories": [{"id": 2, "name": "disc"}], "images": images, "annotations": objects}
    (tmp_path / "loose/train/_annotations.coco.json").write_text(json.dumps(content))
    name = "train/_annotations.coco.json"
    content = {"path": ".", "train": name, "val": name, "kpt_shape": [1, 2]}  # an outline has as many numbers
    data = write_yaml(tmp_path / "loose/my.yaml", content)
    pack(str(data), str(tmp_path / "pack"), "8K", task)
    check_equal(data, tmp_path / "pack/data.yaml", task, HYP)


def test_equals_label_files_with_key_points(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_image(tmp_path / f"loose/images/{name}/a.png", noise(40, 40), "0 .7 .3 .1 .2 .7 .3")
    splits = {name: f"images/{name}" for name in ("train", "val")}
    data = write_yaml(tmp_path / "loose/my.yaml", {"path": ".", **splits, "names": ["disc"], "kpt_shape": [1, 2]})
    pack(str(data), str(tmp_path / "pack"), "8K")
    check_equal(data, tmp_path / "pack/data.yaml", "detect", HYP)


def test_tar_unpacks_the_files(tmp_path: Path) -> None:
    data = loose(tmp_path / "loose")
    pack(str(data), str(tmp_path / "pack"), "8K")
    (tmp_path / "files").mkdir()
    for shard in sorted((tmp_path / "pack").glob("*.tar")):
        subprocess.run(["tar", "xf", shard, "-C", tmp_path / "files"], check=True)
    expected = [path for path in (tmp_path / "loose").rglob("*") if path.is_file() and path != data]
    for path in expected:
        assert (tmp_path / "files" / path.relative_to(tmp_path / "loose")).read_bytes() == path.read_bytes()
    assert len(expected) == len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) > 20


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_goes_on_where_it_ended(tmp_path: Path) -> None:
    data, out = loose(tmp_path / "loose"), tmp_path / "pack"
    pack(str(data), str(out), "8K")
    older = out / "train-000000.json"
    older.write_text(older.read_text().replace('"bytes": ', '"sha256": "f0", "bytes": ', 1))  # in older packs
    whole = contents(out)
    for name in ("index.json", "data.yaml", "train-000002.json", "val-000000.json", "val-000000.tar"):
        (out / name).unlink()
    (out / "train-000002.tar").write_bytes(b"half")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / ".train-000002.tar-k1l2m3.part").write_bytes(b"half")  # of an attempt that was killed
    with pytest.raises(UserError, match=r"`train: train` does not exist"):
        read_spec(write_yaml(tmp_path / "early.yaml", {"path": str(out), "train": "train"})).images("train")
    pack(str(data), str(out), "8K")
    assert contents(out) == whole
    changed = {name for name, time in before.items() if (out / name).stat().st_mtime_ns != time}
    assert changed == {"train-000002.tar"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data, out: {"shard_size": "16K"}, "has shards of another data set, of other files, or of another"),
        (lambda data, out: write_image(data.parent / "images/train/0/0.png", noise(8, 8)), "has shards of another"),
        (
            lambda data, out: (out / "data.yaml").write_text("names: [x]"),
            "data.yaml exists and belongs to another data set",
        ),
        (lambda data, out: {"shard_size": "large"}, "--shard-size large is not a size"),
        (lambda data, out: {"shard_size": "0"}, "--shard-size 0 is not a size"),
        (
            lambda data, out: {"data": str(out / "data.yaml")},
            "is packed already; name the data YAML of the loose",
        ),
        (lambda data, out: {"out": str(data)}, "cannot be written"),
    ],
)
def test_refuses(tmp_path: Path, change: Callable[[Path, Path], Any], message: str) -> None:
    data, out = loose(tmp_path / "loose"), tmp_path / "pack"
    pack(str(data), str(out), "8K")
    changed = change(data, out)
    arguments = {"data": str(data), "out": str(out), "shard_size": "8K"}
    before = contents(out)
    with pytest.raises(UserError, match=message):
        pack(**{**arguments, **(changed if isinstance(changed, dict) else {})})
    assert contents(out) == before


def test_the_data_set_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the task: here each image is of the class that its name says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("cat-1.png", "dog-1.png", "cat-2.png"):
        write_image(tmp_path / f"loose/train/{name}", noise(40, 40))
    data = write_yaml(tmp_path / "loose/my.yaml", {"path": ".", "train": "train"})
    (tmp_path / "named_by_file.py").write_text(
        """
from data.classification import ClassificationData
from models.tasks import TaskEntry


class NamedByFile(ClassificationData):
    @staticmethod
    def groups(spec, split):
        return {path: path.name.partition("-")[0] for path in spec.images(split)}


TASKS = {"named": TaskEntry("models.tasks.classification.task:ClassificationTask", f"{__name__}:NamedByFile", "X")}
"""
    )
    try:
        pack(str(data), str(tmp_path / "pack"), task=str(tmp_path / "named_by_file.py"))
    finally:
        TASKS.pop("named", None)
    assert json.loads((tmp_path / "pack/index.json").read_text())["task"] == "named"
    packed = data_source(str(tmp_path / "pack/data.yaml"), CLASSES["classify"])
    assert packed.names() == {0: "cat", 1: "dog"}
    assert [path.name for path in packed.kind.groups(packed.spec, "train")] == ["cat-1.png", "cat-2.png", "dog-1.png"]
    with pytest.raises(UserError, match=r"^--task pose is neither detect, classify, segment, nor the path of a Python"):
        pack(str(data), str(tmp_path / "other"), task="pose")


def test_needs_names(tmp_path: Path) -> None:
    write_image(tmp_path / "train/cat/0.png")
    data = write_yaml(tmp_path / "my.yaml", {"train": "train"})
    with pytest.raises(UserError, match="for folders of classes add --task classify"):
        pack(str(data), str(tmp_path / "pack"))
    assert not (tmp_path / "pack").exists()


def test_sizes() -> None:
    assert [size_in_bytes(text) for text in ("512M", "2g", "64KB", "100")] == [2**29, 2**31, 2**16, 100]
