"""val.py against YOLOv5's own numbers."""

from __future__ import annotations

from pathlib import Path

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


def test_other_classes_are_refused(shared: Path, small_data: Path, tmp_path: Path, run_script: RunScript) -> None:
    weights = str(shared / "weights" / "yolov5n.pt")
    given = ("--data", str(small_data), "--weights", weights, "--project", str(tmp_path))
    printed = run_script("val.py", *given, "--device", "cpu", fails=True)
    assert "80 classes" in printed
    assert "Traceback" not in printed
