"""Shards: files in them, and sentences for what is damaged or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data import shards, storage
from data.dataset import DataOptions, data_source
from data.images import read_image
from data.pack import pack
from tests.making import noise, write_image, write_yaml
from utils.errors import UserError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A pack with two images in one shard."""
    for name, folder in (("a", "train"), ("b", "train"), ("c", "val")):
        write_image(tmp_path / f"loose/images/{folder}/{name}.png", noise(20, 30), "0 .5 .5 .5 .5")
    content = {"path": ".", "train": "images/train", "val": "images/val", "names": ["disc"]}
    pack(str(write_yaml(tmp_path / "loose/my.yaml", content)), str(tmp_path / "pack"))
    storage.forget()
    return tmp_path / "pack"


def first_image(packed: Path) -> Path:
    return packed / "train-000000.tar/images/train/a.png"


def test_files_in_a_shard(packed: Path) -> None:
    image = first_image(packed)
    assert not storage.is_local(image)
    assert storage.read_bytes(image) == (packed.parent / "loose/images/train/a.png").read_bytes()
    assert storage.label_name(str(image)) == f"{packed}/train-000000.tar/labels/train/a.txt"
    assert storage.read_bytes(storage.label_name(str(image))) == b"0 .5 .5 .5 .5"
    assert storage.image_size(image) == (20, 30)
    assert read_image(image).shape == (30, 20, 3)
    assert storage.unpacked_name(image) == f"{packed}/images/train/a.png"
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(packed / "train-000000.tar/images/train/none.png")


def test_a_label_beside_its_image_below_a_folder_named_images(tmp_path: Path) -> None:
    write_image(tmp_path / "loose/a.png", noise(20, 20), "0 .5 .5 .5 .5")
    data = write_yaml(tmp_path / "loose/my.yaml", {"path": ".", "train": ".", "val": ".", "names": ["disc"]})
    out = tmp_path / "images/pack"
    pack(str(data), str(out))
    opened = data_source(str(out), "data.detection:DetectionData").open(32, 32, DataOptions())
    assert opened.split("train").labels.counts.tolist() == [1]


def test_a_folder_may_be_named_like_a_shard(tmp_path: Path) -> None:
    image = write_image(tmp_path / "old.tar/images/a.png", noise(20, 20))
    assert storage.is_local(image)
    assert storage.read_bytes(image) == image.read_bytes()


def change_byte(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def read_all(packed: Path) -> None:
    data = data_source(str(packed), "data.detection:DetectionData").open(32, 32, DataOptions())
    split = data.split("train")
    for batch in data.evaluation_loader(split, data.evaluation_batches(split, 2, square=False)):
        assert len(batch.images) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda packed: change_byte(packed / "train-000000.tar", 600),
            r"bytes of 'images/train/a.png' differ",
        ),
        (
            lambda packed: os.truncate(packed / "train-000000.tar", 600),
            r"bytes of 'images/train/\w.png' differ",
        ),
        (lambda packed: (packed / "train-000000.tar").unlink(), r"train-000000.tar cannot be read: No such file"),
        (lambda packed: (packed / "train-000000.json").unlink(), r"train-000000.json cannot be read: No such file"),
        (lambda packed: (packed / "train-000000.json").write_text('{"images": [[]]}'), r"train-000000.json is damaged"),
        (lambda packed: (packed / "index.json").write_text('{"lockstep_pack": 9}'), r"by another version of data.pack"),
        (lambda packed: (packed / "index.json").write_text('{"lockstep_pack": 1}'), r"index.json is damaged"),
        (lambda packed: (packed / "index.json").write_text("{"), r"`train: train` does not exist"),
        (lambda packed: (packed / "index.json").unlink(), r"`train: train` does not exist"),
    ],
)
def test_damage_is_named(packed: Path, damage: Callable[[Path], object], message: str) -> None:
    read_all(packed)
    damage(packed)
    with pytest.raises(UserError, match=message):
        read_all(packed)


def test_another_programs_index_is_no_pack(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('["train"]')
    assert shards.find_pack(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("name", 5), ("name", None), ("offset", -1), ("offset", 1.5), ("size", 10**30), ("checksum", "a")),
        *(("width", None), ("height", True), ("label", 7), ("group", []), ("outlines", {})),
    ],
)
def test_an_odd_field_of_a_list_is_damage(packed: Path, column: str, value: Any) -> None:
    file = packed / "train-000000.json"
    content = json.loads(file.read_text())
    row = content["images"][0]
    row += [None, "", None][len(row) - 6 :]
    row[content["columns"].index(column)] = value
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"train-000000.json is damaged \(.+\); copy it again"):
        read_all(packed)


@pytest.mark.parametrize("name", ["index.json", "train-000000.json", "train-000000.tar"])
def test_a_pipe_is_not_waited_for(packed: Path, name: str) -> None:
    (packed / name).unlink()
    os.mkfifo(packed / name)
    with pytest.raises(UserError, match=r"not a regular file"):
        read_all(packed)
