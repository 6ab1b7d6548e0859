"""What trackers are told of a run: where it is logged, under which name, and with what."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from utils.checkpoint.progress import Progress
from utils.config.options import TrainOptions
from utils.run import Run
from utils.summary import Summary, evenly
from utils.tracking.tracker import (
    FINISH,
    TENSORBOARD,
    UPLOAD,
    WANDB,
    TensorBoard,
    Tracker,
    WandB,
    git_commit,
    new_id,
    wanted,
)

EXAMPLES = "examples/validation"  # the key of the photos with boxes
TIMES = 10  # a run that they are logged where no interval is given


class Dashboard:
    """A run's trackers. Every process calls the same; the main one has trackers, if anyone."""

    def __init__(self, run: Run, task: Any, options: TrainOptions, images: Sequence[Path]) -> None:
        """images: those of the validation."""
        self.run, self.task, self.options, self.images = run, task, options, images
        interval = options.bbox_interval
        self.every = max(options.epochs // TIMES, 1) if interval < 0 else interval

    def begin(self, settings: Mapping[str, Any], devices: Sequence[str], dataset: Mapping[str, Any], step: int) -> None:
        """Begin to log. settings: all of them. dataset: what tells its files apart. step: where the run goes on."""
        facts = {
            "git_commit": git_commit(),
            "command": shlex.join(sys.argv),
            "world_size": self.run.accelerator.num_processes,
            "devices": list(devices),
            "dataset": dict(dataset),
        }
        self.run.start_trackers(self._trackers, {**settings, **facts}, step)

    def _trackers(self) -> list[Tracker]:
        options, run = self.options, self.run
        names, warnings = wanted(options.log_with, options.no_wandb)
        run.print(*warnings)
        made: list[Tracker] = []
        if WANDB in names:
            patience = UPLOAD if options.upload_model or options.upload_dataset else FINISH
            made.append(WandB(run.path, wandb_arguments(options, run.path), run.print, patience))
        if TENSORBOARD in names:
            made.append(TensorBoard(run.path, options.wandb_id, run.print))
        return made

    def epoch(
        self, row: Mapping[str, Any], facts: Mapping[str, float], summary: Summary | None, progress: Progress
    ) -> None:
        """Log an epoch: its row of results.csv, `facts` about it, its classes, and what is best so far."""
        values = {**row, **{f"epoch/{name}": value for name, value in facts.items()}}
        for measure, classes in (summary.by_class if summary else {}).items():
            values |= {f"class/{measure}/{name}": value for name, value in classes.items()}
        if best := progress.summary:
            values |= {"best/epoch": progress.best_epoch, "best/fitness": progress.best}
            values |= {f"best/{name}": value for name, value in best.metrics.items()}
        self.run.log_point(values, progress.step)

    def examples(self, summary: Summary | None, epoch: int) -> None:
        """Log validation photos with their boxes, when it is time."""
        trackers = self.run.trackers
        due = self.every and (epoch % self.every == 0 or epoch + 1 == self.options.epochs)
        if summary is None or not due or not trackers:
            return
        found = self.task.examples(summary)
        found = [found[k] for k in evenly(len(found), self.options.max_images)]
        photos = [
            {
                "file": str(self.images[example.image]),
                "name": example.name,
                "truth": [box._asdict() for box in example.truth],
                "found": [box._asdict() for box in example.found],
            }
            for example in found
        ]
        if photos:
            for tracker in trackers:
                tracker.examples(EXAMPLES, photos, list(self.task.names.values()), self.run.step, epoch)

    # Artifacts

    def upload(self, names: Sequence[str], *aliases: str) -> None:
        """Upload files in weights/ of the run, with --upload-model."""
        files = [self.run.path / "weights" / name for name in names]
        if self.options.upload_model and files:
            for tracker in self.run.trackers:
                tracker.artifact(f"run_{self.options.wandb_id}_model", "model", aliases, files=files)

    def upload_last(self, progress: Progress) -> None:
        """Upload last.pt and best.pt, which are one where the last epoch was the best."""
        last = progress.epoch - 1
        if progress.best_epoch == last:
            self.upload(["best.pt"], "latest", "best", f"epoch-{last}")
        else:
            self.upload(["best.pt"], "best", f"epoch-{progress.best_epoch}")
            self.upload(["last.pt"], "latest", f"epoch-{last}")

    def upload_dataset(
        self, yaml: Path, files: Callable[[], Mapping[str, Sequence[Path]]], identity: Mapping[str, Any]
    ) -> None:
        """Make the data set an artifact, with --upload-dataset: the YAML itself, and the addresses of all files.

        files: gives them by what they are.
        """
        if not self.options.upload_dataset or not self.run.trackers:
            return
        references = []
        for what, paths in files().items():
            there = [str(path.absolute()) for path in paths if path.is_file()]
            top = os.path.commonpath([os.path.dirname(path) for path in there]) if there else ""
            references += [(path, f"{what}/{os.path.relpath(path, top)}") for path in there]
        name = re.sub(r"[^\w.-]", "-", yaml.stem)
        for tracker in self.run.trackers:
            tracker.artifact(name, "dataset", ["latest"], files=[yaml], references=references, metadata=identity)


def with_wandb_id(options: TrainOptions, run: Run, state: Mapping[str, Any] | None) -> TrainOptions:
    """The options with the name of the W&B run: one that a flag or the run to go on with has, or a new one."""
    return replace(
        options, wandb_id=run.collectives.broadcast(options.wandb_id or (state or {}).get("wandb_id") or new_id())
    )


def wandb_arguments(options: TrainOptions, folder: Path) -> dict[str, Any]:
    """What `wandb.init` is to be told of where the run belongs."""
    project = Path(options.project).name
    return {
        "project": options.wandb_project or ("lockstep" if project == "train" else project),
        "entity": options.wandb_entity or None,
        "group": options.wandb_group or None,
        "tags": list(options.wandb_tags) or None,
        "name": options.wandb_name or folder.name,
        "id": options.wandb_id,
    }
