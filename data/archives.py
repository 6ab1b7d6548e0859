"""A data set from the archives that its YAML's `download:` names: fetched once per machine, whole or absent."""

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

BLOCK = 2**20  # bytes that are copied at once
STRANGERS = ("__MACOSX",)  # folders that a Mac adds to an archive
DAMAGE = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)

Sources = dict[str, tuple[str, ...]]  # addresses of archives, by the folder below the data set's that they go to


class _Member(NamedTuple):
    """A file of an archive, by the parts of its name."""

    parts: tuple[str, ...]
    size: int
    open: Callable[[], IO[bytes]]


def archive_sources(value: Any) -> Sources:
    """What a `download:` says: an address, a list of them, or either by folder. Nothing where it is something else,
    such as a script."""
    if not isinstance(value, Mapping):
        value = {".": value}
    found = {}
    for folder, addresses in value.items():
        addresses = [addresses] if isinstance(addresses, str) else addresses
        if not isinstance(addresses, list) or not all(map(is_address, addresses)) or not _inside(str(folder)):
            return {}
        found[str(folder)] = tuple(addresses)
    return found


def fetch_dataset(
    sources: Sources, root: Path, wanted: Sequence[str], finish: Callable[[Path], object] = lambda folder: None
) -> None:
    """Make the folder `root` of what the archives hold. `wanted`: what a data YAML looks for below it; `finish`: is
    called on the folder when all is unpacked and nobody sees it yet.

    All is made in a folder beside it, which then takes the name: a process that is killed leaves nothing half, and the
    next one goes on. Raises `UserError`.
    """
    mark = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:8]
    work = root.with_name(f".{root.name}-{mark}.download")
    with one_at_a_time(root.with_name(f".{root.name}.lock")):
        if not is_filled(root):
            try:
                for number, (folder, address) in enumerate(
                    (f, a) for f, addresses in sources.items() for a in addresses
                ):
                    _bring(address, work, number, folder, root, wanted if folder == "." else ())
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
                    os.rmdir(work)  # where nothing came


def is_filled(folder: Path) -> bool:
    """Is there anything in a folder?"""
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _bring(address: str, work: Path, number: int, folder: str, root: Path, wanted: Sequence[str]) -> None:
    """Fetch an archive and unpack it below `work`/files, unless that is done."""
    target, done = Path(os.path.normpath(root / folder)), work / f"{number}.done"
    if done.is_file():
        return
    name = unquote(PurePosixPath(urlsplit(address).path).name) or "archive"
    archive = download(address, work / f"{number}-{name}", advice=f"fetch it by other means and unpack it to {target}")
    try:
        unpack(archive, work / "files" / folder, target.name, wanted, address)
    except UserError:
        archive.unlink()
        raise
    done.touch()
    archive.unlink()


def unpack(archive: Path, folder: Path, own: str, wanted: Sequence[str] = (), name: str = "") -> None:
    """Unpack a zip or tar archive into `folder`, without the one folder that it holds where that is the data set's
    `own` or is not in the names that are `wanted`.

    Nothing is written elsewhere, and files only: an archive with a link or a name that leads out is refused before
    anything is written. Raises `UserError`, which calls the archive `name`, and OSError where it takes more than is
    free.
    """
    name = name or str(archive)
    folder.mkdir(parents=True, exist_ok=True)
    with _damage_told(name), _opened(archive, name) as members:
        members = _stripped(members, own, wanted)
        total, free = sum(member.size for member in members), shutil.disk_usage(folder).free
        if total > free:
            told = f"{name} unpacks to {gigabytes(total)}, and {gigabytes(free)} are free"
            raise OSError(errno.ENOSPC, told, str(folder))
        shown = f"unpacking {name.rpartition('/')[2]}"
        with tqdm(total=total, desc=shown, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            for member in members:
                path = folder.joinpath(*member.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, path.open("wb") as file:
                    while block := source.read(BLOCK):
                        file.write(block)
                        bar.update(len(block))


@contextmanager
def _damage_told(name: str) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of our own disk
            raise
        raise UserError(f"{name} cannot be unpacked ({error}); try again, or unpack it by other means") from None


@contextmanager
def _opened(archive: Path, name: str) -> Iterator[list[_Member]]:
    """The files of an archive. Raises `UserError` where one of them may not be written."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield [_zipped(opened, info, name) for info in opened.infolist() if not info.is_dir()]
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            yield [_tarred(tar, info, name) for info in tar.getmembers() if not info.isdir()]
            while tar.fileobj and tar.fileobj.read(BLOCK):  # to the checksum, which stands at the end
                pass
    else:
        raise UserError(f"what came from {name} is neither a zip nor a tar archive; mend the address")


def _zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where the archive was not made on Unix
    return _Member(
        _checked(info.filename, kind in (0, stat.S_IFREG), name), info.file_size, partial(archive.open, info)
    )


def _tarred(archive: tarfile.TarFile, info: tarfile.TarInfo, name: str) -> _Member:
    # A regular file has content; mypy cannot know.
    return _Member(_checked(info.name, info.isreg(), name), info.size, partial(archive.extractfile, info))  # type: ignore[arg-type]


def _checked(member: str, regular: bool, name: str) -> tuple[str, ...]:
    """The parts of a member's name, with either slash between them."""
    if not regular:
        raise UserError(f"{name} holds '{member}', which is a link or a device; unpack it by other means")
    if not _inside(member):
        raise UserError(f"{name} holds '{member}', which leads out of the data set; do not trust it")
    return PurePosixPath(member.replace("\\", "/")).parts


def _inside(name: str) -> bool:
    """Does it stay below the folder that it is relative to?"""
    path = PureWindowsPath(name)  # takes either slash, and drives
    return not (path.anchor or ".." in path.parts or "\0" in name)


def _stripped(members: list[_Member], own: str, wanted: Sequence[str]) -> list[_Member]:
    """Without the top folder that all are in, where it is the data set itself."""
    members = [member for member in members if member.parts and member.parts[0] not in STRANGERS]
    tops = {member.parts[0] for member in members}
    if len(tops) != 1 or any(len(member.parts) == 1 for member in members):
        return members
    (top,) = tops
    names = {member.parts[:end] for member in members for end in range(1, len(member.parts) + 1)}
    looked = [PurePosixPath(entry).parts for entry in wanted]
    found = any((top, *parts) in names and parts not in names for parts in looked if parts)
    if top == own or found:
        return [member._replace(parts=member.parts[1:]) for member in members]
    return members
