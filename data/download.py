"""Bring a data set onto this machine, once: archives of `download:`, and the folder of an object store or web server.

Called by data/data_yaml.py. Nothing else knows where a data set came from.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from utils.download import SERVER_TIMEOUT_SECONDS, download, gigabytes, is_address
from utils.errors import UserError, first_line, plural, without_secrets
from utils.files import PART_SUFFIX, cache_folder, one_at_a_time

IGNORED_FOLDER = "__MACOSX"  # added to an archive by macOS
BLOCK_BYTES = 2**20
# The file systems of fsspec to use: some of the others run code that an address or a file names.
PROTOCOLS = ("http", "https", "s3", "s3a", "gs", "gcs", "hf", "file")
REQUESTS_AT_ONCE = 16
LISTED_DEPTH = 32  # levels of folders that are listed on a web server

Sources = dict[str, tuple[str, ...]]  # archive addresses by target folder, relative to the data set's folder


def archive_sources(value: Any) -> Sources:
    """Return the archives in `download:`, addresses by target folder; {} for any other value, such as a script.

    Args:
        value: an address, a list of addresses, or a mapping from target folders to either
    """
    sources = {}
    for folder, addresses in (value if isinstance(value, Mapping) else {".": value}).items():
        addresses = [addresses] if isinstance(addresses, str) else addresses
        if not isinstance(addresses, list) or not all(map(is_address, addresses)) or not is_inside(str(folder)):
            return {}
        sources[str(folder)] = tuple(addresses)
    return sources


def is_inside(name: str) -> bool:
    """Return whether a relative path of any system stays below the folder that it is relative to."""
    path = PureWindowsPath(name)  # accepts either slash, and drives
    return not (path.anchor or ".." in path.parts or "\0" in name)


def has_content(folder: Path) -> bool:
    """Return whether a folder exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def fetch_dataset(sources: Sources, root: Path, expected: Sequence[str]) -> None:
    """Download and unpack the archives into the folder `root`, unless it has content. Raises `UserError`.

    Everything is written to a folder beside `root`, which is renamed at the end: `root` is never incomplete, and the
    next process continues after the last archive of a killed one. `expected` are paths that the data YAML names.
    """
    work = root.with_name(f".{root.name}.download")
    with one_at_a_time(root.with_name(f".{root.name}.lock")):
        if has_content(root):
            return
        archives = [(folder, address) for folder, addresses in sources.items() for address in addresses]
        for folder, address in archives:
            done = work / f"{sha256(f'{folder} {address}'.encode()).hexdigest()[:16]}.done"
            if done.is_file():
                continue
            name = unquote(PurePosixPath(urlsplit(address).path).name) or "archive"
            advice = f"download it in another way and unpack it to {os.path.normpath(root / folder)}"
            archive = download(address, work / name, advice=advice)
            top = root.name if folder == "." else PurePosixPath(folder).name
            try:
                unpack(archive, work / "files" / folder, top, expected if folder == "." else (), address)
                done.touch()
            finally:
                archive.unlink()
        try:
            os.rename(work / "files", root)  # over an empty folder too
            shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            message = f"the data set cannot be written to {root} ({error.strerror}); fix the permissions"
            raise UserError(f"{message}, or change `path:`") from None


def unpack(archive: Path, folder: Path, dataset: str, expected: Sequence[str] = (), name: str = "") -> None:
    """Unpack a zip or tar archive into `folder`, whole or not at all.

    A single top folder is dropped if it is named `dataset` or contains the `expected` paths. Raises `UserError` for an
    archive that is damaged, is larger than the free space, or has a link or a name that leads out of `folder`.

    Args:
        name: the archive's name in error messages; '' for its path
    """
    name, part = name or str(archive), archive.with_name(f"{archive.name}.unpacked")
    try:
        part.mkdir()
        _extract(archive, part, name)
        shutil.rmtree(part / IGNORED_FOLDER, ignore_errors=True)
        tops = list(part.iterdir())
        is_dataset = len(tops) == 1 and tops[0].is_dir()
        if is_dataset and tops[0].name != dataset:
            is_dataset = any((tops[0] / path).exists() and not (part / path).exists() for path in expected)
        source = tops[0] if is_dataset else part
        for file in [path for path in source.rglob("*") if path.is_file()]:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
    except UserError:
        raise
    except Exception as error:  # the standard library raises many kinds for a damaged archive
        raise UserError(f"{name} cannot be unpacked ({first_line(error)}); try again, or unpack it yourself") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _extract(archive: Path, folder: Path, name: str) -> None:
    """Extract all regular files of an archive. Raises `UserError` if one is unsafe, or any error if it is damaged."""
    is_zip = zipfile.is_zipfile(archive)
    if not is_zip and not tarfile.is_tarfile(archive):
        raise UserError(f"the content of {name} is neither a zip nor a tar archive; fix the address")
    with zipfile.ZipFile(archive) if is_zip else tarfile.open(archive) as opened:
        members: list[Any] = opened.infolist() if isinstance(opened, zipfile.ZipFile) else opened.getmembers()
        for member in members:
            if is_zip:  # a link in it is extracted as a file
                member.filename = member.filename.replace("\\", "/")
            elif not member.isreg() and not member.isdir():
                raise UserError(f"{name} contains '{member.name}', which is a link or a device; unpack it yourself")
            if not is_inside(path := member.filename if is_zip else member.name):
                raise UserError(f"{name} contains '{path}', which leads out of the data set; do not trust it")
        total = sum(member.file_size if is_zip else member.size for member in members)
        if total > (free := shutil.disk_usage(folder).free):
            raise UserError(
                f"{name} needs {gigabytes(total)} unpacked, and {gigabytes(free)} are free; free disk space"
            )
        rules: Any = {} if is_zip else {"filter": "data"}
        for member in tqdm(members, f"unpacking {name.rpartition('/')[2]}", unit=" files", disable=None, leave=False):
            opened.extract(member, folder, **rules)
        stream = None if isinstance(opened, zipfile.ZipFile) else opened.fileobj
        while stream and stream.read(BLOCK_BYTES):  # up to the checksum at its end
            pass


