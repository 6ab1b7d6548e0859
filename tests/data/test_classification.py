"""Folders of images as classes: which image is of which class and split, the same pixels however they are loaded."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data import labels
from data.batches import Batch
from data.cache import Images, ImagesInMemory, ImagesOnDisk
from data.classification import (
    ClassificationData,
    ClassificationSplit,
    EvaluationItems,
    ImageInfo,
    TrainingItems,
    collate,
)
from data.dataset import DataOptions, dataset_class
from data.labels import EXIF_ORIENTATION
from data.sampler import SampleIndex
from data.sources import read_spec
from data.transforms import TransformSettings
from models.tasks.classification.task import ClassificationRecipe
from utils.errors import UserError

NOTHING = ClassificationRecipe(crop_scale=1.0, fliplr=0.0, brightness=0.0, contrast=0.0, saturation=0.0)
EVERYTHING = ClassificationRecipe(
    crop_scale=0.3, fliplr=0.5, flipud=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, randaugment=2,
    randaugment_magnitude=7, erasing=0.5, mixup=0.3, cutmix=0.3, mixup_alpha=0.4, cutmix_alpha=0.8,
)  # fmt: skip
TRAIN_VAL = "train: train\nval: val\n"
# Width and height of the images of the small data set, in turns.
SIZES = ((32, 32), (50, 40), (36, 61), (20, 20), (80, 45), (37, 36), (11, 30))


def write_image(file: Path, width: int = 20, height: int = 20, seed: int = 0) -> Path:
    """An image of coarse noise."""
    file.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    Image.fromarray(coarse.repeat(4, 0).repeat(4, 1)[:height, :width]).save(file)
    return file


def write_classes(folder: Path, **counts: int) -> Path:
    """A folder per class, each of so many images called 0.png, 1.png, ..."""
    seed = 0
    for name, count in counts.items():
        for number in range(count):
            write_image(folder / name / f"{number}.png", *SIZES[seed % len(SIZES)], seed=seed)
            seed += 1
    return folder


def data_of(folder: Path, content: str = TRAIN_VAL, imgsz: int = 32, **options: Any) -> ClassificationData:
    """The data set that a data.yaml of this content describes."""
    file = folder / "data.yaml"
    file.write_text(content)
    return ClassificationData(read_spec(file), imgsz, 1, DataOptions(**options))


def sampled(data: ClassificationData, **flags: Any) -> ClassificationData:
    """The same data set with other flags of `Sampling`."""
    return replace(data, options=replace(data.options, **flags))


def names(split: ClassificationSplit) -> list[str]:
    """The images of a split as class folder/name."""
    return [f"{image.parent.name}/{image.name}" for image in split.images]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirteen images of three classes for training, and others for validation."""
    write_classes(tmp_path / "train", cat=5, dog=4, owl=4)
    write_classes(tmp_path / "val", cat=1, dog=2)
    return tmp_path


# folders and classes


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


@pytest.mark.parametrize("caption", ["a cat on a mat", "0 0.5 0.5 0.5 0.5", "9 10 20 30 40"])
def test_texts_beside_images_are_not_taken_for_labels(folder: Path, caption: str) -> None:
    for image in (folder / "train").rglob("*.png"):
        image.with_suffix(".txt").write_text(caption)
    split = data_of(folder, strict=True).split("train")
    assert split.problems == ()
    assert split.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4


def test_names_say_the_numbers_of_the_classes(folder: Path) -> None:
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
        f"{folder}/data.yaml: `val:` has a folder 'elk', which is none of the classes cat, dog, owl; "
        "add it to `train:` and `names:`, or move it away"
    )
    with pytest.raises(UserError, match="`train:` has a folder 'owl', which is none of the classes cat, dog; add it"):
        data_of(folder, TRAIN_VAL + "names: [cat, dog]\n").split("train")


def test_a_class_without_training_images_is_a_problem(folder: Path) -> None:
    data = data_of(folder, TRAIN_VAL + "names: [cat, ant, dog, owl]\n")
    split = data.split("train")
    assert [problem.partition(";")[0] for problem in split.problems] == [
        f"{folder}/data.yaml: `train:` has no images of the class 'ant'"
    ]
    assert split.labels.tolist() == [0] * 5 + [2] * 4 + [3] * 4
    assert data.split("val").problems == ()  # where some are absent too


