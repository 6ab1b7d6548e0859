"""Tests of data set YAMLs: keys, names, relative paths, the images of a split, label files, and error messages."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.builtin import DrawnSet
from data.data_yaml import read_spec
from tests.making import write_yaml
from utils.errors import UserError


def write_spec(file: Path, **content: Any) -> Path:
    """Write a data YAML with one class, unless `names` is passed. Keys whose value is None are left out."""
    content = {"names": ["thing"], **content}
    return write_yaml(file, {key: value for key, value in content.items() if value is not None})


def touch(folder: Path, *names: str) -> list[Path]:
    """Make empty files, as only names matter."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return [folder / name for name in names]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    """The path of a data YAML in a folder `set`, with two images in `set/images/train`."""
    touch(tmp_path / "set/images/train", "a.jpg", "b.png")
    return tmp_path / "set/data.yaml"


# Data sets by share

DAY, NIGHT = {"path": "day/images/train", "share": 0.7}, {"path": "night.yaml", "share": 0.3}


def sets_of(folder: Path, *train: Any, **content: Any) -> list[tuple[str, float, tuple[int, ...]]]:
    """Read a YAML that lists data sets; return their names, shares and class numbers."""
    write_yaml(folder / "night.yaml", {"path": "night", "train": "images/train", "names": ["dog", "cat"]})
    whole = {"path": ".", "train": [*train], "val": "day", "names": ["cat", "dog"], **content}
    spec = read_spec(write_yaml(folder / "mix.yaml", whole))
    return [(part.name, part.weight, part.classes) for split in ("train", "val") for part in spec.sets.get(split, ())]


def test_data_sets_have_names_by_path_and_classes_by_name(tmp_path: Path) -> None:
    sets = sets_of(tmp_path, DAY, NIGHT, names=["wolf", "cat", "dog"], val=[{"path": "night.yaml"}])
    assert sets == [("day", 0.7, (0, 1, 2)), ("night", 0.3, (2, 1)), ("night", 0.0, (2, 1))]
    renamed = sets_of(tmp_path, {"path": "night.yaml", "rename": {"dog": "cat"}}, names=["cat"])
    assert renamed == [("night", 0.0, (0, 0))]


@pytest.mark.parametrize(
    ("train", "content", "words"),
    [
        ([DAY, NIGHT], {"names": ["cat"]}, "has the class dog in night, which `names` lacks; add it there"),
        ([DAY, {**NIGHT, "share": 0.5}], {}, "shares that add up to 1.2 instead of 1"),
        ([DAY, {"path": "night.yaml", "weight": 1}], {}, "needs a positive `share` or `weight` for each data set"),
        ([DAY, {**DAY, "share": 0.3}], {}, "names a data set 'day'; give each a `name` of its own"),
        ([DAY, {**NIGHT, "shares": 1}], {}, "no keys but path, name, share, weight, rename"),
        ([{"path": "."}], {}, "names a data set ''"),
        ([{"path": "mix.yaml"}], {}, "which lists data sets itself; list them here"),
        ([{**NIGHT, "share": 1, "rename": {"bird": "cat"}}], {}, "has `rename: {'bird': 'cat'}` for night"),
        ([DAY, NIGHT], {"val": None}, "`val` must be given, because `train:` lists data sets"),
    ],
)
def test_an_invalid_list_of_data_sets(train: list[Any], content: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        sets_of(tmp_path, *train, **content)


# Keys and values


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"names": {0: "cat", 1: "dog"}}, {0: "cat", 1: "dog"}),
        ({"names": {1: "dog", 0: "cat"}, "nc": 2}, {0: "cat", 1: "dog"}),
        ({"names": ["cat", "dog"], "nc": 2}, {0: "cat", 1: "dog"}),
        ({"names": {k: f"class {k}" for k in range(12)}}, {k: f"class {k}" for k in range(12)}),
        ({"names": {0: 7, 1: 1.5, 2: "010", 3: "1e3", 4: "~"}}, {0: "7", 1: "1.5", 2: "010", 3: "1e3", 4: "~"}),
        ({"names": None, "nc": 3}, {0: "0", 1: "1", 2: "2"}),
        ({"names": {"0": "cat", "1": "no"}, "nc": "2"}, {0: "cat", 1: "no"}),
        ({"names": None}, {}),
    ],
)
def test_names_may_be_a_mapping_a_list_or_a_count(yaml_file: Path, content: dict[str, Any], names: Any) -> None:
    assert list(read_spec(write_spec(yaml_file, **content)).names.items()) == list(names.items())


PLAIN_NAMES = ["010", "01", "12:30", "1.50", "no", "true", "~", "null", "1e3", "0x1F", "2024-01-01", "1_000", ".5", "="]


@pytest.mark.parametrize(
    "text",
    [
        f"names: [{', '.join(PLAIN_NAMES)}]",
        f"some: &some [{', '.join(PLAIN_NAMES)}]\nnames: *some",
        "\r".join(["names:", *(f"- {name}" for name in PLAIN_NAMES)]),
        "\n".join(["names:", *(f"  {number:03}: {name}" for number, name in enumerate(PLAIN_NAMES))]),
        "\n".join(
            ["x: &x {0: '010'}\nnames:\n  <<: *x", *(f"  {k}: {PLAIN_NAMES[k]}" for k in range(1, len(PLAIN_NAMES)))]
        ),
    ],
)
def test_names_are_the_text_that_is_written_and_their_numbers_decimal(yaml_file: Path, text: str) -> None:
    yaml_file.write_text(text, encoding="utf-16")
    assert read_spec(yaml_file).names == dict(enumerate(PLAIN_NAMES))


WRONG: dict[str, list[Any]] = {
    "names": [
        [],
        {},
        "cat",
        [""],
        [["a"]],
        [" "],
        ["a"] * 5000,
        {1: "a", 2: "b"},
        {0: "a", 2: "b"},
        {"1": "a"},
        {"000": "a", 0: "b"},
        {0.0: "a"},
        {"": "a"},
    ],
    "nc": [1, 3, 0, "3", "two", True],
    "split": [1, -0.1, 20, True, "20%", [0.2], float("nan"), float("inf")],
    "split_seed": [-1, 0.5, 1.0, True, "one"],
    "train": [3, {"folder": "a"}, ["a", 3], "images\ntrain", "images\0train", [["a" * 9999]]],
    "path": [["a"], 3],
    "images": [3, {"trian": "x"}],
    "kpt_shape": [17, "text", [17], [17, 4], [0, 2], [True, 2]],
    "defaults": [{"epoch": 3}, {"imgsz": 0}],
    **{key: ["x"] for key in ("tain", "vall", "valid", "name", "pth", "Train", "spilt", "split-seed", "default")},
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_key_or_value_is_refused(yaml_file: Path, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{yaml_file}: .*[`']{key}\b"):
        read_spec(write_spec(yaml_file, **{"names": ["a", "b"], key: value}))


def test_keys_that_are_not_used_are_named(yaml_file: Path) -> None:
    """But for those of other programs."""
    known = {"license": "x", "roboflow": {"a": 1}, "flip_idx": [0], "channels": 3, "split": 0.2, "split_seed": 3}
    spec = read_spec(write_spec(yaml_file, train="images/train", **known, defaults={"imgsz": 64}))
    assert (spec.warnings, spec.split, spec.split_seed, spec.defaults) == ((), 0.2, 3, {"imgsz": 64})
    touch(yaml_file.parent / "images/val", "c.jpg")
    spec = read_spec(write_spec(yaml_file, train="images/train", val="images/val", split=0.2, bbox_format="xyxy"))
    assert [name for name in ("'bbox_format'", "`split: 0.2`") if name not in "".join(spec.warnings)] == []
    assert (len(spec.images("train")), [path.name for path in spec.images("val")]) == (2, ["c.jpg"])


def test_a_share_of_the_training_images_is_held_out(yaml_file: Path) -> None:
    images = touch(yaml_file.parent / "images/train", *(f"{k}.jpg" for k in range(8)))
    spec = read_spec(write_spec(yaml_file, train="images/train", split=0.2))
    train, val = spec.images("train"), spec.images("val")
    assert sorted(train + val) == sorted([*images, *(images[0].with_name(name) for name in ("a.jpg", "b.png"))])
    assert (len(train), len(val), val) == (8, 2, sorted(val))
    assert read_spec(write_spec(yaml_file, train="images/train", split=0.2, split_seed=3)).images("val") != val
    moved = yaml_file.parents[1] / "moved"
    yaml_file.parent.rename(moved)
    again = read_spec(write_spec(moved / "data.yaml", train="images/train", split=0.2))
    assert [path.name for path in again.images("val")] == [path.name for path in val]


# Built-in data sets

Calls = list[tuple[str, Path, int]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Name, folder and seed of each drawing, which makes only one file."""
    calls: Calls = []

    def draw(data: DrawnSet, folder: Path, seed: int) -> None:
        calls.append((data.title, folder.resolve(), seed))
        touch(folder / "images/train", "drawn.jpg")

    monkeypatch.setattr(DrawnSet, "draw_dataset", draw)
    return calls


