"""Random label files and data, hyperparameter and model YAMLs are read correctly or refused with one sentence."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.data_yaml import read_spec
from data.dataset import dataset_class
from data.labels import COORDINATE_TOLERANCE, scan_image
from models.heads.anchors import Detect
from models.layers import Classify
from models.tasks import TASKS
from models.tasks.classify import build_classifier
from models.yolo import build_model
from utils.config.flags import TrainOptions, flags_of
from utils.config.hyperparameters import read_hyperparameters
from utils.errors import UserError

# In time: a hang is an error too.
many = settings(max_examples=200, deadline=20_000, suppress_health_check=list(HealthCheck), derandomize=True)
few = settings(many, max_examples=60)

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 0.5, 1e308, 2**63, 10**400]))
words = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "~", "~nobody", "a\0b", "x" * 5000, "../..", "None", "nc", "\ud800"])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words, st.dates())
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(scalars, inner, max_size=4)),
    max_leaves=8,
)


def sentence_or(call: Callable[[], Any]) -> Any:
    """Return the result of the call, or None if it raises `UserError`."""
    with suppress(UserError):
        return call()


def write(folder: Path, content: Any) -> Path:
    """Write any content that YAML can hold."""
    file = folder / "some.yaml"
    if isinstance(content, str):
        file.write_text(content, errors="replace")
    else:
        with suppress(UnicodeEncodeError, ValueError):  # not even a file
            file.write_text(yaml.safe_dump(content, allow_unicode=True))
    file.touch()
    return file


# Label files

share = st.floats(-0.1, 1.1)
cells = st.one_of(
    st.integers(-2, 5).map(str), share.map(str), numbers.map(str), st.sampled_from(["nan", "0x1", "1_0", "٣", "a"])
)
lines = st.lists(st.lists(cells, max_size=9).map(" ".join), max_size=6).map("\n".join)


@many
@given(st.one_of(lines.map(str.encode), st.text().map(lambda text: text.encode(errors="replace")), st.binary()))
def test_label_files(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        (folder / "labels").mkdir()
        Image.new("RGB", (20, 20)).save(folder / "images/a.png")
        (folder / "labels/a.txt").write_bytes(content)
        labels = scan_image(folder / "images/a.png")
    assert labels.size == ((20, 20) if len(labels.rows) or not labels.problems else (0, 0))
    assert labels.rows.shape[1:] == (5,)
    assert np.isfinite(labels.rows).all()
    classes, centres, sides = labels.rows[:, 0], labels.rows[:, 1:3], labels.rows[:, 3:]
    assert ((classes >= 0) & (classes == classes.round())).all()
    assert (abs(centres - 0.5) <= 0.5 + 2 * COORDINATE_TOLERANCE).all()
    assert (sides >= 0).all()
    assert all("a.txt" in problem and problem.count("\n") == 0 for problem in labels.problems)


# Data sets

suggested = [field.name for field in flags_of(TrainOptions) if "data" in field.metadata["suggested"]]
data_keys = st.sampled_from(["path", "train", "val", "names", "nc", "test", "download", "trian", "draw"])
entries = st.one_of(
    st.sampled_from(["images", "list.txt", "none", "bad.txt"]), words.filter(lambda word: "/" not in word)
)
names = st.one_of(st.lists(scalars, max_size=3), st.dictionaries(st.integers(0, 3), scalars, max_size=3), anything)
parts = {
    "path": entries,
    "train": st.one_of(entries, st.lists(entries)),
    "names": names,
    "nc": anything,
    "split": scalars,
    "split_seed": scalars,
    "defaults": st.one_of(anything, st.dictionaries(st.sampled_from(suggested), scalars, max_size=3)),
}
data_sets = st.one_of(
    anything,
    st.text(),
    st.fixed_dictionaries({}, optional=parts),
    st.dictionaries(data_keys, scalars.filter(lambda value: not isinstance(value, int) and value not in ("/", ".."))),
)


@many
@given(data_sets, st.text())
def test_data_sets(content: Any, listed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        (folder / "images/a.jpg").touch()
        (folder / "bad.txt").write_text(listed, errors="replace")
        (folder / "list.txt").write_text("images/a.jpg\n")
        spec = sentence_or(lambda: read_spec(write(folder, content)))
        listing = spec and sentence_or(lambda: spec.listing("train"))
        if spec:
            assert spec.names or not isinstance(content, dict) or content.get("names") is None
            for kind in (dataset_class(entry.data) for entry in TASKS.values()):
                sentence_or(lambda kind=kind: kind.class_names(spec, False))
                sentence_or(lambda kind=kind: kind.files(spec))
            assert all(isinstance(name, str) for name in spec.names.values())
        if listing:
            assert listing.images


# Hyperparameters

RECIPES = [entry.load().recipe for entry in TASKS.values()]


recipes = [st.dictionaries(st.sampled_from(list(kind.__dataclass_fields__)), scalars) for kind in RECIPES]


@many
@given(st.one_of(anything, st.text(), *recipes))
def test_hyperparameters(content: Any) -> None:
    for kind in RECIPES:
        with tempfile.TemporaryDirectory() as name:
            hyp = sentence_or(lambda kind=kind, name=name: read_hyperparameters(str(write(Path(name), content)), kind))
        if hyp is not None:
            for field in kind.__dataclass_fields__.values():
                value = getattr(hyp, field.name)
                for number in value.values() if isinstance(value, dict) else [value]:
                    assert number in field.metadata["within"]


# Models

SOUND: dict[str, Any] = {
    "nc": 2,
    "anchors": [[4, 4, 8, 4], [16, 16, 32, 24]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "C3", [8]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "SPPF", [8, 5]]],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 1], 1, "Concat", [1]],
        [[1, 3], 1, "Detect", ["nc", "anchors"]],
    ],
}
small = st.one_of(st.integers(-2, 40), st.floats(-2, 4), scalars)
modules = st.sampled_from(
    ["Conv", "DWConv", "C3", "SPP", "SPPF", "Bottleneck", "Concat", "nn.Upsample", "Detect", "Classify", "C4", 3, None]
)
arguments = st.one_of(st.lists(st.one_of(small, st.lists(small, max_size=3)), max_size=4), anything)
origins = st.one_of(st.integers(-4, 7), st.lists(st.integers(-4, 7), max_size=3), anything)
rows = st.one_of(st.tuples(origins, small, modules, arguments).map(list), anything)
places = st.tuples(st.sampled_from(["backbone", "head"]), st.integers(0, 3))
model_keys = ["task", "nc", "anchors", "depth_multiple", "width_multiple", "activation", "ch", "head"]
keys = st.dictionaries(st.one_of(st.sampled_from(model_keys), words), st.one_of(small, anything), max_size=2)


@few
@given(st.dictionaries(places, rows, min_size=1, max_size=2), keys)
def test_models(changed: dict[tuple[str, int], Any], more: dict[Any, Any]) -> None:
    description = copy.deepcopy(SOUND)
    for (part, number), row in changed.items():
        description[part][number % len(description[part])] = row
    head = Classify if more.get("task") == "classify" else Detect
    model = sentence_or(lambda: build_model({**description, **more}, head=head))
    if model is not None:
        maps = model(torch.zeros(1, int(model.yaml["ch"]), 64, 64))
        if model.yaml["task"] == "classify":
            assert maps.shape == (1, model.yaml["nc"])
        else:
            assert len(maps) == len(model.head.stride)


@few
@given(anything)
def test_models_of_anything(content: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        sentence_or(lambda: build_model(write(Path(name), content)))


options = st.one_of(anything, st.dictionaries(st.sampled_from(["dropout", "width_per_group"]), scalars))
architectures = st.one_of(st.sampled_from(["resnet18", "squeezenet1_1"]), anything)


@few
@given(
    st.fixed_dictionaries({"architecture": architectures}, optional={"args": options}),
    st.dictionaries(words, anything, max_size=1),
)
def test_classifiers(content: Any, more: dict[str, Any]) -> None:
    model = sentence_or(lambda: build_classifier({**content, **more}, 3, 64))
    if model is not None:
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
