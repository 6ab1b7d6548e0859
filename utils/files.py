"""Find, lock, read and atomically write files, and number folders. Imported everywhere."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml
from filelock import FileLock, Timeout

from utils.errors import UserError

LOCK_FILE = ".lock"  # in a run folder that a run writes to
LOCK_TIMEOUT_SECONDS = 5.0  # loader processes of a killed run hold the lock a little longer
PART_SUFFIX = ".part"  # of a file that is being written
ROOT = Path(__file__).resolve().parents[1]  # the repository


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush it and rename it to `path`, on failure remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=PART_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)  # the only way to read it
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only their owner may read
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Run the block in one process at a time of those that use the same lock file.

    Without a lock if the file cannot be made, or while another process removes it.
    """
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock))
            stack.callback(lock.unlink, missing_ok=True)
        yield


def lock_folder(folder: Path) -> FileLock:
    """Lock a run folder until the lock is released or this process ends; do nothing on a disk without locks.

    Raises `UserError` if another process has locked the folder.
    """
    lock = FileLock(folder / LOCK_FILE, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another run is writing into {folder}; wait for its end, or choose another --name") from None
    except (OSError, NotImplementedError):
        pass
    return lock


def find_file(name: str, what: str, folders: Sequence[str], suffix: str = ".yaml") -> Path:
    """Return the file that a flag names: a path, absolute or relative to here or the repository, or a shipped file.

    name: with or without `suffix`; an existing path is never replaced by a shipped file. what: kind of file, for the
    error. folders: of shipped files, relative to the repository. Raises `UserError` with a list of the shipped files.
    """
    stem = name if name.endswith(suffix) else name + suffix
    candidates = [Path(name), ROOT / name, *(ROOT / folder / Path(stem).name for folder in folders)]
    for candidate in candidates:
        if os.path.isfile(candidate):  # Path.is_file raises an error for a name that is too long
            return candidate
        if name and os.path.exists(candidate):
            raise UserError(f"{what} '{name}' is a folder; give the path of a {suffix} file")
    shipped = sorted(p.name for folder in folders for p in (ROOT / folder).glob("*" + suffix))
    raise UserError(
        f"{what} '{name}' is not a file; give the path of a file, or one of the repository's: {', '.join(shipped)}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises `UserError` with file and line if there is none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}{line}: {problem}; fix the YAML there") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} has no `key: value` lines; it must be a YAML mapping")
    return content


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the content of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def numbered_folder(project: Path, name: str, exist_ok: bool) -> Path:
    """Make and return the folder `project/name`, or if it exists the first free one of name2, name3, ...

    exist_ok: use `project/name` even if it exists; else two runs that start together get different folders. Raises
    `UserError`.
    """
    number = 1
    while True:
        folder = project / (f"{name}{number}" if number > 1 else name)
        try:
            project.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=exist_ok)
            return folder
        except OSError as error:
            taken = isinstance(error, FileExistsError) and project.is_dir() and not exist_ok
            if not taken:
                message = f"the run folder {folder} cannot be made: {error.strerror}; choose another --project"
                raise UserError(message) from None
        number += 1


def cache_folder() -> Path:
    """Return the folder of caches: `$XDG_CACHE_HOME/lockstep`, by default `~/.cache/lockstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
