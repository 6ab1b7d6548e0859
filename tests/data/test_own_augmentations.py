"""Augmentations of a user: what a Python file and a YAML may say, what they change, and the sentences about errors."""

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
from data.dataset import DataOptions, data_source
from data.own_augmentations import NO_AUGMENTATIONS, Labelling, OwnAugmentations, read_augmentations
from data.polygons import Polygons
from models.tasks.classification.task import ClassificationRecipe
from tests.conftest import not_here
from tests.making import noise, write_image, write_yaml
from utils.batch import Batch
from utils.config.hyperparameters import Hyperparameters, Recipe
from utils.errors import UserError
from utils.files import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EXAMPLE = ROOT / "examples" / "own_augmentations.py"
BOXES, OUTLINES, NONE = Labelling(3), Labelling(3, outlines=True), Labelling()
DRAWING = """
import random
import numpy as np
import torch

def speckle(image, rng):
    '''Draws from all generators.'''
    level = rng.integers(30) + np.random.randint(30) + random.randrange(30) + int(torch.randint(30, (1,)))
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


def applied(own: OwnAugmentations, given: Sample | None = None, place: str = "item", seed: int = 0) -> Sample:
    return own.apply(place, given or sample(own.labelling.outlines), np.random.default_rng(seed), "a.png")


# What callables get, and what becomes of it


def test_without_a_file_nothing_changes() -> None:
    own = read_augmentations("", BOXES)
    given = sample()
    assert (own, bool(own), own.messages) == (NO_AUGMENTATIONS, False, [])
    assert own.apply("item", given, np.random.default_rng(0), "a.png") is given


def test_a_callable_gets_the_parts_that_it_names(tmp_path: Path) -> None:
    """The image is RGB, and parts that nothing takes stay the same objects."""
    code = """
def red(image):
    image[..., 0] = 255
    return image

def last(classes, polygons, image, boxes):
    assert (classes.dtype, boxes.dtype, len(polygons)) == ("int64", "float32", 2)
    return classes[1:] - 1, polygons[1:], image, boxes[1:] + 1

