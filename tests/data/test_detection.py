"""Batches: the same pixels for any number of workers, targets where the pixels are, and the way back to the file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data import detection
from data.augment import AugmentSettings, Placement, Sample
from data.batches import empty_pixels
from data.cache import Images, ImagesInMemory
from data.dataset import DataOptions, dataset_class
from data.detection import (
    Batch,
    DetectionData,
    DetectionSplit,
    EvaluationItems,
    ImageInfo,
    TrainingItems,
    collate,
    to_tensors,
)
from data.labels import EXIF_ORIENTATION
from data.sampler import SampleIndex
from data.sources import DataSpec, label_file, read_spec
from utils.config.hyperparameters import Hyperparameters
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


def write_image(file: Path, pixels: np.ndarray, *rows: str, **options: Any) -> Path:
    """An image of these RGB pixels, and its label file where there are rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **options)
    if rows:
        label_file(file).parent.mkdir(parents=True, exist_ok=True)
        label_file(file).write_text("\n".join(rows))
    return file


def data_of(folder: Path, names: int = 3, imgsz: int = 64, **options: Any) -> DetectionData:
    """The data set whose images are in `folder`/images, for training and validation alike."""
    file = folder / "data.yaml"
    file.write_text(f"train: images\nval: images\nnames: {[f'class {number}' for number in range(names)]}\n")
    return DetectionData(read_spec(file), imgsz, 32, DataOptions(**options))


def sampled(data: DetectionData, **flags: Any) -> DetectionData:
    """The same data set with other flags of `Sampling`."""
    return replace(data, options=replace(data.options, **flags))


def evaluation_batch(data: DetectionData, square: bool = True) -> Batch:
    """The one batch of a small validation split."""
    split = data.split("val")
    batches = data.evaluation_batches(split, batch_size=16, square=square)
    (batch,) = data.evaluation_loader(split, batches)
    return batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of twelve images of noise in many shapes, with up to three boxes each."""
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        pixels = coarse.repeat(4, 0).repeat(4, 1)[:height, :width]
        rows = []
        for _ in range(0 if number == 3 else number % 3 + 1):
            low, side = rng.uniform(0.0, 0.4, 2), rng.uniform(0.3, 0.6, 2)
            x, y = low + side / 2
            rows.append(f"{rng.integers(3)} {x:.4f} {y:.4f} {side[0]:.4f} {side[1]:.4f}")
        write_image(tmp_path / f"images/{number:02}.png", pixels, *rows)
    return tmp_path


# the same pixels


def epochs(
    data: DetectionData, split: DetectionSplit, hyp: Hyperparameters, batch_size: int = 4, **more: Any
) -> list[list[Batch]]:
    """Two epochs of a loader, its processes kept between them."""
    loader = sampled(data, **more).train_loader(split, batch_size=batch_size, hyp=hyp, seed=3)
    found = []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        found.append(list(loader))
    return found


def check_same(first: list[Batch], second: list[Batch]) -> None:
    """Bit by bit, and in the same order."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
        assert [info.path for info in a.infos] == [info.path for info in b.infos]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("cache", ["", "ram"])
def test_pixels_and_targets_do_not_depend_on_the_number_of_workers(folder: Path, cache: str) -> None:
    alone = data_of(folder)
    split = alone.split("train")
    wanted = epochs(alone, split, EVERYTHING)
    assert [len(epoch) for epoch in wanted] == [3, 3]
    assert all(len(batch.targets) > 4 for epoch in wanted for batch in epoch)
    for workers in (1, 4) if cache == "" else (2,):
        found = epochs(data_of(folder, workers=workers, cache=cache), split, EVERYTHING)
        for epoch in range(2):
            check_same(found[epoch], wanted[epoch])
    for epoch in range(2):
        check_same(epochs(data_of(folder), split, EVERYTHING)[epoch], wanted[epoch])  # and a restart repeats it


