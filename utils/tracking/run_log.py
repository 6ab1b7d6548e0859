"""The log of a run in its trackers: settings, epochs, examples, artifacts.

Called by train.py and val.py.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from utils.console import log
from utils.files import IS_INSTALLED, ROOT
from utils.summary import Example, Summary, evenly_spaced
from utils.tracking.requested import DEFAULT_PROJECT, make_trackers
from utils.tracking.tracker import ImageReader, Tracker

if TYPE_CHECKING:
    from utils.checkpoint.training_state import Progress
    from utils.config.flags import TrainOptions
    from utils.run import Run

EXAMPLES_KEY = "examples/validation"
LOGGED_IMAGES = 16  # validation images in the trackers, the same ones every time
EXAMPLES_PER_RUN = 10  # how often examples are logged if no interval is given
TABLES = ("classes.csv",)  # logged whenever an epoch is the best so far
CHARTS = ("PR_curve.csv", "curves.csv", "mask_PR_curve.csv", "mask_curves.csv", "confusion_matrix.csv")  # logged last


class RunLog:
    """The log of a run in its trackers. Every process makes the same calls; only the main one has trackers.

    Args:
        run_id: the run's id in trackers
        shown: returns an image of the validation split by index and longest side in pixels, see `Split.shown`
        class_names: class names in the order of their numbers
    """

    def __init__(
        self, run: Run, options: TrainOptions, run_id: str, shown: ImageReader, class_names: Sequence[str]
    ) -> None:
        self.run, self.options, self.run_id, self.shown, self.class_names = run, options, run_id, shown, class_names
        self.metadata: dict[str, Any] = {}  # metadata of uploaded weights
        self.metrics: dict[int, dict[str, float]] = {}  # metrics of this process's epochs
        interval = options.bbox_interval
        self.examples_interval = max(options.epochs // EXAMPLES_PER_RUN, 1) if interval < 0 else interval  # epochs

    def start(self, settings: Mapping[str, Any], dataset: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
        """Make the trackers and log the configuration of the run.

        Args:
            settings: all settings
            dataset: values that identify the files of the data set
            saved: state of a resumed run
        """
        config = {
            **settings,
            "git_commit": git_commit(),
            "command": shlex.join(sys.argv),
            "world_size": len(self.run.devices),
            "devices": list(self.run.devices),
            "dataset": dict(dataset),
        }
        self.metadata = {"dataset": dict(dataset), "command": config["command"], "git_commit": config["git_commit"]}
        self.run.start_trackers(self._make_trackers, config, saved["progress"]["step"] if saved else 0)

    def _make_trackers(self) -> list[Tracker]:
        options, run = self.options, self.run
        uploads = options.upload_model or options.upload_dataset
        trackers, warnings = make_trackers(
            options.project,
            options.log_with,
            self.run_id,
            run.path,
            log,
            "train",
            no_wandb=options.no_wandb,
            uploads=uploads,
        )
        log(*warnings)
        return trackers

    def log_epoch(
        self, row: Mapping[str, Any], timings: Mapping[str, float], summary: Summary | None, progress: Progress
    ) -> None:
        """Log an epoch: its row of results.csv, `timings`, its metrics by class, and the best epoch so far.

        Logged epochs are counted from 1.
        """
        values = {**row, "epoch": row["epoch"] + 1, **{f"epoch/{name}": value for name, value in timings.items()}}
        for metric, classes in (summary.by_class if summary else {}).items():
            values |= {f"class/{metric}/{name}": value for name, value in classes.items()}
        if best := progress.summary:
            values |= {"best/epoch": progress.best_epoch + 1, "best/fitness": progress.best}
            values |= {f"best/{name}": value for name, value in best.metrics.items()}
        self.run.log_point(values, progress.step)
        if summary:
            self.metrics[row["epoch"]] = dict(summary.metrics)
            if progress.best_epoch == row["epoch"]:
                self._log_documents(TABLES, progress)

    def _log_documents(self, names: Sequence[str], progress: Progress) -> None:
        """Log text files of the run folder about the best epoch, if they exist."""
        if not (trackers := self.run.trackers):
            return
        files = {name: self.run.path / name for name in names}
        documents = {name: file.read_text(errors="replace") for name, file in files.items() if file.is_file()}
        for tracker in trackers:
            tracker.log_documents(documents, progress.step, progress.best_epoch)

    def log_examples(self, examples: Callable[[], Sequence[Example]], epoch: int) -> None:
        """Log validation images with their boxes if they are due in this epoch, the same images each time.

        Args:
            examples: returns the validation images; called only on the main process, and only if they are due
        """
        due = self.examples_interval and (epoch % self.examples_interval == 0 or epoch + 1 == self.options.epochs)
        trackers = self.run.trackers
        if not due or not trackers:
            return
        candidates = examples()
        chosen = [candidates[k] for k in evenly_spaced(len(candidates), LOGGED_IMAGES)]
        if chosen:
            for tracker in trackers:
                tracker.log_examples(EXAMPLES_KEY, chosen, self.shown, self.class_names, self.run.step, epoch)

    # Artifacts

    def save_weights(self, model: nn.Module, content: Mapping[str, Any], progress: Progress, improved: bool) -> None:
        """Save `model` in weights/: last.pt, best.pt if the epoch is the best so far, epochN.pt every --save-period.

        Args:
            content: what the files hold beside the tensors
        """
        options, epoch = self.options, progress.epoch
        names = []
        if progress.finished or not options.nosave:
            names += ["last.pt", "best.pt"] if improved else ["last.pt"]
        numbered = [f"epoch{epoch}.pt"] if options.save_period > 0 and epoch % options.save_period == 0 else []
        aliases = ["latest", f"epoch-{epoch}", *(["best"] if improved else [])]
        self.run.files.save_weights([*names, *numbered], model, partial(self.upload, numbered, *aliases), **content)

    def upload(self, names: Sequence[str], *aliases: str) -> None:
        """Upload files of the run's weights/ if --upload-model is given."""
        files = [self.run.path / "weights" / name for name in names]
        if not self.options.upload_model or not files:
            return
        epoch = next((int(alias.removeprefix("epoch-")) for alias in aliases if alias.startswith("epoch-")), -1)
        metadata = {**self.metadata, "epoch": epoch, "metrics": self.metrics.get(epoch, {})}
        for tracker in self.run.trackers:
            name = f"run_{self.run_id}_model"
            tracker.log_artifact(name, "model", aliases, files=files, metadata=metadata)

    def log_results(self, progress: Progress) -> None:
        """Log the curves of the best epoch, and upload last.pt and best.pt.

        The two files are one version with both aliases if the last epoch was the best.
        """
        self._log_documents(CHARTS, progress)
        last = progress.epoch - 1
        if progress.summary:
            self.metrics[progress.best_epoch] = dict(progress.summary.metrics)
        if progress.best_epoch == last:
            self.upload(["best.pt"], "latest", "best", f"epoch-{last}")
        else:
            self.upload(["best.pt"], "best", f"epoch-{progress.best_epoch}")
            self.upload(["last.pt"], "latest", f"epoch-{last}")

    def upload_dataset(
        self, source: Path, files: Callable[[], Mapping[str, Sequence[Path]]], identity: Mapping[str, Any]
    ) -> None:
        """Log the data set, its YAML and references to all files, as an artifact if --upload-dataset is given.

        Args:
            source: data set YAML, or a folder without a YAML
            files: returns files by kind; each kind is a folder of the artifact
            identity: metadata of the artifact
        """
        if not self.options.upload_dataset or not self.run.trackers:
            return
        references = []
        for kind, paths in files().items():
            existing = [str(path.absolute()) for path in paths if path.is_file()]
            root = os.path.commonpath([os.path.dirname(path) for path in existing]) if existing else ""
            references += [(path, f"{kind}/{os.path.relpath(path, root)}") for path in existing]
        name, yaml = re.sub(r"[^\w.-]", "-", source.stem), [source] if source.is_file() else []
        for tracker in self.run.trackers:
            tracker.log_artifact(
                name, "dataset", ["latest"], files=yaml, references=references, metadata=identity, is_input=True
            )