AUGMENTATIONS = {"item": [red, last], "image": [red]}
"""
    own = read_augmentations(python(tmp_path, code), OUTLINES)
    assert own.messages == [f"augmentations of {tmp_path}/own_file.py: red, last (each item); red (each image)"]
    given = sample(outlines=True)
    changed = applied(own, given)
    assert (changed.image[..., 2] == 255).all()
    assert np.array_equal(changed.image[..., :2], given.image[..., :2])
    assert changed.boxes.tolist() == [[31, 11, 51, 21]]
    assert changed.classes.tolist() == [1]
    assert changed.polygons is not None
    assert given.polygons is not None
    assert np.array_equal(changed.polygons.outline(0), given.polygons.outline(1))
    of_image = applied(own, given, "image")
    assert of_image.boxes is given.boxes
    assert of_image.polygons is given.polygons


def test_random_numbers_come_from_the_generator_alone(tmp_path: Path) -> None:
    """Those of global generators too, whose state stays."""
    own = read_augmentations(python(tmp_path, f"{DRAWING}\nAUGMENTATIONS = [speckle, speckle]\n"), BOXES)
    first = applied(own)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    random.random()
    torch.rand(1)
    np.random.rand()  # noqa: NPY002
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert np.array_equal(applied(own).image, first.image)
    assert random.getstate() == after[0] != before[0]
    assert torch.equal(torch.get_rng_state(), after[2])
    assert not np.array_equal(applied(own, seed=1).image, first.image)


def test_a_copy_for_another_process_reads_the_file_again(tmp_path: Path) -> None:
    file = python(tmp_path, f"{DRAWING}\nAUGMENTATIONS = [lambda image, rng: speckle(image, rng)]\n")
    own = read_augmentations(file, BOXES)
    copied = pickle.loads(pickle.dumps(own))
    assert np.array_equal(applied(copied).image, applied(own).image)


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
    """At both places; the epochs differ, and the built-in augmentation stays what it was."""
    file = draw(tmp_path / "set", kind)
    own = python(tmp_path, f"{DRAWING}\nAUGMENTATIONS = {{'image': [speckle], 'item': [speckle]}}\n")
    given = [own] if kind == "classification" else [own, str(EXAMPLE)]
    plain = epoch_of(file, kind, "")
    for augmentations in given:
        batches = epoch_of(file, kind, augmentations)
        assert is_same(epoch_of(file, kind, augmentations, workers=2), batches)
        assert not is_same(epoch_of(file, kind, augmentations, epoch=1), batches)
        assert not is_same(batches, plain)
    idle = python(
        tmp_path, "AUGMENTATIONS = {'image': [lambda image: image], 'item': [lambda image: image]}", "own_2.py"
    )
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


# Errors of callables, at an image


def returning(parts: str, value: str) -> str:
    return f"import numpy as np\n\ndef mine({parts}):\n    return {value}\n\nAUGMENTATIONS = [mine]\n"


ALL = "image, boxes, classes, polygons"
RETURNED = [
    ("image", "None", "returned None as the image instead of an array uint8"),
    ("image", "image / 255", r"returned an array float64 \(40, 60, 3\) as the image instead of an array uint8"),
    (
        "image",
        "image[1:]",
        r"returned an image of shape \(39, 60, 3\) instead of \(40, 60, 3\); the size must not change",
    ),
    ("image, boxes", "image", r"returned an array uint8 .* instead of the parts that it takes, \(image, boxes\)"),
    ("image, boxes", "(image, boxes, 3)", r"returned 3 values instead of the parts that it takes, \(image, boxes\)"),
    ("boxes", "boxes[1:]", "returned an image with 1 boxes, 2 classes, 2 polygons; take all three and return as many"),
    ("boxes, classes", "(boxes, classes[:1])", "returned an image with 2 boxes, 1 classes, 2 polygons"),
    ("boxes", "boxes + 40", r"returned the box \(42, 44, 60, 70\) outside of the image; clip it, or leave it out"),
    ("boxes", "boxes[:, [2, 1, 0, 3]]", r"returned the box \(20, 4, 2, 30\) whose x2 or y2 is less than x1 or y1"),
    ("boxes", "boxes * np.nan", "returned boxes with NaN or infinite coordinates"),
    ("boxes", "boxes[:, :3]", r"returned boxes of shape \(2, 3\) instead of \(k, 4\)"),
    ("boxes", "'boxes'", "returned boxes that are not rows of 4 numbers: 'boxes'"),
    ("classes", "classes + 1", "returned class 3, and classes are 0 to 2"),
    ("classes", "classes + 0.5", "returned classes that are not whole numbers"),
    ("polygons", "polygons[0]", r"returned an array float32 .* as polygons instead of a list of arrays"),
    (
        ALL,
        "(image, boxes, classes, [p[:, :1] for p in polygons])",
        r"returned a polygon's points of shape \(4, 1\)",
    ),
]


@pytest.mark.parametrize(("parts", "value", "message"), RETURNED, ids=lambda value: value[:20])
def test_what_a_callable_must_not_return(parts: str, value: str, message: str, tmp_path: Path) -> None:
    file = python(tmp_path, returning(parts, value))
    outlined = "polygons" in parts
    own = read_augmentations(file, OUTLINES if parts == ALL else BOXES)
    given = sample(outlined)
    with pytest.raises(UserError, match=rf"^{file}, line 3: the augmentation 'mine' {message}.*, for a.png$"):
        applied(own, given)


def test_lists_are_as_good_as_arrays(tmp_path: Path) -> None:
    value = "(image, [[1, 2, 3, 4]], [1], [[[1, 2], [3, 4], [1, 4]]])"
    changed = applied(read_augmentations(python(tmp_path, returning(ALL, value)), OUTLINES))
    assert (changed.boxes.tolist(), changed.classes.tolist()) == ([[1, 2, 3, 4]], [1])
    empty = python(tmp_path, returning(ALL, "(image, [], [], [])"), "own_2.py")
    changed = applied(read_augmentations(empty, OUTLINES))
    assert (changed.boxes.shape, changed.classes.shape) == ((0, 4), (0,))


def test_a_box_that_was_beyond_the_image_may_stay(tmp_path: Path) -> None:
    own = read_augmentations(python(tmp_path, returning("boxes", "boxes")), BOXES)
    given = sample()._replace(boxes=np.array([[-3, 0, 70, 30], [0, 0, 1, 1]], np.float32))
    assert np.array_equal(applied(own, given).boxes, given.boxes)


# Errors of files, at the start


@pytest.mark.parametrize(
    ("code", "labelling", "message"),
    [
        ("def f(image):\n  return = 3", BOXES, "{file}, line 2: invalid syntax"),
        ("import nothing_of_that_name", BOXES, "{file}, line 1: ModuleNotFoundError"),
        ("x = 3", BOXES, r"{file} has no list AUGMENTATIONS of functions; write AUGMENTATIONS = \[my_function\]"),
        ("AUGMENTATIONS = []", BOXES, "{file} lists no augmentation; add one, or leave --augmentations out"),
        ("\nAUGMENTATIONS = [3]", BOXES, "{file}, line 2: 3 is not a function; list functions, or objects with"),
        ("AUGMENTATIONS = {'items': []}", BOXES, r"{file}, line 1: 'items' is not a place .*\(did you mean 'item'\?\)"),
        ("AUGMENTATIONS = {'item': 3}", BOXES, "{file}, line 1: `item` must be a list of augmentations, not 3"),
        ("def f(img):\n  pass\nAUGMENTATIONS = [f]", BOXES, "{file}, line 1: the augmentation 'f' takes 'img'; name"),
        ("def f(*a):\n  pass\nAUGMENTATIONS = [f]", BOXES, "{file}, line 1: the augmentation 'f' takes 'a'; name"),
        ("def f(rng):\n  pass\nAUGMENTATIONS = [f]", BOXES, "{file}, line 1: the augmentation 'f' takes none of image"),
        (returning("image, boxes", "3"), NONE, "{file}, line 3: the augmentation 'mine' takes boxes, but this data"),
        (
            returning("boxes", "3"),
            OUTLINES,
            "{file}, line 3: the augmentation 'mine' takes boxes without polygons, and",
        ),
        (
            returning("polygons", "3"),
            OUTLINES,
            "{file}, line 3: .* takes polygons without boxes, and this data set has",
        ),
    ],
)
def test_what_is_no_list_of_augmentations(code: str, labelling: Labelling, message: str, tmp_path: Path) -> None:
    file = python(tmp_path, code)
    with pytest.raises(UserError, match=f"^{message.replace('{file}', file)}"):
        read_augmentations(file, labelling)


@pytest.mark.parametrize("name", ["gone.py", "own.txt", "."])
def test_no_such_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("x")
    with pytest.raises(
        UserError, match=rf"^--augmentations {tmp_path}/{name}/? is not a .py or .yaml file; give the path"
    ):
        read_augmentations(f"{tmp_path}/{name}", BOXES)


def test_what_only_a_run_names_is_not_run(tmp_path: Path) -> None:
    """The same content at the same place is run if this user has run it before; in a YAML too."""
    code = "AUGMENTATIONS = [lambda image: image]\ndef f(image):\n    return image\n"
    file = python(tmp_path, code)
    listed = write_yaml(tmp_path / "list.yaml", {"item": ["own_file.py:f"]})
    for name in (file, str(listed)):
        message = (
            rf"^the run's settings.yaml names {file}, a Python file .*; read it, and .* add --augmentations {name}$"
        )
        with pytest.raises(UserError, match=message):
            read_augmentations(name, BOXES, is_named=False)
    read_augmentations(file, BOXES)
    for name in (file, str(listed)):
        assert read_augmentations(name, BOXES, is_named=False)


# YAML


def test_a_yaml_names_functions_and_classes_with_arguments(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    code = """
class Grey:
    def __init__(self, level=1):
        self.level = level
    def __call__(self, image):
        return image * 0 + self.level