def test_a_class_without_training_images_is_refused_where_told_to(folder: Path) -> None:
    with pytest.raises(UserError, match=r"`train:` has no images of the class 'ant' \(--strict; 1 such problems in"):
        data_of(folder, TRAIN_VAL + "names: [cat, ant, dog, owl]\n", strict=True).split("train")


@pytest.mark.parametrize("content", ["train: train\n", "train: list.txt\n", "path: train\nsplit: 0.2\n"])
def test_no_folders_of_images_are_named_with_the_place_looked_at(tmp_path: Path, content: str) -> None:
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
    with pytest.raises(UserError, match="--single-cls leaves a classifier nothing to tell apart"):
        data_of(folder, single_cls=True)


def test_all_files_that_training_reads_are_listed(folder: Path) -> None:
    (folder / "train/cat/notes.txt").write_text("text")
    data = data_of(folder)
    files = ClassificationData.files(data.spec)
    assert files == {name: data.split(name).images for name in ("train", "val")}
    assert [len(paths) for paths in files.values()] == [13, 3]


def test_the_task_classify_has_this_data() -> None:
    assert dataset_class("data.classification:ClassificationData") is ClassificationData


# holding out


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
    """`printf 0/cat/0.png | sha256sum` and so on: the two that come first are kept, by any version of Lockstep."""
    write_classes(tmp_path, cat=10, dog=10)
    assert names(data_of(tmp_path, f"path: .\nsplit: 0.2\nsplit_seed: {seed}\n").split("val")) == held


@pytest.mark.parametrize(("share", "held"), [(0.01, 1), (0.25, 2), (0.99, 9)])
def test_at_least_one_is_held_out_and_never_all(whole: Path, share: float, held: int) -> None:
    data = data_of(whole, f"path: .\nsplit: {share}\n")
    assert np.bincount(data.split("val").labels, minlength=4)[[0, 2]].tolist() == [held, 0]
    assert np.bincount(data.split("train").labels)[[0, 2]].tolist() == [10 - held, 1]


def test_the_choice_is_the_same_elsewhere_and_by_any_number_of_processes(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {name: names(data_of(whole, "path: .\nsplit: 0.3\n").split(name)) for name in ("train", "val")}
    moved = shutil.copytree(whole, tmp_path_factory.mktemp("other") / "deeper/still")
    monkeypatch.setattr(labels, "FILES_PER_CHUNK", 4)  # or one process would do
    data = data_of(moved, "path: .\nsplit: 0.3\n", workers=2)
    assert {name: names(data.split(name)) for name in ("train", "val")} == wanted


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
    with pytest.raises(UserError, match="`test:` has a folder 'owl', which is none of the classes cat, dog"):
        data.split("test")
    shutil.rmtree(whole / "tests/owl")
    data = data_of(whole, "train: photos\ntest: tests\nsplit: 0.2\n")
    assert [str(image) for image in data.split("test").images] == [f"{whole}/tests/cat/{k}.png" for k in range(2)]


def test_a_folder_for_validation_beside_a_share_is_the_one_that_is_taken(folder: Path) -> None:
    data = data_of(folder, TRAIN_VAL + "split: 0.2\n")
    assert names(data.split("val")) == ["cat/0.png", "dog/0.png", "dog/1.png"]
    assert {image.parents[1].name for image in data.split("val").images} == {"val"}


def test_the_folder_to_be_split_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: `path:` does not exist; looked for .*/flowers"):
        data_of(tmp_path, "path: no/../flowers\nsplit: 0.2\n")


def test_nothing_to_hold_out_is_an_error(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=1, dog=1)
    with pytest.raises(UserError, match=r"data\.yaml: "):
        data_of(tmp_path, "path: .\nsplit: 0.2\n").split("val")


# what cannot be used


def test_what_cannot_be_read_is_left_out_and_named(folder: Path) -> None:
    torn = folder / "train/dog/0.png"
    torn.write_bytes(torn.read_bytes()[:-60])
    (folder / "train/cat/1.png").write_bytes(b"not an image")
    write_image(folder / "train/owl/3.png", 9, 40)
    data = data_of(folder)
    split = data.split("train")
    assert [problem.split(": ")[0] for problem in split.problems] == [
        f"{folder}/train/{name}" for name in ("cat/1.png", "dog/0.png", "owl/3.png")
    ]
    assert all(problem.endswith("; left out") for problem in split.problems)
    assert "9x40 pixels, smaller than 10" in split.problems[2]
    assert names(split) == [
        "cat/0.png", "cat/2.png", "cat/3.png", "cat/4.png", "dog/1.png", "dog/2.png", "dog/3.png", "owl/0.png",
        "owl/1.png", "owl/2.png",
    ]  # fmt: skip
    assert split.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert split.sizes.tolist()[4] == list(SIZES[6])  # dog/1.png is the seventh image
    for batch in data.evaluation_loader(split, data.evaluation_batches(split, batch_size=4, square=True)):
        for info in batch.infos:
            assert info.path == str(split.images[info.image])


@pytest.mark.parametrize(("width", "content"), [(9, None), (20, b""), (20, b"not an image")])
def test_strict_refuses_what_would_be_left_out(folder: Path, width: int, content: bytes | None) -> None:
    file = write_image(folder / "train/dog/1.png", width)
    if content is not None:
        file.write_bytes(content)
    assert len(data_of(folder, strict=True).split("val").images) == 3
    with pytest.raises(UserError, match=r"train/dog/1\.png: .* \(--strict; 1 such problems in train\)$"):
        data_of(folder, strict=True).split("train")


def test_a_split_of_which_nothing_is_readable_is_an_error(folder: Path) -> None:
    for image in (folder / "val").rglob("*.png"):
        image.write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"data\.yaml: no image of `val:` can be read; the first: .*val/cat/0\.png: "):
        data_of(folder).split("val")


