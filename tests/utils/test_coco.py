"""COCO's results and metrics, with numbers worked out by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.batch import CocoImage
from utils.coco import (
    COCO_METRICS,
    Annotations,
    CocoIds,
    default_ids,
    find_annotations,
    read_annotations,
    report,
    results,
    score,
)
from utils.errors import UserError
from utils.files import ROOT, read_yaml

NAMES = {0: "cat", 1: "dog"}
PATHS = [Path("/data/images/val/000000000009.jpg"), Path("/data/images/val/b.png"), Path("/data/images/val/7.jpg")]


def annotations(**changes: Any) -> dict[str, Any]:
    """Return the annotations of two cats of 40 x 40 pixels in one image and a dog in another."""

    def box(number: int, image: int, category: int, *bbox: float) -> dict[str, Any]:
        area = bbox[2] * bbox[3]
        return {"id": number, "image_id": image, "category_id": category, "bbox": bbox, "area": area, "iscrowd": 0}

    return {
        "images": [
            {"id": number, "file_name": name, "width": 100, "height": 100}
            for number, name in ((9, "000000000009.jpg"), (50, "val/b.png"), (51, "train/b.png"), (8, "other.jpg"))
        ],
        "categories": [{"id": 17, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 4, "name": "bird"}],
        "annotations": [
            box(1, 9, 3, 10, 10, 40, 40),
            box(2, 9, 3, 50, 50, 40, 40),
            box(3, 50, 17, 0, 0, 40, 40),
            box(4, 8, 4, 0, 0, 40, 40),  # of another image and class
        ],
        **changes,
    }


def written(folder: Path, content: Any, name: str = "instances_val.json") -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def detections(image: int, *rows: tuple[float, ...]) -> CocoImage:
    return CocoImage(image, str(PATHS[image]), np.array(rows, np.float64).reshape(-1, 6))


# Results


def test_results_in_order_of_images() -> None:
    ids = CocoIds((3, 17), (9, "b", 7), "")
    rows = results(
        [detections(2), detections(1, (1, 2, 4.00049, 8.5, 0.1234567, 1)), detections(0, (0, 0, 1, 1, 1, 0))], ids
    )
    assert rows == [
        {"image_id": 9, "category_id": 3, "bbox": [0, 0, 1, 1], "score": 1},
        {"image_id": "b", "category_id": 17, "bbox": [1, 2, 3, 6.5], "score": 0.12346},
    ]
    assert json.loads(json.dumps(rows)) == rows


def test_default_ids() -> None:
    ids = default_ids(NAMES, PATHS)
    assert ids.images == (9, "b", 7)
    assert ids.categories == (0, 1)
    assert "numbers of the classes" in ids.origin


def test_cocos_classes_have_cocos_ids() -> None:
    """From instances_val2017.json of https://cocodataset.org."""
    names = read_yaml(ROOT / "data" / "coco128.yaml")["names"]
    ids = default_ids(names, PATHS)
    by_name = dict(zip(names.values(), ids.categories, strict=True))
    known = {"person": 1, "fire hydrant": 11, "stop sign": 13, "bed": 65, "dining table": 67, "toilet": 70, "tv": 72}
    assert {name: by_name[name] for name in known} == known
    assert (by_name["toothbrush"], len(set(ids.categories))) == (90, 80)
    assert "COCO's" in ids.origin


def test_cocos_ids_are_those_of_its_annotations(shared: Path) -> None:
    content = json.loads((shared / "data" / "coco128" / "annotations" / "instances_train2017.json").read_bytes())
    by_name = {one["name"]: one["id"] for one in content["categories"]}
    names = read_yaml(ROOT / "data" / "coco128.yaml")["names"]
    assert [by_name[name] for name in names.values()] == list(default_ids(names, PATHS).categories)


# Annotations


def test_the_annotations_of_a_split(tmp_path: Path) -> None:
    roots, folder = (tmp_path / "none", tmp_path), tmp_path / "annotations"
    paths = [tmp_path / "images" / "val2017" / "1.jpg"]
    file, message = find_annotations(roots, "val", paths)
    assert file is None
    assert "instances_val2017.json" in message
    for other in ("captions_val2017.json", "instances_train2017.json"):
        written(folder, {}, other)
    assert find_annotations(roots, "val", paths)[0] is None
    for name in ("instances_val2014.json", "instances_val2017.json"):
        file = written(folder, {}, name)
        assert find_annotations(roots, "val", paths) == (file, "")
    assert find_annotations(roots, "val", [tmp_path / "images" / "1.jpg"])[0] is None  # ambiguous


def test_ids_of_annotations(tmp_path: Path) -> None:
    """There are two b.png, so folders of a file_name count; an image without annotations has its default id."""
    read = read_annotations(written(tmp_path, annotations()), NAMES, PATHS)
    assert read.ids.images == (9, 50, 7)
    assert read.ids.categories == (3, 17)
    assert read.annotated == {0, 1}
    warnings = [report(read.file, [], NAMES, paths, "best").lines[1:] for paths in (PATHS, PATHS[:2])]
    assert [len(lines) for lines in warnings] == [1, 0]


