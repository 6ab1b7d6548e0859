"""The log of a run in its trackers: settings, epochs, examples, artifacts. Only the main process has trackers."""

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
from utils.tracking import wandb
from utils.tracking.trackers import WANDB, Tracker, requested_trackers

if TYPE_CHECKING:
    from utils.checkpoint import Progress
    from utils.config.flags import TrainOptions
    from utils.run import Run

LOGGED_IMAGES = 16  # validation images in the trackers, the same ones every time
EXAMPLES_PER_RUN = 10  # how often examples are logged if no interval is given
DEFAULT_PROJECT = "train"  # the last folder of the default --project; the trackers' project is then "lockstep"


def start_trackers(
    run: Run,
    config: Mapping[str, Any],
    step: int,
    job: str,
    run_id: str,
    project: str,
    names: Sequence[str],
    uploads: bool = False,
) -> dict[str, Any]:
    """Start trackers by name, and return what they get: `config`, the git commit and the command.

    `step` is the number of optimizer steps before the start, `job` W&B's type of the run, `project` --project.
    """
    folder, path = Path(project).name, run.path
    project = "lockstep" if folder == DEFAULT_PROJECT else folder

    def make() -> list[Tracker]:
        tracker = partial(wandb.WandbTracker, path, project, run_id, job, uploads)
        return [tracker() if name == WANDB else Tracker(name, project, path) for name in names]

    config = {**config, "git_commit": git_commit(), "command": shlex.join(sys.argv)}
    run.start_trackers(make, config, step)
    return config


