"""Augmentations of a user: what a Python file may list, what it changes, and the sentences about errors."""

from __future__ import annotations

import importlib.util
import pickle
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.augment import Sample
from data.augmentations import UserAugmentations, read_augmentations
from data.dataset import DataOptions, data_source
from data.polygons import Polygons
from models.tasks.classify import ClassificationRecipe
from tests.conftest import not_here
from tests.making import noise, write_image, write_yaml
from utils.batch import Batch
from utils.config.hyperparameters import Hyperparameters, Recipe
from utils.errors import UserError
from utils.files import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EXAMPLE = ROOT / "examples" / "own_augmentations.py"
CLASSES = 3
DRAWING = """
import random
import numpy as np
import torch

def speckle(image, rng):
    '''Draws from all generators.'''
    level = rng.integers(30) + np.random.randint(30) + random.randrange(12) + int(torch.randint(30, (1,)))
    image[:: 4] = level
    return image
"""


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the files of a test: those of the next one have the same names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def python(folder: Path, code: str, name: str = "own_file.py") -> str:
    (folder / name).write_text(code)
    return str(folder / name)


def sample(outlines: bool = False) -> Sample:
    """A noisy image of 40 x 60 pixels with two objects."""
    boxes = np.array([[2, 4, 20, 30], [30, 10, 50, 20]], np.float32)
    polygons = Polygons.of([box[[0, 1, 2, 1, 2, 3, 0, 3]].reshape(4, 2) for box in boxes])
    return Sample(noise(60, 40, seed=0), boxes, np.array([0, 2], np.float32), polygons if outlines else None)


def applied(file: str, given: Sample, seed: int = 0) -> Sample:
    return read_augmentations(file, CLASSES)(given, np.random.default_rng(seed), "a.png")


# What callables get, and what becomes of it


def test_without_a_file_nothing_changes() -> None:
    given = sample()
    assert read_augmentations("", CLASSES) == UserAugmentations()
    assert applied("", given) is given


def test_a_callable_gets_the_parts_that_it_names(tmp_path: Path) -> None:
    """The image is RGB."""
    code = """
def red(image):
    image[..., 0] = 255
    return image

def last(classes, polygons, image, boxes):
    assert (classes.dtype, boxes.dtype, len(polygons)) == ("int64", "float32", 2)
    return classes[1:] - 1, polygons[1:], image, boxes[1:] + 1

AUGMENTATIONS = [red, last]
"""
    file, given = python(tmp_path, code), sample(outlines=True)
    assert read_augmentations(file, CLASSES).messages == [f"augmentations of {file}: red, last"]
    changed = applied(file, given)
    assert (changed.image[..., 2] == 255).all()
    assert np.array_equal(changed.image[..., :2], given.image[..., :2])
    assert (changed.boxes.tolist(), changed.classes.tolist()) == ([[31, 11, 51, 21]], [1])
    assert changed.polygons is not None
    assert given.polygons is not None
    assert np.array_equal(changed.polygons.outline(0), given.polygons.outline(1))


def test_a_mirrored_view_of_the_image_is_as_good_as_an_array(tmp_path: Path) -> None:
    file = python(tmp_path, "AUGMENTATIONS = [lambda image: image[:, ::-1], lambda image: image]")
    assert np.array_equal(applied(file, sample()).image, sample().image[:, ::-1])


def test_random_numbers_come_from_the_generator_alone(tmp_path: Path) -> None:
    """Those of global generators too, whose state stays."""
    file = python(tmp_path, f"{DRAWING}\nAUGMENTATIONS = [speckle, speckle]\n")
    first = applied(file, sample())
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert np.array_equal(applied(file, sample()).image, first.image)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # noqa: NPY002
    assert not np.array_equal(applied(file, sample(), seed=1).image, first.image)


def test_a_copy_for_another_process_reads_the_file_again(tmp_path: Path) -> None:
    file = python(tmp_path, f"{DRAWING}\nAUGMENTATIONS = [lambda image, rng: speckle(image, rng)]\n")
    copied = pickle.loads(pickle.dumps(read_augmentations(file, CLASSES)))
    assert np.array_equal(copied(sample(), np.random.default_rng(0), "").image, applied(file, sample()).image)


# Data sets


