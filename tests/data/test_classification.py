"""Classification data: folders of images as classes and splits, and the targets of images.

The promises that all data sets share are in test_contract.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data.augmentations import UserAugmentations
from data.classification import (
    ERASED_RGB,
    ClassificationData,
    ClassificationSplit,
    TrainingItems,
    centre_crop,
    to_array,
)
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.sampler import SampleIndex, Sampling
from models.tasks.classify import ClassificationRecipe
from tests.making import noise, write_image
from utils.batch import Batch
from utils.errors import UserError

NOTHING = ClassificationRecipe(crop_scale=1.0, fliplr=0.0, brightness=0.0, contrast=0.0, saturation=0.0)
EVERYTHING = ClassificationRecipe(
    crop_scale=0.3, fliplr=0.5, flipud=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, randaugment=2,
    randaugment_magnitude=7, erasing=0.5, mixup=0.3, cutmix=0.3, mixup_alpha=0.4, cutmix_alpha=0.8,
)  # fmt: skip
TRAIN_VAL = "train: train\nval: val\n"
# Width and height of the images of the small data set, in turns.
SIZES = ((32, 32), (50, 40), (36, 61), (20, 20), (80, 45), (37, 36), (11, 30))


def write_classes(folder: Path, **counts: int) -> Path:
    """Write a folder per class, with `counts` images called 0.png, 1.png, ..."""
    files = [folder / name / f"{number}.png" for name, count in counts.items() for number in range(count)]
    for seed, file in enumerate(files):
        write_image(file, noise(*SIZES[seed % len(SIZES)], seed))
    return folder


def data_of(folder: Path, content: str = TRAIN_VAL, imgsz: int = 32, **options: Any) -> ClassificationData:
    """Open the data set that a data.yaml of this content describes."""
    file = folder / "data.yaml"
    file.write_text(content)
    return ClassificationData(read_spec(file), imgsz, 1, DataOptions(**options))


def epoch_of(data: ClassificationData, hyp: ClassificationRecipe, batch_size: int = 4, epoch: int = 0) -> list[Batch]:
    loader: Any = data.train_loader(data.split("train"), batch_size, hyp, seed=3)
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def names(split: ClassificationSplit) -> list[str]:
    """Return the images of a split as class folder/name."""
    return [f"{image.parent.name}/{image.name}" for image in split.images]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirteen images of three classes for training, and three of two of them for validation."""
    write_classes(tmp_path / "train", cat=5, dog=4, owl=4)
    write_classes(tmp_path / "val", cat=1, dog=2)
    return tmp_path


# Folders and classes


def test_each_folder_of_images_is_a_class(folder: Path) -> None:
    data = data_of(folder)
    assert data.names == {0: "cat", 1: "dog", 2: "owl"}
    train, val = data.split("train"), data.split("val")
    assert [str(image) for image in val.images] == [
        f"{folder}/val/cat/0.png", f"{folder}/val/dog/0.png", f"{folder}/val/dog/1.png",
    ]  # fmt: skip
    assert (val.labels.dtype, val.labels.tolist()) == (np.int64, [0, 1, 1])
    assert val.sizes.tolist() == [[32, 32], [50, 40], [36, 61]]
    assert train.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert train.names == val.names == data.names
    assert train.problems == val.problems == ()


def test_hidden_folders_loose_files_and_empty_folders_are_no_classes(folder: Path) -> None:
    for name in ("train/loose.png", "train/.cache/a.png", "val/.DS/a.png"):
        write_image(folder / name)
    (folder / "train/LICENSE.txt").write_text("text")
    (folder / "train/empty").mkdir()
    data = data_of(folder)
    assert data.names == {0: "cat", 1: "dog", 2: "owl"}
    assert len(data.split("train").images) == 13
    assert len(data.split("val").images) == 3


def test_a_folder_of_no_known_class_is_refused(folder: Path) -> None:
    write_image(folder / "val/elk/0.png")
    data = data_of(folder)
    with pytest.raises(UserError) as caught:
        data.split("val")
    assert str(caught.value) == (
        f"{folder}/data.yaml: `val:` has a folder 'elk', which is not one of the classes cat, dog, owl; "
        "add it to `train:` and `names:`, or move it away"
    )
    with pytest.raises(
        UserError, match="`train:` has a folder 'owl', which is not one of the classes cat, dog; add it"
    ):
        data_of(folder, TRAIN_VAL + "names: [cat, dog]\n").split("train")