def test_pixels_do_not_depend_on_how_the_epoch_is_cut_into_batches(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    small, large = (epochs(data, split, EVERYTHING, batch_size)[1] for batch_size in (2, 6))
    assert torch.equal(torch.cat([batch.images for batch in small]), torch.cat([batch.images for batch in large]))
    assert torch.equal(
        torch.cat([batch.targets[:, 1:] for batch in small]), torch.cat([batch.targets[:, 1:] for batch in large])
    )


@pytest.mark.parametrize(("near", "most"), [(True, 7), (False, 16)])
def test_a_process_reads_neighbours_once(folder: Path, near: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of four positions: seven images where partners are neighbours."""
    data = data_of(folder, partners="near" if near else "any")
    loader = data.train_loader(data.split("train"), batch_size=4, hyp=replace(NOTHING, mosaic=1.0), seed=3)
    images, loads = loader.dataset.images, []
    read = images.read
    monkeypatch.setattr(images, "read", lambda index: loads.append(index) or read(index))
    next(iter(loader))
    assert 4 < len(loads) <= most
    assert (len(loads) == len(set(loads))) or not near


def test_the_images_of_a_batch_are_written_once(folder: Path) -> None:
    """Straight into the batch: a batch of items made one by one holds the same."""
    data = data_of(folder)
    loader = data.train_loader(data.split("train"), batch_size=4, hyp=EVERYTHING, seed=3)
    drawn = next(iter(loader.batch_sampler))
    items = loader.dataset.__getitems__(drawn)
    batch = collate(items)
    assert batch.images.data_ptr() == items[0][0].data_ptr()
    check_same([collate([loader.dataset[draw] for draw in drawn])], [batch])


def test_epochs_positions_and_seeds_each_give_other_pixels(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    loader = data.train_loader(split, batch_size=4, hyp=EVERYTHING, seed=3)
    draws = [SampleIndex(0, 0, 5, (64, 64)), SampleIndex(1, 0, 5, (64, 64)), SampleIndex(0, 1, 5, (64, 64))]
    items = [loader.dataset[draw][0] for draw in draws]
    other = data.train_loader(split, batch_size=4, hyp=EVERYTHING, seed=4).dataset[draws[0]][0]
    assert torch.equal(loader.dataset[draws[0]][0], items[0])
    for a, b in ((items[0], items[1]), (items[0], items[2]), (items[1], items[2]), (items[0], other)):
        assert not torch.equal(a, b)


def test_an_epoch_shows_every_image_once_in_a_new_order(folder: Path) -> None:
    data = data_of(folder)
    orders = [
        [info.image for batch in epoch for info in batch.infos] for epoch in epochs(data, data.split("train"), NOTHING)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]


def test_a_training_epoch_has_full_batches_only(folder: Path) -> None:
    data = data_of(folder)
    found = epochs(data, data.split("train"), EVERYTHING, batch_size=5)[0]
    assert [batch.images.shape for batch in found] == [(5, 3, 64, 64)] * 3
    order = [info.image for batch in found for info in batch.infos]
    assert order[12:] == order[:3]


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_cached_images_make_the_same_batches(folder: Path, cache: str) -> None:
    data = data_of(folder)
    split = data.split("train")
    wanted = epochs(data, split, EVERYTHING)
    found = epochs(data_of(folder, cache=cache), split, EVERYTHING)
    for epoch in range(2):
        check_same(found[epoch], wanted[epoch])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_evaluation_does_not_depend_on_the_number_of_workers(folder: Path) -> None:
    found: list[list[Batch]] = []
    for workers in (0, 3):
        data = data_of(folder, workers=workers)
        split = data.split("val")
        batches = data.evaluation_batches(split, batch_size=5, square=False)
        found.append(list(data.evaluation_loader(split, batches)))
        assert sorted(info.image for batch in found[-1] for info in batch.infos) == list(range(12))
    check_same(*found)


def test_a_share_of_the_evaluation_is_part_of_the_whole(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("val")
    batches = data.evaluation_batches(split, batch_size=5, square=False)
    whole = list(data.evaluation_loader(split, batches))
    assert [len(batch.images) for batch in whole] == [5, 5, 2]
    check_same(list(data.evaluation_loader(split, batches[1::2])), whole[1::2])


# what a training item is


def test_without_augmentation_targets_are_the_labels_in_the_letterbox(tmp_path: Path) -> None:
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[8:16, 16:48] = 255
    # x 16 to 48 of 64, y 8 to 16 of 32; in the square 16 rows lower
    write_image(tmp_path / "images/a.png", pixels, "2 0.5 0.375 0.5 0.25")
    data = data_of(tmp_path)
    ((batch,), _) = epochs(data, data.split("train"), NOTHING, batch_size=1)
    wanted = torch.full((3, 64, 64), 114, dtype=torch.uint8)
    wanted[:, 16:48] = 0
    wanted[:, 24:32, 16:48] = 255
    assert torch.equal(batch.images[0], wanted)
    assert batch.targets.tolist() == [[0, 2, 0.5, 28 / 64, 0.5, 8 / 64]]
    assert batch.infos[0].placement == Placement((0, 0), (0, 0))


def test_targets_follow_the_pixels_through_everything(tmp_path: Path) -> None:
    """One white square on black: whatever happens to it, some target lies around each piece of what is bright."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[20:44, 20:44] = 255
    for number in range(3):
        write_image(tmp_path / f"images/{number}.png", pixels, "0 0.5 0.5 0.375 0.375")
    data = data_of(tmp_path)
    hyp = replace(EVERYTHING, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0, mixup=0.0, scale=0.1)
    checked = 0
    for epoch in epochs(data, data.split("train"), hyp, batch_size=8):
        for batch in epoch:
            for number, image in enumerate(batch.images):
                for _, _, x, y, width, height in batch.targets[batch.targets[:, 0] == number].tolist():
                    left, top, right, bottom = (
                        round(64 * side) for side in (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                    )
                    inside = image[0, top:bottom, left:right]
                    assert (inside > 128).float().mean() > 0.5  # a box around a turned square has dark corners
                    checked += 1
    assert checked > 15


def test_rectangular_training_batches_have_their_own_shapes_and_no_mosaic(tmp_path: Path) -> None:
    for number, (width, height) in enumerate(((64, 32), (32, 64), (32, 64), (64, 32))):
        write_image(
            tmp_path / f"images/{number}.png", np.full((height, width, 3), 40 * number, np.uint8), "1 .5 .5 1 1"
        )
    data = data_of(tmp_path)
    hyp = replace(NOTHING, mosaic=1.0)
    for batches in epochs(data, data.split("train"), hyp, batch_size=2, rect=True):
        assert [batch.images.shape for batch in batches] == [(2, 3, 32, 64), (2, 3, 64, 32)]
        for batch in batches:
            assert batch.targets[:, 1:].tolist() == [[1, 0.5, 0.5, 1, 1]] * 2
            for image, info in zip(batch.images, batch.infos, strict=True):
                assert (image == 40 * info.image).all()


def test_hyperparameters_reach_the_augmentation(folder: Path) -> None:
    data = data_of(folder)
    items = data.train_loader(data.split("train"), batch_size=4, hyp=EVERYTHING, seed=3).dataset
    assert isinstance(items, TrainingItems)
    assert items.augmenter.settings == AugmentSettings(
        hsv_h=0.015, hsv_s=0.7, hsv_v=0.4, degrees=10.0, translate=0.1, scale=0.5, shear=2.0, perspective=0.0005,
        flipud=0.5, fliplr=0.5, mosaic=1.0, mixup=0.5,
    )  # fmt: skip
    assert items.augmenter.count == 12


def test_an_epoch_is_what_it_was_when_first_released(folder: Path) -> None:
    """Numbers written down before there were other ways to draw: with all of them off no curve may change."""
    data = data_of(folder)
    found = epochs(data, data.split("train"), EVERYTHING)[1]
    assert [info.image for batch in found for info in batch.infos] == [3, 5, 10, 11, 9, 7, 2, 0, 8, 6, 4, 1]
    assert [len(batch.targets) for batch in found] == [30, 26, 26]
    assert [batch.images.float().mean().item() for batch in found] == pytest.approx([114.69, 117.25, 110.41], abs=0.2)
    wanted = [[0, 2, 0.7122, 0.2504, 0.5756, 0.5008], [0, 1, 0.5985, 0.4641, 0.4314, 0.7385]]
    assert found[0].targets[:2].numpy() == pytest.approx(np.array(wanted), abs=2e-4)


# other ways to draw

WAYS = (
    {"multi_scale": True},
    {"multi_scale": True, "rect": True},
    {"image_weights": True},
    {"repeat_factor": 0.9, "multi_scale": True},
    {"image_weights": True, "partners": "near"},
)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_other_ways_to_draw_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    hyp = replace(EVERYTHING, copy_paste=0.5)
    outline(folder)
    for way in WAYS[2:4]:
        alone, two = data_of(folder), data_of(folder, workers=2)
        wanted, found = (epochs(data, data.split("train", hyp), hyp, **way) for data in (alone, two))
        for epoch in range(2):
            check_same(found[epoch], wanted[epoch])


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_goes_on_sees_what_it_would_have(folder: Path, way: dict[str, Any]) -> None:
    data = data_of(folder)
    split = data.split("train")
    whole = epochs(data, split, EVERYTHING, **way)[1]
    loader = sampled(data, **way).train_loader(split, batch_size=4, hyp=EVERYTHING, seed=3)
    loader.batch_sampler.set_epoch(1)
    loader.batch_sampler.skip(1)
    check_same(list(loader), whole[1:])


def test_batches_of_many_sizes_have_the_targets_of_the_usual_one(folder: Path) -> None:
    data = data_of(folder, imgsz=96)
    split = data.split("train")
    hyp = replace(EVERYTHING, mixup=0.0, scale=0.1)
    sizes, kept = set(), 0
    for usual, scaled in zip(epochs(data, split, hyp, 2), epochs(data, split, hyp, 2, multi_scale=True), strict=True):
        for a, b in zip(usual, scaled, strict=True):
            sizes.add(b.images.shape[2:])
            assert a.infos[0].path == b.infos[0].path
            if len(a.targets) == len(b.targets):  # else one is too small to be kept at one of the sizes
                assert b.targets.numpy() == pytest.approx(a.targets.numpy(), abs=2e-3)
                kept += 1
    assert sizes == {(64, 64), (96, 96), (128, 128)}
    assert kept > 8


def test_images_are_drawn_by_their_rarest_classes(tmp_path: Path) -> None:
    """Class 1 is in one of eight images; images without labels weigh nothing."""
    for number in range(9):
        rows = [f"{int(number == 0)} .5 .5 .5 .5"] if number < 8 else []
        write_image(tmp_path / f"images/{number}.png", np.full((20, 20, 3), 10 * number, np.uint8), *rows)
    data = data_of(tmp_path)
    split = data.split("train")
    counts = {}
    for name, flags in {"weights": {"image_weights": True}, "repeats": {"repeat_factor": 0.9}}.items():
        batches = sampled(data, **flags).train_loader(split, batch_size=1, hyp=NOTHING, seed=0).batch_sampler
        drawn = []
        for epoch in range(60):
            batches.set_epoch(epoch)
            drawn += [draw.image for batch in batches for draw in batch]
        counts[name] = np.bincount(drawn, minlength=9) / 60
    assert counts["weights"].tolist()[8] == 0
    assert counts["weights"][0] == pytest.approx(4.5, abs=1.2)
    assert counts["repeats"][1:8] == pytest.approx(np.full(7, (0.9 / (7 / 9)) ** 0.5), abs=0.2)
    assert counts["repeats"][8] == 1
    assert counts["repeats"][0] == pytest.approx((0.9 * 9) ** 0.5, abs=0.4)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_epochs_show_single_images_only(tmp_path: Path, workers: int) -> None:
    """Each image is of one colour, so that a mixed one is not; the loader's processes are kept."""
    for number in range(4):
        write_image(tmp_path / f"images/{number}.png", np.full((64, 64, 3), 60 * number, np.uint8), "0 .5 .5 .9 .9")
    data = data_of(tmp_path, workers=workers, close_mosaic=2, epochs=4)
    hyp = replace(NOTHING, mosaic=1.0, mixup=1.0)
    loader = data.train_loader(data.split("train"), batch_size=4, hyp=hyp, seed=3)
    single = []
    for epoch in range(4):
        loader.batch_sampler.set_epoch(epoch)
        (batch,) = loader
        single.append([len(image.unique()) == 1 for image in batch.images])
    assert not any(single[0] + single[1])
    assert all(single[2] + single[3])


def outline(folder: Path) -> None:
    """Make a polygon of each box of a data set: what it is the box around."""
    for file in (folder / "labels").iterdir():
        rows = [list(map(float, line.split())) for line in file.read_text().splitlines()]
        file.write_text(
            "\n".join(
                f"{int(label)} {x} {y - h / 2} {x + w / 2} {y} {x} {y + h / 2} {x - w / 2} {y}"
                for label, x, y, w, h in rows
            )
        )


def test_objects_are_pasted_where_labels_have_polygons(folder: Path) -> None:
    data, hyp = data_of(folder), replace(EVERYTHING, copy_paste=1.0)
    plain, boxes_alone = (epochs(data, data.split("train", one), one)[0] for one in (EVERYTHING, hyp))
    check_same(boxes_alone, plain)
    outline(folder)
    split, bare = data.split("train", hyp), data.split("train", EVERYTHING)
    assert split.labels.polygons is not None
    assert bare.labels.polygons is None
    assert split.identity() == bare.identity()
    counts = [
        sum(len(batch.targets) for batch in epochs(data, split, replace(hyp, copy_paste=chance, mosaic=mosaic))[0])
        for chance, mosaic in ((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0))
    ]
    assert counts[1] > counts[0]
    assert counts[2] == counts[3]  # mosaics only


def test_only_the_validation_is_cached(folder: Path) -> None:
    data = data_of(folder, cache="val")
    split = data.split("val")
    train = data.train_loader(split, batch_size=4, hyp=NOTHING, seed=3)
    batches = data.evaluation_batches(split, batch_size=4, square=False)
    found = data.evaluation_loader(split, batches)
    assert type(train.dataset.images) is Images
    assert type(found.dataset.images) is ImagesInMemory
    for a, b in zip(found, data_of(folder).evaluation_loader(split, batches), strict=True):
        assert torch.equal(a.images, b.images)


# what an evaluation item is


def test_a_red_image_is_red_in_its_first_channel(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.full((64, 64, 3), (255, 0, 0), np.uint8))
    data = data_of(tmp_path)
    ((batch,), _) = epochs(data, data.split("val"), NOTHING, batch_size=1)
    for images in (batch.images, evaluation_batch(data).images):
        assert (images.dtype, images.shape) == (torch.uint8, (1, 3, 64, 64))
        assert images[0, :, 30, 30].tolist() == [255, 0, 0]


def test_a_pixel_of_the_file_is_found_in_the_batch_and_back(tmp_path: Path) -> None:
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[20:24, 40:48] = 255
    # x 40 to 48 of 128, y 20 to 24 of 64
    file = write_image(tmp_path / "images/a.png", pixels, f"1 {44 / 128} {22 / 64} {8 / 128} {4 / 64}")
    batch = evaluation_batch(data_of(tmp_path))
    (info,) = batch.infos
    assert info[:3] == (0, str(file), (128, 64))
    assert info.rows.tolist() == [[1, 44 / 128, 22 / 64, 8 / 128, 4 / 64]]
    # halved to 64x32, then 16 grey rows above and below
    assert info.placement == Placement((0.5, 0.5), (0, 16))
    wanted = torch.full((64, 64), 114, dtype=torch.uint8)
    wanted[16:48] = 0
    wanted[26:28, 20:24] = 255
    assert torch.equal(batch.images[0], wanted.expand(3, 64, 64))
    assert batch.targets.tolist() == [[0, 1, 22 / 64, 27 / 64, 4 / 64, 2 / 64]]
    (scale_x, scale_y), (left, top) = info.placement
    assert (40 * scale_x + left, 20 * scale_y + top) == (20, 26)
    assert ((24 - left) / scale_x, (28 - top) / scale_y) == (48, 24)


def test_a_rectangular_batch_has_half_a_stride_more_and_never_enlarges_into_it(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.zeros((64, 128, 3), np.uint8), "0 0.5 0.5 1 1")
    batch = evaluation_batch(data_of(tmp_path), square=False)
    # 32 / 32 + 0.5 and 64 / 32 + 0.5 strides, rounded up: 64 and 96, around an image of 64x32
    assert batch.images.shape == (1, 3, 64, 96)
    assert (batch.images[0, :, 16:48, 16:80] == 0).all()
    assert (batch.images == 0).sum() == 3 * 32 * 64
    assert batch.infos[0].placement == Placement((0.5, 0.5), (16, 16))
    assert batch.targets[0].tolist() == pytest.approx([0, 0, 0.5, 0.5, 64 / 96, 32 / 64])


def test_a_placement_has_one_gain(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.zeros((33, 100, 3), np.uint8), "0 0.5 0.5 1 1")
    batch = evaluation_batch(data_of(tmp_path))
    scale, offset = batch.infos[0].placement
    assert scale == pytest.approx((0.64, 0.64))  # though 21.12 rows are rounded up
    assert offset == (0, 21)
    assert (batch.images[0, 0, :, 5] == 0).nonzero().ravel().tolist() == list(range(21, 43))
    assert batch.targets[0].tolist() == pytest.approx([0, 0, 0.5, 0.5, 1, 22 / 64])


def test_a_small_image_is_enlarged_to_the_size(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.zeros((16, 32, 3), np.uint8), "0 0.25 0.5 0.5 1")
    batch = evaluation_batch(data_of(tmp_path))
    assert batch.infos[0].placement == Placement((2, 2), (0, 16))
    assert (batch.images[0, 0, :, 5] == 0).nonzero().ravel().tolist() == list(range(16, 48))
    assert batch.targets.tolist() == [[0, 0, 0.25, 0.5, 0.5, 0.5]]


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_a_sideways_image_has_its_labels_where_its_upright_pixels_are(tmp_path: Path, suffix: str) -> None:
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:8, :16] = 255  # turned clockwise, this corner comes to the top right
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    # upright it is 64x128 with the white part at x 56 to 64, y 0 to 16
    row = f"0 {60 / 64} {8 / 128} {8 / 64} {16 / 128}"
    write_image(tmp_path / f"images/a{suffix}", pixels, row, exif=exif)
    batch = evaluation_batch(data_of(tmp_path))
    assert batch.infos[0].size == (64, 128)
    assert batch.infos[0].placement == Placement((0.5, 0.5), (16, 0))
    wanted = torch.full((64, 64), 114, dtype=torch.uint8)
    wanted[:, 16:48] = 0
    wanted[:8, 44:48] = 255
    assert torch.equal(batch.images[0, 0], wanted)
    assert batch.targets.tolist() == [[0, 0, 46 / 64, 4 / 64, 4 / 64, 8 / 64]]


def test_shrinking_is_smooth_for_evaluation_and_quick_for_training(tmp_path: Path) -> None:
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[1::4, 1::4] = 160  # one of every 16 pixels, among the four that quick shrinking looks at
    write_image(tmp_path / "images/a.png", pixels)
    data = data_of(tmp_path)
    ((batch,), _) = epochs(data, data.split("val"), NOTHING, batch_size=1)
    assert (evaluation_batch(data).images == 10).all()
    assert (batch.images == 40).all()


# what is shown of an image


def test_an_image_is_shown_as_displayed_and_no_larger_than_asked(tmp_path: Path) -> None:
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:16, :32] = (200, 100, 50)  # turned clockwise, this corner comes to the top right
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    write_image(tmp_path / "images/a.png", pixels, exif=exif)
    write_image(tmp_path / "images/b.png", np.full((10, 33, 3), 9, np.uint8), "0 0.5 0.5 1 1")
    split = data_of(tmp_path).split("val")
    found = split.shown(0, 64)
    assert (found.dtype, found.shape) == (np.uint8, (64, 32, 3))
    assert (found[:16, 24:] == (50, 100, 200)).all()  # blue comes first
    assert (found[16:] == 0).all()
    assert (found[:, :24] == 0).all()
    for side in (128, 500):
        assert split.shown(0, side).shape == (128, 64, 3)
    assert split.shown(1, 16).shape == (5, 16, 3)  # 4.8 rows are rounded up
    assert split.shown(1, 640).shape == (10, 33, 3)


def test_an_image_is_shrunk_smoothly_to_be_shown(tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[1::4, 1::4] = 160  # one of every 16 pixels
    write_image(tmp_path / "images/a.png", pixels, "0 0.5 0.5 1 1")
    assert (data_of(tmp_path).split("val").shown(0, 16) == 10).all()


# documents


def labelled(tmp_path: Path) -> DetectionData:
    """Training: classes 0, 0 and 2 in one image, 2 in another, nothing in a third. Validation: class 1."""
    grey = np.zeros((20, 20, 3), np.uint8)
    write_image(tmp_path / "images/train/a.png", grey, "0 .5 .5 .25 .5", "2 .5 .5 1 1", "0 0.123456 .5 .1 .2")
    write_image(tmp_path / "images/train/b.png", grey, "2 .4 .5 .3 .2")
    write_image(tmp_path / "images/train/c.png", grey)
    write_image(tmp_path / "images/val/d.png", grey, "1 .5 .5 .5 .5")
    file = tmp_path / "data.yaml"
    file.write_text("train: images/train\nval: images/val\nnames: ['a, \"b\"', car, disc]\n")
    return DetectionData(read_spec(file), 64, 32, DataOptions())


def test_documents(tmp_path: Path) -> None:
    data = labelled(tmp_path)
    assert data.documents(data.split("train"), data.split("val")) == {
        "labels.csv": (
            "split,class,images,instances\n"
            'train,"a, ""b""",1,2\n'
            "train,car,0,0\n"
            "train,disc,2,2\n"
            'val,"a, ""b""",0,0\n'
            "val,car,1,1\n"
            "val,disc,0,0\n"
        ),
        "boxes.csv": (
            "class,x,y,width,height\n"
            '"a, ""b""",0.5,0.5,0.25,0.5\n'
            "disc,0.5,0.5,1,1\n"
            '"a, ""b""",0.12346,0.5,0.1,0.2\n'
            "disc,0.4,0.5,0.3,0.2\n"
        ),
    }


def test_documents_of_a_single_cls(tmp_path: Path) -> None:
    data = sampled(labelled(tmp_path), single_cls=True)
    documents = data.documents(data.split("train"), data.split("val"))
    assert documents["labels.csv"].splitlines()[1:] == ["train,item,2,4", "val,item,1,1"]
    assert [row.split(",")[0] for row in documents["boxes.csv"].splitlines()[1:]] == ["item"] * 4


def test_documents_where_nothing_is_labelled_for_validation(tmp_path: Path) -> None:
    data = labelled(tmp_path)
    (tmp_path / "labels/val/d.txt").unlink()
    documents = data.documents(data.split("train"), data.split("val"))
    assert documents["labels.csv"].splitlines()[4:] == ['val,"a, ""b""",0,0', "val,car,0,0", "val,disc,0,0"]


def test_of_many_boxes_some_are_listed_from_beginning_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"0 0.{k:03} 0.5 0.1 0.1" for k in range(100, 200)]
    write_image(tmp_path / "images/a.png", np.zeros((20, 20, 3), np.uint8), *rows)
    data = data_of(tmp_path)
    split = data.split("train")
    assert detection.LISTED_BOXES == 5000
    monkeypatch.setattr(detection, "LISTED_BOXES", 4)
    documents = data.documents(split, split)
    assert [row.split(",")[1] for row in documents["boxes.csv"].splitlines()[1:]] == ["0.1", "0.125", "0.15", "0.175"]
    assert documents["labels.csv"].splitlines()[1] == "train,class 0,1,100"


# pieces


def test_targets_are_cut_at_the_edges_of_the_image() -> None:
    boxes = np.array([[-5, 2, 15, 12], [4, 5, 8, 10]], np.float32)
    pixels, targets = to_tensors(
        Sample(np.zeros((10, 20, 3), np.uint8), boxes, np.array([3, 1], np.float32)), empty_pixels(3, 10, 20)
    )
    assert pixels.shape == (3, 10, 20)
    assert targets.dtype == torch.float32
    # 0 to 15 of 20, 2 to 10 of 10; 4 to 8 of 20, 5 to 10 of 10
    assert targets.numpy() == pytest.approx(np.array([[3, 0.375, 0.6, 0.75, 0.8], [1, 0.3, 0.75, 0.2, 0.5]]))


def test_pixels_are_turned_from_rows_of_bgr_to_planes_of_rgb() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    pixels, targets = to_tensors(
        Sample(image, np.zeros((0, 4), np.float32), np.zeros(0, np.float32)), empty_pixels(3, 2, 4)
    )
    assert pixels[0].tolist() == [[2, 5, 8, 11], [14, 17, 20, 23]]
    assert pixels[2].tolist() == [[0, 3, 6, 9], [12, 15, 18, 21]]
    assert pixels.is_contiguous()
    assert targets.shape == (0, 5)


def info(number: int) -> ImageInfo:
    return ImageInfo(number, f"{number}.png", (8, 8), Placement((1, 1), (0, 0)), np.zeros((0, 5), np.float32))


def test_collate_numbers_the_targets_by_their_place_in_the_batch() -> None:
    rows = torch.tensor([[2, 0.5, 0.5, 0.25, 0.125], [1, 0.25, 0.5, 0.5, 0.5], [0, 0.5, 0.5, 1, 1]])
    images = [torch.full((3, 4, 8), value, dtype=torch.uint8) for value in (7, 8, 9)]
    batch = collate([(images[0], rows[:0], info(5)), (images[1], rows[:2], info(3)), (images[2], rows[2:], info(4))])
    assert batch.targets.dtype == torch.float32
    assert batch.targets[:, 0].tolist() == [1, 1, 2]
    assert torch.equal(batch.targets[:, 1:], rows)
    assert (batch.images.shape, batch.images.dtype) == ((3, 3, 4, 8), torch.uint8)
    assert batch.images[:, 0, 0, 0].tolist() == [7, 8, 9]
    assert [entry.image for entry in batch.infos] == [5, 3, 4]


def test_a_batch_of_backgrounds_has_no_targets() -> None:
    image = torch.zeros((3, 4, 8), dtype=torch.uint8)
    assert collate([(image, torch.zeros((0, 5)), info(0))] * 2).targets.shape == (0, 6)


def test_a_batch_moves_to_a_device_whole() -> None:
    batch = collate([(torch.zeros((3, 4, 8), dtype=torch.uint8), torch.zeros((1, 5)), info(0))])
    moved = batch.to("meta")
    assert (moved.images.device.type, moved.targets.device.type) == ("meta", "meta")
    assert moved.infos == batch.infos


# splits


def test_labels_stay_with_their_images_when_others_are_left_out(tmp_path: Path) -> None:
    for number in range(4):
        write_image(tmp_path / f"images/{number}.png", np.full((20, 20, 3), number, np.uint8), f"{number} .5 .5 .5 .5")
    (tmp_path / "images/0.png").write_bytes(b"not an image")
    write_image(tmp_path / "images/2.png", np.zeros((5, 20, 3), np.uint8))
    data = data_of(tmp_path, names=4)
    split = data.split("val")
    assert [image.name for image in split.images] == ["1.png", "3.png"]
    assert split.labels.rows[:, 0].tolist() == [1, 3]
    assert split.labels.counts.tolist() == [1, 1]
    assert split.labels.sizes.tolist() == [[20, 20], [20, 20]]
    batch = evaluation_batch(data)
    for image, entry, target in zip(batch.images, batch.infos, batch.targets, strict=True):
        assert entry.path == f"{tmp_path}/images/{int(target[1])}.png"
        assert (image == int(target[1])).all()


def test_a_report_counts_and_names_the_first_problems(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.zeros((20, 20, 3), np.uint8), "0 .5 .5 .5 .5", "1 .5 .5 .5 .5")
    write_image(tmp_path / "images/b.png", np.zeros((20, 20, 3), np.uint8))
    bad = write_image(tmp_path / "images/c.png", np.zeros((20, 20, 3), np.uint8), *["bad"] * 7)
    lines = data_of(tmp_path).split("val").report("val")
    assert lines[0] == "val: 3 images, 2 boxes, 2 images without any"
    assert lines[1].startswith(f"warning: {label_file(bad)}, line 1: ")
    assert lines[5].startswith(f"warning: {label_file(bad)}, line 5: ")
    assert lines[6:] == ["warning: 2 more such problems in val; problems.txt in the run folder lists all"]


def test_a_report_without_problems_is_one_line(folder: Path) -> None:
    # images 0 to 11 have 1, 2, 3, 1, ... boxes, the fourth none
    assert data_of(folder).split("val").report("val") == ["val: 12 images, 23 boxes, 1 images without any"]


def test_a_split_of_which_nothing_is_readable_is_an_error(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.zeros((5, 5, 3), np.uint8))
    with pytest.raises(UserError, match=r"data\.yaml: no image of `val:` can be read; the first: .*a\.png: 5x5 pixels"):
        data_of(tmp_path).split("val")


def test_an_unknown_class_is_an_error_that_names_the_label_file(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/0.png").write_bytes(b"not an image")  # left out, before the one to be named
    write_image(tmp_path / "images/a.png", np.zeros((20, 20, 3), np.uint8), "2 .5 .5 .5 .5")
    write_image(tmp_path / "images/b.png", np.zeros((20, 20, 3), np.uint8), "3 .5 .5 .5 .5")
    with pytest.raises(UserError, match=r"/labels/b\.txt has class 3, but `names` of .*data\.yaml ends at 2"):
        data_of(tmp_path).split("train")


def test_a_single_cls_takes_every_class_for_one(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a.png", np.zeros((64, 64, 3), np.uint8), "7 .5 .5 .5 .5", "0 .25 .25 .5 .5")
    data = data_of(tmp_path, names=1, single_cls=True)
    assert data.split("train").labels.rows[:, 0].tolist() == [0, 0]
    batch = evaluation_batch(data)
    assert batch.targets.tolist() == [[0, 0, 0.5, 0.5, 0.5, 0.5], [0, 0, 0.25, 0.25, 0.5, 0.5]]
    assert batch.infos[0].rows[:, 0].tolist() == [0, 0]
    # the label cache keeps the classes of the file
    with pytest.raises(UserError, match="has class 7"):
        data_of(tmp_path, names=1).split("train")


def differing(one: DetectionSplit, other: DetectionSplit) -> set[str]:
    """What tells two splits apart."""
    assert one.identity().keys() == other.identity().keys()
    return {what for what, value in one.identity().items() if other.identity()[what] != value}


def test_the_same_files_elsewhere_are_the_same_split(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    split = data_of(folder).split("train")
    assert split.identity()["count"] == "12"
    moved = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "deeper")
    assert not differing(split, data_of(moved).split("train"))
    (moved / "images/03.png").touch()  # nor does it matter when they were written
    assert not differing(split, data_of(moved).split("train"))


def test_other_images_are_another_split(folder: Path) -> None:
    split = data_of(folder).split("train")
    assert differing(split, replace(split, images=split.images[::-1])) == {"files"}
    (folder / "images/11.png").rename(folder / "images/12.png")
    (folder / "labels/11.txt").rename(folder / "labels/12.txt")
    assert differing(split, data_of(folder).split("train")) == {"files"}
    (folder / "images/12.png").unlink()
    assert differing(split, data_of(folder).split("train")) == {"count", "files", "labels"}


def test_other_labels_are_told_apart(folder: Path) -> None:
    split = data_of(folder).split("train")
    assert differing(split, data_of(folder, single_cls=True).split("train")) == {"labels"}
    rows = (folder / "labels/00.txt").read_text()
    (folder / "labels/00.txt").unlink()
    (folder / "labels/03.txt").write_text(rows)  # the same rows, of another image
    assert differing(split, data_of(folder).split("train")) == {"labels"}
    moved = replace(split.labels, offsets=np.append(0, split.labels.offsets[:-1]))
    assert differing(split, replace(split, labels=moved)) == {"labels"}  # only where one image ends has changed


def test_class_names_are_those_of_the_data_or_item() -> None:
    spec = DataSpec(Path("data.yaml"), {0: "cat", 1: "dog"}, (), {})
    assert DetectionData.class_names(spec, single_cls=False) == {0: "cat", 1: "dog"}
    assert DetectionData.class_names(spec, single_cls=True) == {0: "item"}


@pytest.mark.parametrize("single_cls", [False, True])
def test_without_any_class_the_message_says_how_to_name_them(tmp_path: Path, single_cls: bool) -> None:
    (tmp_path / "data.yaml").write_text("train: images\n")
    with pytest.raises(UserError) as caught:
        DetectionData.class_names(read_spec(tmp_path / "data.yaml"), single_cls)
    assert str(caught.value) == (
        f"{tmp_path}/data.yaml: `names` must list the classes, as `0: person` lines or as [person, ...]"
    )


def test_all_files_that_training_reads_are_listed(folder: Path) -> None:
    data = data_of(folder)
    images = [folder / f"images/{number:02}.png" for number in range(12)]
    rows = [folder / f"labels/{number:02}.txt" for number in range(12)]  # one of them is not there
    assert DetectionData.files(data.spec) == {
        "train": images,
        "val": images,
        "labels of train": rows,
        "labels of val": rows,
    }


def test_strict_refuses_the_first_problem_of_a_split(folder: Path) -> None:
    (folder / "labels/01.txt").write_text("bad\n0 .5 .5 .5 .5\nbad\n")
    with pytest.raises(UserError, match=r"labels/01\.txt, line 1: .* numbers \(--strict; 2 such problems in train\)$"):
        data_of(folder, strict=True).split("train")


def test_the_task_detect_has_this_data() -> None:
    assert dataset_class("data.detection:DetectionData") is DetectionData


def test_the_two_loaders_have_items_of_their_kinds(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    evaluation = data.evaluation_loader(split, data.evaluation_batches(split, batch_size=4, square=True))
    assert isinstance(evaluation.dataset, EvaluationItems)
    found: Iterator[Batch] = iter(evaluation)
    assert next(found).images.shape == (4, 3, 64, 64)
