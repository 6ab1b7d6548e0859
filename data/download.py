"""Bring a data set onto this machine, once: archives of `download:`, or a folder of an object store or web server."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import unquote

from utils.errors import UserError, first_line, public
from utils.files import SERVER_TIMEOUT_SECONDS, cache_folder, check_free_space, download, is_address, one_at_a_time

PROTOCOLS = ("http", "https", "s3", "s3a", "gs", "gcs", "hf", "file")  # some others of fsspec run an address's code
LISTED_DEPTH = 32  # levels of folders that are listed on a web server


def archive_sources(value: Any) -> list[tuple[str, str]]:
    """Return folder and address of each archive of `download:`, one, a list or a mapping; [] for others, as scripts."""
    sources = []
    for folder, addresses in (value if isinstance(value, Mapping) else {".": value}).items():
        addresses = addresses if isinstance(addresses, list) else [addresses]
        sources += [(str(folder), address) for address in addresses]
    return sources if all(is_inside(folder) and is_address(address) for folder, address in sources) else []


def is_inside(name: str) -> bool:
    """Return whether a relative path of any system stays below the folder that it is relative to."""
    path = PureWindowsPath(name)  # accepts either slash, and drives
    return not (path.anchor or ".." in path.parts or "\0" in name)


def has_content(folder: Path) -> bool:
    """Return whether a folder exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def fetch_dataset(sources: Sequence[tuple[str, str]], root: Path, expected: Sequence[str]) -> None:
    """Download and unpack the archives into the folder `root`, unless it has content. Raises `UserError`.

    They are unpacked into a folder beside `root`, which is renamed at the end: `root` is never incomplete, and the next
    process continues after the last archive of a killed one. `expected` are paths that the data YAML names.
    """
    home = Path(os.path.realpath(root))  # on the disk of a link's target
    work = home.with_name(f".{home.name}.download")
    with one_at_a_time(root.with_name(f".{root.name}.lock")):
        if has_content(root):
            return
        for folder, address in sources:
            archive = work / sha256(f"{folder} {address}".encode()).hexdigest()[:16]
            if (done := archive.with_suffix(".done")).is_file():
                continue
            download(address, archive, advice=f"unpack it to {os.path.normpath(root / folder)} yourself")
            try:
                unpack(archive, work / "files" / folder, (root / folder).name, expected if folder == "." else ())
                done.touch()
            except Exception as error:  # the standard library raises many kinds for a damaged archive
                raise UserError(f"{address} cannot be unpacked ({first_line(error)}); unpack it yourself") from None
            finally:
                archive.unlink()
        try:
            os.rename(work / "files", home)  # over an empty folder too
        except OSError as error:  # a folder that is another disk
            raise UserError(f"{work / 'files'} is not renamed ({error.strerror}); move its files to {root}") from None
        shutil.rmtree(work, ignore_errors=True)


def unpack(archive: Path, folder: Path, dataset: str, expected: Sequence[str] = ()) -> None:
    """Unpack a zip or tar archive into `folder`, whole or not at all. Raises an error of many kinds if it is damaged.

    A single top folder is dropped if it is named `dataset` or contains the `expected` paths. Names that lead out of
    `folder` are shortened by `zipfile`, and refused, as links out of it and devices are, by the filter of `tarfile`.
    """
    part, is_zip = archive.with_suffix(".unpacked"), zipfile.is_zipfile(archive)
    opener: Any = zipfile.ZipFile if is_zip else tarfile.open
    try:
        part.mkdir(exist_ok=True)
        with opener(archive) as opened:
            sizes = [file.file_size for file in opened.infolist()] if is_zip else [member.size for member in opened]
            check_free_space(part, sum(sizes))
            opened.extractall(part, **({} if is_zip else {"filter": "data"}))
        shutil.rmtree(part / "__MACOSX", ignore_errors=True)  # added by macOS
        tops = list(part.iterdir())
        is_dataset = len(tops) == 1 and tops[0].is_dir()
        if is_dataset and tops[0].name != dataset:
            is_dataset = any((tops[0] / path).exists() and not (part / path).exists() for path in expected)
        source = tops[0] if is_dataset else part
        for file in [path for path in source.rglob("*") if path.is_file() and not path.is_symlink()]:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def copy_remote(address: str) -> Path:
    """Return this machine's copy of a folder of an object store or a web server, made once. Raises `UserError`."""
    folder = cache_folder() / "remote" / sha256(address.encode()).hexdigest()[:16]
    done = folder.with_suffix(".done")
    with one_at_a_time(folder.with_suffix(".lock")):
        if not (done.is_file() and folder.is_dir()):
            print(f"copying {public(address)} to {folder}", file=sys.stderr, flush=True)
            try:
                _copy_files(address.rstrip("/"), folder)
                done.touch()
            except Exception as error:  # each store has its own kinds
                if address.startswith("http"):  # web servers give no sizes, by which the next start could continue
                    shutil.rmtree(folder, ignore_errors=True)
                raise UserError(f"{address} cannot be copied ({first_line(error)}); check address and login") from None
    return folder


def _copy_files(address: str, folder: Path) -> None:
    """Copy all files below an address by fsspec, but not those that an earlier start has copied."""
    from fsspec.callbacks import Callback
    from fsspec.core import url_to_fs

    if address.partition("://")[0] not in PROTOCOLS or "::" in address:
        raise ValueError(f"the scheme must be one of {', '.join(PROTOCOLS)}, without `::`")
    options, limits, is_web = {}, {}, address.startswith("http")
    progress: Any = Callback()
    if is_web:
        from aiohttp import ClientTimeout

        # Called for each file with the header's size, if any, and as it grows: it may have no end.
        space = {"space": lambda size, value, **_: check_free_space(folder, max((size or 0) - value, 0))}
        progress.branched = lambda *_, **__: Callback(hooks=space)
        silence = ClientTimeout(None, sock_connect=SERVER_TIMEOUT_SECONDS, sock_read=SERVER_TIMEOUT_SECONDS)
        options = {"client_kwargs": {"timeout": silence}}
        limits = {"maxdepth": LISTED_DEPTH, "on_error": "raise"}
    filesystem, top = url_to_fs(address, **options)
    files = {}
    for name, info in filesystem.find(top, detail=True, **limits).items():
        path = (unquote if is_web else str)(name.removeprefix(top).lstrip("/"))
        if not is_inside(path):
            raise ValueError(f"the file '{path}' leads out of the folder")
        if not (is_web and "?" in name):  # a link that sorts the list
            files[name] = folder / path, info.get("size")
            files[name][0].parent.mkdir(parents=True, exist_ok=True)
    if not files:
        raise FileNotFoundError("it has no files")
    missing = [name for name, (path, size) in files.items() if not path.is_file() or path.stat().st_size != size]
    check_free_space(folder, sum(files[name][1] or 0 for name in missing))
    filesystem.get(missing, [str(files[name][0]) for name in missing], callback=progress)
