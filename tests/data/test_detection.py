"""Detection data: boxes stay aligned with the pixels, predictions map back to the file, documents of a data set.

The promises that all data sets share are in test_contract.py.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import cv2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from data import sampler
from data.augment import Sample
from data.data_yaml import read_spec
from data.dataset import DataOptions, empty_pixels
from data.detection import DetectionData, to_tensors
from data.segmentation import SegmentationData
from tests.making import label_file, plain, write_image, write_yaml
from utils.batch import Placement
from utils.config.hyperparameters import Hyperparameters
from utils.distributed import ranks
from utils.errors import UserError

NOTHING = Hyperparameters(
    hsv_h=0.0, hsv_s=0.0, hsv_v=0.0, translate=0.0, scale=0.0, fliplr=0.0, mosaic=0.0
)  # no augmentation at all
EVERYTHING = Hyperparameters(
    hsv_h=0.015, hsv_s=0.7, hsv_v=0.4, degrees=10.0, translate=0.1, scale=0.5, shear=2.0, perspective=0.0005,
    flipud=0.5, fliplr=0.5, mosaic=1.0, mixup=0.5,
)  # fmt: skip

# Width and height of the images of the small data set; the fourth is background.
SIZES = ((64, 64), (64, 48), (40, 64), (30, 30), (100, 50), (48, 96), (64, 20), (20, 64), (70, 61), (33, 47), (64, 64),
         (80, 60))  # fmt: skip


class Stretched(DetectionData):
    fit = "stretch"


def data_of(folder: Path, names: int = 3, imgsz: int = 64, kind: Any = DetectionData, **options: Any) -> Any:
    """Open the data set whose images are in `folder`/images, for training and validation alike."""
    content = {"train": "images", "val": "images", "names": [f"class {number}" for number in range(names)]}
    return kind(read_spec(write_yaml(folder / "data.yaml", content)), imgsz, 32, DataOptions(**options))


def epoch_of(data: DetectionData, hyp: Hyperparameters, batch_size: int = 4, epoch: int = 0) -> list[Any]:
    loader: Any = data.train_loader(data.split("train", hyp), batch_size, hyp, seed=3)
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def evaluation_batch(data: DetectionData, square: bool = True) -> Any:
    """Return the one batch of a small validation split."""
    split = data.split("val")
    (batch,) = data.evaluation_loader(split, data.evaluation_batches(split, batch_size=16, square=square))
    return batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of twelve images of noise in many shapes, with up to three boxes each."""
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        rows = []
        for _ in range(0 if number == 3 else number % 3 + 1):
            low, side = rng.uniform(0.0, 0.4, 2), rng.uniform(0.3, 0.6, 2)
            x, y = low + side / 2
            rows.append(f"{rng.integers(3)} {x:.4f} {y:.4f} {side[0]:.4f} {side[1]:.4f}")
        write_image(tmp_path / f"images/{number:02}.png", coarse.repeat(4, 0).repeat(4, 1)[:height, :width], *rows)
    return tmp_path


# Several data sets


