"""The files of a data set, wherever they are: on disk, in shards (data/shards.py), or remote (data/remote.py).

Called by the modules of data/ that read images and labels; a path of each kind is a `Path`.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data import label_rows, remote, shards
from utils.files import read_regular


def forget() -> None:
    """Forget what is known of all files: they may have changed since the last run of this process."""
    remote.forget()
    shards.forget()


def is_local(path: str | Path) -> bool:
    """Return whether a path leads to a file on disk, not in a shard or in a store."""
    name = os.fspath(path)
    return not remote.is_remote(name) and shards.place_of(name) is None


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file. Raises OSError, or `UserError` for a server that fails or a damaged shard."""
    name = os.fspath(path)
    if place := shards.place_of(name):
        return shards.read_member(*place)
    if remote.is_remote(name):
        return remote.read_object(name)
    return read_regular(name)


def read_label(path: str, outlined: bool) -> bytes:
    """Return the content of a label file. Raises as `read_bytes` does.

    Args:
        outlined: whether to return outlines, if a pack has both boxes and outlines
    """
    place = shards.place_of(path)
    return shards.read_label(*place, outlined) if place else read_bytes(path)


def open_for_pillow(path: Path) -> Path | BinaryIO:
    """Return what Pillow opens: the path of a local file, or the content of another one."""
    return path if is_local(path) else io.BytesIO(read_bytes(path))


def label_name(image: str) -> str:
    """Return the path of an image's label file, which is in the same shard if the image is in one."""
    place = shards.place_of(image)
    return f"{place[0]}{os.sep}{label_rows.label_name(place[1])}" if place else label_rows.label_name(image)


def unpacked_name(path: Path) -> str:
    """Return the path of a packed image once its shard is unpacked in place; return other paths unchanged."""
    place = shards.place_of(os.fspath(path))
    return os.path.join(os.path.dirname(place[0]), place[1]) if place else os.fspath(path)


def image_size(path: Path) -> tuple[int, int] | None:
    """Return width and height of an image, pixels as displayed, if they are known without reading it, else None."""
    place = shards.place_of(os.fspath(path))
    return shards.member_size(*place) if place else None


def exists(path: Path) -> bool:
    """Return whether there is such a file or folder. Raises `UserError` for a server that fails."""
    name = os.fspath(path)
    return remote.exists(name) if remote.is_remote(name) else os.path.exists(name)


def is_file(path: Path) -> bool:
    """Return whether there is such a file. Raises `UserError` for a server that fails."""
    name = os.fspath(path)
    if remote.is_remote(name):
        return remote.version_of(name) is not None and not remote.is_folder(name)
    return os.path.isfile(name)


def file_test(folder: str) -> Callable[[str], bool]:
    """Return a test of whether a path below a folder is a file; it may list a remote folder once."""
    return set(remote.files_below(folder)).__contains__ if remote.is_remote(folder) else os.path.isfile


def require_regular_file(path: str | Path) -> None:
    """Raise OSError for a local pipe, socket or device, which may be endless. Links to files are files."""
    if is_local(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")


def stamps(paths: Iterable[str]) -> bytes:
    """Return size in bytes and a number that changes with the content of each file, as int64 (n, 2).

    Both are -1 if there is no file.
    """
    names = list(map(_stamped_name, paths))
    remote.refresh_versions(sorted({name for name in names if remote.is_remote(name)}))
    known = {name: _stamp(name) for name in dict.fromkeys(names)}
    return np.array([known[name] for name in names], np.int64).tobytes()


def stamp(path: Path) -> tuple[int, int]:
    """Return the two numbers of `stamps` for one file."""
    return _stamp(_stamped_name(os.fspath(path)))


def file_size(path: Path) -> int:
    """Return the number of bytes of a file, -1 if it is unknown; requests nothing that `stamps` has requested."""
    name = os.fspath(path)
    place = shards.place_of(name)
    return shards.member_bytes(*place) if place else _stamp(name)[0]


def _stamped_name(name: str) -> str:
    """Return the file whose size and time stand for a path: a packed file's shard list, else the path itself."""
    place = shards.place_of(name)
    return shards.list_of(place[0]) if place else name


def _stamp(name: str) -> tuple[int, int]:
    if remote.is_remote(name):
        return remote.version_of(name) or (-1, -1)
    try:
        status = os.stat(name)
    except (OSError, ValueError):  # the latter for a name that no file can have
        return -1, -1
    # A program may set the modification time back after an edit, but not the change time. Every process hashes alike.
    return status.st_size, hash((status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


def prefetch(paths: Sequence[str | Path]) -> None:
    """Request remote files, many at once, into the cache; do nothing for others."""
    names = [os.fspath(path) for path in paths]
    missing = [name for name in names if remote.is_remote(name) and not _is_cached(name)]
    if missing:
        remote.prefetch(read_bytes, list(dict.fromkeys(missing)))


def _is_cached(name: str) -> bool:
    place = shards.place_of(name)
    return remote.is_cached(shards.key_of(*place) if place else name)
