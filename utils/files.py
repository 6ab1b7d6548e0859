"""Find, lock, read and atomically write files, and number folders. Imported everywhere."""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

import yaml
from filelock import FileLock, Timeout
from yaml.error import MarkedYAMLError

from utils.errors import UserError, first_line, shortened

LOCK_FILE = ".lock"  # file in a run folder that a run writes to
LOCK_TIMEOUT_SECONDS = 5.0  # loader processes of a killed run hold the lock a little longer
PART_SUFFIX = ".part"  # suffix of a file that is being written
SUGGESTED_LIKENESS = 0.85  # least similarity, from 0 to 1, of a shipped file's name that an error suggests
MAX_YAML_CHARACTERS = 2**20  # limit for a YAML file, and for its values once aliases are expanded
ILLEGAL_CHARACTERS = re.compile(r'[<>:"/\\|?*\x00-\x1f]')  # in file names of Linux, macOS or Windows
MAX_SHOWN_PATH = 240  # characters of a path in an error
_locks: WeakSet[FileLock] = WeakSet()  # this process's locks on run folders
ROOT = Path(__file__).resolve().parents[1]  # the repository, or its copy that pip has installed
PROJECT_FILE = ROOT / "pyproject.toml"
# Whether pip has installed this code: as a package without a project file, in a folder where nothing is written.
IS_INSTALLED = (ROOT / "__init__.py").is_file() and not PROJECT_FILE.is_file()


def version() -> str:
    """Return the version of this code, or words if it is not known, as of a copy of the scripts."""
    if IS_INSTALLED:
        return metadata.version("lockstep")
    text = PROJECT_FILE.read_text(encoding="utf-8") if PROJECT_FILE.is_file() else ""
    match = re.search(r'(?m)^version = "(.+)"$', text)
    return match[1] if match else "of an unknown version"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush it and rename it to `path`, on failure remove it.

    Args:
        path: file to write; its name may contain characters that the locale's encoding lacks, see `file_name`
    """
    path = Path(file_name(str(path)))
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
    """Hold an inter-process lock for the duration of the block.

    The block runs without a lock if the lock file cannot be made, or while another process removes it.
    """
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock))
            stack.callback(lock.unlink, missing_ok=True)
        yield


def lock_folder(folder: Path) -> FileLock:
    """Lock a run folder until the lock is released, `release_locks` is called, or this process ends.

    Does nothing on a disk without locks. Raises `UserError` if another process has locked the folder, or if no files
    can be made in it.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        message = f"the run folder {folder} cannot be written: {error.strerror}; make it writable, or name another"
        raise UserError(message) from None
    lock = FileLock(folder / LOCK_FILE, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another run is writing into {folder}; wait until it ends, or choose another --name") from None
    except (OSError, NotImplementedError):
        pass
    _locks.add(lock)
    return lock


def release_locks() -> None:
    """Release the locks of all run folders when a run called from Python ends, though its objects may still exist."""
    while _locks:
        _locks.pop().release()


def remove_if_empty(folder: Path) -> None:
    """Remove a run folder that contains only folders and its own released lock."""
    if all(path.name == LOCK_FILE or (path.is_dir() and not path.is_symlink()) for path in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def find_file(name: str, what: str, folders: Sequence[str], suffix: str = ".yaml", kind: str = "a file") -> Path:
    """Return the file that a flag names: a path, absolute or relative to the working folder, or a shipped file.

    An existing path is never replaced by a shipped file. Raises `UserError`, which lists the shipped files.

    Args:
        name: the flag's value, with or without `suffix`; a shipped file's name or its path in the repository will do
        what: kind of file, for the error
        folders: folders of shipped files, relative to the repository
        kind: what `name` may be, for the error
    """
    with_suffix = name if name.endswith(suffix) else name + suffix
    shipped_folders = [ROOT / folder for folder in folders]
    shipped = [base / with_suffix for base in (ROOT, *shipped_folders)]
    candidates = [Path(name), *(path for path in shipped if path.parent in shipped_folders)]
    for candidate in candidates:
        if os.path.isfile(candidate):  # Path.is_file raises an error for a name that is too long
            return candidate
        if name and os.path.exists(candidate):
            wrong = "a folder" if os.path.isdir(candidate) else "not a regular file"
            raise UserError(f"{what} '{name}' is {wrong}; give the path of a {suffix} file")
    names = sorted(path.name for folder in shipped_folders for path in folder.glob("*" + suffix))
    stems = [Path(file).stem for file in names]
    near = get_close_matches(Path(with_suffix).stem, stems, n=1, cutoff=SUGGESTED_LIKENESS)
    hint = f" (did you mean {near[0]}{suffix}?)" if near else ""
    raise UserError(
        f"{what} '{name}' is not {kind}{hint}; give the path of {kind}, or one of the repository's: {', '.join(names)}"
        f"{looked_for(*candidates)}"
    )


def looked_for(*paths: Path) -> str:
    """Return the end of an error about a missing file: the paths that were tried."""
    tried = dict.fromkeys(shortened(os.path.abspath(path), MAX_SHOWN_PATH) for path in paths)
    return f" (looked for {' and '.join(tried)})"


def located(files: Mapping[str, Iterable[Path]]) -> str:
    """Return a line for the console with the paths of files by kind; kinds without files are left out.

    Paths inside the working folder are relative to it.
    """
    lists = {kind: ", ".join(map(_from_here, paths)) for kind, paths in files.items()}
    return "; ".join(f"{kind}: {paths}" for kind, paths in lists.items() if paths)


def _from_here(path: Path) -> str:
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute) if Path(absolute).is_relative_to(Path.cwd()) else absolute


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor for reading a file. Raises OSError for a pipe, socket or device, which may never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe without a writer waits
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        reason = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "it is not a regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, reason, os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. Raises OSError as `open_regular` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a text file; invalid UTF-8 is replaced. Raises OSError as `open_regular` does."""
    return read_regular(path).decode("utf-8-sig", errors="replace").splitlines()


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises `UserError` with file and line if it cannot be read as one.

    A key that occurs twice is an error, and so are 1_0 and 1:30, which YAML 1.1 reads as the numbers 10 and 90.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
        if len(text) > MAX_YAML_CHARACTERS:
            raise UserError(f"{path} has {len(text)} characters; at most {MAX_YAML_CHARACTERS} are read, so shorten it")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node:
            _check_node(node, {})
        content = loader.construct_document(node) if node else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}{line}: {shortened(problem)}; fix the YAML there") from None
    except RecursionError:
        raise UserError(f"{path} nests brackets too deeply; fix the YAML") from None
    except (ValueError, LookupError, AttributeError) as error:  # raised for a value such as 2026-99-99 or `!!int x`
        raise UserError(f"{path} has a value that cannot be read ({first_line(error)}); fix the YAML") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} has no `key: value` lines; it must be a YAML mapping")
    return content


