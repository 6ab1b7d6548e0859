"""val.py against YOLOv5's own numbers."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import RunScript

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def coco128(shared: Path, tmp_path: Path) -> Path:
    """A data YAML for the 128 photos."""
    names = yaml.safe_load((ROOT / "data" / "coco128.yaml").read_text())["names"]
    file = tmp_path / "photos.yaml"
    content = {"path": str(shared / "data" / "coco128"), "train": "images/train", "val": "images/train", "names": names}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.parametrize(
    ("flags", "map50", "map50_95"), [((), 0.5597, 0.3608), (("--square",), 0.5515, 0.3557)], ids=["rect", "square"]
)
def test_official_weights(
    flags: tuple[str, ...],
    map50: float,
    map50_95: float,
    coco128: Path,
    shared: Path,
    tmp_path: Path,
    run_script: RunScript,
) -> None:
    """The official nano on coco128 at 640, conf 0.001, iou 0.6; the reference is YOLOv5's own val.py."""
    before = {path: path.stat().st_mtime_ns for path in (shared / "data" / "coco128").rglob("*")}
    given = ("--data", str(coco128), "--weights", str(shared / "weights" / "yolov5n.pt"), "--project", str(tmp_path))
    printed = run_script("val.py", *given, "--device", "cpu", "--save-txt", "--save-conf", *flags)
    overall = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["all"])
    assert overall[1:3] == ["128", "929"]
    assert float(overall[5]) == pytest.approx(map50, abs=0.003)
    assert float(overall[6]) == pytest.approx(map50_95, abs=0.003)
    texts = list((tmp_path / "exp" / "labels").glob("*.txt"))
    assert len(texts) == 128
    assert all(len(line.split()) == 6 for text in texts for line in text.read_text().splitlines())
    assert {path: path.stat().st_mtime_ns for path in (shared / "data" / "coco128").rglob("*")} == before
    check_documents(tmp_path / "exp", [float(value) for value in overall[3:]])


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def check_documents(run: Path, overall: list[float]) -> None:
    """What is written agrees with the table's row of all classes, and with itself."""
    classes = read_csv(run / "classes.csv")
    labelled = [row for row in classes if row["AP50"]]
    assert (len(classes), len(labelled)) == (80, 71)
    for column, value in zip(("precision", "recall", "AP50", "AP50-95"), overall, strict=True):
        assert np.mean([float(row[column]) for row in labelled]) == pytest.approx(value, abs=1e-4)

    rows = read_csv(run / "confusion_matrix.csv")
    names = [*(row["class"] for row in classes), "background"]
    assert [row.pop("true \\ predicted") for row in rows] == names
    counts = np.array([list(row.values()) for row in rows], int)
    assert counts[:-1].sum(1).tolist() == [int(row["instances"]) for row in classes]
    assert counts[-1, -1] == 0
    confident = sum(float(line.split()[5]) > 0.25 for text in (run / "labels").glob("*.txt") for line in text.open())
    assert counts[:, :-1].sum() == confident
    assert np.trace(counts) > 0.4 * counts[:-1].sum() > counts[-1].sum()  # many are found, and few are made up

    curves = defaultdict(list)
    for row in read_csv(run / "PR_curve.csv"):
        curves[row["class"]].append((float(row["recall"]), float(row["precision"])))
    assert list(curves) == [row["class"] for row in labelled]
    for row in labelled:
        recall, precision = zip(*curves[row["class"]], strict=True)
        assert np.trapezoid(precision, recall) == pytest.approx(float(row["AP50"]), abs=0.01)
    assert len(read_csv(run / "curves.csv")) == 71 * 201


def test_other_classes_are_refused(shared: Path, small_data: Path, tmp_path: Path, run_script: RunScript) -> None:
    weights = str(shared / "weights" / "yolov5n.pt")
    given = ("--data", str(small_data), "--weights", weights, "--project", str(tmp_path))
    printed = run_script("val.py", *given, "--device", "cpu", fails=True)
    assert "80 classes" in printed
    assert "Traceback" not in printed
