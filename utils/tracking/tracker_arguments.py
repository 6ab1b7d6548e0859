"""Start Accelerate's trackers for a run: arguments, folders, and modes without a server.

Used by accelerate_tracker.py. The packages are imported when they are used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from utils.tracking.log_position import LogPosition

MLFLOW_STORE = "mlruns"  # folder beside the run folders, unless the variable MLFLOW_TRACKING_URI names another store
MLFLOW_DATABASE = "mlflow.db"  # used instead if SQLAlchemy is installed, as it is with the full mlflow package


class RunLocation(NamedTuple):
    """The facts about a run that a tracker needs.

    Attributes:
        folder: the run folder
        run: `project`, `name` and `id` of the run
        position: last position that an earlier process logged
    """

    folder: Path
    run: Mapping[str, Any]
    position: LogPosition


def arguments(tracker: str, location: RunLocation) -> dict[str, Any]:
    """Return the arguments of Accelerate's class for a tracker."""
    return {"run_name": location.run["project"], **TRACKER_ARGUMENTS.get(tracker, lambda _: {})(location)}


def _mlflow(location: RunLocation) -> dict[str, Any]:
    # Otherwise MLflow logs the tables of its database. The variable has no effect once MLflow is imported.
    logging.getLogger("mlflow").setLevel(os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING").upper())
    _choose_mlflow_store(location.folder.parent)
    project, name = location.run["project"], location.run["name"]
    return {"experiment_name": project, "run_name": name, "run_id": location.position.remote_id or None}


def _choose_mlflow_store(folder: Path) -> None:
    """Store MLflow's runs in `folder`, unless the environment names a store; MLflow's default is the current folder."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # by default MLflow tries for minutes
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return
    if importlib.util.find_spec("sqlalchemy"):
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / MLFLOW_DATABASE}"
    else:
        os.environ["MLFLOW_TRACKING_URI"] = (folder / MLFLOW_STORE).as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions require it


def _trackio(location: RunLocation) -> dict[str, Any]:
    return {"name": f"{location.run['name']}-{location.run['id']}", "resume": "allow"}


def _comet(location: RunLocation) -> dict[str, Any]:
    from comet_ml import ExperimentConfig

    directory = os.environ.get("COMET_OFFLINE_DIRECTORY") or str(location.folder / "comet")
    # The key needs at least 32 characters; it is made from the run's id, so that a resumed run continues the same one.
    key = hashlib.md5(location.run["id"].encode(), usedforsecurity=False).hexdigest()
    # Neither code nor what this process prints is uploaded, unless the user's own settings ask for it.
    for name in ("COMET_AUTO_LOG_CODE", "COMET_AUTO_LOG_GIT_PATCH"):
        os.environ.setdefault(name, "false")
    config = ExperimentConfig(
        name=location.run["name"], offline_directory=directory, parse_args=False, auto_output_logging=False
    )
    return {"experiment_key": key, "mode": "get_or_create", "experiment_config": config}


def _clearml(location: RunLocation) -> dict[str, Any]:
    # ClearML would otherwise record this process's imports, output and arguments. Its search for a repository hangs if
    # ClearML forks at the moment when the search starts git.
    frameworks = dict.fromkeys(("detect_repository", "pytorch", "tensorboard", "tensorflow", "matplotlib"), False)
    automatic = dict.fromkeys(("auto_connect_arg_parser", "auto_connect_streams"), False)
    return {
        "task_name": location.run["name"],
        "reuse_last_task_id": False,
        "auto_connect_frameworks": frameworks,
        **automatic,
    }


def _aim(location: RunLocation) -> dict[str, Any]:
    continued = {"run_hash": location.position.remote_id} if location.position.remote_id else {}
    repository = {"logging_dir": str(location.folder.parent), "experiment": location.run["project"]}
    return {"run_name": location.run["name"], **repository, **continued, "capture_terminal_logs": False}


def _dvclive(location: RunLocation) -> dict[str, Any]:
    folder = location.folder / "dvclive"
    # Otherwise DVCLive writes dvc.yaml and a commit into the repository of the current folder.
    return {"dir": str(folder), "resume": location.position.continues, "dvcyaml": None, "save_dvc_exp": False}


def _swanlab(location: RunLocation) -> dict[str, Any]:
    folder = os.environ.get("SWANLAB_LOG_DIR") or str(location.folder / "swanlab")
    return {"name": location.run["name"], "log_dir": folder, "id": location.run["id"], "resume": "allow"}


TRACKER_ARGUMENTS: dict[str, Callable[[RunLocation], dict[str, Any]]] = {
    "mlflow": _mlflow,
    "trackio": _trackio,
    "comet_ml": _comet,
    "clearml": _clearml,
    "aim": _aim,
    "dvclive": _dvclive,
    "swanlab": _swanlab,
}


def remote_id(tracker: str, started: Any) -> str:
    """Return the id that a tracker gave to its run, if it is needed to continue the run; else ''."""
    if tracker == "mlflow":
        return str(started.tracker.info.run_id)
    return str(started.tracker.hash) if tracker == "aim" else ""


def accepted(tracker: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under keys that a tracker accepts: MLflow refuses the characters of `mAP_0.5(B)`."""
    renamed = {re.sub(r"[^\w\-. :/]", "_", key): value for key, value in values.items()}
    if tracker == "dvclive":  # "step" is a number in its files
        return {re.sub("^step/", "steps/", key): value for key, value in renamed.items()}
    if tracker == "clearml":  # it would log 0 instead
        return {key: value for key, value in renamed.items() if math.isfinite(value)}
    return renamed


# Without a server


def missing_key(tracker: str) -> str:
    """Return why a tracker cannot reach its server; '' if only an attempt can tell.

    Without this check Comet would try for 20 s even without a key.
    """
    if tracker != "comet_ml" or os.environ.get("COMET_START_ONLINE"):
        return ""
    config = importlib.import_module("comet_ml.config").get_config()
    return "" if config["comet.api_key"] else "there is no API key (comet login)"


def _comet_offline(folder: Path) -> str:
    os.environ["COMET_START_ONLINE"] = "0"
    return f"comet upload {os.environ.get('COMET_OFFLINE_DIRECTORY') or folder / 'comet'}/*.zip"


def _clearml_offline(folder: Path) -> str:
    os.environ.setdefault("CLEARML_CACHE_DIR", str(folder / "clearml"))
    importlib.import_module("clearml").Task.set_offline(True)
    return f"clearml-task --import-offline-session {os.environ['CLEARML_CACHE_DIR']}/offline/*.zip"


def _swanlab_offline(folder: Path) -> str:
    os.environ["SWANLAB_MODE"] = "offline"
    return f"swanlab sync {os.environ.get('SWANLAB_LOG_DIR') or folder / 'swanlab'}/run-*"


# For trackers that can store a run without their server: switch to that mode, and return the command for the upload.
OFFLINE: dict[str, Callable[[Path], str]] = {
    "comet_ml": _comet_offline,
    "clearml": _clearml_offline,
    "swanlab": _swanlab_offline,
}
