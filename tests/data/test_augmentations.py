"""Augmentations of a user: what a Python file may list, what it changes, and errors that name the file."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data.augment import Sample
from data.augmentations import read_augmentations
from data.polygons import Polygons
from tests.conftest import not_here
from tests.making import noise
from utils.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CLASSES = 3


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
    polygons = Polygons.from_outlines([box[[0, 1, 2, 1, 2, 3, 0, 3]].reshape(4, 2) for box in boxes])
    return Sample(noise(60, 40, seed=0), boxes, np.array([0, 2], np.float32), polygons if outlines else None)


def applied(file: str, given: Sample, seed: int = 0) -> Sample:
    return read_augmentations(file, CLASSES)(given, np.random.default_rng(seed), "a.png")


def test_a_callable_gets_the_parts_that_it_names(tmp_path: Path) -> None:
    """The image is RGB, and lists are as good as arrays."""
    code = """
def red(image):
    image[..., 0] = 255
    return image

def last(classes, image, boxes):
    assert (classes.dtype, boxes.dtype) == ("int64", "float32")
    return (classes[1:] - 1).tolist(), image, (boxes[1:] + 1).tolist()

AUGMENTATIONS = [red, last]
"""
    file, given = python(tmp_path, code), sample()
    read = pickle.loads(pickle.dumps(read_augmentations(file, CLASSES)))  # as for another process
    assert [name for name, _ in read.calls] == ["red", "last"]
    changed = read(given, np.random.default_rng(0), "a.png")
    assert (changed.image[..., 2] == 255).all()
    assert np.array_equal(changed.image[..., :2], given.image[..., :2])
    assert (changed.boxes.tolist(), changed.classes.tolist()) == ([[31, 11, 51, 21]], [1])


@pytest.mark.parametrize("outlines", [False, True])
@pytest.mark.parametrize(
    ("parts", "value"),
    [
        *(("image", value) for value in ("None", "image / 255", "image[1:]")),
        *(("boxes", value) for value in ("boxes[1:]", "boxes[:, [2, 1, 0, 3]]", "boxes * np.nan", "boxes[:, :3]")),
        *(("boxes", "'boxes'"), ("classes", "classes + 1"), ("classes", "classes - 1"), ("nothing", "nothing")),
        ("image, boxes", "(image, boxes, 3)"),
    ],
)
def test_what_a_callable_must_not_return(parts: str, value: str, outlines: bool, tmp_path: Path) -> None:
    file = python(tmp_path, f"import numpy as np\ndef mine({parts}):\n    return {value}\nAUGMENTATIONS = [mine]\n")
    with pytest.raises(UserError, match=rf"^{file}.*, in the augmentation 'mine' of a.png"):
        applied(file, sample(outlines))


def test_objects_with_outlines_stay_where_they_are(tmp_path: Path) -> None:
    file = python(tmp_path, "AUGMENTATIONS = lambda image, boxes: (255 - image, boxes)")
    changed = applied(file, sample(outlines=True))
    assert np.array_equal(changed.image, 255 - sample().image)
    assert changed.polygons is not None
    empty = Sample(sample().image, np.zeros((0, 4), np.float32), np.zeros(0), Polygons.from_outlines(()))
    assert len(applied(file, empty).boxes) == 0
    for number, value in enumerate(("boxes + 2", "boxes[:1]", "boxes[::-1]")):
        code = f"AUGMENTATIONS = [lambda boxes, classes: ({value}, classes[:len({value})])]"
        file = python(tmp_path, code, f"own_{number}.py")
        assert len(applied(file, sample()).boxes) > 0
        with pytest.raises(UserError, match=file):
            applied(file, sample(outlines=True))


@pytest.mark.parametrize(
    "code", ["def f(image):\n  return = 3", "import no_name", "x = 3", "AUGMENTATIONS = []", "AUGMENTATIONS = [3]"]
)
def test_what_is_no_list_of_augmentations(code: str, tmp_path: Path) -> None:
    file = python(tmp_path, code)
    with pytest.raises(UserError, match=f"^{file}"):
        read_augmentations(file, CLASSES)
    with pytest.raises(UserError, match=r"gone\.py"):
        read_augmentations(f"{tmp_path}/gone.py", CLASSES)


def test_what_only_a_run_names_is_not_run(tmp_path: Path) -> None:
    """The same content at the same place is run if this user has run it before."""
    file = python(tmp_path, "AUGMENTATIONS = [lambda image: image]\n")
    with pytest.raises(UserError, match=rf"--augmentations {file}$"):
        read_augmentations(file, CLASSES, named_by_user=False)
    read_augmentations(file, CLASSES)
    assert read_augmentations(file, CLASSES, named_by_user=False).calls


@pytest.mark.parametrize("code", ["[{}]", "A.Compose([A.NoOp(), {}])"], ids=["a list", "Compose"])
def test_transforms_of_albumentations(code: str, tmp_path: Path) -> None:
    """What leaves the image is cut, and dropped if little is left; with outlines, objects must stay."""
    if importlib.util.find_spec("albumentations") is None:
        not_here("albumentations")
    shift = "A.Affine(translate_px={'x': [25, 29], 'y': 0}, interpolation=0, p=1)"
    file = python(tmp_path, f"import albumentations as A\nAUGMENTATIONS = {code.format(shift)}\n")
    given, left = sample(), set()
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
        assert np.array_equal(applied(file, given, seed).image, changed.image)
    assert left == {1, 2}
    with pytest.raises(UserError, match=file):
        applied(file, sample(outlines=True))
    inverted = code.format("A.InvertImg(p=1)")
    file = python(tmp_path, f"import albumentations as A\nAUGMENTATIONS = {inverted}\n", "own_2.py")
    assert np.array_equal(applied(file, sample(outlines=True)).image, 255 - sample().image)
