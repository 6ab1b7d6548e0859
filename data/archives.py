"""Download and unpack the archives in `download:` of a data YAML, once per machine, all or nothing.

Called by data/data_yaml.py.
"""

from __future__ import annotations

import errno
import glob
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

COPY_BYTES = 2**20  # bytes copied at a time
IGNORED_FOLDERS = ("__MACOSX",)  # added to an archive by macOS
# Errors of the standard library for a damaged archive.
ARCHIVE_ERRORS = (
    *(OSError, EOFError, ValueError, RuntimeError),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
)

Sources = dict[str, tuple[str, ...]]  # archive addresses by target folder, relative to the data set's folder


class _Member(NamedTuple):
    """A file in an archive."""

    parts: tuple[str, ...]  # parts of its path in the archive
    size: int  # bytes
    open: Callable[[], IO[bytes]]


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


def fetch_dataset(sources: Sources, root: Path, expected: Sequence[str], finish: Callable[[Path], object]) -> None:
    """Download and unpack the archives into the folder `root`, unless it has content. Raises `UserError`.

    Everything is written to a folder beside `root`, which is renamed at the end: `root` is never incomplete, and the
    next process continues the work of a killed one.

    Args:
        expected: paths below `root` that the data YAML names
        finish: function that is called with the unpacked folder before it is renamed to `root`
    """
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:8]
    work = root.with_name(f".{root.name}-{digest}.download")
    with one_at_a_time(root.with_name(f".{root.name}.lock")):
        if not has_content(root):
            try:
                archives = [(folder, address) for folder, addresses in sources.items() for address in addresses]
                for number, (folder, address) in enumerate(archives):
                    _fetch_archive(address, work, number, folder, root, expected if folder == "." else ())
                finish(work / "files")
                os.rename(work / "files", root)  # over an empty folder too
                for other in root.parent.glob(f".{glob.escape(root.name)}-*.download"):  # left by other addresses too
                    shutil.rmtree(other, ignore_errors=True)
            except OSError as error:
                raise UserError(
                    f"the data set cannot be written to {root} ({error.strerror or error}: {error.filename or work}); "
                    "free disk space, fix the permissions, or change `path:`"
                ) from None
            finally:
                with suppress(OSError):
                    os.rmdir(work)  # if nothing was downloaded


def has_content(folder: Path) -> bool:
    """Return whether a folder exists and is not empty."""
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _fetch_archive(address: str, work: Path, number: int, folder: str, root: Path, expected: Sequence[str]) -> None:
    """Download an archive and unpack it below `work`/files, unless an earlier process has done so."""
    target, done = Path(os.path.normpath(root / folder)), work / f"{number}.done"
    if done.is_file():
        return
    name = unquote(PurePosixPath(urlsplit(address).path).name) or "archive"
    archive = download(
        address, work / f"{number}-{name}", advice=f"download it in another way and unpack it to {target}"
    )
    try:
        unpack(archive, work / "files" / folder, target.name, expected, address)
    except UserError:
        archive.unlink()
        raise
    done.touch()
    archive.unlink()


def unpack(archive: Path, folder: Path, dataset: str, expected: Sequence[str] = (), name: str = "") -> None:
    """Unpack a zip or tar archive into `folder`.

    A single top folder is dropped if it is named `dataset` or contains the `expected` paths. An archive with a link or
    with a name that leads outside of `folder` is refused before anything is written. After an error, no extracted file
    is left. Raises `UserError`, and OSError if there is too little disk space.

    Args:
        name: the archive's name in error messages; '' for its path
    """
    written: list[Path] = []
    try:
        _unpack(archive, folder, dataset, expected, name or str(archive), written)
    except BaseException:
        for path in (*written, folder / "none"):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # a folder that is not empty
                os.removedirs(path.parent)
        raise


def _unpack(archive: Path, folder: Path, dataset: str, expected: Sequence[str], name: str, written: list[Path]) -> None:
    """Unpack an archive as `unpack` does, and append the paths of its files to `written`."""
    folder.mkdir(parents=True, exist_ok=True)
    with _open_members(archive, name) as members:
        members = _without_top_folder(members, dataset, expected)
        total, free = sum(member.size for member in members), shutil.disk_usage(folder).free
        if total > free:
            message = f"{name} needs {gigabytes(total)} unpacked, and {gigabytes(free)} are free"
            raise OSError(errno.ENOSPC, message, str(folder))
        title = f"unpacking {name.rpartition('/')[2]}"
        with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            for member in members:
                path = folder.joinpath(*member.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():  # otherwise an earlier archive has written it
                    written.append(path)
                with member.open() as source, path.open("wb") as file:
                    while block := source.read(COPY_BYTES):
                        file.write(block)
                        bar.update(len(block))


@contextmanager
def _open_members(archive: Path, name: str) -> Iterator[list[_Member]]:
    """Open an archive and yield its files. Raises `UserError` if one is unsafe, or if the archive is damaged."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                yield [_zip_member(opened, info, name) for info in opened.infolist() if not info.is_dir()]
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as tar:
                yield [_tar_member(tar, info, name) for info in tar if not info.isdir()]
                while tar.fileobj and tar.fileobj.read(COPY_BYTES):  # read up to the checksum at the end
                    pass
        else:
            raise UserError(f"the content of {name} is neither a zip nor a tar archive; fix the address")
    except ARCHIVE_ERRORS as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # an error of this machine's disk
            raise
        raise UserError(f"{name} cannot be unpacked ({error}); try again, or unpack it yourself") from None


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the archive was not made on Unix
    parts = _member_parts(info.filename, kind in (0, stat.S_IFREG), name)
    return _Member(parts, info.file_size, partial(archive.open, info))


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo, name: str) -> _Member:
    # A regular file has content, which mypy cannot know.
    return _Member(_member_parts(info.name, info.isreg(), name), info.size, partial(archive.extractfile, info))  # type: ignore[arg-type]


def _member_parts(member: str, regular: bool, name: str) -> tuple[str, ...]:
    """Return the parts of a member's name, separated by either slash. Raises `UserError` for an unsafe member."""
    if not regular:
        raise UserError(f"{name} contains '{member}', which is a link or a device; unpack it yourself")
    if not is_inside(member):
        raise UserError(f"{name} contains '{member}', which leads out of the data set; do not trust it")
    return PurePosixPath(member.replace("\\", "/")).parts


def is_inside(name: str) -> bool:
    """Return whether a relative path of any system stays below the folder that it is relative to."""
    path = PureWindowsPath(name)  # accepts either slash, and drives
    return not (path.anchor or ".." in path.parts or "\0" in name)


def _without_top_folder(members: list[_Member], dataset: str, expected: Sequence[str]) -> list[_Member]:
    """Drop the top folder of all members if it is the data set itself."""
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