# Holding out


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Images of four classes, not split."""
    return write_classes(tmp_path / "whole", cat=10, dog=10, fox=1, owl=3)


def test_a_share_of_each_class_is_held_out(whole: Path) -> None:
    data = data_of(whole, "path: .\nsplit: 0.2\n")
    train, val = data.split("train"), data.split("val")
    # 2 of 10; 0.6 of 3 is one; of a single image none
    assert Counter(name.split("/")[0] for name in names(val)) == {"cat": 2, "dog": 2, "owl": 1}
    assert val.labels.tolist() == [0, 0, 1, 1, 3]
    assert sorted(train.images + val.images) == sorted(whole.rglob("*.png"))
    assert not set(train.images) & set(val.images)
    assert train.problems == val.problems == ()


@pytest.mark.parametrize(
    ("seed", "held"),
    [
        (0, ["cat/0.png", "cat/1.png", "dog/1.png", "dog/9.png"]),
        (1, ["cat/2.png", "cat/7.png", "dog/5.png", "dog/6.png"]),
    ],
)
def test_images_are_held_out_by_a_hash(tmp_path: Path, seed: int, held: list[str]) -> None:
    """The two smallest of `printf 0/cat/0.png | sha256sum` and so on, in any version of Lockstep."""
    write_classes(tmp_path, cat=10, dog=10)
    assert names(data_of(tmp_path, f"path: .\nsplit: 0.2\nsplit_seed: {seed}\n").split("val")) == held


@pytest.mark.parametrize(("share", "held"), [(0.01, 1), (0.25, 2), (0.99, 9)])
def test_at_least_one_is_held_out_and_never_all(whole: Path, share: float, held: int) -> None:
    data = data_of(whole, f"path: .\nsplit: {share}\n")
    assert np.bincount(data.split("val").labels, minlength=4)[[0, 2]].tolist() == [held, 0]
    assert np.bincount(data.split("train").labels)[[0, 2]].tolist() == [10 - held, 1]


def test_other_splits_below_the_folder_are_no_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=3, dog=3)
    write_classes(tmp_path / "other/test", cat=1, dog=1)
    data = data_of(tmp_path, "path: .\nsplit: 0.34\ntest: other/test\n")
    assert data.names == {0: "cat", 1: "dog"}
    assert len(data.split("train").images) == 4
    assert len(data.split("test").images) == 2


def test_nothing_to_hold_out_is_an_error(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=1, dog=1)
    with pytest.raises(UserError, match=r"data\.yaml: no class has two images, so `split: 0\.2` leaves none"):
        data_of(tmp_path, "path: .\nsplit: 0.2\n").split("val")


# Splits and documents


def test_documents_list_the_classes_and_the_images_of_each_split(tmp_path: Path) -> None:
    for name in ("train/dog/0.png", 'train/Käfer, "rot"/1.png', "val/dog/2.png"):
        write_image(tmp_path / name)
    data = data_of(tmp_path)
    documents = data.documents(data.split("train"), data.split("val"))
    assert json.loads(documents["class_indices.json"]) == {"0": 'Käfer, "rot"', "1": "dog"}
    assert "Käfer" in documents["class_indices.json"]
    assert documents["split.csv"] == (
        "split,class,image\n"
        f'train,"Käfer, ""rot""","{tmp_path}/train/Käfer, ""rot""/1.png"\n'
        f"train,dog,{tmp_path}/train/dog/0.png\n"
        f"val,dog,{tmp_path}/val/dog/2.png\n"
    )


# Training items


def test_without_augmentation_a_square_image_is_that_of_its_file(tmp_path: Path) -> None:
    for seed, name in enumerate(("train/cat/0.png", "train/dog/0.png", "train/dog/1.png")):
        write_image(tmp_path / name, noise(32, 32, seed))
    for batch in epoch_of(data_of(tmp_path), NOTHING, batch_size=3):
        for image, target, info in zip(batch.images, batch.targets, batch.infos, strict=True):
            assert np.array_equal(image.permute(1, 2, 0), np.asarray(Image.open(info.path)))
            assert target.tolist() == [info.label == 0, info.label == 1]
            assert info.label == ("dog" in info.path)


