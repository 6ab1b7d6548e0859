"""Call the scripts from Python. train.py and val.py write their results: the main process may be another one."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from utils.console import log
from utils.distributed.failure import notify_failure
from utils.distributed.launch import reset_accelerate
from utils.errors import UserError
from utils.files import release_locks
from utils.summary import RESULT
from utils.user_code import as_user_error


def call(start: Callable[[list[str]], dict[str, Any] | None], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function that starts a script with the `command_words` of flags by name.

    Returns what `Summary.write_result` wrote, or else the function's result, {} for None. Raises `UserError` if the
    command would end with an error, and KeyboardInterrupt if Ctrl-C has stopped it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, returned, threads = Path(folder) / "result.json", None, torch.get_num_threads()
        os.environ[RESULT] = str(file)
        try:
            with as_user_error():
                returned = start([*command_words(flags)])
        except SystemExit as end:  # this process or its children have printed the reason
            if end.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt from None
            if end.code:
                raise UserError(f"the run ended with exit code {end.code}; see the messages above") from None
        finally:
            del os.environ[RESULT]
            notify_failure()  # after an error trackers are open
            log.reset()
            reset_accelerate()
            release_locks()
            torch.set_num_threads(threads)  # one for --logical-processes
        return json.loads(file.read_text()) if file.is_file() else returned or {}


def command_words(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags by name as words of a command line: none for None, several for a list."""
    for name, value in flags.items():
        if isinstance(value, (list, tuple)):
            yield from (f"--{name}", *map(str, value))
        elif value is not None:
            yield f"--{name}={value}"
