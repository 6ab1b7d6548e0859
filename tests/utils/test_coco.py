"""COCO's results and metrics, with numbers worked out by hand."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.batch import CocoImage
from utils.coco import COCO_METRICS, CocoIds, annotated_ids, default_ids, metrics, report, results
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
            for number, name in ((9, "000000000009.jpg"), (50, "val/b.png"), (51, "train/b.png"), (8, "7.png"))
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


def written(folder: Path, content: Any) -> Path:
    file = folder / "instances_val.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def detections(image: int, *rows: tuple[float, ...]) -> CocoImage:
    return CocoImage(image, str(PATHS[image]), np.array(rows, np.float64).reshape(-1, 6))


def test_results_in_order_of_images() -> None:
    """Without those of images that the annotations lack."""
    found = [detections(2, (0, 0, 1, 1, 1, 0)), detections(1, (1, 2, 4.00049, 8.5, 0.1234567, 1))]
    rows = results([*found, detections(0, (0, 0, 1, 1, 1, 0))], CocoIds((3, 17), (9, "b", None), ""))
    assert rows == [
        {"image_id": 9, "category_id": 3, "bbox": [0, 0, 1, 1], "score": 1},
        {"image_id": "b", "category_id": 17, "bbox": [1, 2, 3, 6.5], "score": 0.12346},
    ]
    assert json.loads(json.dumps(rows)) == rows


def test_default_ids() -> None:
    """COCO's classes have the ids of instances_val2017.json of https://cocodataset.org."""
    assert default_ids(NAMES, PATHS)[:2] == ((0, 1), (9, "b", 7))
    names = read_yaml(ROOT / "data" / "coco128.yaml")["names"]
    by_name = dict(zip(names.values(), default_ids(names, PATHS).categories, strict=True))
    known = {"person": 1, "fire hydrant": 11, "stop sign": 13, "bed": 65, "dining table": 67, "toilet": 70, "tv": 72}
    assert {name: by_name[name] for name in known} == known
    assert (by_name["toothbrush"], len({*by_name.values()})) == (90, 80)


def test_ids_of_annotations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are two b.png, so folders of a file_name count."""
    file = written(tmp_path, annotations())
    assert annotated_ids(file, NAMES, PATHS)[:2] == ((3, 17), (9, 50, None))
    for some, warnings in ((PATHS, 1), (PATHS[:2], 0)):
        report(len, file, True, [], NAMES, some, "best")
        assert capsys.readouterr().out.count("warning: ") == warnings


def images(*pairs: tuple[int, str]) -> dict[str, Any]:
    return annotations(images=[{"id": number, "file_name": name} for number, name in pairs])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "instances_val"),
        ([], "instances_val"),
        ({"images": []}, "`categories`"),
        (None, "instances_val"),
        (annotations(categories=[{"id": 1, "name": "cat"}, {"id": 2, "name": "dogs"}]), "'dog' .*'dogs'"),
        (annotations(categories=[{"id": 4, "name": "cat"}, {"id": 4, "name": "dog"}]), "4 .*'cat' .*'dog'"),
        (images((1, "c.jpg")), "000000000009.jpg"),
        (images((5, "7.jpg"), (5, "8.jpg")), "5 .*'7.jpg'.*'8.jpg'"),
        (images((5, "7.jpg"), (6, "7.jpg")), "'7.jpg' .*5 .*6"),
    ],
)
def test_annotations_that_do_not_fit(content: Any, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, content)
    if content is None:
        file.unlink()
    with pytest.raises(UserError, match=message):
        annotated_ids(file, NAMES, PATHS)


def test_two_images_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a/7\.jpg.*b/7\.jpg"):
        annotated_ids(written(tmp_path, images((5, "7.jpg"))), NAMES, [Path("/a/7.jpg"), Path("/b/7.jpg")])


def scores(file: Path, *found: CocoImage) -> dict[Any, float]:
    ids = annotated_ids(file, NAMES, PATHS)
    ((_, values),) = metrics(file, ids, results(found, ids))
    return dict(zip(COCO_METRICS, values, strict=True))


def test_metrics_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cat of two is detected, with more confidence than a false one; the dog only at IoU 0.6.

    Of COCO's 101 recalls the cats have a precision of 1 at 51.
    """
    file, cat = written(tmp_path, annotations()), 51 / 101
    cats = detections(0, (10, 10, 50, 50, 0.9, 0), (0, 60, 40, 100, 0.8, 0))
    absent = detections(2, (0, 0, 40, 24, 0.9, 1))  # of an image without annotations
    made = scores(file, cats, detections(1, (0, 0, 40, 24, 0.9, 1)), absent)
    assert made["AP", "0.50", "all", 100] == pytest.approx((cat + 1) / 2)
    assert made["AP", "0.75", "all", 100] == pytest.approx((cat + 0) / 2)
    assert made["AP", "0.50:0.95", "all", 100] == pytest.approx((cat + 0.3) / 2)
    assert made["AR", "0.50:0.95", "all", 1] == pytest.approx((0.5 + 0.3) / 2)
    assert made["AP", "0.50:0.95", "small", 100] == -1
    assert [*scores(file).values()][:3] == [0, 0, 0]  # no detections
    documents: dict[str, str] = {}
    report(documents.update, file, True, [detections(0, (10, 10, 50, 50, 0.9, 0))], NAMES, PATHS, "best")
    table = list(csv.DictReader(documents["coco.csv"].splitlines()))
    assert (len(table), float(table[1]["value"]), table[3]["value"]) == (12, pytest.approx(cat / 2), "")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["AP", "0.50", "all", "100", f"{cat / 2:.3f}"] in printed
    assert ["AP", "0.50:0.95", "small", "100"] in printed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (5, 5, 5, 5), (None, None, None, None)])
