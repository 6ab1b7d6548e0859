"""Files of object stores and web servers, through fsspec: each is requested once per machine, then read from a cache.

A remote file is a path too, with one slash after the colon, as `Path` writes it: `s3:/bucket/a.jpg`. Errors are for the
user and show the address without user names, passwords and queries. Called by data/storage.py and data/pack.py.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from utils.download import RETRIED_STATUS_CODES
from utils.errors import StorageError, UserError, without_secrets
from utils.files import cache_folder, one_at_a_time, replacing

T = TypeVar("T")
REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/+(?=[^/])")
# The file systems of fsspec to use: some of the others run code that an address or a file names.
PROTOCOLS = ("http", "https", "s3", "s3a", "gs", "gcs", "hf", "file")
MIN_FREE_SHARE = 0.1  # share of the disk that the caches leave free
CACHE_RULE = f"as long as {MIN_FREE_SHARE:.0%} of its disk stays free"
ATTEMPTS = 6  # attempts to read an object
FIRST_WAIT_SECONDS = 0.5  # pause before the second attempt; doubled before each further one
TIMEOUTS = (TimeoutError, asyncio.TimeoutError)  # fsspec's is the latter, another class before Python 3.11
SILENT_SECONDS = 20  # timeout of a server that does not answer
LISTING_SECONDS = 60.0  # timeout for a web server's list of a folder, whose length is unknown
LISTED_DEPTH = 32  # levels of folders that are listed on a web server
REQUESTS_AT_ONCE = 16  # parallel requests of a process
# Keys in fsspec's descriptions of files whose values change with the content.
VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "Last-Modified", "mtime", "updated", "blob_id")


class Version(NamedTuple):
    """The version of an object.

    Attributes:
        size: size in bytes, -1 if unknown
        number: number that changes with the content
    """

    size: int
    number: int


_versions: dict[str, Version | None] = {}  # by path, None if there is no object; loader processes inherit them


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or an address is remote."""
    return REMOTE.match(os.fspath(path)) is not None


def address_of(path: str | os.PathLike[str]) -> str:
    """Return the address of a remote path, such as `s3://bucket/a.jpg`."""
    return REMOTE.sub(r"\1://", os.fspath(path), count=1)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for a message; for a remote path, its address without secrets."""
    return without_secrets(address_of(path))


def _path_of(address: str) -> str:
    return address.replace("://", ":/", 1)


# Requests


def _is_web(path: str) -> bool:
    return address_of(path).partition("://")[0] in ("http", "https")


def _filesystem(path: str, lists: bool = False) -> tuple[Any, str]:
    """Return fsspec's file system for a path, and the file's name in it. Raises `UserError`.

    Args:
        lists: whether folders will be listed
    """
    from fsspec.core import url_to_fs

    address = address_of(path)
    protocol = address.partition("://")[0]
    if protocol not in PROTOCOLS or "::" in address:
        raise UserError(
            f"{without_secrets(address)} has an unsupported URL scheme; give a path, or an address that "
            f"begins with one of {', '.join(PROTOCOLS)}, without `::`"
        )
    options: dict[str, Any] = {}
    if _is_web(path):
        options = {"client_kwargs": {"timeout": _http_timeout()}}
        if lists:
            options["timeout"] = _http_timeout(LISTING_SECONDS)  # timeout of each request
    elif protocol in ("s3", "s3a"):
        timeouts = {"connect_timeout": SILENT_SECONDS, "read_timeout": SILENT_SECONDS}
        options = {"config_kwargs": {**timeouts, "retries": {"total_max_attempts": 1}}}  # `_request` tries again
    try:
        filesystem, name = url_to_fs(address, **options)
    except ImportError as error:
        package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(protocol)
        advice = f"pip install {package}" if package else f"install the package that fsspec names: {error}"
        raise UserError(f"{without_secrets(address)} cannot be read without another package: {advice}") from None
    except Exception as error:  # each store has its own kinds
        raise UserError(f"{without_secrets(address)} cannot be read ({_reason(error)}); correct the address") from None
    return filesystem, name


def _http_timeout(total: float | None = None) -> Any:
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        raise UserError("addresses of web servers need another package: pip install aiohttp") from None
    return ClientTimeout(total=total, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)


def _request(path: str, call: Callable[[Any, str], T], lists: bool = False) -> T:
    """Return `call` of a path's file system and the file's name in it, with retries after errors.

    Raises FileNotFoundError, or a `UserError` that names the object.

    Args:
        lists: whether folders are listed
    """
    filesystem, name = _filesystem(path, lists)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call(filesystem, name)
        except UserError:
            raise
        except Exception as raised:  # each store has its own kinds
            error = _cause(raised)
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, "no such object", shown_path(path)) from None
            if lists and isinstance(error, TIMEOUTS):
                raise StorageError(f"{shown_path(path)} cannot be listed within {LISTING_SECONDS:g} s") from None
            if attempt == ATTEMPTS or _is_final(error):
                raise StorageError(
                    f"{shown_path(path)} cannot be read ({_reason(error)}); check the address, the credentials and "
                    "the server"
                ) from None
            time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError


def _cause(error: Exception) -> Exception:
    """Return the failure of a web server that fsspec has turned into FileNotFoundError, else `error` itself."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _is_web_failure(cause):
        return cause
    return error


