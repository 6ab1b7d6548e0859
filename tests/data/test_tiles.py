"""Windows of large images: their labels and pixels in training, and their place in an evaluation."""

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
from data.tiles import Tiles
from tests.making import noise, plain, write_image, write_yaml
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError

HYP = Hyperparameters(mosaic=1.0, scale=0.2)
# Boxes of an image of 160 x 96 in windows of 64 that begin at x 0, 48, 96 and y 0, 32: inside of one window in a row,
# cut into a half and a quarter by x = 48 and x = 64, and larger than any window.
ROWS = ((0, 20, 8, 28, 24), (1, 40, 70, 56, 86), (2, 60, 70, 76, 86))


def data_of(folder: Path, tiles: dict[str, Any], imgsz: int = 64, **options: Any) -> DetectionData:
    content = {"train": "images", "val": "images", "names": ["a", "b", "c"], "tiles": tiles}
    return DetectionData(read_spec(write_yaml(folder / "data.yaml", content)), imgsz, 32, DataOptions(**options))


def write(folder: Path, name: str, pixels: np.ndarray, *boxes: tuple[int, ...]) -> None:
    """Write an image and its boxes: class and xyxy in pixels."""
    height, width = pixels.shape[:2]
    rows = [
        f"{label} {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {(x2 - x1) / width} {(y2 - y1) / height}"
        for label, x1, y1, x2, y2 in boxes
    ]
    write_image(folder / f"images/{name}.png", pixels, *rows)


def epoch_of(data: DetectionData) -> list[Any]:
    return list(data.train_loader(data.split("train", HYP), 4, HYP, seed=3))


@pytest.mark.parametrize(("width", "height"), [(64, 64), (65, 64), (160, 96), (1000, 333), (40, 300)])
def test_windows_cover_the_image(width: int, height: int) -> None:
    bounds = Tiles(64, 0.25).bounds(width, height, with_whole=True).tolist()
    if max(width, height) > 64:
        assert bounds.pop() == [0, 0, width, height]
    covered = np.zeros((height, width), int)
    for left, top, right, bottom in bounds:
        assert (right - left, bottom - top) == (min(width, 64), min(height, 64))
        covered[top:bottom, left:right] += 1
    assert covered.min() == 1
    lefts = sorted({window[0] for window in bounds})
    assert max(np.diff(lefts), default=0) <= 48  # neighbours share a quarter
    assert len(bounds) == len({tuple(window) for window in bounds})


def test_labels_of_windows(tmp_path: Path) -> None:
    """Whole, clipped, and hidden: no box of which less than a third is in the window."""
    write(tmp_path, "a", plain(160, 96), *ROWS)
    data = data_of(tmp_path, {"size": 64, "overlap": 0.25, "background": 0})
    split = data.split("train", HYP)
    assert split.windows
    boxes = {}
    for window, (left, top, *_) in enumerate(split.windows.bounds.tolist()):
        rows = split.labels.image_rows(window) * np.array((1, 64, 64, 64, 64))
        corners = np.concatenate((rows[:, :1], rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2), 1)
        boxes[left, top] = corners.round(3).tolist()
    assert boxes == {
        (0, 0): [[0, 20, 8, 28, 24]],
        (0, 32): [[1, 40, 38, 56, 54]],  # of the third box a quarter is there
        (48, 32): [[1, 0, 38, 8, 54], [2, 12, 38, 28, 54]],
    }
    image = data.train_loader(split, 1, HYP, seed=0).dataset.load(1).image  # type: ignore[attr-defined]
    grey = (image == PADDING_LEVEL).all(2)
    assert grey[38:54, 60:64].all()
    assert grey.sum() == 16 * 4  # nothing else
    assert split.display_image(1, 100).shape == (64, 64, 3)
    every = data_of(tmp_path, {"size": 64, "overlap": 0.25, "background": 1}).split("train", HYP)
    assert len(every.images) == 6
    assert every.identity()["labels"] != split.identity()["labels"]