def test_the_first_unreadable_image_is_named_where_a_class_has_none_too(tmp_path: Path) -> None:
    write_image(tmp_path / "train/cat/0.png", 9)
    with pytest.raises(UserError, match=r"no image of `train:` can be read; the first: .*cat/0\.png: 9x20 pixels"):
        data_of(tmp_path, TRAIN_VAL + "names: [ant, cat]\n").split("train")


# what is told of a split


def test_a_report_counts_images_and_classes(folder: Path) -> None:
    data = data_of(folder)
    assert data.split("train").report("train") == ["train: 13 images of 3 classes, 4 to 5 each"]
    assert data.split("val").report("val") == ["val: 3 images of 2 classes, 0 to 2 each"]


def test_a_report_names_the_first_problems(folder: Path) -> None:
    for image in sorted((folder / "train").rglob("*.png"))[:7]:
        image.write_bytes(b"not an image")
    lines = data_of(folder).split("train").report("training")
    assert lines[0] == "training: 6 images of 2 classes, 0 to 4 each"
    assert lines[1].startswith(f"warning: {folder}/train/cat/0.png: not readable as an image")
    assert lines[6:] == ["warning: 3 more such problems in training; problems.txt in the run folder lists all"]


def differing(one: ClassificationSplit, other: ClassificationSplit) -> set[str]:
    """What tells two splits apart."""
    assert one.identity().keys() == other.identity().keys()
    return {what for what, value in one.identity().items() if other.identity()[what] != value}


def test_the_same_files_elsewhere_are_the_same_split(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    split = data_of(folder).split("train")
    assert split.identity()["count"] == "13"
    moved = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "deeper")
    (moved / "train/cat/3.png").touch()
    assert not differing(split, data_of(moved).split("train"))


def test_other_images_are_another_split(folder: Path) -> None:
    split = data_of(folder).split("train")
    (folder / "train/owl/3.png").rename(folder / "train/owl/4.png")
    assert differing(split, data_of(folder).split("train")) == {"files"}
    (folder / "train/owl/4.png").unlink()
    assert differing(split, data_of(folder).split("train")) == {"count", "files", "labels"}


