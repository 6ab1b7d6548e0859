"""Data sets packed into tar files by `python -m data.pack`: their index, and the files in them, read without unpacking.

A pack is a folder, local or remote, with `index.json`, and for each shard `train-000000.tar` and `train-000000.json`,
which lists its images. The path of a file in a shard leads through the shard, such as
pack/train-000000.tar/images/a.jpg. Called by data/storage.py, data/data_yaml.py, data/classification.py and
data/pack.py.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from data import remote
from data.label_rows import label_name
from utils.errors import UserError, first_line
from utils.files import open_regular, read_regular

INDEX_FILE = "index.json"
INDEX_VERSION = 1
SHARD_SUFFIX, LIST_SUFFIX = ".tar", ".json"
OPEN_SHARDS = 64  # open shards of a process, at most


class PackedImage(NamedTuple):
    """An image of a shard."""

    name: str  # path in the shard
    offset: int  # start of its bytes in the shard
    size: int  # bytes
    checksum: int  # CRC-32 of its bytes
    width: int  # pixels, as displayed; 0 if the file is not a whole image
    height: int
    label: str | None = None  # content of its label file, if there is one
    group: str = ""  # class name, if the image belongs to one class as a whole
    outlines: str | None = None  # replaces `label` if outlines are read and come from an annotation file


class Pack(NamedTuple):
    """The index of a pack."""

    root: str
    names: dict[int, str]  # class names by number
    shards: dict[str, list[str]]  # names of each split's shards, without suffix

    def images(self, split: str) -> list[str]:
        """Return the paths of a split's images, in the order of packing. Raises `UserError`."""
        return [path for path, _ in self.grouped_images(split)]

    def grouped_images(self, split: str) -> list[tuple[str, str]]:
        """Return path and `group` of each image of a split."""
        return _listed(tuple(os.path.join(self.root, name) + SHARD_SUFFIX for name in self.shards[split]))


@lru_cache(8)
def _listed(shards: Sequence[str]) -> list[tuple[str, str]]:
    return [(os.path.join(shard, image.name), image.group) for shard in shards for image in read_list(shard)]


def find_pack(root: str) -> Pack | None:
    """Return the pack in a folder, None if there is none. Raises `UserError` if its index is damaged."""
    file = os.path.join(root, INDEX_FILE)
    try:
        content = json.loads(_read_small(file))
        version = content["lockstep_pack"]
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None  # another program's index.json
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; copy it again from where it was packed") from None
    if version != INDEX_VERSION:
        raise UserError(f"{file} was written by another version of data.pack ({version}); pack the data set again")
    try:
        names = {int(number): str(name) for number, name in content["names"].items()}
        shards = {split: [str(shard["name"]) for shard in each] for split, each in content["splits"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error!r}); pack the data set again") from None
    return Pack(root, names, shards)


def read_list(shard: str) -> list[PackedImage]:
    """Return the images of a shard. Raises `UserError` if its list is absent or damaged."""
    file = list_of(shard)
    try:
        return [_packed_image(row) for row in json.loads(_read_small(file))["images"]]
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; copy it again from where it was packed") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({first_line(error)}); copy it again from where it was packed") from None


def _packed_image(row: Sequence[Any]) -> PackedImage:
    """Return the image of a row of a list. Raises ValueError or TypeError if a field is wrong."""
    image = PackedImage(*row)
    numbers = (image.offset, image.size, image.checksum, image.width, image.height)
    texts = (image.name, image.group, *(text for text in (image.label, image.outlines) if text is not None))
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"the numbers {numbers} of '{image.name}'")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"the texts of {image.name!r}")
    return image


class Summary(NamedTuple):
    """A shard, as `index.json` describes it."""

    name: str  # without suffix
    images: int
    bytes: int


def read_summary(shard: str) -> Summary:
    """Return the summary at the start of a shard's list. Raises OSError, KeyError, or the errors of `json.loads`."""
    summary = json.loads(_read_small(list_of(shard)))["shard"]
    return Summary(*(summary[field] for field in Summary._fields))  # lists of older packs have another one


def list_text(summary: Summary, images: Sequence[PackedImage]) -> str:
    """Return the content of a shard's list: JSON in ASCII, whatever bytes the names have."""
    head = f'"shard": {json.dumps(summary._asdict())},\n"columns": {json.dumps(PackedImage._fields)}'
    rows = ",\n".join(json.dumps(image) for image in images)
    return f'{{{head},\n"images": [\n{rows}\n]}}\n'


def list_of(shard: str) -> str:
    """Return the path of a shard's list."""
    return shard.removesuffix(SHARD_SUFFIX) + LIST_SUFFIX


def _read_small(file: str) -> bytes:
    """Return the content of an index or a list. Raises OSError."""
    return remote.read_object(file) if remote.is_remote(file) else read_regular(file)


# Files in shards