def test_a_share_of_the_background(tmp_path: Path) -> None:
    write(tmp_path, "a", plain(1600, 1600), (0, 2, 2, 20, 20))
    counts = [len(data_of(tmp_path, {"size": 32, "background": k}).split("train", HYP).images) for k in (0, 0.25, 1)]
    assert counts[0] == 1
    assert counts[1] / counts[2] == pytest.approx(0.25, abs=0.03)


def test_pixels_do_not_depend_on_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is decoded once for all of its windows and epochs; on a full disk more often, for the same pixels."""
    for number in range(3):
        write(tmp_path, str(number), noise(200, 150, number), (0, 10, 10, 60, 60), (1, 90, 50, 190, 140))
    decoded, read = [], cache.read_image
    monkeypatch.setattr(cache, "read_image", lambda path: (decoded.append(path), read(path))[1])
    data, usage = data_of(tmp_path, {"size": 100, "background": 1}), shutil.disk_usage
    batches = epoch_of(data)
    assert len(decoded) == 3
    assert len(batches) == 5  # 18 windows
    with monkeypatch.context() as full:
        full.setattr(cache, "cache_folder", lambda: tmp_path / "elsewhere")
        full.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=0))
        others = [epoch_of(data)]
    assert len(decoded) > 10
    del decoded[:]
    others += [
        epoch_of(data_of(tmp_path, {"size": 100, "background": 1}, **how)) for how in ({"workers": 2}, {"cache": "ram"})
    ]
    assert not decoded
    for other in others:
        assert all(torch.equal(a.images, b.images) for a, b in zip(batches, other, strict=True))
        assert all(torch.equal(a.targets, b.targets) for a, b in zip(batches, other, strict=True))


def test_an_evaluation_has_all_windows_of_an_image_in_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their placements map the image's labels to the windows' targets; a small image is as without `tiles`."""
    write(tmp_path, "a", noise(160, 96), *ROWS)
    write(tmp_path, "b", noise(50, 40), (0, 5, 5, 30, 30))
    decoded, read = [], cache.read_image
    monkeypatch.setattr(cache, "read_image", lambda path: (decoded.append(path), read(path))[1])
    data = data_of(tmp_path, {"size": 64, "overlap": 0.25}, imgsz=96)
    split = data.split("val")
    a, b = data.evaluation_loader(split, data.evaluation_batches(split, 2, square=False))
    assert len(decoded) == 2
    assert [info.image for info in a.infos] == [0] * 7
    assert a.infos[-1].window == (0, 0, 160, 96)
    assert {info.size for info in a.infos} == {(160, 96)}
    found = 0
    for number, info in enumerate(a.infos):
        (scale, _), (x, y) = info.placement
        assert info.rows.tolist() == split.labels.image_rows(0).tolist()
        for label, *box in a.targets[a.targets[:, 0] == number, 1:].tolist():
            _, x1, y1, x2, y2 = ROWS[int(label)]
            left, top, right, bottom = info.window
            x1, y1, x2, y2 = max(x1, left), max(y1, top), min(x2, right), min(y2, bottom)
            place = ((x1 + x2) / 2 * scale + x, (y1 + y2) / 2 * scale + y, (x2 - x1) * scale, (y2 - y1) * scale)
            assert np.array(box) * 96 == pytest.approx(np.array(place), abs=0.7)
            found += 1
    assert found == 4 + 3
    assert [info.image for info in b.infos] == [1]
    parts = a.parts(3)
    assert [len(part.infos) for part in parts] == [len(part.images) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.targets[:, 1:] for part in parts]), a.targets[:, 1:])
    assert parts[1].targets[:, 0].max() < 3


@pytest.mark.parametrize(
    "tiles", [1024, {}, {"size": 31}, {"size": 64.5}, {"size": 64, "overlap": 1}, {"size": 64, "step": 2}]
)
def test_wrong_tiles(tmp_path: Path, tiles: Any) -> None:
    with pytest.raises(UserError, match=r"data.yaml: `tiles` must be \{size: 1024\}"):
        data_of(tmp_path, tiles)