def test_other_labels_are_told_apart(folder: Path) -> None:
    split = data_of(folder).split("train")
    other = data_of(folder, TRAIN_VAL + "names: [owl, cat, dog]\n")
    assert differing(split, other.split("train")) == {"labels"}
    # the last of the cats becomes the first of the dogs: the names stay in their order
    (folder / "train/cat/4.png").rename(folder / "train/dog/+.png")
    split = replace(split, images=[*split.images[:4], Path("+.png"), *split.images[5:]])
    assert differing(split, data_of(folder).split("train")) == {"labels"}


def test_documents_list_the_classes_and_the_images_of_each_split(tmp_path: Path) -> None:
    for name in ("train/dog/0.png", "train/Käfer/1.png", "val/dog/2.png"):
        write_image(tmp_path / name)
    data = data_of(tmp_path)
    documents = data.documents(data.split("train"), data.split("val"))
    assert documents == {
        "class_indices.json": '{\n  "0": "Käfer",\n  "1": "dog"\n}\n',
        "split.csv": (
            "split,class,image\n"
            f"train,Käfer,{tmp_path}/train/Käfer/1.png\n"
            f"train,dog,{tmp_path}/train/dog/0.png\n"
            f"val,dog,{tmp_path}/val/dog/2.png\n"
        ),
        "labels.csv": ("split,class,images,instances\ntrain,Käfer,1,1\ntrain,dog,1,1\nval,Käfer,0,0\nval,dog,1,1\n"),
    }


def test_documents_keep_names_with_commas_and_quotes(tmp_path: Path) -> None:
    name = 'a, "b"'
    write_image(tmp_path / f"train/{name}/0.png")
    data = data_of(tmp_path, "train: train\nval: train\n")
    documents = data.documents(data.split("train"), data.split("val"))
    assert json.loads(documents["class_indices.json"]) == {"0": name}
    rows = list(csv.reader(documents["split.csv"].splitlines()))
    assert rows[1:] == [[split, name, f"{tmp_path}/train/{name}/0.png"] for split in ("train", "val")]
    counts = list(csv.reader(documents["labels.csv"].splitlines()))
    assert counts[1:] == [[split, name, "1", "1"] for split in ("train", "val")]


def test_documents_count_the_images_of_each_class(folder: Path) -> None:
    data = data_of(folder)
    documents = data.documents(data.split("train"), data.split("val"))
    assert documents["labels.csv"].splitlines()[1:] == [
        "train,cat,5,5", "train,dog,4,4", "train,owl,4,4", "val,cat,1,1", "val,dog,2,2", "val,owl,0,0"
    ]  # fmt: skip


# training items


def epochs(
    data: ClassificationData, split: ClassificationSplit, hyp: ClassificationRecipe, batch_size: int = 4, **more: Any
) -> list[list[Batch]]:
    """Two epochs of a loader, its processes kept between them."""
    loader = sampled(data, **more).train_loader(split, batch_size=batch_size, hyp=hyp, seed=3)
    found = []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        found.append(list(loader))
    return found


def check_same(first: list[list[Batch]], second: list[list[Batch]]) -> None:
    """Bit by bit, and in the same order."""
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.targets, b.targets)
            assert a.infos == b.infos


def items_of(folder: Path, seed: int = 3) -> TrainingItems:
    data = data_of(folder)
    items = data.train_loader(data.split("train"), batch_size=4, hyp=EVERYTHING, seed=seed).dataset
    assert isinstance(items, TrainingItems)
    return items


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_items_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    alone = data_of(folder)
    split = alone.split("train")
    wanted = epochs(alone, split, EVERYTHING)
    assert [len(epoch) for epoch in wanted] == [4, 4]
    for workers in (1, 2):
        torch.manual_seed(workers)
        check_same(epochs(data_of(folder, workers=workers), split, EVERYTHING), wanted)
    check_same(epochs(data_of(folder), split, EVERYTHING), wanted)  # and a restart repeats it


