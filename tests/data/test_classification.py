"""Classification data: folders of images as classes and splits, and the targets of images.

The promises that all data sets share are in test_contract.py.
"""

from __future__ import annotations

import json
import random
import shutil
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

from data.augment import torch_seeded_by
from data.augmentations import UserAugmentations
from data.classification import (
    ERASED_RGB,
    ClassificationData,
    ClassificationSplit,
    TrainingItems,
    centre_crop,
    collate,
    to_array,
)
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.sampler import SampleIndex, Sampling
from models.tasks.classify import ClassificationRecipe
from tests.making import noise, write_image
from utils.batch import Batch, ClassInfo
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


def test_folders_are_searched_at_every_depth_and_several_are_joined(tmp_path: Path) -> None:
    for name in ("one/cat/deep/deeper/b.JPG", "one/cat/a.png", "two/cat/c.png", "two/ant/d.webp"):
        write_image(tmp_path / name)
    data = data_of(tmp_path, "train: [one, two, one]\n")
    assert data.names == {0: "ant", 1: "cat"}
    split = data.split("train")
    assert [image.name for image in split.images] == ["d.webp", "a.png", "b.JPG", "c.png"]
    assert split.labels.tolist() == [0, 1, 1, 1]


def test_hidden_folders_loose_files_and_empty_folders_are_no_classes(folder: Path) -> None:
    for name in ("train/loose.png", "train/.cache/a.png", "val/.DS/a.png"):
        write_image(folder / name)
    (folder / "train/LICENSE.txt").write_text("text")
    (folder / "train/empty").mkdir()
    data = data_of(folder)
    assert data.names == {0: "cat", 1: "dog", 2: "owl"}
    assert len(data.split("train").images) == 13
    assert len(data.split("val").images) == 3


def test_text_files_beside_images_are_not_taken_for_labels(folder: Path) -> None:
    for image in (folder / "train").rglob("*.png"):
        image.with_suffix(".txt").write_text("a cat on a mat")
    split = data_of(folder, strict=True).split("train")
    assert split.problems == ()
    assert split.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4


def test_classes_are_numbered_as_in_names(folder: Path) -> None:
    data = data_of(folder, TRAIN_VAL + "names: [owl, cat, dog]\n")
    assert data.names == {0: "owl", 1: "cat", 2: "dog"}
    split = data.split("val")
    assert list(zip(names(split), split.labels.tolist(), strict=True)) == [
        ("cat/0.png", 1),
        ("dog/0.png", 2),
        ("dog/1.png", 2),
    ]


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


def test_a_class_without_training_images_is_a_problem(folder: Path) -> None:
    content = TRAIN_VAL + "names: [cat, ant, dog, owl]\n"
    data = data_of(folder, content)
    split = data.split("train")
    assert [problem.partition(";")[0] for problem in split.problems] == [
        f"{folder}/data.yaml: `train:` has no images of the class 'ant'"
    ]
    assert split.labels.tolist() == [0] * 5 + [2] * 4 + [3] * 4
    assert data.split("val").problems == ()  # classes may be absent there
    with pytest.raises(UserError, match=r"`train:` has no images of the class 'ant' \(--strict; 1 such problem in"):
        data_of(folder, content, strict=True).split("train")


def test_a_class_whose_images_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", cat=2, dog=1)
    (tmp_path / "train/dog/0.png").write_bytes(b"nothing")
    problems = data_of(tmp_path, "train: train\nval: train\n").split("train").problems
    assert "0.png: not readable" in problems[0]
    assert "no images of the class 'dog'" in problems[1]


def test_the_first_unreadable_image_is_named_even_if_a_class_has_none(tmp_path: Path) -> None:
    write_image(tmp_path / "train/cat/0.png", noise(9, 20))
    with pytest.raises(UserError, match=r"no image of `train:` can be used; the first problem: .*cat/0\.png: 9x20 pix"):
        data_of(tmp_path, TRAIN_VAL + "names: [ant, cat]\n").split("train")


