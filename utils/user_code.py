"""Run a user's Python code: the files of --layers and --augmentations, and the files and packages of --task-file.

Called by models/ and data/.

Code named by a run folder or a weight file, not by the command line, is run only if this user has run it before.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from utils.errors import UserError, first_line
from utils.files import cache_folder

_modules: dict[str, Path] = {}  # paths of the files and packages of `imported`, by the names of their modules
_paths: set[Path] = set()  # all files and packages that have run in this process


def class_named(place: str) -> Any:
    """Import the class that `module:class` names. Raises ImportError or AttributeError if it does not exist."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def is_users(module: str) -> bool:
    """Return whether a module belongs to a user's task: its file, or a module in its package."""
    name = module.partition(".")[0]
    return name in _modules and name in sys.modules


def load(module: str) -> ModuleType:
    """Import a module of a user's task. Raises `UserError` if that fails."""
    with running(_modules[module.partition(".")[0]]):
        return importlib.import_module(module)


def trust(path: Path, flag: str, is_named: bool, named_by: str) -> None:
    """Remember that this user runs a Python file or package, at this path and with this content.

    Raises `UserError` if the user has neither given `flag` nor run the same code before.

    Args:
        flag: the flag with its value, as the user would give it
        is_named: whether the user has given `flag`
        named_by: file that names the path otherwise, such as a weight file, perhaps somebody else's
    """
    mark = cache_folder() / flag.split()[0].strip("-") / _digest(path)
    if not is_named and not mark.is_file():
        raise UserError(
            f"{named_by} names {path}, a Python file or package that would be run and that you have not run before; "
            f"read it, and if you trust it add {flag}"
        )
    with suppress(OSError):  # without the record the user must name it each time
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _digest(path: Path) -> str:
    """Return a hash of the path and the content of a file, or of the names and contents of a package's files."""
    digest = hashlib.sha256(os.fsencode(path) + b"\0")
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        digest.update(os.fsencode(file.relative_to(path)) + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def running(path: Path) -> Iterator[None]:
    """Run a block that imports a user's file or package. Writes no bytecode.

    Raises `UserError` with file and line for any error in it.
    """
    _paths.add(path)
    dont_write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with explained(path):
            yield
    finally:
        sys.dont_write_bytecode = dont_write


@contextmanager
def explained(place: object = "", context: str = "") -> Iterator[None]:
    """Raise `UserError` with file and line for what a user's code raises in a block, StopIteration and SystemExit too.

    Args:
        place: file or line of the user's code that is named if an error has none; '' if the block may run no such code
        context: words after the error
    """
    try:
        yield
    except BaseException as error:
        where, reason = raised_at(error) or place, f"{type(error).__name__}: {first_line(error)}{context}; fix it there"
        if isinstance(error, SyntaxError):
            where = where and f"{error.filename or where}, line {error.lineno or 1}"
            reason = f"{error.msg}; fix the Python there"
        if not where or isinstance(error, UserError | KeyboardInterrupt):
            raise
        raise UserError(f"{where}: {reason}") from error


def raised_at(error: BaseException) -> str:
    """Return the innermost line of a user's code that an error passed, else its cause, `file, line 3`; '' if none."""
    frames = [row for each in (error.__cause__, error) if each for row in traceback.extract_tb(each.__traceback__)]
    own = [frame for frame in frames if _paths & {(file := Path(frame.filename)), *file.parents}]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


@contextmanager
def imported(path: Path, flag: str) -> Iterator[ModuleType]:
    """Import a Python file or package under its own name, and run a block with it; if that fails, forget the module.

    Its folder stays the last in `sys.path`, so that loader processes can import it too. Raises `UserError` if another
    module has the name, or for an error in the file or package.

    Args:
        path: resolved path of the file or package
        flag: the flag that names the file or package
    """
    name, folder = path.stem, str(path.parent)
    file = path / "__init__.py" if path.is_dir() else path
    before, is_first = list(sys.path), name not in sys.modules
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        with running(path):
            spec = importlib.util.find_spec(name) if name.isidentifier() else None
            if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
                raise UserError(
                    f"{flag} {path}: '{name}' is not a valid module name, or another module has it; rename it"
                )
            module = importlib.import_module(name)
            _modules[name] = path
            yield module
    except BaseException:
        sys.path[:] = before
        if is_first:
            _modules.pop(name, None)
            for loaded in [other for other in sys.modules if other.partition(".")[0] == name]:
                del sys.modules[loaded]
        raise