def test_items_do_not_depend_on_how_the_epoch_is_cut_into_batches(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    small, large = (epochs(data, split, EVERYTHING, size)[1] for size in (2, 7))
    for part in ("images", "targets"):
        assert torch.equal(*(torch.cat([getattr(batch, part) for batch in found]) for found in (small, large)))


def test_an_item_is_the_same_after_others(folder: Path) -> None:
    draws = [SampleIndex(epoch, position, 6, (32, 32)) for epoch in range(3) for position in range(5)]
    items = items_of(folder)
    wanted = [items[draw] for draw in draws]
    for draw, (pixels, shares, info) in zip(reversed(draws), reversed(wanted), strict=True):
        found = items[draw]
        assert torch.equal(found[0], pixels)
        assert torch.equal(found[1], shares)
        assert found[2] == info == ImageInfo(6, f"{folder}/train/dog/1.png", 1)


def test_epochs_positions_and_seeds_each_give_other_pixels(folder: Path) -> None:
    items, other = items_of(folder), items_of(folder, seed=4)
    draw = SampleIndex(0, 0, 5, (32, 32))
    found = [items[draw], items[draw._replace(epoch=1)], items[draw._replace(position=1)], other[draw]]
    assert len({pixels.numpy().tobytes() for pixels, _, _ in found}) == 4


def test_hyperparameters_reach_the_augmentation(folder: Path) -> None:
    augmenter = items_of(folder).augmenter
    assert augmenter.settings == TransformSettings(
        crop_scale=0.3, fliplr=0.5, flipud=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, randaugment=2,
        randaugment_magnitude=7, erasing=0.5, mixup=0.3, cutmix=0.3, mixup_alpha=0.4, cutmix_alpha=0.8,
    )  # fmt: skip
    assert (augmenter.count, augmenter.classes) == (13, 3)


def test_a_training_epoch_shows_every_image_in_full_batches(folder: Path) -> None:
    data = data_of(folder)
    first, second = epochs(data, data.split("train"), EVERYTHING)
    for batch in first:
        assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (4, 3, 32, 32))
        assert (batch.targets.dtype, batch.targets.shape) == (torch.float32, (4, 3))
        assert batch.targets.sum(1).tolist() == pytest.approx([1] * 4)
    orders = [[info.image for batch in epoch for info in batch.infos] for epoch in (first, second)]
    assert sorted(orders[0][:13]) == sorted(orders[1][:13]) == list(range(13))
    assert orders[0] != orders[1]


def test_without_augmentation_a_square_image_is_that_of_its_file(tmp_path: Path) -> None:
    for seed, name in enumerate(("train/cat/0.png", "train/dog/0.png", "train/dog/1.png")):
        write_image(tmp_path / name, 32, 32, seed)
    data = data_of(tmp_path)
    for batch in epochs(data, data.split("train"), NOTHING, batch_size=3)[0]:
        for image, target, info in zip(batch.images, batch.targets, batch.infos, strict=True):
            assert np.array_equal(image.permute(1, 2, 0), np.asarray(Image.open(info.path)))
            assert target.tolist() == [info.label == 0, info.label == 1]
            assert info.label == ("dog" in info.path)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_other_ways_to_draw_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    for way in ({"image_weights": True}, {"repeat_factor": 0.35, "multi_scale": True}):
        alone = data_of(folder, imgsz=64)
        split = alone.split("train")
        wanted = epochs(alone, split, EVERYTHING, **way)
        check_same(epochs(data_of(folder, imgsz=64, workers=2), split, EVERYTHING, **way), wanted)


def test_batches_of_many_sizes_show_the_same(folder: Path) -> None:
    data = data_of(folder, imgsz=64)
    split = data.split("train")
    hyp = replace(EVERYTHING, randaugment=0, erasing=0.0, cutmix=0.0, mixup=0.0)  # which count in pixels
    sizes = set()
    for usual, scaled in zip(epochs(data, split, hyp), epochs(data, split, hyp, multi_scale=True), strict=True):
        for a, b in zip(usual, scaled, strict=True):
            sizes.add(tuple(b.images.shape[2:]))
            assert torch.equal(a.targets, b.targets)
            means = [batch.images.float().mean((2, 3)) for batch in (a, b)]
            assert means[1].numpy() == pytest.approx(means[0].numpy(), abs=6)
    assert sizes == {(64, 64), (96, 96)}