@pytest.mark.parametrize(("module", "seed"), [("shapes", 0), ("shapes_cls", 7), ("shapes_seg", 3)])
def test_draw_makes_a_built_in_data_set_at_its_path(yaml_file: Path, drawn: Calls, module: str, seed: int) -> None:
    content = {"path": "../drawn", "train": "images/train", "draw": {f"data.builtin.{module}": seed}}
    spec, folder = read_spec(write_spec(yaml_file, **content)), yaml_file.parents[1] / "drawn"
    assert drawn == [(module.replace("_", "-"), folder, seed)]
    assert spec.images("train") == [folder / "images/train/drawn.jpg"]


@pytest.mark.parametrize(
    "draw",
    [
        *(5, True, "shapes_cls", ["shapes_cls"], {}, {"data.builtin.shapes": 0, "data.builtin.shapes_cls": 0}),
        *({"data.builtin.shapes_cls": seed} for seed in (-1, True, None)),
        *({name: 0} for name in (5, "data.builtin.nothing", "data.builtin", "json", "os.path", "../evil", "own")),
    ],
)
def test_draw_needs_a_known_name_and_a_seed(yaml_file: Path, drawn: Calls, draw: object) -> None:
    (yaml_file.parent / "own.py").write_text("raise SystemExit\n")
    with pytest.raises(UserError, match=r"data\.yaml: `draw` "):
        read_spec(write_spec(yaml_file, draw=draw))
    assert drawn == []