def draw(folder: Path, kind: str) -> Path:
    """Draw thirteen images with one to three diamonds, or with a class; return the YAML."""
    rng = np.random.default_rng(0)
    for number in range(13):
        rows = []
        for x, y in rng.uniform(0.4, 0.6, (number % 3 + 1, 2)):
            diamond = (x, y - 0.2, x + 0.3, y, x, y + 0.2, x - 0.3, y)
            rows.append(f"{number % 3} {' '.join(f'{value:.4f}' for value in diamond)}")
        inner = "abc"[number % 3] if kind == "classification" else "images"
        file = folder / inner / f"{number:02}.png"
        write_image(file, noise(64, 48, seed=number), *(rows if kind != "classification" else ()))
    if kind == "classification":
        return write_yaml(folder / "data.yaml", {"path": ".", "split": 0.1})
    return write_yaml(folder / "data.yaml", {"train": "images", "val": "images", "names": ["a", "b", "c"]})


RECIPES: dict[str, Recipe] = {
    "detection": Hyperparameters(mosaic=0.5, mixup=0.5, degrees=5.0, fliplr=0.5),
    "segmentation": Hyperparameters(mosaic=0.5, mixup=0.5, degrees=5.0, fliplr=0.5),
    "classification": ClassificationRecipe(crop_scale=0.5, fliplr=0.5, mixup=0.3, cutmix=0.3),
}


def epoch_of(file: Path, kind: str, augmentations: str, workers: int = 0, epoch: int = 0) -> list[Batch]:
    name = f"data.{kind}:{kind.capitalize()}Data"
    data = data_source(str(file), name).open(64, 32, DataOptions(workers=workers, augmentations=augmentations))
    loader: Any = data.train_loader(data.split("train", RECIPES[kind]), 4, RECIPES[kind], seed=3)
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def is_same(one: list[Batch], other: list[Batch]) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", RECIPES)
def test_batches_do_not_depend_on_the_workers(kind: str, tmp_path: Path) -> None:
    """The epochs differ, and the built-in augmentation stays what it was."""
    file = draw(tmp_path / "set", kind)
    own = python(tmp_path, f"{DRAWING}\nAUGMENTATIONS = [speckle]\n")
    given = [own] if kind == "classification" else [own, str(EXAMPLE)]
    plain = epoch_of(file, kind, "")
    for augmentations in given:
        batches = epoch_of(file, kind, augmentations)
        assert is_same(epoch_of(file, kind, augmentations, workers=2), batches)
        assert not is_same(epoch_of(file, kind, augmentations, epoch=1), batches)
        assert not is_same(batches, plain)
    idle = python(tmp_path, "AUGMENTATIONS = [lambda image: image]", "own_2.py")
    assert is_same(epoch_of(file, kind, idle), plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_one_sentence_with_transform_image_and_line(workers: int, tmp_path: Path) -> None:
    file = draw(tmp_path / "set", "detection")
    own = python(tmp_path, "def broken(image):\n    return image + [1, 2]\n\nAUGMENTATIONS = [broken]\n")
    with pytest.raises(UserError) as caught:
        epoch_of(file, "detection", own, workers)
    start = rf"{own}, line 2: ValueError: operands could not be .*, in the augmentation 'broken' of "
    assert re.fullmatch(rf"{start}{tmp_path}/set/images/\d\d.png; fix it there", str(caught.value))


@pytest.mark.parametrize("error", ["StopIteration", "SystemExit(0)", "GeneratorExit"])
def test_nothing_that_it_raises_ends_an_epoch_early(error: str, tmp_path: Path) -> None:
    """torch would take a StopIteration for the end of the loader, and the others end a loader process."""
    own = python(tmp_path, f"def broken(image):\n    raise {error}\n\nAUGMENTATIONS = [broken]\n")
    with pytest.raises(UserError, match=rf"^{own}, line 2: {error[:8]}"):
        epoch_of(draw(tmp_path / "set", "detection"), "detection", own, workers=1)


# Errors


def returning(parts: str, value: str) -> str:
    return f"import numpy as np\n\ndef mine({parts}):\n    return {value}\n\nAUGMENTATIONS = [mine]\n"


ALL = "image, boxes, classes, polygons"


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ("image", "None"),
        ("image", "image / 255"),
        ("image", "image[1:]"),
        ("image, boxes", "(image, boxes, 3)"),
        ("boxes", "boxes[1:]"),
        ("boxes", "boxes[:, [2, 1, 0, 3]]"),
        ("boxes", "boxes * np.nan"),
        ("boxes", "boxes[:, :3]"),
        ("boxes", "'boxes'"),
        ("classes", "classes + 1"),
        ("classes", "classes - 1"),
        (ALL, "(image, boxes, classes, polygons[:1])"),
        ("nothing", "nothing"),
    ],
)
def test_what_a_callable_must_not_return(parts: str, value: str, tmp_path: Path) -> None:
    file = python(tmp_path, returning(parts, value))
    with pytest.raises(UserError, match=rf"^{file}.*, in the augmentation 'mine' of a.png"):
        applied(file, sample(outlines=parts == ALL))