class ValidationLog:
    """The log of a run of val.py in its trackers, joined to the training run of the weights.

    Every process makes the same calls; only the main one has trackers.
    """

    def __init__(self, run: Run, flags: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        """Start the trackers that the flags name.

        Args:
            training: settings of the training run that made the weights
        """
        self.run = run
        config = {**flags, "git_commit": git_commit(), "command": shlex.join(sys.argv)}
        config["training_run"] = training.get("wandb_id", "")

        def make() -> list[Tracker]:
            if flags["log_with"] == "none":
                return []
            project = str(training.get("project") or DEFAULT_PROJECT)
            trackers, warnings = make_trackers(project, flags["log_with"], wandb_run_id(), run.path, log, "val",
                inputs=[f"run_{training['wandb_id']}_model:best"] if training.get("wandb_id") else [],
            )  # fmt: skip
            log(*warnings)
            return trackers

        run.start_trackers(make, config, 0)

    def log(self, values: Mapping[str, Any], documents: Mapping[str, str]) -> None:
        """Log the values of the validation by key, and its text files by name."""
        self.run.log_point({**values, "epoch": 0}, 0)
        for tracker in self.run.trackers:
            tracker.log_documents(documents, 0, 0)


def wandb_run_id() -> str:
    """Return the id of a new run for trackers: WANDB_RUN_ID, else a random one.

    W&B sweeps set WANDB_RUN_ID. Random ids differ between processes, so the main process's id must be broadcast.
    """
    return os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)


def git_commit() -> str:
    """Return the git commit of this code, with "+" if files have changed since; '' without a git checkout."""
    if IS_INSTALLED:  # the repository around it, if there is one, is the user's
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--match=", "--dirty=+"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""
