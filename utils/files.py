"""Find, lock, read, download and atomically write files, and number folders. Imported everywhere."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import itertools
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen
from uuid import uuid4
from weakref import WeakSet

import yaml
from filelock import FileLock, Timeout
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper
from yaml.error import MarkedYAMLError

from utils.errors import UserError, first_line, nearest, public, quoted

VERSION = "1.0.0"  # pyproject.toml reads it
LOCK_FILE = ".lock"  # file in a run folder that a run writes to
SETTINGS_FILE = "settings.yaml"  # file that every run folder has
LOCK_TIMEOUT_SECONDS = 5.0  # loader processes of a killed run hold the lock a little longer
IMAGES_FILE = "images.json"  # file of a run of detect.py that lists its images as COCO does
PART_NAME = re.compile(r"\..+-[0-9a-f]+\.part")  # name of a file that is being written
ILLEGAL_CHARACTERS = re.compile(r'[<>:"/\\|?*\x00-\x1f]')  # in file names of Linux, macOS or Windows
SERVER_TIMEOUT_SECONDS = 20.0  # longest wait for data from the server
SPARE_BYTES = 2**30  # downloads leave this much of the disk free
HUB_PREFIX = "hf:"  # prefix of --weights
HUB_NAME = re.compile(r"(?://)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")  # owner/name, revision, file
HUB_TOKEN = re.compile(r"Bearer [^'\"]*|hf_\w+")  # in errors of a library
WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
_locks: WeakSet[FileLock] = WeakSet()  # this process's locks on run folders
ROOT = Path(__file__).resolve().parents[1]  # the repository, or its copy that pip has installed
# Whether pip has installed this code: as a package without a project file, in a folder where nothing is written.
IS_INSTALLED = (ROOT / "__init__.py").is_file() and not (ROOT / "pyproject.toml").is_file()


def cache_folder() -> Path:
    """Return the folder of caches: `$XDG_CACHE_HOME/lockstep`, by default `~/.cache/lockstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def numbered_folder(project: Path, name: str, exist_ok: bool, inputs: Iterable[str | Path] = ()) -> Path:
    """Make and return the folder `project/name`, or the first of name2, name3, ... that does not exist.

    With `exist_ok` it may exist if it is empty, or the folder of an earlier run without any of this run's `inputs`.
    Raises `UserError`. Two runs that start together get different folders.
    """
    if name in ("", "..") or Path(name).name != name:
        raise UserError(f"--name {quoted(name)} must name one folder; put the folders above it into --project")
    try:
        project.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            with suppress(FileExistsError):
                (folder := project / f"{name}{number if number > 1 else ''}").mkdir(exist_ok=exist_ok)
                break
        is_empty = not any(folder.iterdir())
        settings = [line for file in folder.glob(SETTINGS_FILE) for line in read_text(file).split("\n")]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be made: {error.strerror}; choose another --project") from None
    if not (is_empty or (folder / LOCK_FILE).is_file() or any(line.startswith("exist_ok:") for line in settings)):
        raise UserError(f"--exist-ok: {folder} has files, and no run has written them; choose another --name")
    root = os.path.realpath(folder)
    for path in filter(os.path.lexists, inputs if exist_ok else ()):
        if any(Path(os.path.realpath(name)).is_relative_to(root) for name in (path, os.path.dirname(path))):
            raise UserError(f"--exist-ok: {folder} has an input of this run, {path}; choose another --name")
    return folder


def lock_folder(folder: Path) -> FileLock:
    """Lock a run folder until the lock or `release_locks` releases it, or this process ends. Raises `UserError`."""
    lock = FileLock(folder / LOCK_FILE, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        with suppress(NotImplementedError):  # a disk without locks
            lock.acquire()
    except Timeout:
        raise UserError(f"another run is writing into {folder}; wait until it ends, or choose another --name") from None
    except OSError as error:
        raise UserError(f"the run folder {folder} cannot be written: {error.strerror}; choose another one") from None
    _locks.add(lock)
    return lock


def release_locks() -> None:
    """Release the locks of all run folders when a run called from Python ends, though its objects may still exist."""
    while _locks:
        _locks.pop().release()


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold an inter-process lock for the duration of the block, or none if the lock file cannot be made."""
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock))
            if os.name != "nt":  # there the lock removes its file
                stack.callback(lock.unlink, missing_ok=True)
        yield


def find_file(name: str, what: str, folders: Sequence[str], kind: str = "a file") -> Path:
    """Return the YAML file that a flag names: a path, or the name of a file in `folders`, with or without .yaml.

    The name may begin with any of `folders`, because YOLOv5 has some files in others. Raises `UserError`, which says
    `what` the file is for, and what `kind` of name it is.
    """
    if os.path.isfile(name):  # Path.is_file raises an error for a name that is too long
        return Path(name)
    shipped = sorted(path for folder in folders for path in (ROOT / folder).glob("*.yaml"))
    file_name = f"{name.removesuffix('.yml').removesuffix('.yaml')}.yaml"
    for path in shipped:
        if file_name in (path.name, *(f"{folder}/{path.name}" for folder in folders)):
            return path
    raise UserError(
        f"{what} '{name}' is not {kind}{nearest(name, (path.stem for path in shipped), 0.7)}; give the path of {kind}, "
        f"or one of the repository's: {', '.join(path.name for path in shipped)} (looked for {os.path.abspath(name)})"
    )


def format_paths(files: Mapping[str, Iterable[Path]]) -> str:
    """Return a line with the paths of files by kind; paths in the working folder are relative to it."""
    here = f"{Path.cwd()}{os.sep}"
    lists = {kind: ", ".join(os.path.abspath(path).removeprefix(here) for path in files[kind]) for kind in files}
    return "; ".join(f"{kind}: {paths}" for kind, paths in lists.items() if paths)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. Raises OSError for a pipe, socket or device too, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return Path(path).read_bytes()


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """Return a text file, in UTF-8 or in UTF-16 with a byte order mark; lines end in `\\n`. Raises `UserError`."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        text = error.object[: error.start].decode(encoding, "replace") + "\0"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:  # as in UTF-16 without a mark
        lines = text.partition("\0")[0].split("\n")
        raise UserError(f"{path}, line {len(lines)} is not UTF-8 text; save the file as UTF-8")
    return text


class YamlLoader(yaml.SafeLoader):
    """Takes keys as text, and values that match `text`; refuses a key that occurs twice."""

    # Unquoted values that are text here, but in YAML 1.1 something else: 010 is 8, 12:30 is 750, no is False.
    text = re.compile(r"[-+]?0[0-9bx].*|.*[:_].*|(?i:yes|no|on|off)|\d{4}-.*|=")

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        is_text = kind is yaml.ScalarNode and implicit[0] and self.text.fullmatch(value)
        return self.DEFAULT_SCALAR_TAG if is_text else super().resolve(kind, value, implicit)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            key.tag = key.tag if key.value == "<<" else self.DEFAULT_SCALAR_TAG
            if str(key.value) in keys:
                raise MarkedYAMLError(problem=f"duplicate key {quoted(key.value)}", problem_mark=key.start_mark)
            keys.add(str(key.value))
        return node


class _TextLoader(YamlLoader):
    text = re.compile("(?!<<$).*")


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; values in `names` are text. Raises `UserError` with file and line."""
    text = read_text(path)
    try:
        mapping = yaml.load(text, YamlLoader)
        if isinstance(mapping, dict) and mapping.get("names"):
            mapping["names"] = yaml.load(text, _TextLoader)["names"]
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: {getattr(error, 'problem', None) or first_line(error)}; fix the YAML") from None
    if not isinstance(mapping, dict):
        raise UserError(f"{path} has no `key: value` lines; it must be a YAML mapping")
    return mapping


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush it and rename it to `path`, on failure remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}-{uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: Any) -> None:
    """Write a file, whole or not at all, and flush it. Raises OSError."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str, append: bool = False) -> None:
    """Write a new text file, never through a link, or `append` to it; "" removes the file. Raises `UserError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            path.unlink(missing_ok=True)
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        if not text:
            path.unlink()
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be written: {error.strerror}") from None