def test_a_file_in_another_folder_is_recognised_by_its_last_part(tmp_path: Path) -> None:
    images = [
        {"id": 5, "file_name": "train2017/7.jpg"},
        {"id": 6, "file_name": "x/b.png"},
        {"id": 7, "file_name": "y/b.png"},
    ]
    read = read_annotations(written(tmp_path, annotations(images=images)), NAMES, PATHS)
    assert read.annotated == {2}
    assert read.ids.images[2] == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "instances_val"),
        ({"images": []}, "`categories`"),
        (annotations(categories=[{"id": 1, "name": "cat"}, {"id": 2, "name": "dogs"}]), "no category 'dog' .*'dogs'"),
        (annotations(images=[{"id": 1, "file_name": "c.jpg"}]), "none of the 3 images, such as 000000000009.jpg"),
        (
            annotations(images=[{"id": 5, "file_name": "7.jpg"}, {"id": 5, "file_name": "8.jpg"}]),
            "5 .*'7.jpg'.*'8.jpg'",
        ),
        (annotations(images=[{"id": 5, "file_name": "7.jpg"}, {"id": 6, "file_name": "7.jpg"}]), "'7.jpg' .*5 .*6"),
        (annotations(categories=[{"id": 4, "name": "cat"}, {"id": 4, "name": "dog"}]), "4 .*'cat' .*'dog'"),
        # 7.jpg is not in the file, so its id would be 7
        (annotations(images=[{"id": 7, "file_name": "000000000009.jpg"}]), "7 .*000000000009.jpg' .*7.jpg'"),
    ],
)
def test_annotations_that_do_not_fit(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_annotations(written(tmp_path, content), NAMES, PATHS)


def test_annotations_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: .*; give a file"):
        read_annotations(tmp_path / "absent.json", NAMES, PATHS)


# Metrics


def boxes_score(read: Annotations, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    ((_, scores),) = score(read, rows)
    return scores


def test_metrics_by_hand(tmp_path: Path) -> None:
    """One cat of two is detected, with more confidence than a false one; the dog only at IoU 0.6.

    Of COCO's 101 recalls the cats have a precision of 1 at 51.
    """
    read = read_annotations(written(tmp_path, annotations()), NAMES, PATHS)
    rows = results(
        [
            detections(0, (10, 10, 50, 50, 0.9, 0), (0, 60, 40, 100, 0.8, 0)),
            detections(1, (0, 0, 40, 24, 0.9, 1)),
            detections(2, (0, 0, 40, 24, 0.9, 1)),  # of an image without annotations
        ],
        read.ids,
    )
    scores = dict(zip(COCO_METRICS, boxes_score(read, rows), strict=True))
    cat = 51 / 101
    assert scores["AP", "0.50", "all", 100] == pytest.approx((cat + 1) / 2)
    assert scores["AP", "0.75", "all", 100] == pytest.approx((cat + 0) / 2)
    assert scores["AP", "0.50:0.95", "all", 100] == pytest.approx((cat + 0.3) / 2)
    assert scores["AR", "0.50:0.95", "all", 1] == pytest.approx((0.5 + 0.3) / 2)
    assert scores["AP", "0.50:0.95", "small", 100] == -1
    made = report(read.file, [detections(0, (10, 10, 50, 50, 0.9, 0))], NAMES, PATHS, "best")
    document = list(csv.DictReader(made.documents["coco.csv"].splitlines()))
    assert (len(document), document[1]["value"], document[3]["value"]) == (12, f"{cat / 2:.9g}", "")
    assert made.tables[2].split() == ["AP", "0.50", "all", "100", f"{cat / 2:.4f}"]
    assert made.tables[4].split() == ["AP", "0.50:0.95", "small", "100", "-"]


def test_metrics_without_detections(tmp_path: Path) -> None:
    read = read_annotations(written(tmp_path, annotations()), NAMES, PATHS)
    assert boxes_score(read, [])[:3] == [0, 0, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (5, 5, 5, 5), (None, None, None, None)])
def test_ids_of_annotations_change_nothing(ids: tuple[int | None, ...], tmp_path: Path) -> None:
    """Ids from 0, equal ones or none: the evaluator would warn of the first, and count wrongly."""
    content = annotations()
    read = read_annotations(written(tmp_path, content), NAMES, PATHS)
    rows = results([detections(0, (10, 10, 50, 50, 0.9, 0)), detections(1, (0, 0, 40, 40, 0.9, 1))], read.ids)
    content["annotations"] = [{**one, "id": k} for one, k in zip(content["annotations"], ids, strict=True)]
    other = read_annotations(written(tmp_path, content), NAMES, PATHS)
    assert boxes_score(other, rows) == boxes_score(read, rows)


def test_annotations_without_boxes(tmp_path: Path) -> None:
    content = annotations(annotations=[{"id": 1, "image_id": 9, "category_id": 3}])
    read = read_annotations(written(tmp_path, content), NAMES, PATHS)
    with pytest.raises(UserError, match=r"cannot be used .*give a file of COCO annotations"):
        boxes_score(read, results([detections(0, (10, 10, 50, 50, 0.9, 0))], read.ids))


def test_boxes_are_scored_before_masks(tmp_path: Path) -> None:
    """Annotations without outlines are an error of the masks alone."""
    read = read_annotations(written(tmp_path, annotations()), NAMES, PATHS)
    scores = score(read, results([detections(0, (10, 10, 50, 50, 0.9, 0))], read.ids), ["bbox", "segm"])
    assert next(scores)[0] == "bbox"
    with pytest.raises(UserError, match=r"cannot be used .*iscrowd, and segmentation"):
        next(scores)
