"""Windows of large images: labels and pixels of training, evaluation and detection, on any number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import cache
from data.augment import PADDING_LEVEL
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from data.images import read_image
from models.tasks.contract import Thresholds
from models.tasks.predictions import DetectionPrediction
from predictor import Predictor
from tests.conftest import RunScript
from tests.curves import identical, refused
from tests.making import image_info, noise, plain, write_image, write_yaml
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError

HYP = Hyperparameters(mosaic=1.0, scale=0.2)
SMALL = {"size": 64, "overlap": 0.25}
# Class and xyxy in an image of 160 x 96, whose windows begin at x 0, 48, 96 and y 0, 32: the last is cut to a quarter.
BOXES = np.array(((0, 20, 8, 28, 24), (1, 40, 70, 56, 86), (2, 60, 70, 76, 86)))


def data_of(folder: Path, tiles: Any, imgsz: int = 64, **options: Any) -> DetectionData:
    """Open a set of two images of noise with `BOXES`."""
    rows = [f"{c} {(x + z) / 320} {(y + w) / 192} {(z - x) / 160} {(w - y) / 96}" for c, x, y, z, w in BOXES.tolist()]
    for number in range(0 if (folder / "images").exists() else 2):
        write_image(folder / f"images/{number}.png", noise(160, 96, number), *rows)
    content = {"train": "images", "val": "images", "names": ["a", "b", "c"], "tiles": tiles}
    return DetectionData(read_spec(write_yaml(folder / "data.yaml", content)), imgsz, 32, DataOptions(**options))


def test_labels_of_windows(tmp_path: Path) -> None:
    """Whole, clipped, or under grey: a box of which less than a third is in the window."""
    data = data_of(tmp_path, {**SMALL, "background": 0})
    split = data.split("train", HYP)
    assert split.windows.bounds[:3, :2].tolist() == [[0, 0], [0, 32], [48, 32]]
    boxes = [(split.labels.image_rows(window) * (1, 64, 64, 64, 64)).round(3).tolist() for window in range(3)]
    assert boxes == [[[0, 24, 16, 8, 16]], [[1, 48, 46, 16, 16]], [[1, 4, 46, 8, 16], [2, 20, 46, 16, 16]]]
    loader: Any = data.train_loader(split, 1, HYP, seed=0)
    grey = (loader.dataset.load(1).image == PADDING_LEVEL).all(2)
    assert (grey[38:54, 60:64].all(), grey.sum()) == (True, 64)


def test_background_and_wrong_values(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", plain(1000, 1333), "0 0.01 0.01 0.01 0.01")
    splits = [data_of(tmp_path, {"size": 32, "background": share}).split("train", HYP) for share in (0, 0.25, 1)]
    none, some, every = (len(split.images) for split in splits)
    assert (none, some / every) == (1, pytest.approx(0.25, abs=0.03))
    for wrong in (1024, {}, {"size": 31}, {"size": 64, "overlap": 1}, {"size": 64, "step": 2}):
        with pytest.raises(UserError, match=r"data.yaml: `tiles` must be \{size: 1024\}"):
            data_of(tmp_path, wrong)


def test_pixels_do_not_depend_on_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is decoded once for all of its windows and epochs; on a full disk more often, for the same pixels."""
    decoded, read, usage = [], cache.read_pixels, shutil.disk_usage
    monkeypatch.setattr(cache, "read_pixels", lambda *args: (decoded.append(args[0]), read(*args))[1])

    def epoch(**options: Any) -> list[Any]:
        data = data_of(tmp_path, {**SMALL, "background": 1}, **options)
        return list(data.train_loader(data.split("train", HYP), 4, HYP, seed=3))

    batches = epoch()
    assert (len(batches), len(decoded)) == (3, 2)
    others = [epoch(workers=2), epoch(cache="ram")]  # decode nothing
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "elsewhere")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=0))
    others.append(epoch())
    assert 8 < len(decoded) < 20
    for a, b in ((a, b) for other in others for a, b in zip(batches, other, strict=True)):
        assert torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)  # noqa: PT018