@pytest.mark.parametrize("kind", [DetectionData, SegmentationData])
def test_data_sets_are_joined_by_class_names(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One with boxes alone, one with an outline and its classes in another order, one without any object."""
    rows = {"day": ["0 0.5 0.5 0.4 0.4"], "night": ["0 0.1 0.1 0.9 0.1 0.5 0.9", "1 0.5 0.5 0.4 0.4"], "sky": []}
    for name, number in (*(("day", number) for number in range(10)), ("night", 0), ("sky", 0)):
        write_image(tmp_path / name / f"images/{number}.png", plain(64, 64), *rows[name])
    write_yaml(tmp_path / "night.yaml", {"path": "night", "train": "images", "names": ["dog", "cat"]})
    train = [{"path": path, "weight": weight} for path, weight in (("day/images", 5), ("night.yaml", 5), ("sky", 2))]
    spec = write_yaml(tmp_path / "data.yaml", {"train": train, "val": "day/images", "names": ["cat", "dog"]})
    data, corners = kind(read_spec(spec), 64, 32, DataOptions()), 4 * (kind is SegmentationData)
    split = data.split("train", EVERYTHING)
    assert split.sets == (("day", range(10), 5), ("night", range(10, 11), 5), ("sky", range(11, 12), 2))
    assert split.labels.rows[:, 0].tolist() == [0] * 10 + [1, 0]
    assert split.labels.polygons.counts.tolist() == [corners] * 10 + [3, corners]
    data.report(split, split)
    assert "  day 10 images, 42 %; night 1 images, 42 % (each 5.0 times an epoch); sky" in capsys.readouterr().out
    drawn = [info.image for batch in epoch_of(data, EVERYTHING) for info in batch.infos]
    assert (len(drawn), drawn.count(10), drawn.count(11)) == (12, 5, 2)
    with pytest.raises(UserError, match="decide themselves how often an image is drawn; leave them out"):
        kind(read_spec(spec), 64, 32, DataOptions(rect=True)).split("train", EVERYTHING)


# Training items


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window", [20, 1000])
def test_an_image_is_decoded_about_once_per_epoch(
    window: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all images of the window are in memory."""
    monkeypatch.setattr(sampler, "PARTNERS_WINDOW", window)
    count = 200
    for number in range(count):
        write_image(tmp_path / f"images/{number:03}.png", np.full((16, 16, 3), number, np.uint8), "0 0.5 0.5 0.8 0.8")
    decoded = np.frombuffer(mmap.mmap(-1, 32), np.int64)  # by each loader process
    decode = cv2.imdecode

    def counted(*given: Any) -> np.ndarray:
        worker = get_worker_info()
        decoded[worker.id if worker else 0] += 1
        return decode(*given)

    monkeypatch.setattr("cv2.imdecode", counted)
    data = data_of(tmp_path, workers=workers)
    epoch_of(data, replace(NOTHING, mosaic=1.0))
    assert 0.9 <= decoded.sum() / count <= 1.2


@pytest.mark.parametrize("hyp", [EVERYTHING, replace(NOTHING, mosaic=1.0)], ids=["everything", "mosaic"])
def test_little_memory_changes_no_pixel(folder: Path, hyp: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do workers: the ring holds all twelve images, seven, or none."""
    monkeypatch.setattr(sampler, "PARTNERS_WINDOW", 6)
    expected = epoch_of(data_of(folder), hyp)
    for free, workers in ((2**20, 0), (400_000, 2), (0, 0)):
        monkeypatch.setattr(ranks, "available_bytes", lambda free=free: free)
        monkeypatch.setattr(ranks, "in_use", WeakSet())
        data = data_of(folder, workers=workers)
        loader: Any = data.train_loader(data.split("train", hyp), 4, hyp, seed=3)
        batches = list(loader)
        for batch, same in zip(batches, expected, strict=True):
            assert torch.equal(batch.images, same.images)
            assert torch.equal(batch.targets, same.targets)


def test_an_epoch_is_what_it_was_when_first_released(folder: Path) -> None:
    """Numbers of an earlier version: no change of the code may change a curve."""
    batches = epoch_of(data_of(folder), EVERYTHING, epoch=1)
    assert [info.image for batch in batches for info in batch.infos] == [3, 5, 10, 11, 9, 7, 2, 0, 8, 6, 4, 1]
    assert [len(batch.targets) for batch in batches] == [25, 17, 30]
    assert [batch.images.float().mean().item() for batch in batches] == pytest.approx([140.11, 115.83, 95.08], abs=0.2)
    wanted = [[0, 0, 0.8694, 0.0232, 0.2612, 0.0464], [0, 2, 0.1308, 0.4071, 0.2617, 0.4652]]
    assert batches[0].targets[:2].numpy() == pytest.approx(np.array(wanted), abs=2e-4)


def test_multi_scale_batches_have_the_usual_targets(folder: Path) -> None:
    hyp, sizes, equal = replace(EVERYTHING, mixup=0.0, scale=0.1), set(), 0
    for epoch in (0, 1):
        usual = epoch_of(data_of(folder, imgsz=96), hyp, 2, epoch)
        scaled = epoch_of(data_of(folder, imgsz=96, multi_scale=True), hyp, 2, epoch)
        for a, b in zip(usual, scaled, strict=True):
            sizes.add(b.images.shape[2:])
            assert a.infos[0].path == b.infos[0].path
            if len(a.targets) == len(b.targets):  # otherwise one is too small at one of the sizes
                assert b.targets.numpy() == pytest.approx(a.targets.numpy(), abs=2e-3)
                equal += 1
    assert sizes == {(64, 64), (96, 96), (128, 128)}
    assert equal > 8


def test_what_changes_mosaics_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rect, changes, said in (
        (False, {"mixup": 1.0, "mosaic": 0.0}, "mixup: no effect without mosaics (mosaic 0)\n"),
        (True, {"mixup": 1.0, "copy_paste": 0.5}, "mixup and copy_paste: no effect without mosaics (--rect)\n"),
        *((True, {"mixup": 0.0, "mosaic": 0.0}, ""), (False, {"mixup": 1.0}, "")),
    ):
        data = data_of(folder, rect=rect)
        data.split("train", replace(EVERYTHING, **changes))
        data.split("val")
        assert capsys.readouterr().out == said


def test_objects_are_pasted_along_polygons(folder: Path) -> None:
    data, hyp = data_of(folder), replace(EVERYTHING, copy_paste=1.0)

    def targets(**changes: float) -> int:
        return sum(len(batch.targets) for batch in epoch_of(data, replace(hyp, **changes)))

    assert targets() == targets(copy_paste=0.0)  # there are only boxes
    assert data.split("train", hyp).labels.polygons is None
    unwarped = epoch_of(data, NOTHING)
    for file in (folder / "labels").iterdir():  # diamonds with the same bounds
        rows = [list(map(float, line.split())) for line in file.read_text().splitlines()]
        corners = [(n, x, y - h / 2, x + w / 2, y, x, y + h / 2, x - w / 2, y) for n, x, y, w, h in rows]
        file.write_text("\n".join(f"{int(label)} {' '.join(map(str, points))}" for label, *points in corners))
    with_polygons, bare = data.split("train", hyp), data.split("train", NOTHING)
    assert np.array_equal(with_polygons.labels.rows, bare.labels.rows)
    assert with_polygons.identity() != bare.identity()
    assert (with_polygons.labels.polygons is None, bare.labels.polygons) == (False, None)
    for batch, same in zip(unwarped, epoch_of(data, replace(NOTHING, mosaic=1e-9)), strict=True):
        assert batch.targets.numpy() == pytest.approx(same.targets.numpy(), abs=1e-5)  # the boxes of the files
    assert targets() > targets(copy_paste=0.0)
    assert targets(mosaic=0.0) == targets(mosaic=0.0, copy_paste=0.0)  # into mosaics only


# Evaluation items


@pytest.mark.parametrize("shape", [[1, 2], [1, 3], [2, 2]])
@pytest.mark.parametrize("kind", [DetectionData, SegmentationData])
def test_rows_with_key_points_are_boxes(tmp_path: Path, kind: type[DetectionData], shape: list[int]) -> None:
    """A box with its first key point in it; a box alone; an outline, which is a bad row."""
    points = " ".join([".7", ".3", "2", ".1"][: shape[0] * shape[1]])
    rows = [f"0 .7 .3 .1 .2 {points}", "0 .5 .5 .4 .4", "0 .1 .1 .9 .1 .9 .9 .5 .9 .1 .9"]
    image = write_image(tmp_path / "images/a.png", None, *rows)
    spec = read_spec(write_yaml(tmp_path / "data.yaml", {"train": "images", "names": ["disc"], "kpt_shape": shape}))
    split = kind(spec, 64, 32, DataOptions()).split("train", replace(NOTHING, copy_paste=0.5))
    assert split.labels.rows == pytest.approx(np.array([[0, 0.7, 0.3, 0.1, 0.2], [0, 0.5, 0.5, 0.4, 0.4]]))
    assert f"{label_file(image)}, line 3" in split.problems[-1]
    (message,) = spec.warnings
    assert f"kpt_shape: {shape}" in message


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(12, 200), st.integers(12, 200), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_a_box_of_the_file_is_found_in_the_batch_and_back(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, is_square: bool, is_stretched: bool, seed: int
) -> None:
    """A white box on black, through a placement of one gain; images are never enlarged into half a stride more."""
    folder = tmp_path_factory.getbasetemp() / "placed"
    (x1, y1), (x2, y2) = np.sort(np.random.default_rng(seed).integers(0, (width, height), (2, 2)), 0).tolist()
    x2, y2 = x2 + 1, y2 + 1
    pixels = plain(width, height, 0)
    pixels[y1:y2, x1:x2] = 255
    sides = (x2 - x1) / width, (y2 - y1) / height
    row = f"1 {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {sides[0]} {sides[1]}"
    file = write_image(folder / "images/a.png", pixels, row)
    data = data_of(folder)
    batch = evaluation_batch(Stretched(data.spec, 64, 32, DataOptions()) if is_stretched else data, is_square)
    (info,), (rows, columns) = batch.infos, batch.images.shape[2:]
    assert info[:3] == (0, str(file), (width, height))
    assert info.rows.ravel().tolist() == pytest.approx([1, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, *sides])
    (gain_x, gain_y), (left, top) = info.placement
    if is_stretched:
        assert ((gain_x, gain_y), (left, top)) == ((64 / width, 64 / height), (0, 0))
        assert (rows, columns) == (64, 64)
    else:
        assert gain_x == gain_y == 64 / max(width, height)
        needed = [side * 64 / max(width, height) / 32 for side in (height, width)]
        assert (rows, columns) == ((64, 64) if is_square else tuple(32 * math.ceil(side + 0.5) for side in needed))
        assert (left, top) == ((columns - math.ceil(width * gain_x)) // 2, (rows - math.ceil(height * gain_y)) // 2)
    # The other side is rounded up, by less than a pixel.
    box = batch.targets[0, 2:] * torch.tensor([columns, rows] * 2)
    expected = [(x1 + x2) / 2 * gain_x + left, (y1 + y2) / 2 * gain_y + top, (x2 - x1) * gain_x, (y2 - y1) * gain_y]
    assert box.tolist() == pytest.approx(expected, abs=1.01)
    ys, xs = (batch.images[0, 0] > 127).nonzero(as_tuple=True)
    if len(xs):
        found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        low, high = box[:2] - box[2:] / 2, box[:2] + box[2:] / 2
        assert [float(edge) for edge in found] == pytest.approx([*low.tolist(), *high.tolist()], abs=1.5)


def test_images_may_be_stretched_in_training_and_for_detect(tmp_path: Path) -> None:
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[16:32, 64:128] = 255
    write_image(tmp_path / "images/a.png", pixels, "1 0.75 0.375 0.5 0.25")
    (batch,) = epoch_of(Stretched(data_of(tmp_path).spec, 64, 32, DataOptions()), NOTHING, batch_size=1)
    wanted = torch.zeros(64, 64, dtype=torch.uint8)
    wanted[16:32, 32:] = 255
    assert batch.targets.tolist() == [[0, 1, 0.75, 0.375, 0.5, 0.25]]
    image, _, info = Stretched.item(pixels, "a.png", (64, 64), 32)
    assert torch.equal(batch.images[0], wanted.expand(3, 64, 64))
    assert torch.equal(image, wanted.expand(3, 64, 64))
    assert info.placement == Placement((0.5, 1.0), (0, 0))


# Documents


def test_documents(tmp_path: Path) -> None:
    """Training: classes 0, 0 and 2 in one image, 2 in another, nothing in a third. Validation: class 1."""
    write_image(tmp_path / "images/train/a.png", None, "0 .5 .5 .25 .5", "2 .5 .5 1 1", "0 0.123456 .5 .1 .2")
    write_image(tmp_path / "images/train/b.png", None, "2 .4 .5 .3 .2")
    write_image(tmp_path / "images/train/c.png")
    write_image(tmp_path / "images/val/d.png", plain(20, 10), "1 .5 .5 .5 .5")
    content = {"train": "images/train", "val": "images/val", "names": ['a, "b"', "car", "disc"]}
    data = DetectionData(read_spec(write_yaml(tmp_path / "data.yaml", content)), 64, 32, DataOptions())
    documents = data.documents(data.split("train"), data.split("val"))
    assert documents["labels.csv"].split("\n") == [
        *("split,class,images,instances", 'train,"a, ""b""",1,2', "train,car,0,0", "train,disc,2,2"),
        *('val,"a, ""b""",0,0', "val,car,1,1", "val,disc,0,0", ""),
    ]
    assert documents["boxes.csv"].split("\n") == [
        *("class,x,y,width,height", '"a, ""b""",0.5,0.5,0.25,0.5', "disc,0.5,0.5,1,1"),
        *('"a, ""b""",0.12346,0.5,0.1,0.2', "disc,0.4,0.5,0.3,0.2", ""),
    ]
    assert data.split("val").side_lengths(100).tolist() == [[50, 25]]


# Tensors


def test_targets_are_cut_at_the_edges_of_the_image() -> None:
    boxes = np.array([[-5, 2, 15, 12], [4, 5, 8, 10]], np.float32)
    pixels, targets = to_tensors(
        Sample(np.zeros((10, 20, 3), np.uint8), boxes, np.array([3, 1], np.float32)), empty_pixels(3, 10, 20)
    )
    assert pixels.shape == (3, 10, 20)
    assert targets.dtype == torch.float32
    # 0 to 15 of 20, 2 to 10 of 10; 4 to 8 of 20, 5 to 10 of 10
    assert targets.numpy() == pytest.approx(np.array([[3, 0.375, 0.6, 0.75, 0.8], [1, 0.3, 0.75, 0.2, 0.5]]))


# Splits


def test_a_single_cls_takes_every_class_for_one(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", plain(64, 64), "7 .5 .5 .5 .5", "0 .25 .25 .5 .5")
    data = data_of(tmp_path, names=1, single_cls=True)
    assert data.split("train").labels.rows[:, 0].tolist() == [0, 0]
    assert evaluation_batch(data).targets.tolist() == [[0, 0, 0.5, 0.5, 0.5, 0.5], [0, 0, 0.25, 0.25, 0.5, 0.5]]
    with pytest.raises(UserError, match="class 7"):  # the label cache has the classes of the file
        data_of(tmp_path, names=1).split("train")