def test_images_in_formats_that_are_not_read_are_counted(folder: Path) -> None:
    (folder / "train/cat/a.heic").touch()
    (problem,) = data_of(folder).split("train").problems
    assert problem.startswith(f"{folder}/data.yaml: `train:` has 1 image in formats that are not read (.heic), such as")
    assert data_of(folder).split("val").problems == ()
    shutil.rmtree(folder / "val")
    (folder / "val/cat").mkdir(parents=True)
    (folder / "val/cat/a.gif").touch()
    with pytest.raises(UserError, match=r"`val:` has no folders of images in .*/val; .* not read \(\.gif\)"):
        data_of(folder).split("val")


@pytest.mark.parametrize("content", ["train: train\n", "train: list.txt\n", "path: train\nsplit: 0.2\n"])
def test_a_folder_without_folders_of_images_is_named(tmp_path: Path, content: str) -> None:
    write_image(tmp_path / "train/loose.png")
    (tmp_path / "train/empty").mkdir()
    (tmp_path / "list.txt").write_text("./train/loose.png\n")
    with pytest.raises(
        UserError,
        match=r"data\.yaml: `train:` has no folders of images in .*/(train|list\.txt); put the images of each class",
    ):
        data_of(tmp_path, content)


def test_without_validation_images_the_message_says_how_to_hold_some_out(folder: Path) -> None:
    data = data_of(folder, "train: train\n")
    with pytest.raises(UserError, match=r"data\.yaml has no `val:`; add a folder .*, or `split: 0\.2` to hold out"):
        data.split("val")
    with pytest.raises(UserError, match=r"data\.yaml has no `test:`"):
        data.split("test")


def test_a_single_class_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="--single-cls leaves a classifier only one class"):
        data_of(folder, single_cls=True)


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=2, dog=2)
    with pytest.raises(UserError, match="two classes under `names` have the same name"):
        data_of(tmp_path, "path: .\nsplit: 0.5\nnames: [cat, dog, cat]\n")


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