def test_an_evaluation_has_all_windows_of_an_image_in_a_batch(tmp_path: Path) -> None:
    data = data_of(tmp_path, SMALL, imgsz=96)
    split = data.split("val")
    batches = [*data.evaluation_loader(split, data.evaluation_batches(split, 2, square=False))]
    assert [[info.image for info in batch.infos] for batch in batches] == [[0] * 7, [1] * 7]
    for part in (parts := batches[0].parts(3)):
        for number, label, *row in part.targets.tolist():
            info = part.infos[int(number)]
            box = BOXES[int(label), 1:].clip(info.window[:2] * 2, info.window[2:] * 2)
            x1, y1, x2, y2 = box * np.tile(info.placement.scale, 2) + np.tile(info.placement.offset, 2)
            place = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
            assert np.array(row) * 96 == pytest.approx(np.array(place), abs=0.7)
    assert [len(part.targets) for part in parts] == [1, 3, 3]


def test_windows_are_joined() -> None:
    detections = (
        ((80, 20, 110, 40, 0.9, 0), (90, 60, 110, 80, 0.5, 0), (0, 0, 20, 20, 0.3, 1)),
        ((80, 20, 130, 40, 0.6, 0), (150, 10, 199, 99, 0.8, 1), (151, 10, 200, 99, 0.7, 0)),
        ((0, 1, 20, 21, 0.4, 1), (150, 11, 200, 99, 0.2, 1)),
    )
    file = (0, "a.jpg", {0: "a", 1: "b"}, (200, 100))
    left, *others = (
        DetectionPrediction(*file, torch.tensor(rows).double(), np.zeros((0, 5)), 0) for rows in detections
    )
    infos = [image_info(size=(200, 100))._replace(window=(*x, 100)) for x in ((0, 0, 110), (70, 0, 200), (0, 0, 200))]
    joined = left.joined(others, infos, Thresholds(iou_thres=0.6))
    assert joined.scores.tolist() == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])  # 0.9 is part of 0.6's object
    limits = Thresholds(iou_thres=0.6, agnostic_nms=True, max_det=3)
    assert left.joined(others, infos, limits).scores.tolist() == pytest.approx([0.8, 0.6, 0.5])


def test_processes_change_no_byte(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    (data := tmp_path / "tiles.yaml").write_text(f"{small_data.read_text()}\ntiles: {{size: 96, overlap: 0.25}}\n")
    common = ("--data", str(data), "--imgsz", "64", "--project", str(tmp_path))
    new = (
        "--weights",
        "",
        "--epochs",
        "1",
        "--batch-size",
        "32",
        "--logical-processes",
        "2",
        "--workers",
        "1",
        "--cfg",
    )
    weights = ("--weights", str(tmp_path / "1/weights/last.pt"), "--save-json", "--workers", "0")
    refused(run_script("train.py", *common, *new, "yolov5n-seg.yaml", fails=True), "windows of large images")
    for count in ("1", "2"):
        how = ("--device", "cpu", "--processes", count, "--name")
        run_script("train.py", *common, *new, "yolov5n.yaml", *how, count, OMP_NUM_THREADS="1")
        run_script("val.py", *common, *weights, *how, f"val{count}", OMP_NUM_THREADS="1")
    identical(tmp_path / "2", tmp_path / "1")
    for name in ("classes.csv", "last_predictions.json"):
        assert (tmp_path / "val2" / name).read_bytes() == (tmp_path / "val1" / name).read_bytes()


def test_detections_are_in_pixels_of_the_image(learned: Path, drawn: Path) -> None:
    predictor = Predictor(str(learned), imgsz=96, device="cpu", conf_thres=0.05, quiet=True)
    image = np.concatenate([read_image(file)[:, :100] for file in sorted(drawn.parent.rglob("val/*.jpg"))[:2]], 1)
    result = predictor(image[:96], tile=96)
    windows = [predictor(image[:96, x : x + 96]).array + np.array((x, 0, x, 0, 0, 0)) for x in (0, 77, 104)]
    distances = [np.abs(rows[:, None] - result.array).max(2).min(0, initial=np.inf) for rows in windows]
    found = np.min(distances, 0) < 0.1  # the others are the whole image's
    for side in (result.array[:, 2] < 96, result.array[:, 0] >= 96):
        assert found[side][:8].mean() >= 0.5  # of the most confident ones
