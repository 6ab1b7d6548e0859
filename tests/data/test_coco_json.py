"""Tests of splits that name a COCO annotation file: classes, images, rows, and the cache."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import storage
from data.coco_json import Tally, coco_rows, find_images, read_contents
from data.convert import convert_coco
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData, DetectionSplit
from data.label_rows import BOXES, OUTLINES, POLYGONS, RowRules
from data.labels import load_labels
from data.segmentation import SegmentationData
from tests.making import write_image, write_yaml
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import ROOT, read_yaml

SQUARE = [4, 4, 12, 4, 12, 12, 4, 12]
CATEGORIES = [
    {"id": 0, "name": "pieces", "supercategory": "none"},
    {"id": 3, "name": "queen", "supercategory": "pieces"},
    {"id": 1, "name": "pawn", "supercategory": "pieces"},
]


def objects(*rows: tuple[int, int, list[float]], **more: Any) -> list[dict[str, Any]]:
    """Return annotations. rows: image id, category id and box."""
    return [
        {"id": k, "image_id": image, "category_id": category, "bbox": box, "iscrowd": 0, **more}
        for k, (image, category, box) in enumerate(rows)
    ]


def export(folder: Path, **content: Any) -> Path:
    """Write a split as Roboflow's COCO export has it: three images of 20 x 20 beside their annotations."""
    images = [{"id": k, "file_name": f"{k}.png", "width": 20, "height": 20} for k in range(3)]
    for image in images:
        write_image(folder / str(image["file_name"]))
    annotations = objects((0, 1, [4, 4, 8, 8]), (1, 3, [0, 0, 10, 20]), (1, 1, [15, 15, 10, 10]))
    file = folder / "_annotations.coco.json"
    file.write_text(json.dumps({"categories": CATEGORIES, "images": images, "annotations": annotations, **content}))
    return file


def split_of(folder: Path, **content: Any) -> DetectionSplit:
    """Return the training split of a data YAML that names the export in `folder`/train."""
    file = write_yaml(folder / "my.yaml", {"train": "train/_annotations.coco.json", **content})
    return DetectionData(read_spec(file), 32, 32, DataOptions()).split("train")


def test_a_split_has_the_rows_of_its_annotations(tmp_path: Path) -> None:
    export(tmp_path / "train")
    split = split_of(tmp_path)
    assert [image.name for image in split.images] == ["0.png", "1.png", "2.png"]
    assert split.labels.counts.tolist() == [1, 2, 0]
    expected = [[0, 0.4, 0.4, 0.4, 0.4], [1, 0.25, 0.5, 0.5, 1], [0, 0.875, 0.875, 0.25, 0.25]]
    assert split.labels.rows.tolist() == np.array(expected, np.float32).tolist()
    assert split.problems == ()


def test_classes_are_the_categories_by_id_without_an_empty_supercategory(tmp_path: Path) -> None:
    file = export(tmp_path / "train")
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json"}))
    assert spec.names == {0: "pawn", 1: "queen"}
    assert [line.partition(":")[0] for line in spec.warnings] == [str(file)]
    assert "'pieces' has no objects and is the supercategory of others, so it is not a class" in spec.warnings[0]
    export(tmp_path / "train", annotations=objects((0, 0, [4, 4, 8, 8])))
    assert read_contents(file).classes == ["pieces", "pawn", "queen"]  # it has an object now


@pytest.mark.parametrize("names", [(), ("queen", "pieces", "pawn")])
def test_label_files_have_the_classes_of_the_data_set(tmp_path: Path, names: tuple[str, ...]) -> None:
    file = export(tmp_path / "train")
    split = split_of(tmp_path, **({"names": list(names)} if names else {}))
    classes = convert_coco(file, tmp_path / "labels", names)[1]
    assert classes == list(read_spec(tmp_path / "my.yaml").names.values())
    for k, image in enumerate(split.images):
        written = tmp_path / f"labels/{image.stem}.txt"
        rows = [list(map(float, row.split())) for row in written.read_text().splitlines()] if written.exists() else []
        assert split.labels.of(k) == pytest.approx(np.array(rows, np.float32).reshape(-1, 5))


