"""Call the scripts from Python: their `run` uses `call`.

train.py and val.py end with `write_result`, because their main process may be another one. `Predictor` of detect.py
checks its arguments by `checked`. Errors name arguments, not flags.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import tempfile
import threading
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from utils.config.hyperparameters import OVERRIDE_PREFIX
from utils.config.options import OPTIONS_OF_SCRIPT, flags_of
from utils.config.values import accepts, chosen, expected, separated
from utils.config.yolov5_flags import REFUSED
from utils.distributed.accelerator import reset_accelerate
from utils.distributed.failure import Stopped
from utils.distributed.stop import STOP_SIGNALS
from utils.errors import UserError, nearest, shortened
from utils.files import release_locks
from utils.summary import Summary
from utils.user_code import explained

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Environment variable, also of spawned processes: the file into which the main process writes its result.
RESULT = "LOCKSTEP_RESULT"
INTERRUPTED = 128 + signal.SIGINT  # exit code of a run that Ctrl-C has stopped
HYPERPARAMETER = OVERRIDE_PREFIX.lstrip("-")  # may precede the name of a hyperparameter
NUMBERS_OR_TEXT = ("classes", "device", "name")  # text flags for which callers also write numbers
# A flag in a message, and its value: numbers, quoted text, or a word at the end of a clause.
FLAG_AND_VALUE = re.compile(
    r"(?<![\w-])--(?P<flag>[a-z][a-z-]*[a-z])(?![\w.])"
    r"(?:[ =](?:(?P<numbers>-?\d[\d.]*(?: -?\d[\d.]*)*(?![\w.]|,\d))|(?P<quoted>'[^']*')"
    r"|(?P<word>(?:[^\s:;,]|,(?=\S))+)(?=[:;,]|$)))?"
)


def call(
    start: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    script: str,
    flags: Mapping[str, Any],
    hyperparameters: Callable[[], Collection[str]] = tuple,
) -> dict[str, Any]:
    """Call the function that starts a script, such as `train`, with flags by name.

    Returns the result that `write_result` wrote, or else the function's result, {} for None. Restores the signal
    handlers. Raises `UserError` if the command would end with an error, and KeyboardInterrupt if Ctrl-C has stopped it.

    Args:
        hyperparameters: returns names of hyperparameters that may be arguments, see `checked`
    """
    kind = OPTIONS_OF_SCRIPT[script]
    given = checked(kind, flags, f"{script}.run", hyperparameters=hyperparameters)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        may_set_handlers = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS} if may_set_handlers else {}
        returned = None
        os.environ[RESULT] = str(file)
        try:
            with python_errors(kind), explained():
                returned = start(given)
        except (Stopped, SystemExit) as end:  # this process or its children have printed the reason
            if end.code == INTERRUPTED:
                raise KeyboardInterrupt from None
            if end.code:
                raise UserError(f"the run ended with exit code {end.code}; see the messages above") from None
        finally:
            del os.environ[RESULT]
            reset_accelerate()
            release_locks()
            if handlers:
                signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return json.loads(file.read_text()) if file.is_file() else returned or {}


def write_result(summary: Summary, folder: Path) -> None:
    """Write the metrics of a run and its folder for `call`, if the script was called from Python."""
    if file := os.environ.get(RESULT):
        columns = {"metrics": summary.metrics, "val": summary.losses}
        result = {f"{part}/{name}": value for part, values in columns.items() for name, value in values.items()}
        Path(file).write_text(json.dumps({**result, "fitness": summary.fitness, "folder": str(folder)}))


def checked(
    kind: type[DataclassInstance],
    values: Mapping[str, Any],
    caller: str,
    names: Collection[str] = (),
    hyperparameters: Callable[[], Collection[str]] = tuple,
) -> dict[str, Any]:
    """Return the arguments of a call by the names of their flags. None and False mean that a flag is not given.

    Raises `UserError` for an unknown name or a value of a wrong type or range.

    Args:
        kind: options class that declares the flags
        caller: the call as errors name it
        names: names of the flags that are allowed; all if empty
        hyperparameters: returns names that stand for flags such as --hyp.lr0; called only if a name is not a flag
    """
    fields = {field.name: field for field in flags_of(kind) if not names or field.name in names}
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    for alias, value in values.items():
        name = aliases(kind).get(alias, alias)
        if name not in fields:
            known = hyperparameters()
            if alias in known or ("overrides" in hints and alias.startswith(HYPERPARAMETER)):
                overrides |= {} if value is None else {alias.removeprefix(HYPERPARAMETER): str(value)}
                continue
            if instead := REFUSED.get(name):
                raise UserError(f"{caller}: {alias} {in_python(instead, kind)}")
            raise UserError(f"{caller}: unknown argument {alias}{nearest(alias, [*fields, *known])}")
        if value is None or value is False:
            continue
        hint, metadata = hints[name], fields[name].metadata
        plain = as_plain(value, hint, fields[name])
        for word in plain if isinstance(plain, list) else [plain]:
            if instead := REFUSED.get(f"{name} {word}"):
                raise UserError(f"{caller}: {alias} {word!r} {in_python(instead, kind)}")
        if not accepts(hint, metadata, plain):
            raise UserError(f"{caller}: {alias} must be {expected(hint, metadata)}, not {shortened(repr(value), 80)}")
        given[name] = tuple(plain) if isinstance(plain, list) else hint(plain)
    return {**given, "overrides": overrides} if overrides else given


def as_plain(value: object, hint: Any, field: dataclasses.Field[Any]) -> object:
    """Return a Python argument as a YAML file would hold it: paths as text, one or several values as a list."""
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        plain = [as_plain(item, typing.get_args(hint)[0], field) for item in items]
        if not field.metadata["comma_separated"]:
            return plain
        return [word for item in plain for word in (separated(item) if isinstance(item, str) else [item])]
    if value is True and field.metadata["const"] is not None:
        return field.metadata["const"]
    if isinstance(value, PurePath) or (type(value) is int and field.name in NUMBERS_OR_TEXT):
        return str(value)
    if not isinstance(value, str):
        return value
    return ",".join(separated(value)) if field.metadata["comma_separated"] else chosen(value, field.metadata)


def aliases(kind: type[DataclassInstance]) -> dict[str, str]:
    """Return the names of flags by their synonyms, both with underscores."""
    return {alias.replace("-", "_"): field.name for field in flags_of(kind) for alias in field.metadata["aliases"]}


@contextmanager
def python_errors(kind: type[DataclassInstance]) -> Iterator[None]:
    """Make a `UserError` in the block name the arguments of a call instead of flags.

    Args:
        kind: options class that declares the flags
    """
    try:
        yield
    except UserError as error:
        raise UserError(in_python(str(error), kind)) from error.__cause__


def in_python(text: str, kind: type[DataclassInstance]) -> str:
    """Return a message with the flags of `kind` as arguments of a call: `--imgsz 90 128: ...` as `imgsz=(90, 128)`.

    Flags of other scripts stay as they are.
    """
    hints = typing.get_type_hints(kind)
    other_names = aliases(kind)

    def argument(match: re.Match[str]) -> str:
        name = match["flag"].replace("-", "_")
        name, numbers = other_names.get(name, name), (match["numbers"] or "").split()
        if name not in hints:
            return match[0]
        if hints[name] is bool:
            return f"{name}=True{match[0][len(match['flag']) + 2 :]}"
        if len(numbers) > 1:
            return f"{name}=({', '.join(numbers)})"
        if numbers or match["quoted"]:
            return f"{name}={numbers[0] if numbers else match['quoted']}"
        return f"{name}={match['word']!r}" if match["word"] else name

    if "overrides" in hints:
        text = text.replace(OVERRIDE_PREFIX, "")
    return FLAG_AND_VALUE.sub(argument, text)
