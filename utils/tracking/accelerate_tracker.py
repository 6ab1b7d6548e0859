"""A tracker of Accelerate, called in a thread: training never waits for it and never fails because of it.

Made by utils/tracking/requested.py; utils/tracking/wandb.py has the richer tracker for Weights & Biases.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from utils.background import Background
from utils.errors import UserError, first_line
from utils.tracking.log_position import LogPosition, earlier_epochs
from utils.tracking.tracker import EPOCH, FINISH_SECONDS, STEP, Print, Tracker, axis_of
from utils.tracking.tracker_arguments import OFFLINE, RunLocation, accepted, arguments, missing_key, remote_id

START_SECONDS = 120.0  # how long `tracker` waits for the run to start
FAIL_SECONDS = 3.0  # time to close the run before this process ends with an error


class AccelerateTracker(Tracker):
    """A run in a tracker that Accelerate knows by `name`; it gets numbers and settings.

    Args:
        folder: the run folder
        run: `project`, `name` and `id` of the run
        print_line: prints a line on the console
        timeout: seconds to send the rest at the end of the run
    """

    def __init__(
        self, name: str, folder: Path, run: Mapping[str, Any], print_line: Print, timeout: float = FINISH_SECONDS
    ) -> None:
        self.name = name  # the base class requires it
        super().__init__()
        self.folder, self.run, self.print_line, self.timeout = folder.absolute(), run, print_line, timeout
        self.inner: Any = None  # Accelerate's tracker, once it has started
        self._started = threading.Event()  # set once the run has started or failed to start
        self._background = Background(f"{self.title} has failed", print_line)

    @property
    def title(self) -> str:
        """The tracker's name in warnings."""
        return self.name

    @property
    def tracker(self) -> Any:
        """The package's own run, such as a `wandb.Run`, once it has started; None if it has not."""
        self._started.wait(START_SECONDS)
        return self.inner.tracker if self.inner else None

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the run with its settings."""
        with suppress(Exception, SystemExit):  # import it here: loader processes must not be forked during an import
            importlib.import_module(self.name)
        config = {key: as_text(value) for key, value in values.items()}
        self._earlier = earlier_epochs(self.folder)

        def start() -> None:
            try:
                self._start(config)
            finally:
                self._started.set()

        self._background.do(start)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self._do(lambda: self._log(dict(values), step or 0))

    def fail(self, reason: str) -> None:
        self._do(self._close)
        self._background.finish(FAIL_SECONDS)

    def finish(self, timeout: float = FINISH_SECONDS) -> None:
        self._do(self._close)
        timeout = min(timeout, self.timeout)
        if not self._background.finish(timeout):
            self.print_line(f"warning: {self.title} has not ended after {timeout:.0f} s; {self._where_the_rest_is()}")

    # In the thread

    def _do(self, job: Callable[[], object]) -> None:
        """Do `job` after the earlier jobs, if the run has started by then."""
        self._background.do(lambda: self.inner and job())

    def _start(self, config: Mapping[str, Any]) -> None:
        """Start the run, or continue this folder's run."""
        if self.name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"this version of accelerate has no tracker {self.name}: pip install -U accelerate")
        self._position = self._earlier_position()
        location = RunLocation(self.folder, self.run, self._position)
        tracker = self._start_or_store(location)
        self._position.remote_id = remote_id(self.name, tracker)
        if not self._position.continues:
            tracker.store_init_configuration(flat(config))
        self._position.store()
        self.inner = tracker
        for lost, step in self._position.missed(self._earlier):
            self._log(lost, step)

    def _earlier_position(self) -> LogPosition:
        return LogPosition(self.folder / f".{self.name}.json", self.run["id"])

    def _start_or_store(self, location: RunLocation) -> Any:
        """Return a started tracker; without its server it stores the run on this machine, if it can."""
        reason = missing_key(self.name)
        if not reason:
            try:
                return started(self.name, location)
            except ImportError:
                raise
            except Exception as error:
                if self.name not in OFFLINE:
                    raise
                reason = first_line(error)
        upload = OFFLINE[self.name](self.folder)
        tracker = started(self.name, location)
        self.print_line(f"{self.name}: {reason}; the run is stored on this machine, upload it with: {upload}")
        return tracker

    def _log(self, values: dict[str, Any], step: int) -> None:
        axis = axis_of(values)
        if not self._position.logged_before(axis, values[axis]):
            # The axes are left out: MLflow's files cannot hold a key "epoch" and keys that begin with "epoch/".
            kept = {key: value for key, value in values.items() if key not in (STEP, EPOCH)}
            self.inner.log(accepted(self.name, kept), step=step)
            self._position.advance(axis, values[axis])

    def _close(self) -> None:
        self.inner.finish()

    def _where_the_rest_is(self) -> str:
        """Return the end of the warning that the run has not ended in time."""
        return "what it has not sent is lost"


def started(name: str, location: RunLocation) -> Any:
    """Return a started tracker of Accelerate."""
    tracker: Any = LOGGER_TYPE_TO_CLASS[name](**arguments(name, location))
    tracker.start()
    return tracker


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping with keys such as `hyperparameters.lr0`; lists become text."""
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flattened


def as_text(value: Any) -> Any:
    """Return a value without undecodable bytes of file names, which trackers refuse."""
    return value.encode(errors="surrogateescape").decode(errors="replace") if isinstance(value, str) else value
