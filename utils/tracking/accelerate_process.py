"""The process that logs to a tracker of Accelerate. utils/tracking/accelerate_tracker.py starts it with `main`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from utils.errors import UserError, first_line
from utils.tracking.log_position import LogPosition
from utils.tracking.message_loop import Session, serve
from utils.tracking.tracker import EPOCH, STEP
from utils.tracking.tracker_arguments import OFFLINE, Place, accepted, arguments, missing_key, remote_id

START_SECONDS = 120.0  # time limit of a tracker to start its run; some wait for minutes for a server


class AccelerateSession(Session):
    """A run of one of Accelerate's trackers; its methods are the messages that `AccelerateTracker` sends."""

    start_seconds = START_SECONDS

    def start(
        self, tracker: str, folder: str, run: Mapping[str, Any], config: Mapping[str, Any], timeout: float
    ) -> None:
        """Start the run, or continue the one of this folder. tracker: its name. run: project, name and id."""
        self.title, path = tracker, Path(folder)
        if tracker not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"this version of accelerate has no tracker {tracker}: pip install -U accelerate")
        PartialState(cpu=True)  # Accelerate's trackers ask it for the rank
        self.position = LogPosition(path / f".{tracker}.json", run["id"])
        self.tracker = self._start(tracker, Place(path, run, self.position))
        self.started = True
        self.position.remote_id = remote_id(tracker, self.tracker)
        if not self.position.continues:
            self.tracker.store_init_configuration(_flat(config))
        self.position.store()

    def _start(self, name: str, place: Place) -> Any:
        """Return the started tracker. If that fails and the tracker can store a run without its server, it does."""
        reason = missing_key(name)
        if not reason:
            try:
                return _started(name, place)
            except ImportError:
                raise
            except Exception as error:
                if name not in OFFLINE:
                    raise
                reason = first_line(error)
        upload = OFFLINE[name](place.folder)
        tracker = _started(name, place)
        self.reply(f"{name}: {reason}; the run is stored on this machine, upload it with: {upload}")
        return tracker

    def log(self, values: Mapping[str, Any], step: int, axis: str) -> None:
        """Log numbers by key at an optimizer step. axis: the key of their x axis."""
        if not self.position.logged_before(axis, values[axis]):
            # The axes are left out: MLflow's files cannot hold a key "epoch" and keys that begin with "epoch/".
            kept = {key: value for key, value in values.items() if key not in (STEP, EPOCH)}
            self.tracker.log(accepted(self.title, kept), step=step)
            self.position.advance(axis, values[axis])

    def finish(self, code: int = 0) -> None:
        self.tracker.finish()


def _started(name: str, place: Place) -> Any:
    tracker: Any = LOGGER_TYPE_TO_CLASS[name](**arguments(name, place))
    tracker.start()
    return tracker


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping with keys such as `hyperparameters.lr0`; lists become text."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


def main() -> None:
    """Serve a run."""
    sys.argv = sys.argv[1:]
    serve(AccelerateSession)