def test_boxes_and_outlines_change_together(tmp_path: Path) -> None:
    file = python(tmp_path, returning("boxes", "boxes"))
    assert np.array_equal(applied(file, sample()).boxes, sample().boxes)
    with pytest.raises(UserError, match=file):
        applied(file, sample(outlines=True))


def test_lists_are_as_good_as_arrays(tmp_path: Path) -> None:
    value = "(image, [[1, 2, 3, 4]], [1], [[[1, 2], [3, 4], [1, 4]]])"
    changed = applied(python(tmp_path, returning(ALL, value)), sample(outlines=True))
    assert (changed.boxes.tolist(), changed.classes.tolist()) == ([[1, 2, 3, 4]], [1])
    empty = python(tmp_path, returning(ALL, "(image, [], [], [])"), "own_2.py")
    assert applied(empty, sample(outlines=True)).boxes.shape == (0, 4)


@pytest.mark.parametrize(
    "code",
    [
        "def f(image):\n  return = 3",
        "import nothing_of_that_name",
        "x = 3",
        "AUGMENTATIONS = []",
        "AUGMENTATIONS = [3]",
    ],
)
def test_what_is_no_list_of_augmentations(code: str, tmp_path: Path) -> None:
    file = python(tmp_path, code)
    with pytest.raises(UserError, match=f"^{file}"):
        read_augmentations(file, CLASSES)


@pytest.mark.parametrize("name", ["gone.py", "own.yaml", "."])
def test_no_such_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("x")
    with pytest.raises(UserError, match=rf"^--augmentations {tmp_path}/{name}/? is not a Python file"):
        read_augmentations(f"{tmp_path}/{name}", CLASSES)


def test_what_only_a_run_names_is_not_run(tmp_path: Path) -> None:
    """The same content at the same place is run if this user has run it before."""
    file = python(tmp_path, "AUGMENTATIONS = [lambda image: image]\n")
    with pytest.raises(UserError, match=rf"^the run's settings.yaml names {file}, .* add --augmentations {file}$"):
        read_augmentations(file, CLASSES, is_named=False)
    read_augmentations(file, CLASSES)
    assert read_augmentations(file, CLASSES, is_named=False).calls


# albumentations


def transform(folder: Path, code: str) -> str:
    if importlib.util.find_spec("albumentations") is None:
        not_here("albumentations")
    return python(folder, f"import albumentations as A\nAUGMENTATIONS = {code}\n")


@pytest.mark.parametrize("code", ["[{}]", "A.Compose([A.NoOp(), {}])"], ids=["a list", "Compose"])
@pytest.mark.parametrize("outlines", [False, True], ids=["boxes", "outlines"])
def test_transforms_of_albumentations(outlines: bool, code: str, tmp_path: Path) -> None:
    """What leaves the image is cut, and dropped if little is left."""
    shift = "A.Affine(translate_px={'x': [25, 29], 'y': 0}, interpolation=0, p=1)"
    file, given, left = transform(tmp_path, code.format(shift)), sample(outlines), set()
    for seed in range(12):
        changed = applied(file, given, seed)
        by = round(float(changed.boxes[0, 0] - given.boxes[0, 0]))
        assert 0 < by < 30
        assert np.array_equal(changed.image[:, by:], given.image[:, :-by])
        moved = (given.boxes + np.array([by, 0, by, 0])).clip(0, [60, 40, 60, 40])
        kept = (moved[:, 2] - moved[:, 0]) >= 0.1 * (given.boxes[:, 2] - given.boxes[:, 0])
        left.add(len(changed.boxes))
        assert np.allclose(changed.boxes, moved[kept], atol=1e-3)
        assert changed.classes.tolist() == given.classes[kept].tolist()
        if changed.polygons:
            assert np.allclose(changed.polygons.extents(), moved[kept], atol=1e-3)
        assert np.array_equal(applied(file, given, seed).image, changed.image)
    assert left == {1, 2}


def test_outlines_stay_on_their_objects(tmp_path: Path) -> None:
    """To a fraction of a pixel: albumentations gives points by pixels' centres, and boxes by their edges."""
    changed = applied(
        transform(tmp_path, "[A.Transpose(p=1)]"), sample(outlines=True)._replace(image=noise(60, 60, seed=0))
    )
    assert changed.polygons is not None
    assert np.allclose(changed.polygons.extents(), [[4, 2, 30, 20], [10, 30, 20, 50]], atol=1e-3)
