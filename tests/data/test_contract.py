"""The promises of `data.dataset.DataSet` that hold for every data set."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from data import sampler
from data.dataset import DataOptions, DataSet, data_source
from models.tasks.classify import ClassificationRecipe
from tests.making import noise, write_image, write_yaml
from utils.batch import Batch, Split
from utils.config.hyperparameters import Hyperparameters, Recipe
from utils.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NAMES = ('a, "b"', "car", "disc")
# Width and height of the training images: a prime number of them, in many shapes.
SIZES = ((64, 64), (64, 48), (40, 64), (30, 30), (100, 50), (48, 96), (64, 20), (20, 64), (70, 61), (33, 47), (64, 64),
         (80, 60), (11, 30))  # fmt: skip
TRAIN, VAL, BATCH_SIZE = len(SIZES), 5, 4


def draw(file: Path, number: int, *rows: str) -> None:
    write_image(file, noise(*SIZES[number], seed=number), *rows)


def draw_boxes(folder: Path) -> dict[str, Any]:
    """Draw images with one to three polygons each, and one without any; return the YAML."""
    rng = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            rows = []
            for x, y in rng.uniform(0.4, 0.6, (0 if number == 3 else number % 3 + 1, 2)):
                width, height = rng.uniform(0.15, 0.3, 2)
                diamond = (x, y - height, x + width, y, x, y + height, x - width, y)
                rows.append(f"{number % 3} {' '.join(f'{value:.4f}' for value in diamond)}")
            draw(folder / f"images/{split}/{number:02}.png", number, *rows)
    return {"train": "images/train", "val": "images/val", "names": list(NAMES)}


def draw_classes(folder: Path) -> dict[str, Any]:
    """Draw a folder of images per class; return the YAML."""
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            draw(folder / split / NAMES[number % 3] / f"{number:02}.png", number)
    return {"train": "train", "val": "val"}


DRAWING = """
import random
import numpy as np
import torch

def speckle(image, rng, unused=3):
    image[:: 4] = rng.integers(30) + np.random.randint(30) + random.randrange(12) + int(torch.randint(30, (1,)))
    return image

