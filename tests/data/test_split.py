"""Tests of data.split: its lists and data YAML, equal shares of the classes, groups, and what it refuses."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.dataset import DataOptions, data_source
from data.detection import DetectionSplit
from data.split import assigned, main, split
from tests.layouts import (
    COUNTS,
    class_folders,
    coco_file,
    coco_flat,
    drawn,
    kaggle,
    labelimg,
    roboflow_coco,
    roboflow_voc,
    roboflow_yolo,
    voc,
    voc_without_lists,
)
from tests.making import write_image, write_yaml
from utils.errors import UserError
from utils.files import read_yaml


def splits_of(file: Path) -> tuple[DetectionSplit, DetectionSplit]:
    data = data_source(str(file), "data.detection:DetectionData").open(64, 32, DataOptions(strict=True))
    train, val = data.split("train"), data.split("val")
    assert isinstance(train, DetectionSplit)
    assert isinstance(val, DetectionSplit)
    return train, val


def photos(folder: Path, *classes: tuple[int, ...]) -> Path:
    """Write a data set in YOLO's format without a validation: an image for each of `classes`. Return its YAML."""
    for number, labels in enumerate(classes):
        rows = [f"{label} 0.5 0.5 0.{k + 1} 0.5" for k, label in enumerate(labels)]
        write_image(folder / f"images/{number:03}.png", None, *rows)
    return write_yaml(folder / "my.yaml", {"train": "images", "names": ["a", "b", "c"]})


def held(file: Path) -> list[str]:
    return [image.name for image in splits_of(file)[1].images]


