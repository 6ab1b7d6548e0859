"""Download a data set from the archives that its YAML's `download:` names: once per machine, whole or absent.

Called by data/sources.py.
"""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from utils.download import download, gigabytes, is_address
from utils.errors import UserError
from utils.files import one_at_a_time

COPY_BYTES = 2**20  # that are copied at once
IGNORED_FOLDERS = ("__MACOSX",)  # which macOS adds to an archive
# What the standard library raises for a damaged archive.
ARCHIVE_ERRORS = (
    *(OSError, EOFError, ValueError, RuntimeError),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
)

Sources = dict[str, tuple[str, ...]]  # addresses of archives, by the folder below the data set's that they are for


class _Member(NamedTuple):
    """A file of an archive, by the parts of its name."""

    parts: tuple[str, ...]
    size: int
    open: Callable[[], IO[bytes]]


def archive_sources(value: Any) -> Sources:
    """Return the addresses in `download:`, which is one, a list, or either by folder; {} for anything else, such as a
    script."""
    if not isinstance(value, Mapping):
        value = {".": value}
    sources = {}
    for folder, addresses in value.items():
        addresses = [addresses] if isinstance(addresses, str) else addresses
        if not isinstance(addresses, list) or not all(map(is_address, addresses)) or not _stays_inside(str(folder)):
            return {}
        sources[str(folder)] = tuple(addresses)
    return sources


def fetch_dataset(
    sources: Sources, root: Path, expected: Sequence[str], finish: Callable[[Path], object] = lambda folder: None
) -> None:
    """Download and unpack the archives into the folder `root`, unless it has content.

    expected: the paths below `root` that the data YAML names. finish: called with the unpacked folder before it is
    renamed to `root`. Everything is made in a folder beside `root`: a killed process leaves nothing incomplete, and the
    next one continues. Raises `UserError`.
    """
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:8]
    work = root.with_name(f".{root.name}-{digest}.download")
    with one_at_a_time(root.with_name(f".{root.name}.lock")):
        if not has_content(root):
            try:
                for number, (folder, address) in enumerate(
                    (f, a) for f, addresses in sources.items() for a in addresses
                ):
                    _fetch_archive(address, work, number, folder, root, expected if folder == "." else ())
                finish(work / "files")
                os.rename(work / "files", root)  # over an empty folder too
                shutil.rmtree(work, ignore_errors=True)
            except OSError as error:
                raise UserError(
                    f"the data set cannot be made at {root} ({error.strerror or error}: {error.filename or work}); "
                    "free the space or the permission that it needs, or change `path:`"
                ) from None
            finally:
                with suppress(OSError):
                    os.rmdir(work)  # if nothing was downloaded


def has_content(folder: Path) -> bool:
    """Return whether there is anything in a folder."""
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _fetch_archive(address: str, work: Path, number: int, folder: str, root: Path, expected: Sequence[str]) -> None:
    """Download an archive and unpack it below `work`/files, unless that is done."""
    target, done = Path(os.path.normpath(root / folder)), work / f"{number}.done"
    if done.is_file():
        return
    name = unquote(PurePosixPath(urlsplit(address).path).name) or "archive"
    archive = download(address, work / f"{number}-{name}", advice=f"fetch it by other means and unpack it to {target}")
    try:
        unpack(archive, work / "files" / folder, target.name, expected, address)
    except UserError:
        archive.unlink()
        raise
    done.touch()
    archive.unlink()


def unpack(archive: Path, folder: Path, dataset: str, expected: Sequence[str] = (), name: str = "") -> None:
    """Unpack a zip or tar archive into `folder`.

    If everything in it is in one folder, that level is dropped if it is named `dataset`, or if `expected` paths are
    below it. Only files below `folder` are written: an archive with a link or a name that leads outside is refused
    before anything is written. Raises `UserError`, which calls the archive `name`, and OSError if it takes more than
    is free.
    """
    name = name or str(archive)
    folder.mkdir(parents=True, exist_ok=True)
    with _errors_name_archive(name), _open_members(archive, name) as members:
        members = _without_top_folder(members, dataset, expected)
        total, free = sum(member.size for member in members), shutil.disk_usage(folder).free
        if total > free:
            message = f"{name} unpacks to {gigabytes(total)}, and {gigabytes(free)} are free"
            raise OSError(errno.ENOSPC, message, str(folder))
        title = f"unpacking {name.rpartition('/')[2]}"
        with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            for member in members:
                path = folder.joinpath(*member.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, path.open("wb") as file:
                    while block := source.read(COPY_BYTES):
                        file.write(block)
                        bar.update(len(block))


@contextmanager
def _errors_name_archive(name: str) -> Iterator[None]:
    """Turn the errors of a damaged archive into a `UserError`."""
    try:
        yield
    except ARCHIVE_ERRORS as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of this machine's disk
            raise
        raise UserError(f"{name} cannot be unpacked ({error}); try again, or unpack it by other means") from None


@contextmanager
def _open_members(archive: Path, name: str) -> Iterator[list[_Member]]:
    """Open an archive for its files. Raises `UserError` if one of them must not be written."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield [_zip_member(opened, info, name) for info in opened.infolist() if not info.is_dir()]
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            yield [_tar_member(tar, info, name) for info in tar.getmembers() if not info.isdir()]
            while tar.fileobj and tar.fileobj.read(COPY_BYTES):  # up to the checksum, which is at the end
                pass
    else:
        raise UserError(f"what came from {name} is neither a zip nor a tar archive; fix the address")


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the archive was not made on Unix
    return _Member(
        _member_parts(info.filename, kind in (0, stat.S_IFREG), name), info.file_size, partial(archive.open, info)
    )


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo, name: str) -> _Member:
    # A regular file has content; mypy cannot know.
    return _Member(_member_parts(info.name, info.isreg(), name), info.size, partial(archive.extractfile, info))  # type: ignore[arg-type]


def _member_parts(member: str, regular: bool, name: str) -> tuple[str, ...]:
    """Return the parts of a member's name, which either slash separates. Raises `UserError` for an unsafe member."""
    if not regular:
        raise UserError(f"{name} holds '{member}', which is a link or a device; unpack it by other means")
    if not _stays_inside(member):
        raise UserError(f"{name} holds '{member}', which leads out of the data set; do not trust it")
    return PurePosixPath(member.replace("\\", "/")).parts


def _stays_inside(name: str) -> bool:
    """Return whether a path stays below the folder that it is relative to."""
    path = PureWindowsPath(name)  # takes either slash, and drives
    return not (path.anchor or ".." in path.parts or "\0" in name)


def _without_top_folder(members: list[_Member], dataset: str, expected: Sequence[str]) -> list[_Member]:
    """Drop the top folder that all members are in, if it is the data set itself."""
    members = [member for member in members if member.parts and member.parts[0] not in IGNORED_FOLDERS]
    tops = {member.parts[0] for member in members}
    if len(tops) != 1 or any(len(member.parts) == 1 for member in members):
        return members
    (top,) = tops
    names = {member.parts[:end] for member in members for end in range(1, len(member.parts) + 1)}
    paths = [PurePosixPath(entry).parts for entry in expected]
    if top == dataset or any((top, *parts) in names and parts not in names for parts in paths if parts):
        return [member._replace(parts=member.parts[1:]) for member in members]
    return members