# Object stores and web servers


def is_remote(path: str) -> bool:
    """Return whether `path:` of a data YAML is an address."""
    return re.match(r"[a-z][a-z0-9+.-]+://", path) is not None


def copied(address: str) -> Path:
    """Return the copy of a folder of an object store or a web server, made once per machine through fsspec.

    A copy that was interrupted continues. To copy again, the user deletes the folder. Raises `UserError`.
    """
    shown, protocol = without_secrets(address), address.partition("://")[0]
    if protocol not in PROTOCOLS or "::" in address:
        raise UserError(f"{shown} has an unsupported scheme; give one of {', '.join(PROTOCOLS)}, without `::`")
    folder = cache_folder() / "remote" / sha256(address.encode()).hexdigest()[:16]
    done = folder.with_suffix(".done")
    with one_at_a_time(folder.with_suffix(".lock")):
        if not (done.is_file() and folder.is_dir()):
            print(f"copying {shown} to {folder}", file=sys.stderr, flush=True)
            try:
                _copy(address, folder)
                done.touch()
            except UserError:
                raise
            except Exception as error:  # each store has its own kinds
                reason = without_secrets(f"{type(error).__name__}: {first_line(error)}")
                advice = "check the address, the credentials and the server; the next start continues"
                raise UserError(f"{shown} cannot be copied to this machine ({reason}); {advice}") from None
    return folder


def _copy(address: str, folder: Path) -> None:
    """Copy all files below an address into a folder. Raises `UserError`, or any error of fsspec."""
    from fsspec.core import url_to_fs

    is_web = address.startswith("http")
    options: dict[str, Any] = {}
    if is_web:
        from aiohttp import ClientTimeout

        silence = ClientTimeout(total=None, sock_connect=SERVER_TIMEOUT_SECONDS, sock_read=SERVER_TIMEOUT_SECONDS)
        options = {"client_kwargs": {"timeout": silence}}
    filesystem, top = url_to_fs(address.rstrip("/"), **options)
    limits = {"maxdepth": LISTED_DEPTH, "on_error": "raise"} if is_web else {}
    sizes, paths = {}, {}
    for name, info in filesystem.find(top, detail=True, **limits).items():
        path = name.removeprefix(top).lstrip("/")
        if is_web and "?" in path:  # a link that sorts the list
            continue
        path = unquote(path) if is_web else path
        if not is_inside(path):
            raise UserError(f"{without_secrets(address)} has a file '{path}', which leads out of it; do not trust it")
        sizes[name], paths[name] = info.get("size"), folder / path
    missing = sum(size or 0 for name, size in sizes.items() if not paths[name].is_file())
    folder.mkdir(parents=True, exist_ok=True)
    if not paths or missing > (free := shutil.disk_usage(folder).free):
        problem = f"needs {gigabytes(missing)}, and {gigabytes(free)} are free" if paths else "has no files"
        raise UserError(f"{without_secrets(address)} {problem}; correct `path:`, or free disk space for {folder}")

    def fetch(name: str) -> None:
        path, size = paths[name], sizes[name]
        if path.is_file() and size in (None, path.stat().st_size):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}{PART_SUFFIX}")
        filesystem.get_file(name, str(part))
        if size not in (None, part.stat().st_size):
            raise OSError(f"{part.stat().st_size} of {size} bytes of {path.name} received")
        os.replace(part, path)

    title = f"copying {plural(len(paths), 'file')}"
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        list(tqdm(pool.map(fetch, paths), title, len(paths), unit=" files", disable=None, leave=False))