def lighter(image, by):
    return image + by
"""
    python(tmp_path / "code", code)
    entries = [{"code/own_file.py:Grey": {"level": 7}}, {"code/own_file.py:lighter": {"by": 3}}]
    listed = write_yaml(tmp_path / "list.yaml", {"item": entries, "image": ["code/own_file.py:Grey"]})
    own = read_augmentations(str(listed), BOXES)
    assert own.messages == [f"augmentations of {listed}: Grey, lighter (each item); Grey (each image)"]
    assert (applied(own).image == 10).all()
    assert (applied(own, place="image").image == 1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item:\n- own_file.py:g\n", r"line 2: .*own_file.py has no function or class 'g'"),
        ("item:\n- own_file.py:f: 3\n", r"line 2: \{'own_file.py:f': 3\} is not `NAME: \{arguments\}`; fix it"),
        ("item:\n- 3\n", r"line 2: 3 is not `NAME: \{arguments\}`; fix it"),
        ("item:\n- gone.py:f\n", "line 2: gone.py is not a Python file; write FILE.py:NAME .looked for"),
        ("item:\n\n- own_file.py:C: {x: 3}\n", r"line 3: C refuses its arguments \(TypeError"),
        ("items: []\n", r"list.yaml: 'items' is not a place"),
        ("item: f\n", r"list.yaml: `item` must be a list of augmentations, not 'f'"),
        ("- f\n", "list.yaml has no `key: value` lines"),
    ],
)
def test_what_is_wrong_in_a_yaml(text: str, message: str, tmp_path: Path) -> None:
    python(
        tmp_path, "def f(image):\n    return image\nclass C:\n    def __call__(self, image):\n        return image\n"
    )
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_augmentations(str(tmp_path / "list.yaml"), BOXES)


# albumentations


def test_albumentations_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "albumentations", None)
    listed = write_yaml(tmp_path / "list.yaml", {"item": [{"MotionBlur": {"p": 0.5}}]})
    message = (
        rf"^{listed}, line 2: 'MotionBlur' is a transform of albumentations, which is not installed; run pip install "
        "albumentations, or name a function of your own as FILE.py:NAME$"
    )
    with pytest.raises(UserError, match=message):
        read_augmentations(str(listed), BOXES)


@pytest.fixture
def albumentations() -> None:
    if importlib.util.find_spec("albumentations") is None:
        not_here("albumentations")


@pytest.mark.usefixtures("albumentations")
@pytest.mark.parametrize("labelling", [BOXES, OUTLINES], ids=["boxes", "outlines"])
def test_transforms_of_albumentations(labelling: Labelling, tmp_path: Path) -> None:
    """From a YAML, and as objects in a Python file. What leaves the image is cut, and dropped if little is left."""
    shift = {"translate_px": {"x": [1, 29], "y": 0}, "interpolation": 0, "p": 1}
    listed = write_yaml(tmp_path / "list.yaml", {"item": [{"Affine": shift}]})
    code = f"import albumentations\nAUGMENTATIONS = [albumentations.Affine(**{shift})]\n"
    given, left = sample(labelling.outlines), set()
    for file in (str(listed), python(tmp_path, code)):
        own = read_augmentations(file, labelling)
        assert own.messages[0].endswith("Affine (each item)")
        for seed in range(10):
            changed = applied(own, given, seed=seed)
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
            assert np.array_equal(applied(own, given, seed=seed).image, changed.image)
    assert left == {1, 2}


@pytest.mark.usefixtures("albumentations")
@pytest.mark.parametrize("name", ["HorizontalFlip", "VerticalFlip", "Transpose"])
def test_outlines_stay_on_their_objects(name: str, tmp_path: Path) -> None:
    """To a fraction of a pixel: albumentations gives points by pixels' centres, and boxes by their edges."""
    own = read_augmentations(str(write_yaml(tmp_path / "list.yaml", {"item": [{name: {"p": 1.0}}]})), OUTLINES)
    given = sample(outlines=True)._replace(image=noise(60, 60, seed=0))
    changed = applied(own, given)
    assert changed.polygons is not None
    boxes = {
        "HorizontalFlip": [[40, 4, 58, 30], [10, 10, 30, 20]],
        "VerticalFlip": [[2, 30, 20, 56], [30, 40, 50, 50]],
        "Transpose": [[4, 2, 30, 20], [10, 30, 20, 50]],
    }
    assert np.allclose(changed.polygons.extents(), boxes[name], atol=1e-3)