def place_of(path: str) -> tuple[str, str] | None:
    """Return the shard that a path leads through and the name in it, None for a path outside of shards."""
    end = path.find(f"{SHARD_SUFFIX}{os.sep}")
    if end < 0:
        return None
    shard = path[: end + len(SHARD_SUFFIX)]
    return (shard, path[end + len(SHARD_SUFFIX) + 1 :]) if _is_shard(shard) else None


@lru_cache(4096)
def _is_shard(path: str) -> bool:
    """Return whether a path is a shard, and not a folder that is named like one."""
    return remote.exists(list_of(path)) if remote.is_remote(path) else not os.path.isdir(path)


class _Shard:
    """The places of a shard's images in arrays, which take a tenth of the memory of a dict."""

    def __init__(self, path: str) -> None:
        self.path, images = path, read_list(path)
        hashes = np.array([_hash(image.name) for image in images], np.uint64)
        order = np.argsort(hashes)
        self.hashes = hashes[order]
        fields = [(each.offset, each.size, each.checksum, each.width, each.height) for each in images]
        self.places = np.array(fields, np.int64).reshape(-1, 5)[order]
        self.file = None if remote.is_remote(path) else _open(path)

    def find(self, name: str) -> list[int] | None:
        """Return offset, size, checksum, width and height of an image, None if the shard has no image of that name."""
        key = np.uint64(_hash(name))
        row = int(np.searchsorted(self.hashes, key))
        found = row < len(self.hashes) and self.hashes[row] == key
        return self.places[row].tolist() if found else None

    def read(self, name: str, place: Sequence[int]) -> bytes:
        """Return the bytes of an image. Raises `UserError` if they differ from the packed ones."""
        offset, size, checksum = place[:3]
        if self.file is None:
            data = remote.read_span(self.path, offset, size, checksum)
        else:
            data = _read_at(self.file, offset, size)
        if zlib.crc32(data) != checksum:
            raise UserError(
                f"{remote.shown_path(self.path)} is damaged: the bytes of '{name}' differ from the packed ones; "
                "copy the shard again from where it was packed"
            )
        return data

    def __del__(self) -> None:
        file: int | None = getattr(self, "file", None)
        if file is not None:
            os.close(file)


def _open(path: str) -> int:
    try:
        return open_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; copy it again from where it was packed") from None


def _read_at(file: int, offset: int, size: int) -> bytes:
    """Return bytes of an open file. A memory map would end the process without a message if the disk fails."""
    if hasattr(os, "pread"):
        return os.pread(file, size, offset)
    os.lseek(file, offset, os.SEEK_SET)
    return os.read(file, size)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "big")


@lru_cache(OPEN_SHARDS)
def _shard(path: str) -> _Shard:
    """Return a shard; forked processes inherit it, and read its file by offset, without a shared position."""
    return _Shard(path)


@lru_cache(2)
def _labels(shard: str) -> dict[str, tuple[str, str]]:
    """Return boxes and outlines by label file name, for the last two shards: a scan reads one shard after another."""
    labelled = [image for image in read_list(shard) if image.label is not None]
    return {label_name(each.name): (each.label or "", each.outlines or each.label or "") for each in labelled}


def forget() -> None:
    """Forget all lists: they may have changed since the last run of this process."""
    for cache in (_listed, _is_shard, _shard, _labels):
        cache.cache_clear()


def read_member(shard: str, name: str) -> bytes:
    """Return the bytes of an image or a label file. Raises FileNotFoundError, or `UserError` for damaged bytes."""
    opened = _shard(shard)
    if place := opened.find(name):
        return opened.read(name, place)
    return read_label(shard, name, outlined=False)


def read_label(shard: str, name: str, outlined: bool) -> bytes:
    """Return the content of a label file. Raises FileNotFoundError.

    Args:
        outlined: whether to return outlines, if there are any
    """
    texts = _labels(shard).get(name)
    if texts is None:
        raise FileNotFoundError(errno.ENOENT, "no such file in the shard", f"{shard}/{name}")
    return texts[outlined].encode(errors="surrogateescape")


def key_of(shard: str, name: str) -> str:
    """Return the cache key of an image in a remote shard."""
    place = _shard(shard).find(name) or [0, 0, 0]
    return remote.span_key(shard, *place[:3])


def member_size(shard: str, name: str) -> tuple[int, int] | None:
    """Return width and height of an image, pixels as displayed, or None if it must be read to know them."""
    place = _shard(shard).find(name)
    return (place[3], place[4]) if place and place[3] else None


def member_bytes(shard: str, name: str) -> int:
    """Return the number of bytes of an image, -1 if the shard has no image of that name."""
    place = _shard(shard).find(name)
    return place[1] if place else -1


def index_text(names: dict[int, str], task: str, splits: dict[str, list[Summary]]) -> str:
    """Return the content of `index.json`."""
    shards = {split: [summary._asdict() for summary in each] for split, each in splits.items()}
    return json.dumps({"lockstep_pack": INDEX_VERSION, "task": task, "names": names, "splits": shards}, indent=1) + "\n"
