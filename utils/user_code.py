"""Run a user's Python code: the files of --layers, --augmentations and --log-with, and what --task-file names.

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

_paths: dict[str, Path] = {}  # the files and packages that have run in this process, by their stems


def class_named(place: str) -> Any:
    """Import the class that `module:class` names. Raises ImportError or AttributeError if it does not exist."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def is_users(module: str) -> bool:
    """Return whether a module is a file of the user's, or in a package of the user's."""
    name = module.partition(".")[0]
    return name in _paths and name in sys.modules


def load(module: str) -> ModuleType:
    """Import a module of the user's. Raises `UserError` if that fails."""
    with running(_paths[module.partition(".")[0]]):
        return importlib.import_module(module)


def trust(path: Path, flag: str, is_named: bool, named_by: str) -> None:
    """Remember that this user runs a Python file or package, at this path and with this content.

    Raises `UserError` if the user has neither given `flag`, as `is_named` says, nor run the same code before. Otherwise
    `named_by` names the path: a weight file or a run folder, perhaps somebody else's.
    """
    digest = hashlib.sha256(os.fsencode(path))
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        digest.update(os.fsencode(file) + hashlib.sha256(file.read_bytes()).digest())
    mark = cache_folder() / "trusted" / digest.hexdigest()
    if not is_named and not mark.is_file():
        raise UserError(
            f"{named_by} names {path}, a Python file or package that would be run and that you have not run before; "
            f"read it, and if you trust it add {flag}"
        )
    with suppress(OSError):  # without the record the user must name it each time
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


@contextmanager
def imported(path: Path, flag: str) -> Iterator[ModuleType]:
    """Import a Python file or package by its resolved path, and run a block with it; if that fails, forget the module.

    Its folder stays the last in `sys.path`, so that loader processes can import it too. Raises `UserError`, which names
    `flag`, if another module has its name, or for an error in the file or package.
    """
    name, file, search = path.stem, path / "__init__.py" if path.is_dir() else path, list(sys.path)
    if str(path.parent) not in search:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    is_found = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file
    try:
        if not is_found:
            raise UserError(f"{flag} {path}: '{name}' is not a valid module name, or another module has it; rename it")
        with running(path):
            yield importlib.import_module(name)
    except BaseException:
        sys.path[:] = search
        for loaded in [module for module in sys.modules if module.partition(".")[0] == name and is_found]:
            del sys.modules[loaded]
        raise


@contextmanager
def running(path: Path) -> Iterator[None]:
    """Run a block that imports a user's file or package, without writing bytecode into its folder.

    Raises `UserError` with file and line for any error in it.
    """
    _paths[path.stem] = path
    dont_write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with explained(path):
            yield
    finally:
        sys.dont_write_bytecode = dont_write


@contextmanager
def explained(place: object = "", context: str = "") -> Iterator[None]:
    """Raise `UserError` with file and line for what a user's code raises in a block, StopIteration and SystemExit too.

    `place` is named for an error without a line, unless the block may run other code (''); `context` follows the error.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        errors = [cause for cause in (error.__cause__, error) if cause]
        frames = [frame for cause in errors for frame in traceback.extract_tb(cause.__traceback__)]
        users = [frame for frame in frames if {*_paths.values()} & {(file := Path(frame.filename)), *file.parents}]
        where = f"{users[-1].filename}, line {users[-1].lineno}" if users else place
        if not where:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}{context}; fix it there"
        if isinstance(error, SyntaxError):
            where, reason = f"{error.filename or where}, line {error.lineno or 1}", f"{error.msg}; fix the Python there"
        raise UserError(f"{where}: {reason}") from error
