"""The tracker for Weights & Biases: Accelerate's, with pictures, examples, artifacts and resumed runs.

Made by utils/tracking/requested.py. The package is imported when a run starts.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import WandBTracker

from utils.errors import UserError, first_line
from utils.files import ROOT
from utils.summary import Example
from utils.tracking.accelerate_tracker import AccelerateTracker
from utils.tracking.tracker import AXES, EPOCH, FINISH_SECONDS, WANDB, Axis, ImageReader, Print, axis_of
from utils.tracking.wandb_file import last_logged
from utils.tracking.wandb_media import EXAMPLE_PIXELS, charts, image_with_boxes

UPLOAD_SECONDS = 900.0  # time to send the rest at the end of a run that uploads artifacts
CONNECT_SECONDS = 30.0  # time to reach the server, unless the variable WANDB_INIT_TIMEOUT gives another number
FLUSH_SECONDS = 1.0  # interval of the writes of W&B's file, so the most that a killed run loses


class WandbTracker(AccelerateTracker):
    """A W&B run. `accelerator.get_tracker("wandb", unwrap=True)` returns the `wandb.Run` itself.

    Args:
        folder: the run folder
        run: arguments of `wandb.init` (project, entity, group, tags, name, id, dir, ...)
        print_line: prints a line on the console
        timeout: seconds to send the rest at the end of the run
        inputs: names of artifacts that the run uses, if they exist
    """

    title = "W&B"

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        print_line: Print,
        timeout: float = FINISH_SECONDS,
        inputs: Sequence[str] = (),
    ) -> None:
        os.environ["WANDB_SILENT"] = "true"
        super().__init__(WANDB, folder, run, print_line, timeout)
        self.inputs, self.code = inputs, 0

    def log_pictures(self, files: Mapping[str, Path], step: int) -> None:
        self._do(lambda: self._write({key: self.wandb.Image(str(file)) for key, file in files.items()}, step))

    def log_examples(
        self,
        key: str,
        examples: Sequence[Example],
        shown: ImageReader,
        names: Sequence[str],
        step: int,
        epoch: int,
    ) -> None:
        def log() -> None:
            if self._lacks(key, epoch):
                images = [shown(example.image, EXAMPLE_PIXELS) for example in examples]
                shape = np.max([image.shape[:2] for image in images], axis=0).tolist()  # W&B warns of several sizes
                each = zip(examples, images, strict=True)
                self._write({key: [image_with_boxes(self.wandb, *pair, names, shape) for pair in each]}, step)

        self._do(log)

    def log_documents(self, documents: Mapping[str, str], step: int, epoch: int) -> None:
        def log() -> None:
            made = charts(self.wandb, documents)
            if new := {key: value for key, value in made.items() if self._lacks(key, epoch)}:
                self._write(new, step)

        self._do(log)

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
        def log() -> None:
            artifact = self.wandb.Artifact(name, type=kind, metadata=dict(metadata or {}))
            for file in files:
                artifact.add_file(str(file.absolute()))
            for path, title in references:
                address = Path(path).absolute().as_uri()
                artifact.add_reference(address, name=title, checksum=False, max_objects=10_000_000)
            if is_input:
                # `use_artifact` refuses to work offline, and online it waits for the upload.
                self.inner.run._log_artifact(
                    artifact, aliases=list(aliases), is_user_created=True, use_after_commit=True
                )
            else:
                self.inner.run.log_artifact(artifact, aliases=list(aliases))

        self._do(log)

    def log_line(self, text: str) -> None:
        self._do(lambda: self.inner.run.write_logs(f"{text}\n"))

    def fail(self, reason: str) -> None:
        def note() -> None:
            self.code = 1

        self._do(note)
        super().fail(reason)

    # In the thread

    def _start(self, config: Mapping[str, Any]) -> None:
        """Start the run, or continue the run with this id: online if possible, else on this machine."""
        import wandb

        self.wandb = wandb
        mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
        if mode == "disabled":
            return
        arguments = {"dir": str(self.folder), **self.run, "config": dict(config), "resume": "allow"}
        arguments["settings"] = self._settings()
        offline_reason = "offline" if mode in ("offline", "dryrun") else ""
        if not offline_reason and not has_key():
            offline_reason = "not logged in (wandb login), so the run is stored on this machine"
        tracker = None if offline_reason else self._started_online(arguments)
        self.is_offline = tracker is None
        if tracker is None:
            tracker = started(arguments, "offline")
            reason = offline_reason or "the run is stored on this machine"
            self.print_line(f"W&B: {reason}; upload it with: wandb sync {Path(tracker.run.dir).parent}")
        else:
            self.print_line(f"W&B: {tracker.run.url}")
        self._defined: set[str] = set()  # keys with dots
        for axis in AXES:
            define(tracker.run, axis)
        kinds = "*run-*" if self.is_offline else "offline-run-*"  # the server knows the epochs of online runs
        own = Path(tracker.run.dir).parent
        parts = [part for part in self._wandb_folder.glob(f"{kinds}-{self.run['id']}") if part != own]
        self._last = last_logged(file for part in parts for file in part.glob("*.wandb"))
        if not self.is_offline and tracker.run.resumed:
            for key in dict(tracker.run.summary):
                self._last[key] = max(self._last.get(key, -math.inf), tracker.run.summary.get(EPOCH, 0))
            self._last["step"] = max(self._last.get("step", 0), tracker.run.summary.get("step", 0))
        self.inner = tracker
        if parts or not self.is_offline:  # otherwise it is unknown what the server has received
            self._log_lost_epochs()
        for name in self.inputs:
            if not self.is_offline:
                with suppress(Exception):  # the training run may not have uploaded it
                    tracker.run.use_artifact(name)

    @property
    def _wandb_folder(self) -> Path:
        return Path(self.run.get("dir") or self.folder) / "wandb"

    def _settings(self) -> Any:
        """Return wandb's settings, without settings that an older version lacks."""
        known = getattr(self.wandb.Settings, "model_fields", {})
        newer: dict[str, Any] = {"finish_timeout": self.timeout, "x_transaction_log_flush_interval": FLUSH_SECONDS}
        newer["console"] = "off"  # `log_line` writes what this program prints

        def stop() -> None:
            self.print_line("W&B: the run is stopped from its page")
            os.kill(os.getpid(), signal.SIGTERM)

        newer["stop_fn"] = stop  # called by the button "stop" on the run's page
        if (ROOT / ".git").exists():  # this repository's, whatever the current folder is
            newer["git_root"] = str(ROOT)
        chosen = {name: value for name, value in newer.items() if name in known}
        return self.wandb.Settings(init_timeout=connect_timeout(), **chosen)

    def _started_online(self, arguments: Mapping[str, Any]) -> Any:
        """Return the tracker of a run on the server, None after a warning if that fails."""
        before = set(self._wandb_folder.glob("run-*"))
        try:
            return started(arguments, "online")
        except Exception as error:
            self.print_line(f"warning: W&B: {first_line(error, 1000)}; training continues")
            self.wandb.teardown(1)
            for folder in set(self._wandb_folder.glob("run-*")) - before:
                shutil.rmtree(folder, ignore_errors=True)
            return None

    def _log_lost_epochs(self) -> None:
        """Log the epochs that results.csv had and W&B lacks, because an earlier process was killed."""
        for values in self._earlier:
            if values[EPOCH] > self._last.get(EPOCH, 0):
                self._define_dotted(values)
                self.inner.run.log(values)
                self._last[EPOCH] = values[EPOCH]

    def _lacks(self, key: str, epoch: int) -> bool:
        """Return whether no earlier process has logged a picture, table or chart of an epoch, counted from 0."""
        logged = (self._last.get(name, -math.inf) for name in (key, f"{key}_table"))  # W&B's name of a chart's values
        return epoch + 1 > max(logged)

    def _log(self, values: dict[str, Any], step: int) -> None:
        axis = axis_of(values)
        if values[axis] > self._last.get(axis, -math.inf):
            self._define_dotted(values)
            self._write(values, step)

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        run = self.inner.run
        run.log(dict(values), step=max(step, run.step))  # wandb drops values of steps before its last

    def _define_dotted(self, keys: Iterable[str]) -> None:
        """Define keys with dots singly, because in patterns W&B takes a dot for a nested value and ignores the key."""
        for key in keys:
            if "." in key and key not in self._defined:
                self._defined.add(key)
                for axis in AXES:
                    if axis.pattern.endswith("*") and key.startswith(axis.pattern[:-1]):
                        define(self.inner.run, axis._replace(pattern=key.replace(".", r"\.")))

    def _close(self) -> None:
        self.inner.run.finish(exit_code=self.code)

    def _where_the_rest_is(self) -> str:
        return f"upload it with: wandb sync --include-online {self._wandb_folder}/*run-*-{self.run['id']}"


