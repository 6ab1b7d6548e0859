"""The process that logs to a tracker of Accelerate. utils/tracking/accelerate_tracker.py starts it with `main`."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from utils.errors import UserError
from utils.tracking.log_position import LogPosition
from utils.tracking.message_loop import Session, serve
from utils.tracking.tracker import EPOCH, STEP

MLFLOW_STORE = "mlruns"  # in the folder of the run folders, unless the variable MLFLOW_TRACKING_URI names another one
MLFLOW_DATABASE = "mlflow.db"  # instead, if SQLAlchemy is installed, as with the whole mlflow


class AccelerateSession(Session):
    """A run of one of Accelerate's trackers; its methods are the messages that `AccelerateTracker` sends."""

    def start(
        self, tracker: str, folder: str, run: Mapping[str, Any], config: Mapping[str, Any], timeout: float
    ) -> None:
        """Start the run, or continue the one of this folder. tracker: its name. run: project, name and id."""
        self.title, path = tracker, Path(folder)
        kind = LOGGER_TYPE_TO_CLASS.get(tracker)
        if kind is None:
            raise UserError(f"this version of accelerate has no tracker {tracker}: pip install -U accelerate")
        PartialState(cpu=True)  # Accelerate's trackers ask it for the rank
        self.position = LogPosition(path / f".{tracker}.json", run["id"])
        self.tracker = kind(**_arguments(tracker, path, run, self.position))
        self.tracker.start()
        self.started = True
        if tracker == "mlflow":
            self.position.remote_id = self.tracker.tracker.info.run_id
        if not self.position.continues:
            self.tracker.store_init_configuration(_flat(config))
        self.position.store()

    def log(self, values: Mapping[str, Any], step: int, axis: str) -> None:
        """Log numbers by key at an optimizer step. axis: the key of their x axis."""
        if not self.position.logged_before(axis, values[axis]):
            # The axes are left out: MLflow's files cannot hold a key "epoch" and keys that begin with "epoch/".
            kept = {_accepted(key): value for key, value in values.items() if key not in (STEP, EPOCH)}
            self.tracker.log(kept, step=step)
            self.position.advance(axis, values[axis])

    def finish(self, code: int = 0) -> None:
        self.tracker.finish()


def _arguments(tracker: str, folder: Path, run: Mapping[str, Any], position: LogPosition) -> dict[str, Any]:
    """Return the arguments of Accelerate's class for a tracker."""
    project, name = run["project"], run["name"]
    if tracker == "mlflow":
        _choose_mlflow_store(folder.parent)
        return {"experiment_name": project, "run_name": name, "run_id": position.remote_id or None}
    by_tracker: dict[str, dict[str, Any]] = {
        "trackio": {"name": f"{name}-{run['id']}", "resume": "allow"},
        "aim": {"logging_dir": str(folder.parent)},
        "dvclive": {"dir": str(folder / "dvclive"), "resume": position.continues},
    }
    return {"run_name": name if tracker == "aim" else project, **by_tracker.get(tracker, {})}


def _accepted(key: str) -> str:
    """Return a key in the characters that all trackers accept: MLflow refuses those of `mAP_0.5(B)`."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _choose_mlflow_store(folder: Path) -> None:
    """Store MLflow's runs in a folder, unless the environment names a store; its default is the current folder."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return
    if importlib.util.find_spec("sqlalchemy"):
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / MLFLOW_DATABASE}"
    else:
        os.environ["MLFLOW_TRACKING_URI"] = (folder / MLFLOW_STORE).as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which newer versions ask for


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