@pytest.mark.usefixtures("albumentations")
def test_a_transform_of_albumentations_on_images_alone(tmp_path: Path) -> None:
    own = read_augmentations(str(write_yaml(tmp_path / "list.yaml", {"image": [{"HorizontalFlip": {"p": 1.0}}]})), NONE)
    given = Sample(noise(60, 40, seed=0), np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
    assert np.array_equal(applied(own, given, "image").image, given.image[:, ::-1])


@pytest.mark.usefixtures("albumentations")
def test_transforms_that_albumentations_lacks(tmp_path: Path) -> None:
    for name, message in (
        ("MotionBlurr", r"no transform 'MotionBlurr' \(did you mean 'MotionBlur'\?\)"),
        ("random", "no transform 'rand"),
    ):
        listed = write_yaml(tmp_path / "list.yaml", {"item": [name]})
        with pytest.raises(UserError, match=rf"list.yaml, line 2: albumentations has {message}"):
            read_augmentations(str(listed), BOXES)
    for item, message in (
        ("RandomCrop", r"RandomCrop refuses its arguments \(ValueError: .* height Field required width Field"),
        ({"MotionBlur": {"limit": 3}}, r"MotionBlur refuses its arguments \(.*'limit' are not valid .*\); fix them"),
    ):
        listed = write_yaml(tmp_path / "list.yaml", {"item": [item]})
        with pytest.raises(UserError, match=rf"list.yaml, line 2: {message}"):
            read_augmentations(str(listed), BOXES)