def started(arguments: Mapping[str, Any], mode: str) -> Any:
    """Return Accelerate's tracker of a started run.

    Args:
        arguments: arguments of `wandb.init`
        mode: online or offline
    """
    rest = {name: value for name, value in arguments.items() if name != "project"}
    tracker = WandBTracker(arguments["project"], mode=mode, **rest)
    tracker.start()
    for handler in logging.getLogger("wandb").handlers:  # they write into the run folder, whose disk may be full
        handler.handleError = lambda record: None  # type: ignore[method-assign]  # else a traceback for every line
    return tracker


def define(run: Any, axis: Axis) -> None:
    """Define how W&B shows a key, or keys by a pattern."""
    how = {"step_metric": axis.axis or None, "summary": axis.summary or None, "hidden": axis.is_hidden or None}
    run.define_metric(axis.pattern, **how)


def connect_timeout() -> float:
    """Return the seconds that wandb has to reach the server."""
    return float(os.environ.get("WANDB_INIT_TIMEOUT") or CONNECT_SECONDS)


def has_key() -> bool:
    """Return whether wandb finds a key for its server in any of its places, without asking the user or connecting."""
    os.environ["WANDB_SILENT"] = "true"  # otherwise wandb asks the server for the name of the user
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    newer: dict[str, Any] = {"prompt": False}
    known = inspect.signature(wandb.login).parameters
    try:
        return bool(wandb.login(verify=False, **{name: value for name, value in newer.items() if name in known}))
    except (AuthenticationError, UsageError):  # the key has a wrong form, or there is neither a key nor a terminal
        return False


def download_artifact(name: str, folder: Path) -> list[Path]:
    """Download an artifact, entity/project/name:alias, and return its files. Raises `UserError`."""
    try:
        import wandb
    except ImportError:
        raise UserError("wandb is not installed: pip install wandb") from None
    try:
        if not has_key():
            raise UserError("there is no API key for W&B: wandb login")
        artifact = wandb.Api(timeout=math.ceil(connect_timeout())).artifact(name)
        artifact.download(root=str(folder))
        return [folder / file.name for file in artifact.files()]
    except UserError:
        raise
    except Exception as error:
        raise UserError(first_line(error, 1000)) from None