LAYOUTS = [
    (kaggle, ("train",)), (labelimg, ("train",)), (voc_without_lists, ("train",)), (coco_file, ("train",)),
    (voc, ("train", "val")), (roboflow_voc, ("train", "val")), (coco_flat, ("train", "val")),
    (roboflow_coco, ("train", "val")), (roboflow_yolo, ("train", "val")),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "parts"), LAYOUTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_layout_is_split_without_a_change(
    layout: Callable[[Path], Path], parts: tuple[str, ...], tmp_path: Path
) -> None:
    """Training and validation of before are put together."""
    data = layout(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    *_, last = split(str(data), 0.25, out=str(tmp_path / "out"))
    assert last == f"train with --data {tmp_path}/out/data.yaml"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data.yaml", "train.txt", "val.txt"]
    train, val = splits_of(tmp_path / "out/data.yaml")
    images = {image.stem: image.label_rows() for name in parts for image in drawn(name)}
    total = sum(COUNTS[name] for name in parts)
    assert {path.stem for path in (*train.images, *val.images)} == set(images)
    assert len(train.images) + len(val.images) == total
    assert abs(len(val.images) - 0.25 * total) <= 2
    for part in (train, val):
        for k, path in enumerate(part.images):
            rows = np.array([list(map(float, row.split())) for row in images[path.stem]]).reshape(-1, 5)
            assert part.labels.of(k) == pytest.approx(rows, abs=1e-5)


def test_the_test_images_defaults_and_key_points_stay(tmp_path: Path) -> None:
    file = roboflow_yolo(tmp_path / "set") / "data.yaml"
    write_yaml(file, {**read_yaml(file), "defaults": {"imgsz": 64}, "kpt_shape": [17, 3]})
    split(str(file), out=str(tmp_path / "out"))
    content = read_yaml(tmp_path / "out/data.yaml")
    assert content == {
        "train": str(tmp_path / "out/train.txt"),
        "val": str(tmp_path / "out/val.txt"),
        "test": [str(tmp_path / "set/test/images")],
        "kpt_shape": [17, 3],
        "defaults": {"imgsz": 64},
        "names": {0: "cat", 1: "cow", 2: "dog"},
    }


def test_the_shares_of_classes_are_equal(tmp_path: Path) -> None:
    """40 images with class a, of which 10 have b too and 5 have c; 20 without labels."""
    classes = [(0, 1)] * 10 + [(0, 2)] * 5 + [(0,)] * 25 + [()] * 20
    file = photos(tmp_path / "set", *classes)
    choices = set()
    for seed in range(4):
        lines = split(str(file), 0.2, seed, out=str(tmp_path / f"{seed}"))
        assert lines[0] == "train: 48 images, val: 12 images; 20% to 20% of the images of each class"
        val = splits_of(tmp_path / f"{seed}/data.yaml")[1]
        assert val.counts(3)[0].tolist() == [8, 2, 1]
        assert (val.labels.counts == 0).sum() == 4
        choices.add(tuple(val.images))
    assert len(choices) == 4


def test_the_choice_depends_on_the_seed_and_not_on_the_place(tmp_path: Path) -> None:
    file = photos(tmp_path / "set", *[(0,), (1,), ()] * 8)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        split(str(file), 0.25, seed, out=str(tmp_path / name))
    moved = shutil.copytree(tmp_path / "set", tmp_path / "elsewhere/deeper")
    split(str(moved / "my.yaml"), 0.25, out=str(tmp_path / "moved"))
    one, same, other, from_moved = (held(tmp_path / name / "data.yaml") for name in ("one", "same", "other", "moved"))
    assert one == same == from_moved
    assert one != other


@pytest.mark.parametrize("pattern", [r"^(clip\d)_", r"^clip\d"])
def test_groups_stay_together(tmp_path: Path, pattern: str) -> None:
    for clip in range(6):
        for frame in range(5):
            write_image(tmp_path / f"set/images/clip{clip}_{frame}.png", None, f"{clip % 3} 0.5 0.5 0.5 0.5")
    write_image(tmp_path / "set/images/single.png", None, "0 0.5 0.5 0.5 0.5")
    file = write_yaml(tmp_path / "set/my.yaml", {"train": "images", "names": ["a", "b", "c"]})
    lines = split(str(file), 0.5, group=pattern, out=str(tmp_path / "out"))
    assert lines[1] == "7 groups, each in one part only, 1 image without a match of --group"
    train, val = ({path.name[:5] for path in part.images} for part in splits_of(tmp_path / "out/data.yaml"))
    assert not train & val
    assert {int(name[4]) % 3 for name in val if name.startswith("clip")} == {0, 1, 2}  # a clip of each class


def test_each_image_validates_in_one_of_the_folds(tmp_path: Path) -> None:
    """40 images with class a, of which 10 have b too and 5 have c; 20 without labels."""
    file = photos(tmp_path / "set", *[(0, 1)] * 10, *[(0, 2)] * 5, *[(0,)] * 25, *[()] * 20)
    lines = split(str(file), folds=5, out=str(tmp_path / "out"))
    start = "train: 48 images, val: 12 images; 20% to 20% of the images of each class"
    assert lines[:-1] == [f"fold{number} {start}" for number in range(1, 6)]
    assert lines[-1] == f"train with --data {tmp_path}/out/fold1/data.yaml, and so on to {tmp_path}/out/fold5/data.yaml"
    folds = [splits_of(tmp_path / f"out/fold{number}/data.yaml") for number in range(1, 6)]
    assert sorted(image for _, val in folds for image in val.images) == sorted((tmp_path / "set/images").glob("*.png"))
    for train, val in folds:
        assert not {*train.images} & {*val.images}
        assert val.counts(3)[0].tolist() == [8, 2, 1]
        assert (val.labels.counts == 0).sum() == 4
    split(str(file), folds=5, seed=1, out=str(tmp_path / "other"))
    assert held(tmp_path / "other/fold1/data.yaml") != held(tmp_path / "out/fold1/data.yaml")


def test_groups_stay_together_in_folds(tmp_path: Path) -> None:
    for clip in range(6):
        for frame in range(3):
            write_image(tmp_path / f"set/images/clip{clip}_{frame}.png", None, f"{clip % 3} 0.5 0.5 0.5 0.5")
    file = write_yaml(tmp_path / "set/my.yaml", {"train": "images", "names": ["a", "b", "c"]})
    split(str(file), folds=2, group=r"^(clip\d)_", out=str(tmp_path / "out"))
    for number in (1, 2):
        train, val = (
            {path.name[:5] for path in part.images} for part in splits_of(tmp_path / f"out/fold{number}/data.yaml")
        )
        assert (len(train), len(val), train & val) == (3, 3, set())
        assert {int(name[4]) % 3 for name in val} == {0, 1, 2}
    with pytest.raises(UserError, match="has 6 groups of images for 7 parts; add images"):
        split(str(file), folds=7, group=r"^(clip\d)_", out=str(tmp_path / "more"))


def test_five_parts_of_equal_shares() -> None:
    rng = np.random.default_rng(0)
    counts = (rng.random((200, 6)) < (0.5, 0.3, 0.2, 0.1, 0.05, 0.0)).astype(int)
    counts[:, 5] = counts.sum(1) == 0
    parts = assigned(counts, [0.2] * 5)
    for column in range(6):
        of_class = np.bincount(parts, counts[:, column], minlength=5)
        assert of_class.max() - of_class.min() <= 2
    assert np.bincount(parts, minlength=5).min() >= 37


def test_both_parts_have_an_image(tmp_path: Path) -> None:
    file = photos(tmp_path / "set", (0,), (1,), (2,))
    for share in (0.01, 0.99):
        split(str(file), share, out=str(tmp_path / f"{share}"))
        assert min(len(part.images) for part in splits_of(tmp_path / f"{share}/data.yaml")) == 1


def test_a_class_that_validation_lacks_is_named(tmp_path: Path) -> None:
    lines = split(str(photos(tmp_path / "set", *[(0,)] * 8, (1,))), 0.25, out=str(tmp_path / "out"))
    assert lines[1] == "warning: val has no image of 'b' (1 image)"


def test_what_cannot_be_split(tmp_path: Path) -> None:
    file = str(photos(tmp_path / "set", (0,), (1,)))
    for share in (0, 1, -0.1, float("nan")):
        with pytest.raises(
            UserError, match=r"--val .* must be the share of the images for validation, between 0 and 1"
        ):
            split(file, share)
    for folds in (-1, 0, 1, 10**9):
        with pytest.raises(UserError, match=rf"--folds {folds} must be the number of parts .*, 2 to 1000, such as 5"):
            split(file, folds=folds)
    with pytest.raises(UserError, match=r"--group \( is not a regular expression"):
        split(file, group="(", out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="has 1 group of images for 2 parts"):
        split(file, group=r"\.png", out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"has no `names`; .* for folders of images per class give `split: 0\.2`"):
        split(str(class_folders(tmp_path / "classes")), out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="set exists already; name another --out folder, or add --exist-ok"):
        split(file, out=str(tmp_path / "set"))


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kaggle(tmp_path / "animals")
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--exist-ok", "--val", "0.5", "--seed", "3"]):
        monkeypatch.setattr(sys, "argv", ["split", "animals", *more])
        main()
        assert capsys.readouterr().out.endswith(f"\ntrain with --data {tmp_path}/animals-split/data.yaml\n")
    assert 9 <= len(held(tmp_path / "animals-split/data.yaml")) <= 11
    monkeypatch.setattr(sys, "argv", ["split", "animals", "--folds", "3"])
    main()
    out = capsys.readouterr().out
    assert out.endswith(
        f"--data {tmp_path}/animals-folds/fold1/data.yaml, and so on to {tmp_path}/animals-folds/fold3/data.yaml\n"
    )
    monkeypatch.setattr(sys, "argv", ["split", "animals", "--folds", "3", "--val", "0.5"])
    with pytest.raises(SystemExit):
        main()
    assert "not allowed with argument --folds" in capsys.readouterr().err