def test_multi_scale_batches_show_the_same_images(folder: Path) -> None:
    hyp = replace(EVERYTHING, randaugment=0, erasing=0.0, cutmix=0.0, mixup=0.0)  # which count in pixels
    sizes = set()
    for epoch in (0, 1):
        usual = epoch_of(data_of(folder, imgsz=64), hyp, epoch=epoch)
        for a, b in zip(usual, epoch_of(data_of(folder, imgsz=64, multi_scale=True), hyp, epoch=epoch), strict=True):
            sizes.add(tuple(b.images.shape[2:]))
            assert torch.equal(a.targets, b.targets)
            means = [batch.images.float().mean((2, 3)).numpy() for batch in (a, b)]
            assert means[1] == pytest.approx(means[0], abs=6)
    assert sizes == {(64, 64), (96, 96)}


# Evaluation items


def middle(file: str, side: int) -> np.ndarray:
    """Return the centre crop by Pillow, (side, side, 3) RGB, with the shorter side at 8/7 of `side`."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    shorter = round(side * 8 / 7)
    width, height = (side * shorter // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def test_evaluation_items_are_pillows_centre_crops(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    for batch in data.evaluation_loader(split, data.evaluation_batches(split, batch_size=4, square=False)):
        assert (batch.images.dtype, batch.images.shape[1:]) == (torch.uint8, (3, 32, 32))
        for image, target, info in zip(batch.images, batch.targets, batch.infos, strict=True):
            expected = middle(info.path, 32).astype(int)
            assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 1
            assert target.tolist() == [info.label == number for number in range(3)]
            assert info.label == {"cat": 0, "dog": 1, "owl": 2}[Path(info.path).parent.name]
            assert np.array_equal(split.shown(info.image, 32), image.permute(1, 2, 0).numpy()[..., ::-1])


# Augmentation: each transform, mixing, the source of its randomness, and centre crops

SIDE = 32


def plain(*colour: int, side: int = SIDE) -> Tensor:
    """Return a square image of one colour, RGB, or of one grey."""
    return torch.tensor(colour, dtype=torch.uint8).view(-1, 1, 1).expand(3, side, side).contiguous()


def noisy(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Tensor:
    return torch.from_numpy(noise(width, height, seed).transpose(2, 0, 1).copy())


class Stored:
    """Images in memory, RGB, in place of files; `loaded` are the numbers of those that were read."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.images, self.loaded = images, []

    def name(self, index: int) -> str:
        return f"{index}.png"

    def read(self, index: int) -> np.ndarray:
        self.loaded.append(index)
        return to_array(self.images[index])

    def release(self) -> None:
        return


def items_of(images: Sequence[Tensor], labels: Sequence[int] = (), **hyp: float) -> TrainingItems:
    """Return items of images that each have their own class, unless `labels` are given."""
    stored: Any = Stored(images)
    numbers = np.array(labels or range(len(images)))
    classes = 3 if labels else len(images)
    return TrainingItems(stored, numbers, classes, replace(NOTHING, **hyp), 0, Sampling(), UserAugmentations())


def augmented(items: TrainingItems, image: int, side: int, position: int) -> tuple[Tensor, Tensor]:
    return items[SampleIndex(0, position, image, (side, side))][:2]


def results(count: int, images: Sequence[Tensor], side: int = SIDE, **settings: float) -> list[tuple[Tensor, Tensor]]:
    """Return `count` results for the first image, each with its own generator."""
    items = items_of(images, **settings)
    return [augmented(items, 0, side, position) for position in range(count)]


def pixels(count: int, image: Tensor, side: int = SIDE, **settings: float) -> Tensor:
    """Return the images of `results`, (count, 3, side, side)."""
    return torch.stack([changed for changed, _ in results(count, [image], side, **settings)])


# Single transforms


