"""The base class of trackers, the axes of logged values, and the trackers that flags and environment request.

Used by utils/tracking/requested.py, which makes the trackers, and utils/run.py, on the main process only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate.tracking import GeneralTracker

from utils.config.flags import TRACKERS
from utils.config.values import PYTHON_SUFFIX
from utils.summary import Example

STEP, EPOCH = "step", "epoch"  # the two axes: optimizer steps since the start of the run, and its epochs


class Axis(NamedTuple):
    """The x axis of the keys that match a pattern, and how W&B shows them.

    Attributes:
        pattern: a key, or the beginning of keys and `*`
        axis: key of the x axis, '' for an axis itself
        summary: value that the table of runs shows for a run: `max`, `min`, or '' for the last value
        is_hidden: whether W&B makes no charts of the keys
    """

    pattern: str
    axis: str = EPOCH
    summary: str = ""
    is_hidden: bool = False


AXES = (
    Axis(STEP, ""),
    Axis(EPOCH, ""),
    Axis("step/*", STEP),
    Axis("train/*"),
    Axis("val/*", summary="min"),  # losses
    Axis("metrics/*", summary="max"),
    *map(Axis, ("x/*", "epoch/*", "best/*")),
    Axis("class/*", is_hidden=True),  # hundreds of charts if there are many classes
)
WANDB, TENSORBOARD = "wandb", "tensorboard"  # also the names of the packages to install
WITH_OWN_TRACKERS = (WANDB, TENSORBOARD)  # the other trackers are Accelerate's
FINISH_SECONDS = 60.0  # time limit of a tracker to send the rest at the end of a run
Print = Callable[[str], object]  # prints a line on the console
ImageReader = Callable[[int, int], np.ndarray]  # returns an image by its index and longest side in pixels


def axis_of(values: Mapping[str, Any]) -> str:
    """Return the key of the x axis of `values`."""
    return EPOCH if EPOCH in values else STEP


class Tracker(GeneralTracker):
    """An Accelerate tracker that also takes pictures, examples, artifacts and console output.

    Methods neither wait nor raise, except that `finish` waits. Each does nothing unless a subclass overrides it.
    """

    main_process_only = True
    requires_logging_directory = False

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log numbers by key at an optimizer step; the key "step" or "epoch" is the x axis of the others."""

    def log_pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Log picture files by key at an optimizer step."""

    def log_examples(
        self,
        key: str,
        examples: Sequence[Example],
        shown: ImageReader,
        names: Sequence[str],
        step: int,
        epoch: int,
    ) -> None:
        """Log images with boxes, and masks if there are any, that can be switched on and off.

        Args:
            shown: returns an image by its index and longest side in pixels, uint8 (h, w, 3) BGR
            names: class names
        """

    def log_artifact(
        self,
        name: str,
        kind: str,
        aliases: Sequence[str],
        files: Sequence[Path] = (),
        references: Sequence[tuple[str, str]] = (),
        metadata: Mapping[str, Any] | None = None,
        is_input: bool = False,
    ) -> None:
        """Log a version of an artifact.

        Args:
            files: files to upload
            references: pairs of a path and a name in the artifact; only the path is stored, not the file
            is_input: whether the run reads the artifact instead of making it
        """

    def log_documents(self, documents: Mapping[str, str], step: int, epoch: int) -> None:
        """Log text files of the best epoch so far, by file name, as tables and interactive charts."""

    def log_line(self, text: str) -> None:
        """Log a line of the console output."""

    def fail(self, reason: str) -> None:
        """Log why the run is about to end with an error; return within a second."""

    def finish(self, timeout: float = FINISH_SECONDS) -> None:
        """Send the remaining data and close the run, within `timeout` seconds."""


def requested_trackers(log_with: str, no_wandb: bool) -> tuple[list[str], list[str]]:
    """Return the names of the trackers to use, and warnings about packages that are not installed.

    A user's tracker has the name of its file.

    Args:
        log_with: value of --log-with; '' is W&B if it is installed, without a warning if it is not; `all` is W&B,
            TensorBoard, and the other trackers that are installed
        no_wandb: whether --no-wandb is given
    """
    disabled = os.environ.get("WANDB_MODE") == "disabled"
    disabled |= os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
    every = [name for name in TRACKERS if name in WITH_OWN_TRACKERS or _is_installed(name)]
    given = (Path(word).stem if word.endswith(PYTHON_SUFFIX) else word for word in log_with.split(","))
    names = {"": [WANDB], "none": [], "all": every}.get(log_with, list(dict.fromkeys(given)))
    names = [name for name in names if name != WANDB or not (no_wandb or disabled)]
    missing = [name for name in names if not _is_installed(name)]
    warnings = [f"warning: {name} is not installed, so nothing is logged there: pip install {name}" for name in missing]
    return [name for name in names if name not in missing], warnings if log_with else []


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # no origin: a folder of that name in the current one