def test_a_problem_names_the_annotation(tmp_path: Path) -> None:
    twice = [*objects((0, 1, [4, 4, 8, 8]), (0, 1, [0, 0, 0, 8]), (0, 3, [0, 0, 4, 4]), (0, 1, [4, 4, 8, 8]))]
    file = export(tmp_path / "train", annotations=[{**item, "id": 70 + item["id"]} for item in twice])
    assert f"{file}: annotation 73: the same box again; row left out" in split_of(tmp_path).problems
    line = objects((0, 1, [4, 4, 8, 8]), segmentation=[[4, 4, 8, 8, 12, 12]])
    export(tmp_path / "train", annotations=[*line, *objects((1, 1, [4, 4, 8, 8]))])
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json"}))
    problems = SegmentationData(spec, 32, 32, DataOptions()).split("train").problems
    assert problems[1] == f"{file}: annotation 0: the outline has no area; row left out"
    assert problems[2] == f"annotations of {file.parent}/0.png: no row can be used; its image is left out"


def test_names_select_classes_by_name(tmp_path: Path) -> None:
    export(tmp_path / "train")
    split = split_of(tmp_path, names=["queen", "pieces"])
    assert split.labels.rows[:, 0].tolist() == [0]
    assert "left out: 2 boxes of categories that are not in `names`" in split.problems[0]
    split = split_of(tmp_path, names=["queen", "pawns"])
    assert "no category 'pawns' (did you mean 'pawn'?)" in split.problems[0]
    with pytest.raises(UserError, match="no category 'rook', nor any other of the data set's `names`"):
        split_of(tmp_path, names=["rook"])


def test_crowds_are_left_out_and_are_no_problem(tmp_path: Path) -> None:
    crowd = objects((0, 1, [0, 0, 20, 20]), iscrowd=1)
    export(tmp_path / "train", annotations=[*objects((0, 1, [4, 4, 8, 8])), *crowd])
    split = split_of(tmp_path)
    assert (len(split.labels.rows), split.problems) == (1, ())


@pytest.mark.parametrize("images", ["pictures", {"train": "pictures"}, None])
def test_images_are_searched_for_in_the_stated_folder_and_in_that_of_coco(tmp_path: Path, images: Any) -> None:
    file = export(tmp_path / "annotations")
    folder = tmp_path / ("pictures" if images else "images/train2017")
    for image in file.parent.glob("*.png"):
        folder.mkdir(parents=True, exist_ok=True)
        image.rename(folder / image.name)
    content = {"train": f"annotations/{file.name}", **({"images": images} if images else {})}
    spec = read_spec(write_yaml(tmp_path / "my.yaml", content))
    assert spec.images("train") == [folder / f"{k}.png" for k in range(3)]
    assert spec.annotation_file("train") == file


def test_missing_images_are_counted(tmp_path: Path) -> None:
    file = export(tmp_path / "train")
    (tmp_path / "train/1.png").unlink()
    split = split_of(tmp_path)
    assert len(split.images) == 2
    assert f"{file}: 1 of its images do not exist, such as 1.png" in split.problems[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": "train/_annotations.coco.json", "images": 3}, "`images` must be a folder"),
        ({"train": "train/_annotations.coco.json", "images": {"trian": "x"}}, "`images` must be a folder"),
    ],
)
def test_wrong_folders_of_images_are_an_error(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_spec(write_yaml(tmp_path / "my.yaml", content))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"images": [], "categories": [{"id": "x", "name": "a"}], "annotations": []}', r"\$\.categories\[0\]\.id"),
        ('{"images": [], "categories": [], "annotations": []}', "has no categories"),
        ("[]", "is not a COCO annotation file of objects"),
    ],
)
def test_damaged_annotations_are_an_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=rf"a\.json .*{message}"):
        read_contents(tmp_path / "a.json")