class RunLog:
    """The log of a training, under `run_id` in trackers; `read_image` is `display_image` of the validation split."""

    def __init__(
        self, run: Run, options: TrainOptions, run_id: str, read_image: wandb.ImageReader, class_names: Sequence[str]
    ) -> None:
        self.run, self.options, self.run_id = run, options, run_id
        self.read_image, self.class_names = read_image, class_names
        self.metadata: dict[str, Any] = {}  # metadata of uploaded weights
        self.metrics: dict[int, dict[str, float]] = {}  # metrics of this process's epochs
        interval = options.bbox_interval
        self.examples_interval = max(options.epochs // EXAMPLES_PER_RUN, 1) if interval < 0 else interval  # epochs

    def start(self, settings: Mapping[str, Any], dataset: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
        """Start the trackers with all settings and the values that identify the data set; `saved`: of a resumed run."""
        run, options = self.run, self.options
        config = {**settings, "world_size": len(run.devices), "devices": [*run.devices], "dataset": dict(dataset)}
        step, uploads = saved["progress"]["step"] if saved else 0, options.upload_model or options.upload_dataset
        names = requested_trackers(options.log_with, options.no_wandb)
        if uploads and "wandb" not in names:
            log("warning: W&B is off: --upload-model and --upload-dataset upload nothing")
        config = start_trackers(run, config, step, "train", self.run_id, options.project, names, uploads)
        self.metadata = {name: config[name] for name in ("dataset", "command", "git_commit")}

    def log_epoch(
        self, row: Mapping[str, Any], timings: Mapping[str, float], summary: Summary | None, progress: Progress
    ) -> None:
        """Log an epoch, counted from 1: its row of results.csv, `timings`, metrics by class, and the best epoch."""
        values = {**row, "epoch": row["epoch"] + 1, **{f"epoch/{name}": value for name, value in timings.items()}}
        for metric, classes in (summary.by_class if summary else {}).items():
            values |= {f"class/{metric}/{name}": value for name, value in classes.items()}
        if best := progress.summary:
            values |= {"best/epoch": progress.best_epoch + 1, "best/fitness": progress.best}
            values |= {f"best/{name}": value for name, value in best.metrics.items()}
        self.run.log_point(values, progress.step)
        if summary:
            self.metrics[row["epoch"]] = dict(summary.metrics)

    def log_examples(self, examples: Callable[[], Sequence[Example]], epoch: int) -> None:
        """Log the same few validation images with boxes if due; the main process then calls `examples`."""
        due = self.examples_interval and (epoch % self.examples_interval == 0 or epoch + 1 == self.options.epochs)
        if due and self.run.trackers and (candidates := examples()):
            shown = [candidates[index] for index in evenly_spaced(len(candidates), LOGGED_IMAGES)]
            images = partial(wandb.example_images, shown, self.read_image, self.class_names)
            self.run.log_media(lambda: {"examples/validation": images()})

    # Artifacts

    def save_weights(self, model: nn.Module, content: Mapping[str, Any], progress: Progress, improved: bool) -> None:
        """Save `model` and `content` in weights/: last.pt, best.pt if the epoch is the best, epochN.pt when due."""
        options, epoch = self.options, progress.epoch
        names = []
        if progress.finished or not options.nosave:
            names += ["last.pt", "best.pt"] if improved else ["last.pt"]
        numbered = [f"epoch{epoch}.pt"] if options.save_period > 0 and epoch % options.save_period == 0 else []
        aliases = ["latest", *(["best"] if improved else [])]
        then = partial(self._upload, numbered[0], epoch, aliases) if numbered else bool
        self.run.files.save_weights([*names, *numbered], model, then, **content)

    def _upload(self, name: str, epoch: int, aliases: Sequence[str]) -> None:
        """Upload a file of the run's weights/, made in an epoch, if --upload-model is given."""
        if self.options.upload_model:
            file, aliases = self.run.path / "weights" / name, [*aliases, f"epoch-{epoch}"]
            metadata = {**self.metadata, "epoch": epoch, "metrics": self.metrics.get(epoch, {})}
            artifact = f"run_{self.run_id}_model"
            self.run.with_wandb(lambda run: wandb.log_artifact(run, artifact, "model", aliases, [file], metadata))

    def log_results(self, progress: Progress) -> None:
        """Upload best.pt, if it is saved, and last.pt: one version with both aliases if the last epoch was the best."""
        best, last = progress.best_epoch, progress.epoch - 1
        if progress.summary:
            self.metrics[best] = dict(progress.summary.metrics)
        if best != last and not self.options.nosave:
            self._upload("best.pt", best, ["best"])
        name, aliases = ("best.pt", ["latest", "best"]) if best == last else ("last.pt", ["latest"])
        self._upload(name, last, aliases)

    def upload_dataset(
        self, source: Path, files: Callable[[], Mapping[str, Sequence[Path]]], identity: Mapping[str, Any]
    ) -> None:
        """Log the data set, `source` (a YAML or a folder) and references to all files, as an artifact if asked for.

        `files` returns files by kind, which are folders of the artifact; `identity` is its metadata.
        """
        if not self.options.upload_dataset or not self.run.trackers:
            return
        references: list[tuple[Path, str]] = []
        for group, paths in files().items():
            existing = [path.absolute() for path in paths if path.is_file()]
            root = os.path.commonpath([path.parent for path in existing]) if existing else ""
            references += [(path, f"{group}/{path.relative_to(root)}") for path in existing]
        name, yaml = re.sub(r"[^\w.-]", "-", source.stem), [source] if source.is_file() else []
        upload = partial(wandb.log_artifact, name=name, kind="dataset", aliases=["latest"], files=yaml)
        self.run.with_wandb(lambda wandb_run: upload(wandb_run, metadata=identity, references=references))


def start_validation(run: Run, flags: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Start the trackers of a validation; `training`: settings of the run that made the weights."""
    config, project = {**flags, "training_run": training.get("wandb_id", "")}, training.get("project")
    names = requested_trackers(flags["log_with"])
    start_trackers(run, config, 0, "val", wandb_run_id(), str(project or DEFAULT_PROJECT), names)


def wandb_run_id() -> str:
    """Return the id of a new run: WANDB_RUN_ID, which sweeps set, else a random one, which must be broadcast."""
    return os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)


def git_commit() -> str:
    """Return the git commit of this code, with "+" if files have changed since; '' without a git checkout."""
    return git("describe", "--always", "--abbrev=40", "--match=", "--dirty=+").strip()


def git(*words: str) -> str:
    """Return what a git command prints about this code; '' without a git checkout."""
    if IS_INSTALLED:  # the repository around it, if there is one, is the user's
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, timeout=5, check=True).stdout
    return ""