def test_ids_of_annotations_change_nothing(ids: tuple[int | None, ...], tmp_path: Path) -> None:
    """Ids from 0, equal ones or none: the evaluator would warn of the first, and count wrongly."""
    content, found = annotations(), (detections(0, (10, 10, 50, 50, 0.9, 0)), detections(1, (0, 0, 40, 40, 0.9, 1)))
    expected = scores(written(tmp_path, content), *found)
    content["annotations"] = [{**one, "id": k} for one, k in zip(content["annotations"], ids, strict=True)]
    assert scores(written(tmp_path, content), *found) == expected


def test_annotations_that_cannot_be_scored(tmp_path: Path) -> None:
    """Boxes are scored before masks, so that missing outlines are an error of the masks alone."""
    file, found = written(tmp_path, annotations()), detections(0, (10, 10, 50, 50, 0.9, 0))
    ids = annotated_ids(file, NAMES, PATHS)
    made = metrics(file, ids, results([found._replace(masks=[{"size": [100, 100], "counts": "0"}])], ids))
    assert next(made)[0] == "bbox"
    with pytest.raises(UserError, match="segmentation"):
        next(made)
    without = written(tmp_path, annotations(annotations=[{"id": 1, "image_id": 9, "category_id": 3}]))
    with pytest.raises(UserError, match="instances_val"):
        scores(without, found)


def test_results_are_written_even_if_annotations_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such annotations are an error if the command line names them, else a warning."""
    wrong, found = written(tmp_path, "{"), [detections(2, (0, 0, 2, 1, 0.5, 0))]
    for named_by_user in (False, True):
        documents: dict[str, str] = {}
        with pytest.raises(UserError, match="instances_val") if named_by_user else nullcontext():
            report(documents.update, wrong, named_by_user, found, NAMES, PATHS, "best")
        (row,) = json.loads(documents.pop("best_predictions.json"))
        assert row == {"image_id": 7, "category_id": 0, "bbox": [0, 0, 2, 1], "score": 0.5}
        assert (documents, "instances_val" in capsys.readouterr().out) == ({}, not named_by_user)
