"""Find, lock, number and read files, and write them so that none is ever half written. Imported everywhere."""

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
LOCK_TIMEOUT_SECONDS = 5.0  # loader processes of a killed run hold the lock for a moment longer
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
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files that only their owner may read
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Let the processes of a machine that use the same lock file run this block one after another.

    They run it together if the file cannot be made; so may one that starts while the file is being removed.
    """
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock))
            stack.callback(lock.unlink, missing_ok=True)
        yield


def lock_folder(folder: Path) -> FileLock:
    """Lock a run folder for this process, until the lock is released or the process ends.

    On a disk without locks nothing is locked. Raises `UserError` if another process has locked the folder.
    """
    lock = FileLock(folder / LOCK_FILE, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another run is writing into {folder}; wait for its end, or choose another --name") from None
    except (OSError, NotImplementedError):
        pass
    return lock


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def find_file(name: str, what: str, folders: Sequence[str], suffix: str = ".yaml") -> Path:
    """Return the file that a flag names: a path as given, or below the repository, or a name in a shipped folder.

    name: with or without `suffix`. what: names the kind of file in errors. folders: of shipped files, below the
    repository. Raises `UserError`, which lists the shipped files, if there is no such file.
    """
    stem = name if name.endswith(suffix) else name + suffix
    candidates = [Path(name), ROOT / name, *(ROOT / folder / Path(stem).name for folder in folders)]
    for candidate in candidates:
        if os.path.isfile(candidate):  # unlike Path's, false for a name that no file can have
            return candidate
    shipped = sorted(p.name for folder in folders for p in (ROOT / folder).glob("*" + suffix))
    raise UserError(
        f"{what} '{name}' is not a file; give the path of one, or one that comes with the repository: "
        f"{', '.join(shipped)}"
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
        raise UserError(f"{path} holds no `key: value` lines; it must be a YAML mapping")
    return content


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the content of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def numbered_folder(project: Path, name: str, exist_ok: bool) -> Path:
    """Make and return the folder `project/name`, or if it exists the first free of name2, name3, ...

    exist_ok: use `project/name` even if it exists. Making the folder reserves it: two runs that start together never
    get the same one. Raises `UserError`.
    """
    for candidate in _numbered(name):
        folder = project / candidate
        try:
            project.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=exist_ok)
        except OSError as error:
            taken = isinstance(error, FileExistsError) and project.is_dir() and not exist_ok
            if not taken:
                message = f"the run folder {folder} cannot be made: {error.strerror}; choose another --project"
                raise UserError(message) from None
        else:
            return folder
    raise AssertionError("unreachable")


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


def cache_folder() -> Path:
    """Return the folder of derived files: `$XDG_CACHE_HOME/lockstep`, else `~/.cache/lockstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