def test_classes_of_few_images_are_drawn_as_often(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", cat=9, dog=3)
    write_classes(tmp_path / "val", cat=1)
    data = data_of(tmp_path, image_weights=True)
    batches = data.train_loader(data.split("train"), batch_size=1, hyp=EVERYTHING, seed=0).batch_sampler
    drawn = []
    for epoch in range(100):
        batches.set_epoch(epoch)
        drawn += [number >= 9 for batch in batches for number in (batch[0].image, *batch[0].partners)]
    assert len(drawn) == 2400
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.07)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_last_epochs_show_single_images_only(folder: Path) -> None:
    data = data_of(folder, workers=1, close_mosaic=1, epochs=2)
    hyp = replace(NOTHING, mixup=0.5, cutmix=0.5)
    loader = data.train_loader(data.split("train"), batch_size=13, hyp=hyp, seed=3)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        (batch,) = loader
        labels = torch.tensor([info.label for info in batch.infos])
        assert torch.equal(batch.targets, torch.nn.functional.one_hot(labels, 3).float()) == (epoch == 1)


def test_only_the_validation_is_cached(folder: Path) -> None:
    data = data_of(folder, cache="val")
    split = data.split("val")
    assert type(data.train_loader(split, batch_size=3, hyp=NOTHING, seed=3).dataset.images) is Images
    batches = data.evaluation_batches(split, batch_size=3, square=False)
    assert type(data.evaluation_loader(split, batches).dataset.images) is ImagesInMemory


def test_collate_stacks_items_in_their_order() -> None:
    items = [
        (torch.full((3, 4, 4), k, dtype=torch.uint8), torch.tensor([0.25 * k, 1 - 0.25 * k]), ImageInfo(k, f"{k}", k))
        for k in (2, 0, 1)
    ]
    batch = collate(items)
    assert (batch.images.shape, batch.images.dtype) == ((3, 3, 4, 4), torch.uint8)
    assert batch.images[:, 0, 0, 0].tolist() == [2, 0, 1]
    assert (batch.targets.dtype, batch.targets.tolist()) == (torch.float32, [[0.5, 0.5], [0, 1], [0.25, 0.75]])
    assert [info.image for info in batch.infos] == [2, 0, 1]
    moved = batch.to("meta")
    assert (moved.images.device.type, moved.targets.device.type) == ("meta", "meta")
    assert moved.infos == batch.infos


# evaluation items


def evaluation(data: ClassificationData, split: ClassificationSplit, batch_size: int = 4) -> list[Batch]:
    batches = data.evaluation_batches(split, batch_size=batch_size, square=False)
    loader = data.evaluation_loader(split, batches)
    assert isinstance(loader.dataset, EvaluationItems)
    return list(loader)