def _check_node(node: Any, characters: dict[Any, int]) -> int:
    """Return the number of characters of a YAML node's values, with aliases expanded.

    Raises YAMLError if the expanded document is too large, or has duplicate keys or ambiguous numbers.

    Args:
        characters: numbers of characters of the nodes that were checked so far
    """
    if node in characters:  # an alias
        return characters[node]
    characters[node] = MAX_YAML_CHARACTERS  # until it is known: a node may contain an alias of itself
    count, problem, keys = 1, "", set()
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            count += _check_node(key, characters) + _check_node(value, characters)
            if (name := (key.tag, str(key.value))) in keys:
                raise MarkedYAMLError(problem=f"duplicate key '{shortened(name[1])}'", problem_mark=key.start_mark)
            keys.add(name)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_check_node(value, characters) for value in node.value)
    else:
        count += len(node.value)
        if re.search("[\ud800-\udc7f\udd00-\udfff]", node.value):  # the other surrogates stand for bytes of a name
            problem = "half of a surrogate pair, which is not a character"
        elif node.tag.endswith((":int", ":float")) and re.search("[_:]", node.value):
            problem = f"{shortened(node.value)} would be read as another number; use digits only, or quotes"
    if count > MAX_YAML_CHARACTERS:
        problem = f"its aliases expand to more than {MAX_YAML_CHARACTERS} characters"
    if problem:
        raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    characters[node] = count
    return count


def file_name(text: str) -> str:
    """Convert a file name read from UTF-8 text to the form that os functions expect under the current locale."""
    return os.fsdecode(text.encode(errors="surrogateescape"))


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the content of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def numbered_folder(project: Path, name: str, exist_ok: bool) -> Path:
    """Make and return the folder `project/name`, or if it exists the first free one of name2, name3, ...

    Raises `UserError`.

    Args:
        exist_ok: whether to use `project/name` even if it exists; otherwise two runs that start together get different
            folders
    """
    if name in ("", "..") or Path(name).name != name:
        raise UserError(
            f"--name {shortened(repr(name))} is not a valid run name; give one without a slash, such as --name exp"
        )
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


def unique_stems(names: Iterable[str]) -> list[str]:
    """Return a file stem for each path or address: its own stem, with a number if an earlier name has the same stem.

    Characters that no file name may have on some system become `_`.
    """
    stems: dict[str, None] = {}
    numbers: Counter[str] = Counter()
    for name in names:
        stem = Path(name.split("?")[0]).stem
        free = stem = ILLEGAL_CHARACTERS.sub("_", stem) or "_"
        while free in stems:
            numbers[stem] += 1
            free = f"{stem}-{numbers[stem] + 1}"
        stems[free] = None
    return list(stems)


def write_rows(path: Path, rows: Iterable[str]) -> None:
    """Write a text file with these rows, in UTF-8; bytes of file names that are not UTF-8 stay as they are."""
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", errors="surrogateescape")


def cache_folder() -> Path:
    """Return the folder of caches: `$XDG_CACHE_HOME/lockstep`, by default `~/.cache/lockstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
