"""Random label files and data and hyperparameter YAMLs are read correctly or refused with one sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.data_yaml import read_spec
from data.labels import COORDINATE_TOLERANCE, scan_image
from models.tasks import TASKS
from utils.config.flags import TrainOptions, flags_of
from utils.config.hyperparameters import read_hyperparameters
from utils.errors import UserError
from utils.user_code import class_named

# In time: a hang is an error too.
many = settings(max_examples=200, deadline=20_000, suppress_health_check=list(HealthCheck), derandomize=True)

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
    assert labels.sizes.tolist() == [[20, 20] if len(labels.rows) or not labels.problems else [0, 0]]
    classes, centres, sides = labels.rows[:, 0], labels.rows[:, 1:3], labels.rows[:, 3:]
    assert ((classes >= 0) & (classes == classes.round())).all()
    assert (abs(centres - 0.5) <= 0.5 + 2 * COORDINATE_TOLERANCE).all()
    assert (sides >= 0).all()
    assert all("a.txt" in problem and problem.count("\n") == 0 for problem in labels.problems)


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
            for kind in (class_named(entry.data) for entry in TASKS.values()):
                sentence_or(lambda kind=kind: kind.class_names(spec, False))
                sentence_or(lambda kind=kind: kind.files(spec))
            assert all(isinstance(name, str) for name in spec.names.values())
        if listing:
            assert listing.images


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