def test_the_choice_is_the_same_in_another_folder(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = shutil.copytree(whole, tmp_path_factory.mktemp("other") / "deeper/still")
    for name in ("train", "val"):
        first, second = (names(data_of(folder, "path: .\nsplit: 0.3\n").split(name)) for folder in (whole, moved))
        assert first == second


def test_one_more_image_moves_at_most_one_of_its_class(whole: Path) -> None:
    def held() -> set[str]:
        return set(names(data_of(whole, "path: .\nsplit: 0.2\n").split("val")))

    before, sizes, moves = held(), set(), 0
    for number in range(10, 25):
        write_image(whole / f"cat/{number}.png")
        after = held()
        moved = {name for name in before ^ after if name != f"cat/{number}.png"}
        assert len(moved) <= 1
        assert all(name.startswith("cat/") for name in moved)
        sizes.add(sum(name.startswith("cat/") for name in after))
        moves += len(moved)
        before = after
    assert sizes == {2, 3, 4, 5}  # of 11 to 24 images
    assert moves > 0


def test_the_folder_for_training_may_be_the_one_that_is_split(whole: Path) -> None:
    write_classes(whole / "tests", cat=2, owl=1)
    shutil.move(whole / "cat", whole / "photos/cat")
    shutil.move(whole / "dog", whole / "photos/dog")
    data = data_of(whole, "train: photos\ntest: tests\nsplit: 0.2\n")
    assert data.names == {0: "cat", 1: "dog"}
    assert names(data.split("val")) == ["cat/0.png", "cat/1.png", "dog/1.png", "dog/9.png"]
    assert len(data.split("train").images) == 16
    with pytest.raises(UserError, match="`test:` has a folder 'owl', which is not one of the classes cat, dog"):
        data.split("test")
    shutil.rmtree(whole / "tests/owl")
    data = data_of(whole, "train: photos\ntest: tests\nsplit: 0.2\n")
    assert [str(image) for image in data.split("test").images] == [f"{whole}/tests/cat/{k}.png" for k in range(2)]


def test_val_is_preferred_to_a_share(folder: Path) -> None:
    data = data_of(folder, TRAIN_VAL + "split: 0.2\n")
    assert names(data.split("val")) == ["cat/0.png", "dog/0.png", "dog/1.png"]
    assert {image.parents[1].name for image in data.split("val").images} == {"val"}
    assert names(data.split("train")) == names(data_of(folder).split("train"))


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


def test_a_report_counts_images_and_classes(folder: Path) -> None:
    data = data_of(folder)
    assert data.split("train").report("train") == ["train: 13 images of 3 classes, 4 to 5 each"]
    assert data.split("val").report("val") == ["val: 3 images of 2 classes, 0 to 2 each"]


def test_other_labels_are_another_split(folder: Path) -> None:
    def changed(split: ClassificationSplit, other: ClassificationSplit) -> set[str]:
        return {key for key, value in split.identity().items() if other.identity()[key] != value}

    split = data_of(folder).split("train")
    renumbered = data_of(folder, TRAIN_VAL + "names: [owl, cat, dog]\n").split("train")
    assert changed(split, renumbered) == {"labels"}
    # the last of the cats becomes the first of the dogs: the names stay in their order
    (folder / "train/cat/4.png").rename(folder / "train/dog/+.png")
    split = replace(split, images=[*split.images[:4], folder / "train/dog/+.png", *split.images[5:]])
    assert changed(split, data_of(folder).split("train")) == {"labels"}


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


def test_hyperparameters_reach_the_augmentation(folder: Path) -> None:
    data = data_of(folder)
    loader: Any = data.train_loader(data.split("train"), batch_size=4, hyp=EVERYTHING, seed=3)
    assert loader.dataset.hyp is EVERYTHING


def test_targets_are_shares_of_classes(folder: Path) -> None:
    for batch in epoch_of(data_of(folder), EVERYTHING):
        assert batch.targets.shape == (4, 3)
        assert batch.targets.sum(1).tolist() == pytest.approx([1] * 4)


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


def test_image_weights_balance_the_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", cat=9, dog=3)
    data = data_of(tmp_path, image_weights=True)
    batches: Any = data.train_loader(data.split("train"), batch_size=1, hyp=EVERYTHING, seed=0).batch_sampler
    samples = []
    for epoch in range(100):
        batches.set_epoch(epoch)
        samples += [number >= 9 for batch in batches for number in (batch[0].image, *batch[0].partners)]
    assert len(samples) == 2400
    assert np.mean(samples) == pytest.approx(0.5, abs=0.07)


def test_collate_stacks_items_in_their_order() -> None:
    items = [
        (torch.full((3, 4, 4), k, dtype=torch.uint8), torch.tensor([0.25 * k, 1 - 0.25 * k]), ClassInfo(k, f"{k}", k))
        for k in (2, 0, 1)
    ]
    batch = collate(items)
    assert (batch.images.shape, batch.images.dtype) == ((3, 3, 4, 4), torch.uint8)
    assert batch.images[:, 0, 0, 0].tolist() == [2, 0, 1]
    assert (batch.targets.dtype, batch.targets.tolist()) == (torch.float32, [[0.5, 0.5], [0, 1], [0.25, 0.75]])
    assert [info.image for info in batch.infos] == [2, 0, 1]


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
ALL_TRANSFORMS = {
    **{"crop_scale": 0.3, "fliplr": 0.5, "flipud": 0.5, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
    **{"hue": 0.1, "randaugment": 2, "erasing": 0.5, "mixup": 0.4, "cutmix": 0.4},
}


def plain(*colour: int, side: int = SIDE) -> Tensor:
    """Return a square image of one colour, RGB, or of one grey."""
    return torch.tensor(colour, dtype=torch.uint8).view(-1, 1, 1).expand(3, side, side).contiguous()


def noisy(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Tensor:
    return torch.from_numpy(noise(width, height, seed).transpose(2, 0, 1).copy())


class Stored:
    """Images in memory, RGB, in place of files; `loaded` are the numbers of those that were read."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.images, self.files, self.loaded = images, [Path("a.png")] * len(images), []

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


def test_without_strengths_a_square_image_is_unchanged() -> None:
    images = [noisy(seed=seed) for seed in range(3)]
    for changed, shares in results(10, images):
        assert torch.equal(changed, images[0])
        assert (shares.dtype, shares.tolist()) == (torch.float32, [1, 0, 0])


@pytest.mark.parametrize(("width", "height"), [(10, 10), (20, 64), (64, 20), (47, 33), (100, 100), (200, 10)])
def test_images_of_any_size_become_squares(width: int, height: int) -> None:
    for changed, shares in results(3, [noisy(width, height), noisy(height, width)], crop_scale=0.5, mixup=0.5):
        assert (changed.dtype, changed.shape) == (torch.uint8, (3, SIDE, SIDE))
        assert shares.shape == (2,)


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


def test_a_crop_can_be_flipped() -> None:
    image = torch.cat((plain(20), plain(220)), dim=2)  # dark on the left, bright on the right
    changed = pixels(10, image, crop_scale=0.9, fliplr=1.0)
    assert (changed[..., :4] == 220).all()
    assert (changed[..., -4:] == 20).all()


def test_brightness_scales_all_values() -> None:
    changed = pixels(40, plain(100), brightness=0.5).flatten(1)
    assert (changed.amin(1) == changed.amax(1)).all()
    assert 50 <= changed.min() < 60
    assert 140 < changed.max() <= 150


def test_contrast_scales_the_distance_from_the_mean() -> None:
    image = torch.cat((plain(60)[:, :16], plain(140)[:, :16]), dim=1)
    changed = pixels(40, image, contrast=0.5)
    dark, bright = (changed[:, 0, row, 0].int() for row in (0, -1))
    assert (dark + bright - 200).abs().max() <= 2  # around the mean, 100
    assert 40 <= dark.min() < 45
    assert 75 < dark.max() <= 80


def test_saturation_scales_the_distance_from_grey() -> None:
    changed = pixels(40, plain(150, 100, 50), saturation=0.5)[:, :, 0, 0].double()
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.double)  # of the three colours in grey
    assert (changed @ weights - 109.25).abs().max() < 1.5  # 44.85 + 58.7 + 5.7
    ranges = changed[:, 0] - changed[:, 2]  # 100 in the image
    assert 48 <= ranges.min() < 60
    assert 140 < ranges.max() <= 152


def test_hue_rotates_the_colour_circle() -> None:
    changed = pixels(40, plain(200, 0, 0), hue=0.1)[:, :, 0, 0].int()
    assert (changed[:, 0] - 200).abs().max() <= 1
    assert changed[:, 1:].amin(1).max() <= 1
    assert (changed[:, 1:].amax(0) > 60).all()  # towards yellow and towards magenta
    assert changed[:, 1:].max() <= 121  # 0.1 of the circle is 0.6 of a sixth of it


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


def test_randaugment_changes_pixels_by_its_magnitude() -> None:
    image = noisy()
    changed = pixels(20, image, randaugment=2)
    assert (changed.dtype, changed.shape) == (torch.uint8, (20, *image.shape))
    assert sum(not torch.equal(one, image) for one in changed) > 12  # one of its 14 operations is the identity
    assert not torch.equal(changed, pixels(20, image, randaugment=2, randaugment_magnitude=30))


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


def test_mixup_and_cutmix_each_use_their_own_alpha() -> None:
    images = [plain(8 * k) for k in range(30)]
    mixups = results(30, images, mixup=1.0, mixup_alpha=1e6, cutmix_alpha=0.01)
    firsts = torch.stack([shares[0] for _, shares in mixups])
    assert ((firsts - 0.5).abs() < 0.01).sum() > 25  # but for an image that is its own partner
    assert ((firsts - 0.5).abs() < 0.01).logical_or(firsts > 0.99).all()
    cutmixes = results(30, images, cutmix=1.0, mixup_alpha=0.01, cutmix_alpha=1e6)
    firsts = torch.stack([shares[0] for _, shares in cutmixes])
    # the rectangle has half of the area less the part outside of the image: an eighth if it is centred on a corner
    assert ((firsts > 0.47) & (firsts < 0.9)).sum() > 25


def test_two_mixed_images_of_one_class_belong_to_it_wholly() -> None:
    images = [plain(0), plain(200)]
    items = items_of(images, [1, 1], mixup=1.0, mixup_alpha=1.0)
    mixed = [augmented(items, 0, SIDE, position) for position in range(20)]
    assert all(shares.tolist() == pytest.approx([0, 1, 0]) for _, shares in mixed)
    assert len({int(image[0, 0, 0]) for image, _ in mixed}) > 4


@pytest.mark.parametrize("setting", ["mixup", "cutmix"])
def test_partners_are_drawn_from_all_images(setting: str) -> None:
    items = items_of([plain(0)] * 5, **{setting: 1.0})
    for position in range(60):
        augmented(items, 3, SIDE, position)
    loaded = items.images.loaded
    assert loaded[::2] == [3] * 60
    assert set(loaded[1::2]) == {0, 1, 2, 3, 4}
    assert max(map(loaded[1::2].count, range(5))) < 30


def test_a_partner_is_augmented_too() -> None:
    images = [plain(0), torch.cat((plain(100)[:, :, :16], plain(200)[:, :, :16]), dim=2)]
    for image, shares in results(20, images, mixup=1.0, mixup_alpha=1.0, fliplr=1.0):
        assert (image - shares[1] * images[1].flip(2)).abs().max() <= 0.51


def test_the_shares_of_mixup_and_cutmix() -> None:
    mixed = results(200, [plain(8 * k) for k in range(30)], mixup=0.5, cutmix=0.25, cutmix_alpha=1e6)
    # cutmix gives two greys, mixup one grey of two classes; one in 30 images is its own partner
    kinds = [len(image.unique()) + (shares.max() < 1) for image, shares in mixed]
    plains, mixups, cutmixes = (kinds.count(kind) for kind in (1, 2, 3))
    assert plains + mixups + cutmixes == 200
    assert 30 < cutmixes < 70
    assert 60 < mixups < 130


def test_without_mixing_no_partner_is_loaded() -> None:
    items = items_of([plain(10)] * 9, fliplr=0.5)
    for position in range(10):
        assert augmented(items, 0, SIDE, position)[1][0] == 1
    assert items.images.loaded == [0] * 10


# Randomness


def test_the_result_depends_only_on_the_generator_and_global_generators_continue() -> None:
    items = items_of([noisy(50, 40, seed) for seed in range(6)], **ALL_TRANSFORMS)
    first = [augmented(items, 2, SIDE, position) for position in range(12)]
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)  # noqa: NPY002 - the global generator
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for seed in reversed(range(12)):  # the order must not matter
        for one, other in zip(augmented(items, 2, SIDE, seed), first[seed], strict=True):
            assert torch.equal(one, other)
    assert len({image.numpy().tobytes() for image, _ in first}) == 12
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002


def test_within_the_block_torch_draws_from_the_generator() -> None:
    with torch_seeded_by(np.random.default_rng(1)):
        first = torch.rand(4)
    torch.rand(3)
    with torch_seeded_by(np.random.default_rng(1)):
        assert torch.equal(torch.rand(4), first)
    with torch_seeded_by(np.random.default_rng(2)):
        assert not torch.equal(torch.rand(4), first)


# Centre crops


def test_a_centre_crop_has_seven_eighths_of_the_shorter_side() -> None:
    image = noisy(48, 32)
    # 28 / 0.875 = 32: not resized; 2 rows and 10 columns on either side are cut off
    assert torch.equal(centre_crop(image, 28), image[:, 2:30, 10:38])
    assert torch.equal(centre_crop(image.mT, 28), image[:, 2:30, 10:38].mT)


def test_a_shrunk_centre_crop_is_smooth() -> None:
    def halved(image: Tensor, first: int) -> Tensor:
        """Return 28 columns of the image at half its width, each from four columns with triangular weights."""
        weights = (0.125, 0.375, 0.375, 0.125)
        return sum(weight * image[..., 2 * first - 1 + k :: 2][..., :28] for k, weight in enumerate(weights))

    image = noisy(96, 64)
    expected = halved(halved(image.float(), 10).mT, 2).mT
    crop = centre_crop(image, 28)
    assert (crop.dtype, crop.shape) == (torch.uint8, (3, 28, 28))
    assert (crop - expected).abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(10, 10), (10, 300), (300, 10), (27, 28)])
def test_a_small_or_long_image_is_enlarged_for_a_centre_crop(height: int, width: int) -> None:
    image = plain(10, 20, 30, side=300)[:, :height, :width]
    assert torch.equal(centre_crop(image, 28), plain(10, 20, 30, side=28))