def unique_stems(names: Iterable[str]) -> list[str]:
    """Return a file stem for each path or address: its own without illegal characters, numbered if it is not new."""
    stems: dict[str, int] = {}  # how many names have asked for a stem
    for name in names:
        free = stem = ILLEGAL_CHARACTERS.sub("_", Path(name.split("?")[0]).stem) or "_"
        while free in stems:
            stems[stem] += 1
            free = f"{stem}-{stems[stem]}"
        stems[free] = 1
    return list(stems)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the content of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def check_free_space(folder: Path, size: int) -> None:
    """Raise OSError if writing `size` bytes into a folder would not leave `SPARE_BYTES` of the disk."""
    if size > (free := shutil.disk_usage(folder).free) - SPARE_BYTES:
        raise OSError(f"it needs {size / 1e9:.3g} GB more, {free / 1e9:.3g} GB are free, and 1 GiB must stay free")


def download(
    address: str,
    path: Path,
    sha256: str = "",
    usable: Callable[[Path], bool] = os.path.isfile,
    advice: str = "",
    licence: str = "",
) -> Path:
    """Download the file at `address` to `path` unless `path` exists, and return `path`; print its `licence`.

    One process of a machine downloads, the others wait. `sha256` has the first hex digits of the file's SHA-256, if
    known; `usable` checks the downloaded file. Raises `UserError` with the address, the reason and `advice`.
    """
    with one_at_a_time(path.with_name(f"{path.name}.lock")):
        if path.is_file():
            return path
        try:
            if not is_address(address):
                raise ValueError("it must begin with http://, https:// or file:// and have no spaces and no password")
            request = Request(address, headers={"User-Agent": "lockstep"})
            with urlopen(request, timeout=SERVER_TIMEOUT_SECONDS) as answer, replacing(path) as file:
                terms = f" (licence: {licence})" if licence else ""
                print(f"downloading {public(address)}{terms}", file=sys.stderr, flush=True)
                length = int(answer.headers.get("Content-Length") or 0)
                check_free_space(path.parent, length)
                # disable=None: a progress bar on terminals only
                with tqdm.wrapattr(answer, "read", length or None, desc=path.name, disable=None, leave=False) as source:
                    bounded: Any = CallbackIOWrapper(partial(check_free_space, path.parent), source, "read")
                    shutil.copyfileobj(bounded, file)
                file.flush()
                if length and file.tell() != length:
                    raise ConnectionError(f"the connection ended after {file.tell()} of {length} bytes")
                written = Path(file.name)
                is_other = sha256 and not hashlib.sha256(written.read_bytes()).hexdigest().startswith(sha256)
                if is_other or not usable(written):
                    raise ValueError("the content is not the expected one, or damaged")
        except (OSError, ValueError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            advice = advice or f"download it in another way and save it as {path}"
            raise UserError(f"{address} cannot be downloaded ({reason}); try again, or {advice}") from None
    return path


def is_address(text: Any) -> bool:
    """Return whether `text` is an address for `download`: one with spaces, a user name or a password is not."""
    return isinstance(text, str) and re.fullmatch(r"(?:https?|file)://[^\s/@?#]*(?:[/?#]\S*)?", text) is not None


def fetch_from_hub(name: str) -> Path:
    """Return a weight file of the Hugging Face Hub in the cache of huggingface_hub, downloaded if necessary.

    The name is owner/name, owner/name/file, or with a revision owner/name@revision; without a file it means best.pt,
    else the repository's only weight file. Raises `UserError`.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils import logging  # `import huggingface_hub` imports no submodule

    flag, match = f"--weights {HUB_PREFIX}{name}", HUB_NAME.fullmatch(name)
    if not match:
        raise UserError(f"{flag} is not of the form {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name/file.pt")
    repository, revision, file = match.groups()
    logging.set_verbosity_error()
    names, tags = list[str](), list[str]()
    try:
        info = HfApi().model_info(repository, revision=revision, timeout=SERVER_TIMEOUT_SECONDS)
        names, tags = [entry.rfilename for entry in info.siblings or []], info.tags or []
    except Exception:  # of any class, depending on the version; the file may be in the cache
        with suppress(Exception):
            folder = snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=[])
            names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")]
    weights = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
    file = file or (weights[0] if len(weights) == 1 else "best.pt")
    licence = "".join(f" (licence: {tag[8:]})" for tag in tags if tag.startswith("license:"))
    if file in names:
        print(f"{HUB_PREFIX}{repository}/{file}{licence}", file=sys.stderr, flush=True)
    try:
        for description in {"config.json", "README.md"}.intersection(names):  # see `Task.described`
            hf_hub_download(repository, description, revision=revision)
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:
        reason = first_line(Exception(HUB_TOKEN.sub("...", str(error))))
        raise UserError(
            f"{flag} cannot be downloaded ({reason}); check the name and the network, and log in with "
            "`hf auth login` or set HF_TOKEN if it is private or gated"
        ) from None
