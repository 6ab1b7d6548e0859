"""Finding, numbering and writing files so that nothing is ever half written."""

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

LOCK = ".lock"  # in a run folder that is being written to
PATIENCE = 5.0  # seconds to wait for it: loader processes of a killed run hold it for a moment longer
PART = ".part"  # ends the name of a file that is being written
ROOT = Path(__file__).resolve().parents[1]  # the repository


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush and rename it to `path`, on failure remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=PART)
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
    """Processes of a machine that come here with the same `lock` go on one after another.

    Where the file cannot be made they go on together; so may one that comes while the file is removed.
    """
    with ExitStack() as held:
        with suppress(OSError, NotImplementedError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(lock))
            held.callback(lock.unlink, missing_ok=True)
        yield


def claimed(folder: Path) -> FileLock:
    """Hold a folder for this process, as long as it lives. Raises `UserError` where another one that lives holds it.

    On a disk that knows no locks nothing is held.
    """
    lock = FileLock(folder / LOCK, timeout=PATIENCE)
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
    """The file that a flag names: as given, below the repository, or by its bare name in one of the shipped `folders`.

    Raises `UserError` where there is none, listing the shipped ones.
    """
    stem = name if name.endswith(suffix) else name + suffix
    candidates = [Path(name), ROOT / name, *(ROOT / folder / Path(stem).name for folder in folders)]
    for candidate in candidates:
        if os.path.isfile(candidate):  # unlike Path's, false for a name that no file can have
            return candidate
    shipped = sorted(p.name for folder in folders for p in (ROOT / folder).glob("*" + suffix))
    raise UserError(
        f"{what} '{name}' is not a file; give the path of one, or one that comes with us: {', '.join(shipped)}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises `UserError` with file and line where it cannot be read or is something else."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}{where}: {problem}; mend the YAML there") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no `key: value` lines; it must be a YAML mapping")
    return content


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The content of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def numbered_folder(project: Path, name: str, exist_ok: bool) -> Path:
    """Make `project/name`, or the first free of name2, name3, ... (`exist_ok`: `project/name` itself, as it stands).

    The making is the claim: two runs that start together never get the same folder.
    """
    for attempt in _attempts(name):
        folder = project / attempt
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


def _attempts(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


def cache_folder() -> Path:
    """Where derived files go: `$XDG_CACHE_HOME/lockstep`, else `~/.cache/lockstep`. Never the user's data folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
