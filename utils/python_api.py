"""Call the scripts from Python: train.run and val.run use `call`; their `main` ends with `hand_over`."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.options import OPTIONS_OF_SCRIPT, flags_of
from utils.distributed.accelerator import forget
from utils.distributed.exit import Stopped
from utils.distributed.graceful_stop import STOP_SIGNALS
from utils.errors import UserError, nearest
from utils.summary import Summary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Environment variable, also of spawned processes: the file into which the main process writes its result.
RESULT = "LOCKSTEP_RESULT"


def call(main: Callable[[Sequence[str]], object], script: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Call the `main` of a script, `train` or `val`, with flags by name; return the result of `hand_over`.

    Restores the signal handlers. Raises `UserError` if the command would end with an error.
    """
    arguments = as_arguments(OPTIONS_OF_SCRIPT[script], flags)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        os.environ[RESULT] = str(file)
        try:
            main(arguments)
        except Stopped as stopped:
            if stopped.code:
                raise UserError(f"the run ended early with exit code {stopped.code}") from None
        except SystemExit as error:  # the parser or the spawned processes have printed the reason
            raise UserError(f"the run failed with exit code {error.code}; see the messages above") from None
        finally:
            del os.environ[RESULT]
            forget()
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return json.loads(file.read_text()) if file.is_file() else {}


def hand_over(summary: Summary, folder: Path) -> None:
    """Write the metrics of a run and its folder for `call`, if the script was called from Python."""
    if file := os.environ.get(RESULT):
        columns = {"metrics": summary.metrics, "val": summary.losses}
        result = {f"{part}/{name}": value for part, values in columns.items() for name, value in values.items()}
        Path(file).write_text(json.dumps({**result, "fitness": summary.fitness, "folder": str(folder)}))


def as_arguments(kind: type[DataclassInstance], flags: Mapping[str, Any]) -> list[str]:
    """Convert flags to command-line arguments; True is the flag alone, None and False omit it, a list is many words.

    Raises `UserError` for an unknown name.
    """
    known = {field.name for field in flags_of(kind)}
    aliases = {alias.replace("-", "_"): field.name for field in flags_of(kind) for alias in field.metadata["aliases"]}
    words: list[str] = []
    for name, value in flags.items():
        is_override = name.startswith("hyp.")
        if name not in known and name not in aliases and not is_override:
            raise UserError(f"unknown argument {name}{nearest(name, known)}")
        if value is None or value is False:
            continue
        flag = f"--{name}" if is_override else f"--{aliases.get(name, name).replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={value}")
    return words
