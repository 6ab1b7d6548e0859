"""The log of a training run in its trackers and on the Hub: settings, epochs, examples, artifacts.

Called by train.py.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from utils.files import ROOT
from utils.summary import Example, Summary, evenly_spaced
from utils.tracking.hub import UNKNOWN_LICENCE, login_problem, model_card, push_run
from utils.tracking.tensorboard import TensorBoardTracker
from utils.tracking.tracker import FINISH_SECONDS, TENSORBOARD, WANDB, Tracker, requested_trackers
from utils.tracking.wandb import UPLOAD_SECONDS, WandbTracker

if TYPE_CHECKING:
    from models.tasks.contract import Task
    from utils.checkpoint.progress import Progress

EXAMPLES_KEY = "examples/validation"
EXAMPLES_PER_RUN = 10  # times that examples are logged if no interval is given
OFFICIAL_LICENCE = "agpl-3.0"  # on the Hub, of YOLOv5's release files and of what is trained from them
DEFAULT_PROJECT = "train"  # the last folder of the default --project; W&B's project is then "lockstep"
ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 8


@dataclass(frozen=True)
class TrackingOptions:
    """The settings of a run's trackers, named like their flags."""

    project: str
    epochs: int
    log_with: str = ""
    no_wandb: bool = False
    wandb_project: str = ""
    wandb_entity: str = ""
    wandb_group: str = ""
    wandb_tags: tuple[str, ...] = ()
    wandb_name: str = ""
    wandb_id: str = ""
    bbox_interval: int = -1  # epochs; -1: `EXAMPLES_PER_RUN` times, 0: never
    max_images: int = 16
    upload_model: bool = False
    upload_dataset: bool = False
    push_to_hub: str = ""
    argv: tuple[str, ...] = ()  # the command line


class LoggedRun(Protocol):
    """The part of `utils.run.Run` that a log uses."""

    path: Path
    devices: list[str]  # of the processes
    step: int  # the last optimizer step with a logged value

    @property
    def trackers(self) -> list[Tracker]: ...
    def print(self, *lines: str) -> None: ...
    def start_trackers(self, make: Callable[[], list[Tracker]], config: Mapping[str, Any], step: int) -> None: ...
    def log_point(self, values: Mapping[str, Any], step: int) -> None: ...


