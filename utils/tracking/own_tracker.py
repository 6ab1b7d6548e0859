"""Trackers of a user: the Python files that --log-with names. Called by the scripts, before they write anything.

A file defines a class that extends `accelerate.tracking.GeneralTracker`; from then on it is one of Accelerate's
trackers, named like the file.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from utils.config.values import PYTHON_SUFFIX
from utils.errors import UserError
from utils.files import looked_for
from utils.user_code import imported, trust


def add_own_trackers(log_with: str, is_named: bool = True) -> None:
    """Import the Python files that --log-with names.

    is_named: whether the user names them now; otherwise the run's settings.yaml does, and a file is run only if this
    user has run the same before. Raises `UserError` for a file that does not load or defines no tracker.
    """
    for file in [word for word in log_with.split(",") if word.endswith(PYTHON_SUFFIX)]:
        path, flag = Path(file).resolve(), f"--log-with {file}"
        if not os.path.isfile(path):
            where = looked_for(Path(file))
            raise UserError(f"{flag} is not a file; give the path of a Python file with a tracker{where}")
        trust(path, flag, is_named, "the run's settings.yaml")
        with imported(path, "--log-with") as module:
            _add(module.__name__, tracker_of(vars(module), path))


def tracker_of(defined: dict[str, Any], path: Path) -> type[GeneralTracker]:
    """Return the tracker among the names that a module defines; imported ones are not. Raises `UserError`."""
    classes = [value for value in defined.values() if inspect.isclass(value) and issubclass(value, GeneralTracker)]
    own = [each for each in classes if each.__module__ == path.stem]
    if len(own) != 1:
        names = ", ".join(each.__name__ for each in own)
        raise UserError(
            f"{path} defines {f'several trackers, {names}' if own else 'no tracker'}; write one class that extends "
            "accelerate.tracking.GeneralTracker"
        )
    return own[0]


def _add(name: str, tracker: type[GeneralTracker]) -> None:
    """Make a class one of Accelerate's trackers, which get `run_name`, and `logging_dir` if they require it."""
    from utils.tracking.tracker_arguments import TRACKER_ARGUMENTS, RunLocation

    def arguments(location: RunLocation) -> dict[str, Any]:
        return {"logging_dir": str(location.folder)} if tracker.requires_logging_directory else {}

    LOGGER_TYPE_TO_CLASS[name] = tracker
    TRACKER_ARGUMENTS[name] = arguments
