"""Run a user's Python code: the files of --layers, --augmentations, --log-with and --hooks, what --task-file names.

Code named by a run folder or a weight file, not by the command line, is run only if this user has run it before.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from utils.errors import UserError, first_line
from utils.files import cache_folder

_paths: dict[str, Path] = {}  # the files and packages that have run in this process, by their stems


def class_named(import_path: str) -> type[Any]:
    """Import the class that `module:class` names. Raises ImportError or AttributeError if it does not exist."""
    module, _, name = import_path.partition(":")
    return getattr(importlib.import_module(module), name)


def package_version(place: str) -> str:
    """Return the name and version of the installed package of `module:class`, '' for a name alone or a plain file."""
    names = metadata.packages_distributions().get(place.partition(":")[0].partition(".")[0], []) if ":" in place else []
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted({*names}))


def load(module: str) -> ModuleType | None:
    """Import a module of a user's file or package that has been imported, or return None. Raises `UserError`."""
    name = module.partition(".")[0]
    with as_user_error(_paths.get(name, "")):
        return importlib.import_module(module) if name in _paths and name in sys.modules else None


@contextmanager
def imported(
    place: str | Path, flag: str, named_by_user: bool = True, named_by: str = "the run's settings.yaml"
) -> Iterator[ModuleType]:
    """Import the Python file or package at `place`, and run a block with it; if that fails, forget the module.

    Its folder stays the last in `sys.path`, so that loader processes can import it too. If it is not `named_by_user`,
    but by a file, `named_by`, which may be somebody else's, it is run only if this user has run the same code at the
    same path before. Raises `UserError`, also if another module has its name, or for any error in it or the block.
    """
    path = Path(place).resolve()
    file, name = path / "__init__.py" if os.path.isdir(path) else path, path.stem
    subject = f"{flag} {place}" if named_by_user else f"{named_by} names {flag} {place}"
    if not os.path.isfile(file) or file.suffix != ".py":
        raise UserError(f"{subject}: give a .py file, or a folder with an __init__.py (looked for {file})")
    digest = hashlib.sha256(os.fsencode(path))
    for part in [path] if file == path else sorted(path.rglob("*.py")):
        digest.update(os.fsencode(part) + hashlib.sha256(part.read_bytes()).digest())
    mark = cache_folder() / "trusted" / digest.hexdigest()
    if not named_by_user and not mark.is_file():
        trust = f"read {path}, and if you trust it add {flag} {place}"
        raise UserError(f"{subject}, which would be run and which you have not run before; {trust}")
    with suppress(OSError):  # without the record the user must name it each time
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or Path(spec.origin or "").resolve() != file:
        raise UserError(f"{flag} {path}: '{name}' is not a valid module name, or another module has it; rename it")
    _paths[name] = path
    try:
        with as_user_error(path):
            yield importlib.import_module(name)
    except BaseException:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
        raise


@contextmanager
def as_user_error(place: object = "", context: str = "") -> Iterator[None]:
    """Raise `UserError` with file and line for what a user's code raises in a block, StopIteration and SystemExit too.

    `place`, which may be a file of theirs, is named for an error without a line, unless the block may run other code
    (''); `context` follows the error.
    """
    try:
        yield
    except (UserError, StopTraining, KeyboardInterrupt):
        raise
    except BaseException as error:
        errors = [cause for cause in (error.__cause__, error) if cause]
        frames = [frame for cause in errors for frame in traceback.extract_tb(cause.__traceback__)]
        known = {*_paths.values(), *([Path(str(place))] if place else [])}
        users = [frame for frame in frames if known & {(file := Path(frame.filename)), *file.parents}]
        where = f"{users[-1].filename}, line {users[-1].lineno}" if users else place
        if not where:
            raise
        raise UserError(f"{where}: {type(error).__name__}: {first_line(error)}{context}; fix it there") from error


# Hooks

STOP = "stop"


class StopTraining(Exception):
    """A hook raises this, or returns "stop", to end the run in order after the epoch."""


class Hooks(NamedTuple):
    """A user's functions, which every process calls; None calls nothing.

    `on_epoch(epoch, model, results)` is called after each validation, with the EMA and the epoch's row of results.csv
    by column; `on_end(folder, results)` once the run is finished, with the best epoch's values.
    """

    on_epoch: Callable[..., object] | None = None
    on_end: Callable[..., object] | None = None

    def with_file(self, file: str, named_by_user: bool) -> Hooks:
        """Return the hooks and those of the Python file of --hooks, '' for none, over them. Raises `UserError`."""
        if not file:
            return self
        with imported(file, "--hooks", named_by_user) as module:
            functions = {name: getattr(module, name) for name in self._fields if hasattr(module, name)}
            if not functions or not all(map(callable, functions.values())):
                raise UserError(f"{file} has no function on_epoch(epoch, model, results) or on_end(folder, results)")
        return self._replace(**functions)

    def call(self, gather: Callable[[list[bool]], list[bool]], name: str, *arguments: object) -> bool:
        """Call a hook, if there is one; return whether it ends the run on any process. All must call it together.

        `gather` returns the items of all processes. Raises `UserError` for an error in the hook.
        """
        if (hook := getattr(self, name)) is None:
            return False
        gather([])  # the main process has written state and results
        code = getattr(hook, "__code__", None)
        try:
            with as_user_error(code.co_filename if code else name, f", in {name}"):
                answer = hook(*arguments)
        except StopTraining:
            answer = STOP
        return any(gather([isinstance(answer, str) and answer == STOP]))


NO_HOOKS = Hooks()