def test_crops_have_a_minimum_area_and_a_moderate_aspect() -> None:
    steps = torch.arange(0, 256, 4, dtype=torch.uint8)
    columns, rows = steps.expand(64, 64), steps.view(64, 1).expand(64, 64)
    crops = pixels(60, torch.stack((columns, rows, columns)), side=64, crop_scale=0.25)
    # the extreme values in an enlarged crop are those of its first and last column and row
    lows, highs = crops[:, :2].flatten(2).amin(2), crops[:, :2].flatten(2).amax(2)
    sides = (highs - lows).double() / 4 + 1  # in columns and rows of 64
    areas, aspects = sides.prod(1) / 64**2, sides[:, 0] / sides[:, 1]
    assert areas.min() > 0.25 * (1 - 2 * 0.5 / 32)  # either side is rounded: by half a pixel of about 32
    assert 0.72 < aspects.min() < 0.8
    assert 1.25 < aspects.max() < 1.39
    assert areas.min() < 0.35
    assert areas.max() > 0.8
    assert len({tuple(corner) for corner in lows.tolist()}) > 30


@pytest.mark.parametrize(("setting", "axis"), [("fliplr", 2), ("flipud", 1)])
def test_a_flip_mirrors_the_image(setting: str, axis: int) -> None:
    image = noisy()
    assert (pixels(5, image, **{setting: 1.0}) == image.flip(axis)).all()
    unchanged = [torch.equal(one, image) for one in pixels(100, image, **{setting: 0.5})]
    assert 25 < sum(unchanged) < 75  # 5 standard deviations


def test_an_erased_rectangle_has_the_mean_colour() -> None:
    image = noisy()
    image[0] = 7  # not the mean colour
    shapes = set()
    for one in pixels(30, image, erasing=1.0):
        rows, columns = (one != image).any(0).nonzero(as_tuple=True)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        expected = image.clone()
        expected[:, top:bottom, left:right] = torch.tensor(ERASED_RGB, dtype=torch.uint8).view(3, 1, 1)
        assert torch.equal(one, expected)
        shapes.add((int(bottom - top), int(right - left)))
    assert len(shapes) > 10
    assert 25 < sum(torch.equal(one, image) for one in pixels(100, image, erasing=0.5)) < 75


# Mixing


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_blends_pixels_and_classes_of_two_images_in_the_same_shares(alpha: float) -> None:
    greys = torch.tensor([0, 100, 200, 250])
    mixed = 0
    for image, shares in results(40, [plain(int(grey)) for grey in greys], mixup=1.0, mixup_alpha=alpha):
        assert (image.dtype, shares.dtype, shares.shape) == (torch.uint8, torch.float32, (4,))
        assert shares.sum() == pytest.approx(1)
        assert (shares > 0).sum() <= 2
        assert shares[0] > 0 or alpha < 1  # a share may be rounded to 0
        assert image.min() == image.max()
        assert abs(int(image[0, 0, 0]) - float(shares @ greys.float())) <= 0.51
        mixed += bool(0.05 < shares[0] < 0.95)
    assert mixed >= 5


def test_cutmix_pastes_a_rectangle_and_its_class_in_the_share_of_its_area() -> None:
    greys = torch.tensor([0, 100, 200, 250])
    mixed = 0
    for image, shares in results(40, [plain(int(grey)) for grey in greys], cutmix=1.0):
        areas = torch.stack([(image == grey).all(0).float().mean() for grey in greys])
        assert shares.tolist() == pytest.approx(areas.tolist())
        assert shares.sum() == pytest.approx(1)
        assert (shares > 0).sum() <= 2
        if 0 < shares[0] < 1:
            rows, columns = (image[0] != 0).nonzero(as_tuple=True)
            assert (image[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] != 0).all()
            mixed += 1
    assert mixed >= 15


@pytest.mark.parametrize("setting", ["mixup", "cutmix"])
def test_partners_are_drawn_from_all_images(setting: str) -> None:
    items = items_of([plain(0)] * 5, **{setting: 1.0})
    for position in range(60):
        augmented(items, 3, SIDE, position)
    loaded = items.images.loaded
    assert loaded[::2] == [3] * 60
    assert set(loaded[1::2]) == {0, 1, 2, 3, 4}
    assert max(map(loaded[1::2].count, range(5))) < 30


# Randomness


# Centre crops


def test_a_centre_crop_has_seven_eighths_of_the_shorter_side() -> None:
    image = noisy(48, 32)
    # 28 / 0.875 = 32: not resized; 2 rows and 10 columns on either side are cut off
    assert torch.equal(centre_crop(image, 28), image[:, 2:30, 10:38])
    assert torch.equal(centre_crop(image.mT, 28), image[:, 2:30, 10:38].mT)
