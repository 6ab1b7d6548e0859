"""Accelerate's trackers, and trackers of the user's, each in a thread. Made by run_log.py on the main process."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from utils.config.flags import PYTHON_SUFFIX, TRACKERS
from utils.console import Background, log
from utils.errors import UserError
from utils.user_code import imported

WANDB, TENSORBOARD = "wandb", "tensorboard"
STEP, EPOCH = "step", "epoch"  # the two axes: optimizer steps since the start of the run, and its epochs
START_SECONDS = 120.0  # how long `tracker` waits for the run to start
FINISH_SECONDS = 60.0  # time to send the rest at the end of a run
MODULES = {TENSORBOARD: "torch.utils.tensorboard"}  # imported for a tracker, if not the package of its name
NAME_ARGUMENTS = {"mlflow": "run_name", "clearml": "task_name", "trackio": "name"}  # for the name of the run


class Tracker(GeneralTracker):
    """A tracker of Accelerate, by its `name` there: training never waits for it; the first failure is a warning."""

    requires_logging_directory = False

    def __init__(self, name: str, project: str, folder: Path, finish_seconds: float = FINISH_SECONDS) -> None:
        self.name = name  # the base class requires it
        super().__init__()
        self.project, self.folder, self.finish_seconds = project, folder, finish_seconds
        self.title = "W&B" if name == WANDB else name  # in messages
        self.unsent = "what it has not sent is lost"  # end of the warning if the time is over
        self.inner: Any = None  # Accelerate's tracker, once it has started
        self._started = threading.Event()  # set once the run has started or failed to start
        self._background = Background(f"{self.title} has failed")

    @property
    def tracker(self) -> Any:
        """The package's own run, such as a `wandb.Run`, once it has started; None if it has not."""
        self._started.wait(START_SECONDS)
        return self.inner and self.inner.tracker

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the run with its settings."""
        with suppress(Exception, SystemExit):  # import it here: loader processes must not be forked during an import
            importlib.import_module(MODULES.get(self.name, self.name))
        self._background.submit(lambda: self._start(values))
        self._background.submit(self._started.set)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log numbers by key at an optimizer step; the key "step" or "epoch" is the x axis of the others."""
        self.submit(lambda: self._log(values, step or 0))

    def log_media(self, make: Callable[[], Mapping[str, Any]], step: int) -> None:
        """Log what `make` returns: W&B's pictures by key. Other trackers do nothing."""

    def with_wandb(self, job: Callable[[Any], object]) -> None:
        """Call `job` with W&B's run in the thread. Other trackers do nothing."""

    def submit(self, job: Callable[[], object]) -> None:
        """Do `job` in the thread after the earlier jobs, if the run has started by then."""
        self._background.submit(lambda: self.inner and job())

    def finish(self, patience: float = FINISH_SECONDS, exit_code: int = 0) -> None:
        """Send the rest and close the run, within `patience` seconds and its own time limit."""
        self.submit(lambda: self._end(exit_code))
        patience = min(patience, self.finish_seconds)
        if not self._background.finish(patience) and not exit_code:
            log(f"warning: {self.title} has not ended after {patience:.0f} s; {self.unsent}")

    # In the thread

    def _start(self, config: Mapping[str, Any]) -> None:
        tracker_class: Any = LOGGER_TYPE_TO_CLASS[self.name]
        arguments = {"logging_dir": str(self.folder)} if tracker_class.requires_logging_directory else {}
        if self.name in NAME_ARGUMENTS:
            arguments[NAME_ARGUMENTS[self.name]] = self.folder.name
        # TensorBoard's project is the name of its folder in the run folder.
        tracker = tracker_class(self.name if self.name == TENSORBOARD else self.project, **arguments)
        tracker.start()
        tracker.store_init_configuration(flatten(config))
        self.inner = tracker

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        # MLflow refuses other characters, and a key "epoch" beside keys that begin with "epoch/".
        allowed = {re.sub(r"[^\w\-. :/]", "_", key): value for key, value in values.items() if key not in (STEP, EPOCH)}
        self.inner.log(allowed, step=step)

    def _end(self, exit_code: int) -> None:
        self.inner.finish()


def requested_trackers(log_with: str, no_wandb: bool = False) -> list[str]:
    """Return the installed trackers that --log-with names, a user's by the name of its file; warn of the others."""
    entries = {"": [WANDB], "none": [], "all": TRACKERS}.get(log_with, log_with.split(","))
    names = dict.fromkeys(Path(entry).stem if entry.endswith(PYTHON_SUFFIX) else entry for entry in entries)
    if no_wandb or os.environ.get("WANDB_MODE") == "disabled":
        names.pop(WANDB, None)
    # Without an origin it is a folder of that name in the current one.
    installed = [name for name in names if (spec := importlib.util.find_spec(name)) and spec.origin]
    for name in names if log_with not in ("", "all") else ():
        if name not in installed:
            log(f"warning: {name} is not installed, so nothing is logged there: pip install {name}")
    return installed


def add_user_trackers(log_with: str, named_by_user: bool = True) -> None:
    """Make the Python files that --log-with names trackers of Accelerate, named like their files.

    Unless `named_by_user`, the run's settings.yaml names them. Raises `UserError` for a file that does not load, or
    does not define one class that extends `GeneralTracker`.
    """
    for file in [word for word in log_with.split(",") if word.endswith(PYTHON_SUFFIX)]:
        with imported(file, "--log-with", named_by_user) as module:
            classes = [value for value in vars(module).values() if inspect.isclass(value)]
            defined = [value for value in classes if value.__module__ == module.__name__]
            trackers = [value for value in defined if issubclass(value, GeneralTracker)]
            if len(trackers) != 1:
                raise UserError(f"{file} must define one class that extends accelerate.tracking.GeneralTracker")
            LOGGER_TYPE_TO_CLASS[module.__name__] = trackers[0]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping with keys such as `hyperparameters.lr0`; lists become text."""
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flattened |= flatten(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flattened