def _is_web_failure(error: Exception) -> bool:
    of_client = type(error).__module__.startswith("aiohttp") or isinstance(error, TIMEOUTS)
    return of_client and getattr(error, "status", 0) not in (404, 410)


def _is_final(error: Exception) -> bool:
    """Return whether a further attempt would fail too."""
    status = getattr(error, "status", 500)
    refused = isinstance(error, (PermissionError, NotImplementedError, ImportError)) or "Credentials" in repr(error)
    return refused or (400 <= status < 500 and status not in RETRIED_STATUS_CODES)


def _reason(error: Exception) -> str:
    if status := getattr(error, "status", 0):
        return f"HTTP status {status}"
    return without_secrets(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def version_of(path: str) -> Version | None:
    """Return the version of an object, None if there is none. Raises `UserError`."""
    if path not in _versions:
        try:
            _versions[path] = _version(_request(path, lambda filesystem, name: filesystem.info(name)))
        except FileNotFoundError:
            _versions[path] = None
    return _versions[path]


def _version(info: Any) -> Version:
    text = repr([info[key] for key in VERSION_KEYS if key in info])
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
    size = info.get("size")
    return Version(-1 if size is None else size, number)


def forget() -> None:
    """Forget all versions: they may have changed since the last run of this process."""
    _versions.clear()


def refresh_versions(paths: Sequence[str]) -> None:
    """Request the versions of objects again: with one listing per folder if it includes them, else one by one."""
    folders = sorted({os.path.dirname(path) for path in paths})
    listed = {
        folder for folder, complete in zip(folders, _in_threads(_list_versions, folders), strict=True) if complete
    }
    for path in paths:
        if os.path.dirname(path) in listed:
            _versions.setdefault(path, None)
        else:
            _versions.pop(path, None)
    list(_in_threads(version_of, [path for path in paths if path not in _versions]))


def _list_versions(folder: str) -> bool:
    """Record the versions of all objects of a folder; return whether the store's listing has them."""
    try:
        entries = _request(folder, lambda filesystem, name: filesystem.ls(name, detail=True, refresh=True), lists=True)
    except (FileNotFoundError, UserError):
        return False  # each object is requested instead, with an error that names it
    files = [entry for entry in entries if entry["type"] == "file"]
    if any(entry.get("size") is None for entry in files):
        return False
    for path in [path for path in _versions if os.path.dirname(path) == folder]:
        del _versions[path]
    filesystem, _ = _filesystem(folder)
    _versions.update({_path_of(filesystem.unstrip_protocol(entry["name"])): _version(entry) for entry in files})
    return True


def _in_threads(call: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        yield from pool.map(call, paths)


def exists(path: str) -> bool:
    """Return whether there is an object, or a folder with objects. Raises `UserError`."""
    return version_of(path) is not None


def is_folder(path: str) -> bool:
    """Return whether a path is a folder with objects. Raises `UserError`."""
    return bool(_request(path, lambda filesystem, name: filesystem.isdir(name), lists=True))


def files_below(folder: str) -> list[str]:
    """Return the paths of all objects below a folder. Raises `UserError`."""
    try:
        limits = {"maxdepth": LISTED_DEPTH, "on_error": "raise"} if _is_web(folder) else {}
        names = _request(folder, lambda filesystem, name: filesystem.find(name, refresh=True, **limits), lists=True)
    except FileNotFoundError:
        return []
    filesystem, _ = _filesystem(folder)
    return [_path_of(filesystem.unstrip_protocol(name)) for name in names]


def upload(file: Path, path: str) -> None:
    """Write a local file to a store. Raises `UserError`."""
    try:
        _request(path, lambda filesystem, name: filesystem.put_file(str(file), name))
    except FileNotFoundError:
        raise UserError(f"{shown_path(path)} cannot be written; create the bucket first") from None
    _versions.pop(path, None)


# The cache


def cache_path() -> Path:
    """Return the folder of the cache of remote files."""
    return cache_folder() / "remote"


def read_object(path: str) -> bytes:
    """Return a whole object. Raises FileNotFoundError or `UserError`."""
    version = version_of(path)
    if version is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", shown_path(path))
    return _cached(path, version, partial(_fetch, path, None, version.size))


def read_span(path: str, start: int, size: int, checksum: int) -> bytes:
    """Return `size` bytes of an object from `start` on. Raises as `read_object` does.

    Args:
        checksum: CRC-32 of these bytes, which distinguishes versions in the cache
    """
    span = slice(start, start + size)
    key = span_key(path, start, size, checksum)
    return _cached(key, Version(size, checksum), partial(_fetch, path, span, size))


def span_key(path: str, start: int, size: int, checksum: int) -> str:
    """Return the cache key of a part of an object. A whole object's key is its path."""
    return f"{path}\0{start}\0{size}\0{checksum}"


def is_cached(key: str) -> bool:
    """Return whether the cache has a file for a key, of whichever version."""
    return os.path.exists(cached_file(key))


def prefetch(read: Callable[[str], object], paths: Sequence[str]) -> None:
    """Call `read` for many paths at once, to fill the cache; errors come when the files are read."""

    def attempt(path: str) -> None:
        with suppress(OSError, UserError):
            read(path)

    list(_in_threads(attempt, paths))


def _fetch(path: str, span: slice | None, size: int) -> bytes:
    def call(filesystem: Any, name: str) -> bytes:
        limits: dict[str, Any] = {} if span is None else {"start": span.start, "end": span.stop}
        if not filesystem.async_impl:
            limits["cache_type"] = "none"  # fsspec's own files would read megabytes ahead
        data: bytes = filesystem.cat_file(name, **limits)
        if span is not None and len(data) > size:
            raise UserError(f"the server of {shown_path(path)} does not answer requests for a part of an object")
        if size >= 0 and len(data) != size:
            raise OSError(f"{len(data)} of {size} bytes received")
        return data

    return _request(path, call)


@lru_cache
def _cache_root(*environment: str | None) -> str:
    return str(cache_path())


def cached_file(key: str) -> str:
    """Return the cache's file for a key, as text because `Path` is slow.

    Args:
        key: path of an object, or a key of `span_key`
    """
    digest = hashlib.sha256(os.fsencode(key)).hexdigest()
    return f"{_cache_root(os.environ.get('XDG_CACHE_HOME'), os.environ.get('HOME'))}/{digest[:2]}/{digest}"


def _cached(key: str, version: Version, fetch: Callable[[], bytes]) -> bytes:
    """Return the cached bytes of a key; if there are none, fetch and cache them, in one process at a time.

    The modification time of a cached file is the number of its version.
    """
    file = cached_file(key)
    if (data := _read_cached(file, version)) is not None:
        return data
    with one_at_a_time(Path(f"{file}.lock")):
        if (data := _read_cached(file, version)) is None:
            data = fetch()
            _write_cached(Path(file), data, version)
    return data


def available_bytes(folder: Path) -> int:
    """Return the number of bytes that a cache may still write to a folder's disk."""
    usage = shutil.disk_usage(folder)
    return usage.free - int(usage.total * MIN_FREE_SHARE)


def _read_cached(file: str, version: Version) -> bytes | None:
    try:
        with open(file, "rb") as opened:
            if os.fstat(opened.fileno()).st_mtime_ns != version.number:
                return None
            data = opened.read()
    except OSError:
        return None
    return data if version.size in (-1, len(data)) else None


def _write_cached(file: Path, data: bytes, version: Version) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if available_bytes(file.parent) < len(data):
            raise OSError(errno.ENOSPC, f"less than {MIN_FREE_SHARE:.0%} of the disk would stay free")
        with replacing(file) as opened:
            opened.write(data)
            opened.flush()
            os.utime(opened.fileno(), ns=(version.number, version.number))
    except OSError as error:
        warnings.warn(  # shown once
            f"remote files are not kept in {cache_path()} ({error.strerror}); they are requested each time",
            stacklevel=2,
        )
