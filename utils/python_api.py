"""Call the scripts from Python: their `run` uses `call`, and `Predictor` checks its arguments by `arguments`.

train.py and val.py end with `write_result`, because their main process may be another one.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.flags import IGNORED, OPTIONS_OF_SCRIPT, REFUSED, flags_of
from utils.config.hyperparameters import OVERRIDE_PREFIX
from utils.config.parser import checked
from utils.console import log
from utils.distributed.failure import STOP_SIGNALS
from utils.distributed.launch import reset_accelerate
from utils.errors import UserError, nearest
from utils.files import release_locks
from utils.summary import Summary
from utils.user_code import explained

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Environment variable, also of spawned processes: the file into which the main process writes its result.
RESULT = "LOCKSTEP_RESULT"


def call(
    start: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    script: str,
    flags: Mapping[str, Any],
    hyperparameters: Callable[[], Collection[str]] = tuple,
) -> dict[str, Any]:
    """Call the function that starts a script, such as `train`, with flags by name, see `arguments`.

    Returns the result that `write_result` wrote, or else the function's result, {} for None. Restores the signal
    handlers. Raises `UserError` if the command would end with an error, and KeyboardInterrupt if Ctrl-C has stopped it.
    """
    flags = arguments(OPTIONS_OF_SCRIPT[script], flags, f"{script}.run", hyperparameters=hyperparameters)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with tempfile.TemporaryDirectory() as folder:
        file, returned = Path(folder) / "result.json", None
        os.environ[RESULT] = str(file)
        try:
            with explained():
                returned = start(flags)
        except SystemExit as end:  # this process or its children have printed the reason
            if end.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt from None
            if end.code:
                raise UserError(f"the run ended with exit code {end.code}; see the messages above") from None
        finally:
            del os.environ[RESULT]
            log.reset()
            reset_accelerate()
            release_locks()
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(-1)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return json.loads(file.read_text()) if file.is_file() else returned or {}


def write_result(summary: Summary, folder: Path) -> None:
    """Write the metrics of a run and its folder for `call`, if the script was called from Python."""
    if file := os.environ.get(RESULT):
        result = {**summary.columns(), "fitness": summary.fitness, "folder": str(folder)}
        Path(file).write_text(json.dumps(result))


def aliases(kind: type[DataclassInstance]) -> dict[str, str]:
    """Return the names of flags by their synonyms, both with underscores."""
    return {alias.replace("-", "_"): field.name for field in flags_of(kind) for alias in field.metadata["aliases"]}


def arguments(
    kind: type[DataclassInstance],
    values: Mapping[str, Any],
    caller: str,
    names: Collection[str] = (),
    hyperparameters: Callable[[], Collection[str]] = tuple,
) -> dict[str, Any]:
    """Return the arguments of a call by the names of their flags in `kind`. None and False mean: not given.

    `names` are the flags that are allowed, all if empty. `hyperparameters` returns the names that stand for flags such
    as --hyp.lr0; it is called only if a name is not a flag. Raises `UserError`, which names the `caller`, for an
    unknown name or a value that the flag refuses.
    """
    fields = {field.name: field for field in flags_of(kind) if not names or field.name in names}
    by_flag: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    for alias, value in values.items():
        name, key = aliases(kind).get(alias, alias), alias.removeprefix(OVERRIDE_PREFIX.lstrip("-"))
        if value is None or (value is False and name in {*fields, *REFUSED}) or str(value) == IGNORED.get(name):
            continue
        if name in fields:
            const = fields[name].metadata["const"]
            by_flag[name] = const if value is True and const is not None else value
        elif key in (known := hyperparameters()):
            overrides[key] = str(value)
        else:
            reason = REFUSED.get(name, f"is not known{nearest(alias, [*fields, *known])}")
            raise UserError(f"{caller}: {alias} {reason}")
    by_flag = checked(kind, by_flag, f"{caller}: {{}}".format)
    return {**by_flag, "overrides": overrides} if overrides else by_flag