# Relative paths


@pytest.mark.parametrize(
    ("path", "entry", "images"),
    [
        pytest.param("../store", "photos/train", "store/photos/train", id="relative to the YAML's folder"),
        pytest.param("near", "train", "work/near/train", id="relative to the working folder"),
        pytest.param("both", "train", "configs/both/train", id="the YAML's folder first"),
        pytest.param(None, "train", "configs/train", id="without path, below the YAML's folder"),
        pytest.param(None, "here", "work/here", id="without path, below the working folder"),
        pytest.param("none", "{tmp_path}/far/train", "far/train", id="absolute entry"),
        pytest.param("~/store", "train", "home/store/train", id="home folder"),
        pytest.param("$HOME/store", "train", "home/store/train", id="variable"),
    ],
)
def test_entries_are_relative_to_path_and_path_to_the_yaml_or_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, entry: str, images: str
) -> None:
    for folder in ("work/both/train", "work/x", images):
        touch(tmp_path / folder, "a.jpg")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write_spec(tmp_path / "configs/data.yaml", path=path, train=entry.format(tmp_path=tmp_path))
    assert read_spec(file).images("train") == [tmp_path / images / "a.jpg"]
    spec = read_spec(Path("../configs/data.yaml"))
    monkeypatch.chdir("/")  # the working folder when the YAML is read counts
    assert spec.images("train") == [tmp_path / images / "a.jpg"]


def test_an_entry_means_what_it_says_if_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML's folder comes first, with and without `../`; the working folder is another one."""
    beside, above = touch(tmp_path / "all/set/train", "a.jpg"), touch(tmp_path / "all/train", "b.jpg")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = write_spec(tmp_path / "all/set/data.yaml", train="../train", val="images/val", test="not/used")
    spec = read_spec(file)  # a split that is not used may be absent
    assert spec.images("train") == above
    shutil.rmtree(tmp_path / "all/train")
    assert read_spec(file).images("train") == beside
    with pytest.raises(UserError) as caught:
        spec.images("val")
    named = ("`val: images/val`", f"{tmp_path}/all/set/images/val", f"{tmp_path}/work/images/val")
    assert [name for name in named if name not in str(caught.value)] == []


# The images of a split


