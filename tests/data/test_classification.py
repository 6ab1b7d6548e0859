"""Classification data: folders of images as classes and splits, what each setting does, and centre crops.

The promises that all data sets share are in test_contract.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
# Width and height of the images of the small data set, in turns.
SIZES = ((32, 32), (50, 40), (36, 61), (20, 20), (80, 45), (37, 36), (11, 30))


def write_classes(folder: Path, **counts: int) -> Path:
    """Write a folder per class, with `counts` images called 0.png, 1.png, ..."""
    files = [folder / name / f"{number}.png" for name, count in counts.items() for number in range(count)]
    for seed, file in enumerate(files):
        write_image(file, noise(*SIZES[seed % len(SIZES)], seed))
    return folder


def data_of(
    folder: Path, content: str = "train: train\nval: val\n", imgsz: int = 32, **options: Any
) -> ClassificationData:
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


def test_each_folder_of_images_is_a_class(folder: Path) -> None:
    """Hidden folders, loose files and empty folders are none."""
    for name in ("train/loose.png", "train/.cache/a.png", "val/.DS/a.png"):
        write_image(folder / name)
    (folder / "train/empty").mkdir()
    data = data_of(folder)
    train, val = data.split("train"), data.split("val")
    assert train.names == val.names == data.names == {0: "cat", 1: "dog", 2: "owl"}
    assert names(val) == ["cat/0.png", "dog/0.png", "dog/1.png"]
    assert (val.labels.dtype, val.labels.tolist()) == (np.int64, [0, 1, 1])
    assert val.sizes.tolist() == [[32, 32], [50, 40], [36, 61]]
    assert train.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert train.problems == val.problems == ()
    with pytest.raises(UserError, match="'owl'"):
        data_of(folder, "train: train\nval: val\nnames: [cat, dog]\n").split("train")
    write_image(folder / "val/elk/0.png")
    with pytest.raises(UserError, match=rf"^{folder}/data.yaml: .*'elk'"):
        data_of(folder).split("val")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_share_of_each_class_is_held_out(tmp_path_factory: pytest.TempPathFactory, share: float, seed: int) -> None:
    """At least one of a class that has two images, and never all."""
    top = tmp_path_factory.getbasetemp() / "held"
    if not top.exists():
        write_classes(top, cat=10, fox=1, owl=3)
        write_classes(top / "other/test", cat=1, fox=1)  # another split below the folder is no class
    data = data_of(top, f"path: .\nsplit: {share}\nsplit_seed: {seed}\ntest: other/test\n")
    train, val = data.split("train"), data.split("val")
    held = {"cat": min(max(round(10 * share), 1), 9), "owl": min(max(round(3 * share), 1), 2)}
    assert Counter(name.split("/")[0] for name in names(val)) == held
    assert sorted(names(train) + names(val)) == sorted(
        f"{name}/{k}.png" for name, count in (("cat", 10), ("fox", 1), ("owl", 3)) for k in range(count)
    )
    assert train.problems == val.problems == ()
    assert len(data.split("test").images) == 2


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


def test_nothing_to_hold_out_is_an_error(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=1, dog=1)
    with pytest.raises(UserError, match=r"data\.yaml: .*`split: 0\.2`"):
        data_of(tmp_path, "path: .\nsplit: 0.2\n").split("val")


def test_without_augmentation_a_square_image_is_that_of_its_file(tmp_path: Path) -> None:
    for seed, name in enumerate(("train/cat/0.png", "train/dog/0.png", "train/dog/1.png")):
        write_image(tmp_path / name, noise(32, 32, seed))
    for batch in epoch_of(data_of(tmp_path), NOTHING, batch_size=3):
        for image, target, info in zip(batch.images, batch.targets, batch.infos, strict=True):
            assert np.array_equal(image.permute(1, 2, 0), np.asarray(Image.open(info.path)))
            assert target.tolist() == [info.label == 0, info.label == 1]
            assert info.label == ("dog" in info.path)


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
            assert np.abs(image.permute(1, 2, 0).numpy() - middle(info.path, 32).astype(int)).max() <= 1
            assert target.tolist() == [info.label == number for number in range(3)]
            assert info.label == {"cat": 0, "dog": 1, "owl": 2}[Path(info.path).parent.name]
            assert np.array_equal(split.display_image(info.image, 32), image.permute(1, 2, 0).numpy()[..., ::-1])
    image = torch.from_numpy(noise(48, 32).transpose(2, 0, 1).copy())
    # 28 / 0.875 = 32: not resized; 2 rows and 10 columns on either side are cut off
    assert torch.equal(centre_crop(image, 28), image[:, 2:30, 10:38])
    assert torch.equal(centre_crop(image.mT, 28), image[:, 2:30, 10:38].mT)


# What each setting does to images in memory

GREYS = torch.tensor([0, 100, 200, 250])
NOISE = torch.from_numpy(noise(32, 32).transpose(2, 0, 1).copy())


def results(count: int, images: Sequence[Tensor], **hyp: float) -> list[tuple[Tensor, Tensor]]:
    """Return pixels and target of the first image, `count` times; each image has a class of its own."""
    stored: Any = SimpleNamespace(read=lambda index: to_array(images[index]), name=str, release=lambda: None)
    recipe, labels = replace(NOTHING, **hyp), np.arange(len(images))
    items = TrainingItems(stored, labels, len(images), recipe, 0, Sampling(), UserAugmentations())
    return [items[SampleIndex(0, position, 0, images[0].shape[1:])][:2] for position in range(count)]


@pytest.mark.parametrize("hyp", [{"randaugment": 2}, {"brightness": 0.5}, {"contrast": 0.5}, {"saturation": 0.5}])
def test_a_setting_changes_most_images(hyp: dict[str, float]) -> None:
    changed = torch.stack([image for image, _ in results(20, [NOISE], **hyp)])
    assert (changed != NOISE).flatten(1).any(1).sum() >= 10
    assert len({image.float().mean().item() for image in changed}) >= 8


@pytest.mark.parametrize(("setting", "axis"), [("fliplr", 2), ("flipud", 1)])
def test_a_flip_mirrors_the_image(setting: str, axis: int) -> None:
    assert all(torch.equal(image, NOISE.flip(axis)) for image, _ in results(5, [NOISE], **{setting: 1.0}))
    assert 25 < sum(torch.equal(image, NOISE) for image, _ in results(100, [NOISE], **{setting: 0.5})) < 75


def test_an_erased_rectangle_has_the_mean_colour() -> None:
    image = NOISE.clone()
    image[0] = 7  # not the mean colour
    for one, _ in results(20, [image], erasing=1.0):
        rows, columns = (one != image).any(0).nonzero(as_tuple=True)
        box = np.s_[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (one[box] == torch.tensor(ERASED_RGB).view(3, 1, 1)).all()
    assert 25 < sum(torch.equal(one, image) for one, _ in results(100, [image], erasing=0.5)) < 75


@pytest.mark.parametrize("hyp", [{"mixup": 1.0, "mixup_alpha": 0.2}, {"mixup": 1.0}, {"cutmix": 1.0}])
def test_two_images_and_their_classes_are_mixed_in_the_same_shares(hyp: dict[str, float]) -> None:
    """By weights or by areas; the other image is any of the data set."""
    mixed, partners = 0, set()
    images = [torch.full((3, 32, 32), int(grey), dtype=torch.uint8) for grey in GREYS]
    for image, target in results(40, images, **hyp):
        assert (image.dtype, target.dtype, target.shape) == (torch.uint8, torch.float32, (4,))
        assert target.sum() == pytest.approx(1)
        assert (target > 0).sum() <= 2
        if "cutmix" in hyp:
            assert target.tolist() == pytest.approx([float((image == grey).all(0).float().mean()) for grey in GREYS])
        else:
            assert image.min() == image.max()
            assert abs(int(image[0, 0, 0]) - float(target @ GREYS.float())) <= 0.51
        mixed += bool(0.05 < target[0] < 0.95)
        partners |= {*target.nonzero().flatten().tolist()}
    assert mixed >= 5
    assert partners == {0, 1, 2, 3}