AUGMENTATIONS = [speckle, lambda image: image[:, ::-1]]
"""


class Kind(NamedTuple):
    """A data set: its class, a function that draws one, all augmentation, and the settings that mix images."""

    name: str
    draw: Callable[[Path], dict[str, Any]]
    recipe: Recipe
    unmixed: Mapping[str, float]


BOXES = Hyperparameters(
    hsv_h=0.015, hsv_s=0.7, hsv_v=0.4, degrees=10.0, translate=0.1, scale=0.5, shear=2.0, perspective=0.0005,
    flipud=0.5, fliplr=0.5, mosaic=1.0, mixup=0.5, copy_paste=0.5,
)  # fmt: skip
CLASSES = ClassificationRecipe(
    crop_scale=0.3, fliplr=0.5, flipud=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, randaugment=2,
    randaugment_magnitude=7, erasing=0.5, mixup=0.3, cutmix=0.3, mixup_alpha=0.4, cutmix_alpha=0.8,
)  # fmt: skip
KINDS = {
    "detection": Kind("data.detection:DetectionData", draw_boxes, BOXES, {"mosaic": 0.0}),
    "segmentation": Kind("data.segmentation:SegmentationData", draw_boxes, BOXES, {"mosaic": 0.0}),
    "classification": Kind("data.classification:ClassificationData", draw_classes, CLASSES, {"mixup": 0, "cutmix": 0}),
}


@pytest.fixture(scope="module", params=KINDS)
def drawing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    """A kind of data set and the YAML of a drawn one."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    return kind, write_yaml(folder / "data.yaml", kind.draw(folder))


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a window have fewer images than the data set."""
    monkeypatch.setattr(sampler, "PARTNERS_WINDOW", 6)


@pytest.fixture
def copy(drawing: tuple[Kind, Path], tmp_path: Path) -> tuple[Kind, Path]:
    """The same in a folder that a test may change."""
    kind, file = drawing
    return kind, shutil.copytree(file.parent, tmp_path / "copy") / "data.yaml"


def opened(drawing: tuple[Kind, Path], **options: Any) -> DataSet[Any]:
    kind, file = drawing
    return data_source(str(file), kind.name).open(64, 32, DataOptions(**options))


def train_loader(drawing: tuple[Kind, Path], batch_size: int = BATCH_SIZE, seed: int = 3, **options: Any) -> Any:
    data = opened(drawing, **options)
    recipe = drawing[0].recipe
    return data.train_loader(data.split("train", recipe), batch_size, recipe, seed)


def epoch_of(loader: Any, epoch: int, skipped: int = 0) -> list[Batch]:
    loader.batch_sampler.set_epoch(epoch)
    loader.batch_sampler.skip(skipped)
    return list(loader)


def two_epochs(drawing: tuple[Kind, Path], **options: Any) -> list[Batch]:
    """Return the batches of two epochs of one loader, whose processes stay."""
    loader = train_loader(drawing, **options)
    return [*epoch_of(loader, 0), *epoch_of(loader, 1)]


def evaluation(drawing: tuple[Kind, Path], batch_size: int = BATCH_SIZE, square: bool = False, **options: Any) -> Any:
    data = opened(drawing, **options)
    split = data.split("train")  # there are more images than in the validation
    return data.evaluation_loader(split, data.evaluation_batches(split, batch_size, square))


def images_of(batches: Sequence[Batch]) -> list[int]:
    return [info.image for batch in batches for info in batch.infos]


def check_same(first: Sequence[Batch], second: Sequence[Batch]) -> None:
    """Check that pixels, targets and masks are the same bit by bit, in the same order."""
    for a, b in zip(first, second, strict=True):
        for name in (field.name for field in fields(a) if field.name != "infos"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert [(info.image, info.path) for info in a.infos] == [(info.image, info.path) for info in b.infos]


def differ(first: Sequence[Batch], second: Sequence[Batch]) -> bool:
    return not any(torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True))


# Batches of a training


@pytest.mark.parametrize("code", ["", DRAWING])
def test_pixels_and_targets_do_not_depend_on_workers_or_the_global_seed(
    drawing: tuple[Kind, Path], tmp_path: Path, code: str
) -> None:
    """Neither do augmentations of a user, which change no other random choice."""
    file, idle = (tmp_path / f"{tmp_path.name}{number}.py" for number in (1, 2))  # names of modules, each once
    file.write_text(code)
    options = {"augmentations": str(file)} if code else {}
    expected = two_epochs(drawing, **options)
    assert not code or differ(expected, two_epochs(drawing))
    for workers in (0, 1, 4):
        torch.manual_seed(workers)
        check_same(two_epochs(drawing, workers=workers, **options), expected)
    idle.write_text("AUGMENTATIONS = [lambda image: image]")
    check_same(epoch_of(train_loader(drawing, augmentations=str(idle)), 0), epoch_of(train_loader(drawing), 0))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", ["StopIteration", "SystemExit(0)"])
def test_an_error_of_a_user_names_file_line_and_image(
    drawing: tuple[Kind, Path], tmp_path: Path, workers: int, error: str
) -> None:
    """torch would take a StopIteration for the end of the loader, and SystemExit ends a loader process."""
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(f"def broken(image):\n    raise {error}\n\nAUGMENTATIONS = [broken]\n")
    with pytest.raises(UserError, match=rf"^{file}, line 2: {error[:8]}.* 'broken' of {drawing[1].parent}/.*\.png"):
        epoch_of(train_loader(drawing, workers=workers, augmentations=str(file)), 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampling", [{"image_weights": True}, {"multi_scale": True}], ids=str)
def test_a_run_that_is_resumed_in_mid_epoch_gets_the_batches_that_are_left(
    drawing: tuple[Kind, Path], sampling: dict[str, Any], workers: int
) -> None:
    expected = two_epochs(drawing, **sampling)
    first = len(expected) // 2
    check_same(epoch_of(train_loader(drawing, workers=workers, **sampling), 1, skipped=1), expected[first + 1 :])


def test_an_item_depends_on_its_sample_index_only(drawing: tuple[Kind, Path]) -> None:
    """Made one by one in reversed order, from an epoch of other batches, items make the same batches."""
    small, large = train_loader(drawing, batch_size=1), train_loader(drawing, batch_size=TRAIN)
    samples = [sample for (sample,) in small.batch_sampler]
    items = {sample: small.dataset[sample] for sample in reversed(samples)}
    check_same([large.collate_fn([items[sample] for sample in samples])], epoch_of(large, 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_close_mosaic_ends_the_mixing_of_images(drawing: tuple[Kind, Path], workers: int) -> None:
    kind, file = drawing
    closing = train_loader(drawing, workers=workers, close_mosaic=1, epochs=2)
    usual, unmixed = (
        train_loader(drawing),
        train_loader((kind._replace(recipe=replace(kind.recipe, **kind.unmixed)), file)),
    )
    check_same(epoch_of(closing, 0), epoch_of(usual, 0))
    check_same(epoch_of(closing, 1), epoch_of(unmixed, 1))
    assert differ(epoch_of(usual, 1), epoch_of(unmixed, 1))


# Batches of an evaluation


def test_an_evaluation_validates_each_image_once_whatever_the_workers_and_the_batch_size(
    drawing: tuple[Kind, Path],
) -> None:
    batches = list(evaluation(drawing))
    assert [len(batch.images) for batch in batches] == [4, 4, 4, 1]
    assert sorted(images_of(batches)) == list(range(TRAIN))
    check_same(list(evaluation(drawing, workers=3)), batches)
    small, large = (list(evaluation(drawing, batch_size, square=True)) for batch_size in (1, TRAIN))
    assert images_of(small) == images_of(large)
    assert torch.equal(torch.cat([batch.images for batch in small]), large[0].images)


# Caches


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_cached_images_make_the_same_batches(drawing: tuple[Kind, Path], cache: str) -> None:
    for workers in (0, 2):  # those on disk are written at first, then read
        loader = train_loader(drawing, cache=cache, workers=workers)
        expected_epoch = epoch_of(train_loader(drawing), 0)
        check_same([*epoch_of(loader, 0), *evaluation(drawing, cache=cache)], [*expected_epoch, *evaluation(drawing)])


# Splits


def test_bad_images_are_left_out_and_listed(copy: tuple[Kind, Path], capsys: pytest.CaptureFixture[str]) -> None:
    whole = opened(copy).split("train")
    images, labels = whole.images, whole.instances()
    for image in images[:5]:
        image.write_bytes(b"not an image")
    write_image(images[5], noise(9, 40))
    images[6].write_bytes(images[6].read_bytes()[:-60])  # cut short
    data = opened(copy)
    split = data.split("train")
    bad = [problem.partition(": ")[0] for problem in split.problems if problem.endswith("; left out")]
    assert bad == list(map(str, images[:7]))
    assert split.images == images[7:]
    assert split.instances().classes.tolist() == labels.classes[labels.images >= 7].tolist()
    assert "9x40 pixels, smaller than 10" in split.problems[5]
    split.report("train")
    report = capsys.readouterr().out.splitlines()
    assert report[0].startswith(f"train: {TRAIN - 7} images")
    assert report[1].startswith(f"warning: {images[0]}: ")
    for batch in evaluation(copy, square=True):
        for info in batch.infos:
            assert info.path == str(split.images[info.image])
    with pytest.raises(UserError, match=rf"{images[0].name}: (?!.*left out).*--strict; {len(split.problems)} "):
        opened(copy, strict=True).split("train")
    assert len(opened(copy, strict=True).split("val").images) == VAL
    for image in images[7:-1]:
        image.unlink()
    assert images_of(epoch_of(train_loader(copy), 0)) == [0] * BATCH_SIZE  # a single image
    assert images_of(list(evaluation(copy))) == [0]
    images[-1].write_bytes(b"not an image")
    with pytest.raises(UserError, match=rf"{copy[1]}: .*`train:`.* {images[0]}: "):
        opened(copy).split("train")


def differing(one: Split, other: Split) -> set[str]:
    """Return the keys of the identity in which two splits differ."""
    assert one.identity().keys() == other.identity().keys()
    return {key for key, value in one.identity().items() if other.identity()[key] != value}


def test_moved_files_are_the_same_split_and_other_files_another(
    drawing: tuple[Kind, Path], copy: tuple[Kind, Path]
) -> None:
    split, moved = opened(drawing).split("train"), opened(copy).split("train")
    assert split.identity()["count"] == str(TRAIN)
    moved.images[3].touch()
    assert not differing(split, opened(copy).split("train"))
    assert differing(split, replace(moved, images=moved.images[::-1])) == {"files", "file sizes"}
    moved.images[3].write_bytes(moved.images[3].read_bytes() + b"more")
    assert differing(split, opened(copy).split("train")) == {"file sizes"}
    moved.images[-1].unlink()
    assert differing(split, opened(copy).split("train")) == {"count", "files", "file sizes", "labels"}
