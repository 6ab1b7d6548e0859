"""Calling the scripts from Python."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.options import flags_of
from utils.distributed.accelerator import forget
from utils.distributed.exit import Stopped
from utils.distributed.graceful_stop import STOP_SIGNALS
from utils.errors import UserError, nearest
from utils.summary import Summary

RESULT = "LOCKSTEP_RESULT"  # in the environment: the file that the main process leaves its result in


def call(main: Callable[[Sequence[str]], object], kind: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What `main` hands over, called with `flags` by the names of the fields of `kind`, on as many processes as they
    say. Raises `UserError` where the command would end with an error."""
    arguments = as_arguments(kind, flags)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        os.environ[RESULT] = str(file)
        try:
            main(arguments)
        except Stopped as stopped:
            if stopped.code:
                raise UserError(f"the run was ended early, with the exit code {stopped.code}") from None
        except SystemExit as error:  # of the parser, or of processes that were started: it is said already
            raise UserError(f"the run has failed, with the exit code {error.code}; what it said stands above") from None
        finally:
            del os.environ[RESULT]
            forget()
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return json.loads(file.read_text()) if file.is_file() else {}


def hand_over(summary: Summary, folder: Path) -> None:
    """Leave what a run has reached for whoever has called from Python."""
    if file := os.environ.get(RESULT):
        columns = {"metrics": summary.metrics, "val": summary.losses}
        result = {f"{part}/{name}": value for part, values in columns.items() for name, value in values.items()}
        Path(file).write_text(json.dumps({**result, "fitness": summary.fitness, "folder": str(folder)}))


def as_arguments(kind: type, flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line: True is the flag alone, None and False leave it out, a list is several words.

    Raises `UserError` for a name that is no flag.
    """
    known = {field.name for field in flags_of(kind)}
    names = {alias.replace("-", "_"): field.name for field in flags_of(kind) for alias in field.metadata["aliases"]}
    words: list[str] = []
    for name, value in flags.items():
        if name not in known and name not in names and not name.startswith("hyp."):
            raise UserError(f"unknown argument {name}{nearest(name, known)}")
        if value is None or value is False:
            continue
        flag = f"--{names.get(name, name).replace('_', '-')}" if not name.startswith("hyp.") else f"--{name}"
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={value}")
    return words