def test_a_folder_is_searched_at_every_depth_for_image_suffixes_in_either_case(tmp_path: Path) -> None:
    """Links to folders are followed once, and images sorted folder by folder."""
    expected = touch(tmp_path / "images", "b.JPG", "a.png", "d.Jpeg", "e.tif", "f.TIFF", "g.bmp", "h.webp")
    for folder in ("deep/deeper", "a", "a-b", "a/c", "a b"):
        expected += touch(tmp_path / "images" / folder, "x.jpg", "-.jpg", "two.dots.jpg")
    touch(tmp_path / "images", "notes.txt", "data.json", "film.mp4", "jpg", "c.jpg.bak")
    outside = touch(tmp_path / "outside", "b.jpg")[0].parent
    for link, target in {
        "deep/up": tmp_path / "images",
        "self": tmp_path / "images",
        "y": outside,
        "z": outside,
    }.items():
        (tmp_path / "images" / link).symlink_to(target)
    expected.append(tmp_path / "images/y/b.jpg")
    images = read_spec(write_spec(tmp_path / "data.yaml", train="images")).images("train")
    assert images == sorted(expected)
    assert images != sorted(images, key=str)


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    names = [os.fsdecode(name) for name in ("ä.jpg".encode(), b"\xff.jpg")]
    images = touch(tmp_path / "größe", *names)
    (tmp_path / "list.txt").write_bytes(b"\n".join(b"gr\xc3\xb6\xc3\x9fe/" + os.fsencode(name) for name in names))
    (tmp_path / "wide.txt").write_text("größe/ä.jpg", encoding="utf-16")
    spec = read_spec(write_spec(tmp_path / "data.yaml", train="größe", val="list.txt", test="wide.txt"))
    assert spec.images("test") == images[:1]
    assert spec.listing("train") == spec.listing("val") == (sorted(images), [], ())


def test_a_list_file_names_images_relative_to_itself_or_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = touch(tmp_path / "set/lists/images", "a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg", "f.jpg")
    touch(tmp_path / "set/images", "a.jpg")
    working = touch(tmp_path / "work/images", "g.JPG")
    absolute, above = touch(tmp_path / "far", "h.png"), touch(tmp_path / "set/val", "i.jpg")
    lines = ["./images/a.jpg", "images/b.jpg/", "images/c.jpg/.", "images/./d.jpg", "images//e.jpg"]
    lines += ["../lists/images/f.jpg", "images/g.JPG", str(absolute[0]), "", "  ", "notes.md"]
    lines += ["..\\val\\i.jpg"]
    (tmp_path / "set/lists/train.txt").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    monkeypatch.chdir(tmp_path / "work")
    spec = read_spec(write_spec(tmp_path / "set/data.yaml", path=".", train="lists/train.txt"))
    images, problems, _ = spec.listing("train")
    assert images == sorted(
        [*beside, *working, *absolute, *above, tmp_path / "work/notes.md"]
    )  # the scan leaves it out
    assert problems == []


@pytest.mark.parametrize("prefix", ["data/", "/old/set/", "D:\\set\\", "../"])
def test_a_prefix_that_has_moved_for_all_lines_is_replaced(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and with a line; what is absent there is absent."""
    beside, names = touch(tmp_path / "lists/img/train", "a.jpg", "b.jpg"), ("a", "b", "gone")
    (tmp_path / "lists/list.txt").write_text("\n".join(f"{prefix}img/train/{name}.jpg" for name in names))
    spec = read_spec(write_spec(tmp_path / "data.yaml", train="lists/list.txt"))
    for _ in range(2):
        assert spec.images("train") == [*beside, tmp_path / "lists/img/train/gone.jpg"]
    shown = prefix.replace("\\", "/")
    assert capsys.readouterr().out.count(f"`{shown}` is read as {tmp_path}/lists/\n") == 1


@pytest.mark.parametrize("names", ["img/val/a.jpg img/val/b.jpg", "img/val/b.jpg", "b.jpg", "/old/b.jpg /new/c.jpg"])
def test_no_other_file_replaces_an_absent_one(names: str, tmp_path: Path) -> None:
    """A line exists, the folder exists, or no prefix is common to all lines."""
    touch(tmp_path / "lists/img/val", "a.jpg")
    touch(tmp_path, "b.jpg")
    for folder in ("lists/img", "lists/img/train", "lists/val"):
        touch(tmp_path / folder, "b.jpg")
    (tmp_path / "lists/list.txt").write_text(names.replace(" ", "\n"))
    images = read_spec(write_spec(tmp_path / "data.yaml", train="lists/list.txt")).images("train")
    assert [image.name for image in images if image.exists()] == ["a.jpg"] * ("a.jpg" in names)


def test_a_split_without_images_is_an_error(yaml_file: Path) -> None:
    (yaml_file.parent / "images/val").mkdir()
    spec = read_spec(write_spec(yaml_file, train="images/train/b.png", val="images/val", test=""))
    (yaml_file.parent / "images/train/b.png").write_bytes(b"\xff\xd8\xff\xe0\x00")
    with pytest.raises(UserError, match=r"data\.yaml has no `test:`"):
        spec.images("test")
    with pytest.raises(UserError, match=r"data\.yaml: `val:` has no images in .*/set/images/val"):
        spec.images("val")
    with pytest.raises(UserError, match=r"b\.png is neither a folder nor a readable text list"):
        spec.images("train")