def test_outlines_are_the_masks_of_a_segmenter(tmp_path: Path) -> None:
    export(tmp_path / "train", annotations=objects((0, 1, [4, 4, 8, 8]), segmentation=[SQUARE]))
    file = write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json"})
    split = SegmentationData(read_spec(file), 32, 32, DataOptions()).split("train", Hyperparameters())
    assert split.labels.polygons is not None
    assert (split.labels.polygons.points * 20).tolist() == np.array(SQUARE, np.float32).reshape(-1, 2).tolist()


@pytest.mark.parametrize("kind", [DetectionData, SegmentationData])
def test_a_share_of_its_images_is_held_out(tmp_path: Path, kind: type[DetectionData]) -> None:
    items = objects(*((image, 1, [4, 4, 8, 8]) for image in range(3)), segmentation=[SQUARE])
    file = export(tmp_path / "train", annotations=items)
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json", "split": 0.4}))
    train, val = (kind(spec, 32, 32, DataOptions()).split(name) for name in ("train", "val"))
    assert sorted(path.name for path in [*train.images, *val.images]) == ["0.png", "1.png", "2.png"]
    assert (train.labels.counts.tolist(), val.labels.counts.tolist()) == ([1, 1], [1])
    assert spec.annotation_file("val") == file


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = export(tmp_path / "train")
    first = split_of(tmp_path)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(storage, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
        again = split_of(tmp_path)
    assert np.array_equal(again.labels.rows, first.labels.rows)
    export(tmp_path / "train", annotations=objects((0, 3, [4, 4, 8, 8])))
    assert split_of(tmp_path).labels.rows[:, 0].tolist() == [1]
    status = file.stat()
    file.write_text(file.read_text().replace('"category_id": 3', '"category_id": 1'))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size, too
    assert split_of(tmp_path).labels.rows[:, 0].tolist() == [0]


def test_training_reads_the_annotations_instead_of_label_files(tmp_path: Path) -> None:
    file = export(tmp_path / "train")
    (tmp_path / "plain/images").mkdir(parents=True)
    image = write_image(tmp_path / "plain/images/a.png", None, "0 0.5 0.5 0.5 0.5")
    entries = [str(file), str(image.parent)]
    spec = read_spec(write_yaml(tmp_path / "my.yaml", {"train": entries, "val": str(file)}))
    files = DetectionData.files(spec)
    assert files["labels of train"] == [file, tmp_path / "plain/labels/a.txt"]
    assert (len(files["train"]), files["labels of val"]) == (4, [file])
    assert spec.annotation_file("train") is None
    split = DetectionData(spec, 32, 32, DataOptions()).split("train")
    assert split.labels.counts.tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("rules", [BOXES, POLYGONS, OUTLINES])
def test_coco128_is_the_same_from_annotations_and_from_label_files(
    shared: Path, tmp_path: Path, rules: RowRules
) -> None:
    file = shared / "data/coco128/annotations/instances_train2017.json"
    convert_coco(file, tmp_path / "labels", polygons=rules.outlines)
    (tmp_path / "images").symlink_to(shared / "data/coco128/images/train")
    names = list(read_yaml(ROOT / "data/coco128.yaml")["names"].values())
    annotated, problems = find_images(file, [tmp_path / "images"], names)
    assert read_contents(file).classes == names
    assert problems == []
    images = [Path(path) for path in sorted(annotated.images)]
    one, other = (load_labels(images, "", 0, rules, given) for given in ((), [annotated]))
    assert (one.problems, len(images), len(one.rows)) == (other.problems, 128, 929)
    for field in ("rows", "offsets", "sizes"):
        assert np.array_equal(getattr(one, field), getattr(other, field))
    if one.polygons and other.polygons:
        assert np.array_equal(one.polygons.points, other.polygons.points)
        assert np.array_equal(one.polygons.offsets, other.polygons.offsets)


def masked(counts: str | list[int], size: list[int]) -> dict[str, Any]:
    return {"segmentation": {"counts": counts, "size": size}}


@pytest.mark.parametrize("size", [[40_000, 40_000], [0, 0], [20, 21], [10, 10]])
def test_a_mask_of_another_size_than_its_image_takes_no_memory(tmp_path: Path, size: list[int]) -> None:
    right = objects((1, 3, [0, 0, 10, 20]), **masked([0, 200, 200], [20, 20]))
    wrong = objects((0, 1, [4, 4, 8, 8]), **masked([size[0] * size[1]], size))
    file = export(tmp_path / "train", annotations=[*right, *wrong])
    tally = Tally()
    tracemalloc.start()
    rows = [row for each in coco_rows(file, ["pieces", "pawn", "queen"], tally, polygons=True) for row in each.rows]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert tally["masks of another size than their image"] == 1
    assert peak < 2**24


def images_of(*images: tuple[int, str]) -> list[dict[str, Any]]:
    """Return entries of 20 x 20 pixels. images: id and file name."""
    return [{"id": number, "file_name": name, "width": 20, "height": 20} for number, name in images]


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


def test_entries_that_are_repeated_count_once(tmp_path: Path) -> None:
    images = images_of(*((k, f"{k}.png") for k in range(3)))
    export(tmp_path / "train")
    once = split_of(tmp_path)
    export(tmp_path / "train", images=images * 2, categories=CATEGORIES * 2)
    twice = split_of(tmp_path)
    assert twice.labels.rows.tolist() == once.labels.rows.tolist()
    assert (twice.labels.counts.tolist(), twice.problems) == ([1, 2, 0], ())


def test_key_points_of_label_files_change_no_outline_of_annotations(tmp_path: Path) -> None:
    export(tmp_path / "train", annotations=objects((0, 1, [4, 4, 8, 8]), segmentation=[SQUARE]))
    file = write_yaml(tmp_path / "my.yaml", {"train": "train/_annotations.coco.json", "kpt_shape": [2, 2]})
    split = SegmentationData(read_spec(file), 32, 32, DataOptions()).split("train", Hyperparameters())
    assert split.labels.polygons is not None
    assert (split.labels.polygons.points * 20).tolist() == np.array(SQUARE, np.float32).reshape(-1, 2).tolist()


def test_an_image_of_another_shape_than_its_annotation_says_is_left_out(tmp_path: Path) -> None:
    images = [{"id": k, "file_name": f"{k}.png", "width": (20, 40, 40)[k], "height": (20, 40, 20)[k]} for k in range(3)]
    export(tmp_path / "train", images=images)
    split = split_of(tmp_path)
    assert [image.name for image in split.images] == ["0.png", "1.png"]  # 1.png is only smaller
    assert split.problems[0].endswith("2.png: 20x20 pixels, but its annotation is for 40x20; left out")


def test_categories_of_one_name_are_one_class_with_a_warning(tmp_path: Path) -> None:
    categories = [{"id": 1, "name": "pawn"}, {"id": 2, "name": "queen"}, {"id": 3, "name": "pawn"}]
    export(tmp_path / "train", categories=categories)
    split = split_of(tmp_path, names=["pawn", "queen"])
    assert set(split.labels.rows[:, 0]) == {0}
    assert "several categories are named 'pawn'; they are one class" in split.problems[0]


@pytest.mark.parametrize("name", ["../secret.png", "a/../../secret.png", "{}/secret.png", "/etc/passwd"])
def test_images_outside_of_the_data_set_are_left_out(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / "secret.png")
    name = name.format(tmp_path)
    file = export(tmp_path / "data/train")
    inside = {"id": 1, "file_name": str(tmp_path / "data/train/../train/1.png"), "width": 20, "height": 20}
    export(tmp_path / "data/train", images=[{"id": 0, "file_name": name, "width": 20, "height": 20}, inside])
    split = split_of(tmp_path / "data")
    assert list(split.images) == [file.parent / "1.png"]
    assert f"{file}: 1 of its images are outside of the data set, such as {name}; left out" in split.problems