class RunLog:
    """The log of a run in its trackers. Every process makes the same calls; only the main one has trackers.

    images: files of the validation split. class_names: in the order of their numbers.
    """

    def __init__(
        self, run: LoggedRun, options: TrackingOptions, images: Sequence[Path], class_names: Sequence[str]
    ) -> None:
        self.run, self.options, self.images, self.class_names = run, options, images, class_names
        interval = options.bbox_interval
        self.examples_interval = max(options.epochs // EXAMPLES_PER_RUN, 1) if interval < 0 else interval  # epochs

    def start(self, settings: Mapping[str, Any], dataset: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
        """Make the trackers and log the configuration of the run.

        settings: all settings. dataset: identifies the files of the data set. saved: the state of a resumed run.
        """
        config = {
            **settings,
            "git_commit": git_commit(),
            "command": shlex.join(sys.argv),
            "world_size": len(self.run.devices),
            "devices": list(self.run.devices),
            "dataset": dict(dataset),
        }
        self.run.start_trackers(self._make_trackers, config, saved["progress"]["step"] if saved else 0)

    def _make_trackers(self) -> list[Tracker]:
        options, run = self.options, self.run
        names, warnings = requested_trackers(options.log_with, options.no_wandb)
        if options.push_to_hub and (problem := login_problem()):
            warnings.append(f"warning: --push-to-hub will fail at the end of the run unless you act: {problem}")
        run.print(*warnings)
        trackers: list[Tracker] = []
        if WANDB in names:
            timeout = UPLOAD_SECONDS if options.upload_model or options.upload_dataset else FINISH_SECONDS
            trackers.append(WandbTracker(run.path, wandb_arguments(options, run.path), run.print, timeout))
        if TENSORBOARD in names:
            trackers.append(TensorBoardTracker(run.path, options.wandb_id, run.print))
        return trackers

    def log_epoch(
        self, row: Mapping[str, Any], timings: Mapping[str, float], summary: Summary | None, progress: Progress
    ) -> None:
        """Log an epoch: its row of results.csv, `timings`, its metrics by class, and the best epoch so far.

        Epochs are logged from 1, as people count them.
        """
        values = {**row, "epoch": row["epoch"] + 1, **{f"epoch/{name}": value for name, value in timings.items()}}
        for metric, classes in (summary.by_class if summary else {}).items():
            values |= {f"class/{metric}/{name}": value for name, value in classes.items()}
        if best := progress.summary:
            values |= {"best/epoch": progress.best_epoch + 1, "best/fitness": progress.best}
            values |= {f"best/{name}": value for name, value in best.metrics.items()}
        self.run.log_point(values, progress.step)

    def log_examples(self, examples: Callable[[], Sequence[Example]], epoch: int) -> None:
        """Log validation images with their boxes if they are due in this epoch, the same images each time.

        examples: returns them; called on the main process only, and only if they are due.
        """
        due = self.examples_interval and (epoch % self.examples_interval == 0 or epoch + 1 == self.options.epochs)
        trackers = self.run.trackers
        if not due or not trackers:
            return
        candidates = examples()
        chosen = [candidates[k] for k in evenly_spaced(len(candidates), self.options.max_images)]
        content = [
            {
                "file": str(self.images[example.image]),
                "name": example.name,
                "labels": [box._asdict() for box in example.labels],
                "predictions": [box._asdict() for box in example.predictions],
                "label_outlines": [list(outline) for outline in example.label_outlines],
                "prediction_outlines": [list(outline) for outline in example.prediction_outlines],
            }
            for example in chosen
        ]
        if content:
            for tracker in trackers:
                tracker.log_examples(EXAMPLES_KEY, content, self.class_names, self.run.step, epoch)

    # Artifacts

    def upload(self, names: Sequence[str], *aliases: str) -> None:
        """Upload files of the run's weights/ with --upload-model."""
        files = [self.run.path / "weights" / name for name in names]
        if self.options.upload_model and files:
            for tracker in self.run.trackers:
                tracker.log_artifact(f"run_{self.options.wandb_id}_model", "model", aliases, files=files)

    def upload_last(self, progress: Progress) -> None:
        """Upload last.pt and best.pt; one version with both aliases if the last epoch was the best."""
        last = progress.epoch - 1
        if progress.best_epoch == last:
            self.upload(["best.pt"], "latest", "best", f"epoch-{last}")
        else:
            self.upload(["best.pt"], "best", f"epoch-{progress.best_epoch}")
            self.upload(["last.pt"], "latest", f"epoch-{last}")

    def push(self, task: Task, best: Summary, content: Mapping[str, Any]) -> None:
        """Upload the results to the Hub with --push-to-hub. Called on the main process, when the run has finished.

        content: of the weight files, beside the tensors.
        """
        if not (repository := self.options.push_to_hub):
            return
        settings = content["settings"]
        is_official = re.fullmatch(task.official_weights, Path(settings["weights"]).name)
        card = model_card(
            repository,
            data=Path(settings["data"]).stem,
            tag=task.hub_tag,
            licence=OFFICIAL_LICENCE if is_official else UNKNOWN_LICENCE,
            values=best.metrics,
            names=self.class_names,
            command=shlex.join(["python", "train.py", *self.options.argv]),
        )
        self.run.print(push_run(self.run.path, repository, card))

    def upload_dataset(
        self, source: Path, files: Callable[[], Mapping[str, Sequence[Path]]], identity: Mapping[str, Any]
    ) -> None:
        """Log the data set as an artifact with --upload-dataset: the YAML, and references to all files.

        source: the YAML, or a folder without one. files: returns files by kind; a kind is a folder of the artifact.
        identity: the artifact's metadata.
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
            tracker.log_artifact(name, "dataset", ["latest"], files=yaml, references=references, metadata=identity)


def wandb_run_id(requested: str, state: Mapping[str, Any] | None) -> str:
    """Return the id of a run for trackers: the requested id, that of the resumed state, WANDB_RUN_ID, or a random one.

    W&B sweeps set WANDB_RUN_ID. Random ids differ between processes: broadcast that of the main process.
    """
    existing = requested or (state or {}).get("wandb_id") or os.environ.get("WANDB_RUN_ID")
    return existing or "".join(random.SystemRandom().choices(ID_CHARACTERS, k=ID_LENGTH))


def wandb_arguments(options: TrackingOptions, folder: Path) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that name the run in `folder`: project, entity, group, tags, name, id."""
    project = Path(options.project).name
    return {
        "project": options.wandb_project or ("lockstep" if project == DEFAULT_PROJECT else project),
        "entity": options.wandb_entity or None,
        "group": options.wandb_group or None,
        "tags": list(options.wandb_tags) or None,
        "name": options.wandb_name or folder.name,
        "id": options.wandb_id,
    }


def git_commit() -> str:
    """Return the git commit of this code, with "+" if files have changed since; '' without a git checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--match=", "--dirty=+"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""
