"""Runs on windows of large images: the same bytes on any number of processes, and detections in the image's pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from data.images import read_image
from data.tiles import Tiles
from detect import Predictor
from models.tasks.contract import Thresholds
from models.tasks.predictions import DetectionPrediction
from tests.conftest import RunScript
from tests.curves import identical, refused
from tests.making import image_info, write_yaml
from utils.batch import ImageInfo


@pytest.fixture(scope="module")
def tiled(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 160 px in windows of 96."""
    content = {**yaml.safe_load(small_data.read_text()), "tiles": {"size": 96, "overlap": 0.25}}
    return write_yaml(tmp_path_factory.mktemp("tiled") / "tiled.yaml", content)


def test_processes_change_no_byte(run_script: RunScript, tiled: Path, tmp_path: Path) -> None:
    """Of a training with its validation; val.py has the same metrics, and whole images score differently."""
    what = ("--data", str(tiled), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--epochs", "1")
    how = ("--batch-size", "32", "--workers", "1", "--device", "cpu", "--logical-processes", "2", "--save-steps", "1")
    for count in ("1", "2"):
        flags = ("--project", str(tmp_path), "--name", count, "--processes", count)
        run_script("train.py", *what, *how, *flags, OMP_NUM_THREADS="1")
    identical(tmp_path / "2", tmp_path / "1")
    for count in ("1", "2"):
        flags = (
            "--weights",
            str(tmp_path / "1/weights/last.pt"),
            "--data",
            str(tiled),
            "--imgsz",
            "64",
            "--device",
            "cpu",
        )
        flags += ("--project", str(tmp_path), "--name", f"val{count}", "--workers", "0", "--processes", count)
        run_script("val.py", *flags, "--save-json", OMP_NUM_THREADS="1")
    for name in ("classes.csv", "confusion_matrix.csv", "last_predictions.json"):
        assert (tmp_path / "val2" / name).read_bytes() == (tmp_path / "val1" / name).read_bytes()
    results = [yaml.safe_load((tmp_path / f"val{count}/receipt.yaml").read_text())["results"] for count in "12"]
    assert results[0] == results[1]


def prediction(*detections: tuple[float, ...], size: tuple[int, int] = (200, 100)) -> DetectionPrediction:
    rows = torch.tensor(detections, dtype=torch.float64).reshape(-1, 6)
    return DetectionPrediction(0, "a.jpg", {0: "a", 1: "b"}, size, rows, np.zeros((0, 5), np.float32), 0.6)


def window(left: int, right: int) -> ImageInfo:
    return image_info(size=(200, 100))._replace(window=(left, 0, right, 100))


def test_windows_are_joined() -> None:
    left = prediction((80, 20, 110, 40, 0.9, 0), (90, 60, 110, 80, 0.5, 0), (0, 0, 20, 20, 0.3, 1))
    right = prediction((80, 20, 130, 40, 0.6, 0), (150, 10, 199, 99, 0.8, 1), (151, 10, 200, 99, 0.7, 0))
    whole = prediction((0, 1, 20, 21, 0.4, 1), (150, 11, 200, 99, 0.2, 1))
    infos = [window(0, 110), window(70, 200), window(0, 200)]

    def joined(**limits: object) -> list[tuple[float, float]]:
        made = left.joined([right, whole], infos, Thresholds(iou_thres=0.6, **limits)).rows  # type: ignore[arg-type]
        return [(row[4], row[0]) for row in made.tolist()]

    expected = [(0.8, 150), (0.7, 151), (0.6, 80), (0.5, 90), (0.4, 0)]  # not the more confident part of 0.6's object
    assert joined() == expected
    assert joined(max_det=2) == expected[:2]
    assert joined(agnostic_nms=True) == [expected[0], *expected[2:]]


def test_detections_are_in_pixels_of_the_image(learned: Path, drawn: Path) -> None:
    """Each is one of a window's, at its place, or of the whole image's."""
    predictor = Predictor(str(learned), imgsz=96, device="cpu", conf_thres=0.05, quiet=True)
    a, b, *_ = sorted((drawn.parent / "drawn/images/val").glob("*.jpg"))
    image = np.concatenate((read_image(a), read_image(b)[:, :70]), 1)[:150, :, ::-1]
    result = predictor(image, tile=96)
    assert len(result) > 3
    assert result.size == (230, 150)
    assert np.array_equal(predictor(image[:96, :96], tile=96).array, predictor(image[:96, :96]).array)
    candidates = [predictor(image).array]
    for left, top, right, bottom in Tiles(96).bounds(230, 150, with_whole=False).tolist():
        corner = np.array((left, top, left, top, 0, 0))
        candidates.append(predictor(image[top:bottom, left:right]).array + corner)
    distances = [np.abs(rows[:, None] - result.array).max(2).min(0, initial=np.inf) for rows in candidates]
    assert (np.min(distances, 0) < 4).all()  # the whole image is padded otherwise
    assert (np.min(distances[1:], 0) < 0.1).sum() > 3
    assert (distances[-1] < 0.1).any()
    predictor.tile = 96
    assert np.array_equal(predictor(image).array, result.array)


def test_refusals(run_script: RunScript, tiled: Path, tmp_path: Path) -> None:
    flags = ("--data", str(tiled), "--weights", "", "--cfg", "yolov5n-seg.yaml", "--project", str(tmp_path / "runs"))
    refused(run_script("train.py", *flags, fails=True), "its results of windows are not joined")
    assert not (tmp_path / "runs").exists()