def middle(file: str, side: int) -> np.ndarray:
    """By Pillow: the shorter side at 8/7 of `side`, then the middle square, (side, side, 3) RGB."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    shorter = round(side * 8 / 7)
    width, height = (side * shorter // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def test_evaluation_items_are_those_of_an_independent_computation(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    for batch in evaluation(data, split):
        assert (batch.images.dtype, batch.images.shape[1:]) == (torch.uint8, (3, 32, 32))
        for image, target, info in zip(batch.images, batch.targets, batch.infos, strict=True):
            wanted = middle(info.path, 32).astype(int)
            assert np.abs(image.permute(1, 2, 0).numpy() - wanted).max() <= 1
            assert target.tolist() == [info.label == number for number in range(3)]
            assert info.label == {"cat": 0, "dog": 1, "owl": 2}[Path(info.path).parent.name]
            assert np.array_equal(split.shown(info.image, 32), image.permute(1, 2, 0).numpy()[..., ::-1])


def test_an_evaluation_shows_every_image_once(folder: Path) -> None:
    data = data_of(folder)
    split = data.split("train")
    found = evaluation(data, split)
    assert [len(batch.images) for batch in found] == [4, 4, 4, 1]
    assert [info.image for batch in found for info in batch.infos] == list(range(13))
    batches = data.evaluation_batches(split, batch_size=4, square=True)
    check_same([list(data.evaluation_loader(split, batches[1::2]))], [found[1::2]])  # a share of it


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_evaluation_items_depend_on_neither_batch_nor_worker(folder: Path) -> None:
    split = data_of(folder).split("train")
    wanted = evaluation(data_of(folder), split)
    check_same([evaluation(data_of(folder, workers=2), split)], [wanted])
    for size in (1, 13):
        images = torch.cat([batch.images for batch in evaluation(data_of(folder), split, size)])
        assert torch.equal(images, torch.cat([batch.images for batch in wanted]))


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_cached_images_make_the_same_batches(folder: Path, cache: str) -> None:
    split = data_of(folder).split("train")
    wanted = [*epochs(data_of(folder), split, EVERYTHING), evaluation(data_of(folder), split)]
    for _ in range(2):  # written, and read
        data = data_of(folder, cache=cache)
        opened = data.evaluation_loader(split, []).dataset.images
        assert type(opened) is {"ram": ImagesInMemory, "disk": ImagesOnDisk}[cache]
        check_same([*epochs(data, split, EVERYTHING), evaluation(data, split)], wanted)


# kinds of images


def save(file: Path, image: Image.Image, **options: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, **options)


def both(folder: Path) -> tuple[Tensor, Tensor]:
    """The only image of a data set as a training and as an evaluation item."""
    data = data_of(folder, "train: train\nval: train\n", strict=True)
    split = data.split("train")
    assert split.problems == ()
    ((batch,), _) = epochs(data, split, NOTHING, batch_size=1)
    return batch.images[0], evaluation(data, split)[0].images[0]


@pytest.mark.parametrize(
    ("name", "image", "colour"),
    [
        ("grey.png", Image.new("L", (40, 30), 70), (70, 70, 70)),
        ("grey.jpg", Image.new("L", (40, 30), 70), (70, 70, 70)),
        ("two.png", Image.new("1", (40, 30), 1), (255, 255, 255)),
        ("palette.png", Image.new("RGB", (40, 30), (9, 80, 200)).quantize(4), (9, 80, 200)),
        ("a.webp", Image.new("RGBA", (40, 30), (200, 100, 50, 255)), (200, 100, 50)),
        ("clear.png", Image.new("RGBA", (40, 30), (200, 100, 50, 90)), (200, 100, 50)),
        ("grey-alpha.png", Image.new("LA", (40, 30), (70, 90)), (70, 70, 70)),
        ("print.jpg", Image.new("CMYK", (40, 30), (0, 255, 255, 0)), (255, 0, 0)),
        ("deep.png", Image.fromarray(np.full((30, 40), 0x80FF, np.uint16)), (128, 128, 128)),
    ],
)
def test_images_of_every_kind_become_three_channels(
    tmp_path: Path, name: str, image: Image.Image, colour: tuple[int, int, int]
) -> None:
    save(tmp_path / "train/a" / name, image)
    for found in both(tmp_path):
        assert (found.dtype, found.shape) == (torch.uint8, (3, 32, 32))
        assert (found.int() - torch.tensor(colour).view(3, 1, 1)).abs().max() <= 3  # a JPEG's colours are inexact


def test_a_sideways_image_is_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((64, 40), np.uint8)
    pixels[:, :20] = 255  # turned clockwise, what is on the left comes to the top
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    save(tmp_path / "train/a/0.jpg", Image.fromarray(pixels), exif=exif, quality=95)
    for found in both(tmp_path):
        assert (found[:, :12] > 250).all()
        assert (found[:, -12:] < 5).all()
    assert data_of(tmp_path).split("train").sizes.tolist() == [[64, 40]]


def test_other_splits_below_the_folder_are_no_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=3, dog=3)
    write_classes(tmp_path / "kept/test", cat=1, dog=1)
    data = data_of(tmp_path, "path: .\nsplit: 0.34\ntest: kept/test\n")
    assert data.names == {0: "cat", 1: "dog"}
    assert len(data.split("train").images) == 4
    assert len(data.split("test").images) == 2


def test_a_class_whose_images_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", cat=2, dog=1)
    (tmp_path / "train/dog/0.png").write_bytes(b"nothing")
    problems = data_of(tmp_path, "train: train\nval: train\n").split("train").problems
    assert "0.png: not readable" in problems[0]
    assert "no images of the class 'dog'" in problems[1]


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path, cat=2, dog=2)
    with pytest.raises(UserError, match="two classes under `names` have one name"):
        data_of(tmp_path, "path: .\nsplit: 0.5\nnames: [cat, dog, cat]\n")
