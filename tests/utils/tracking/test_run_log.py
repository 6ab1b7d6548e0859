"""The values that a run sends to its trackers, and when; tests/test_tracking.py has whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.checkpoint import Progress
from utils.config.flags import TrainOptions
from utils.summary import Box, Example, Summary
from utils.tracking import run_log
from utils.tracking.run_log import LOGGED_IMAGES, RunLog, wandb_run_id

SUMMARY = Summary({"mAP_0.5": 0.5}, 0.4, [], [], by_class={"AP": {"cat": 0.25}})


class Recorder:
    """The methods of a run that log, and what they get."""

    def __init__(self, folder: Path, tracked: bool) -> None:
        self.path, self.trackers = folder, [None] if tracked else []
        self.points: list[tuple[Any, int]] = []
        self.media: list[dict[str, Any]] = []
        self.artifacts: list[tuple[Any, ...]] = []

    def log_point(self, values: Any, step: int) -> None:
        self.points.append((values, step))

    def log_media(self, make: Any) -> None:
        self.media.append(make())

    def with_wandb(self, job: Any) -> None:
        job(self)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's pictures and artifacts are what they are made from."""
    monkeypatch.setattr(run_log, "example_images", lambda examples, *_: examples)
    artifact = lambda run, *given, **more: run.artifacts.append((*given, *more.values()))  # noqa: E731
    monkeypatch.setattr(run_log, "log_artifact", artifact)


def make_log(folder: Path = Path("exp"), tracked: bool = True, **options: Any) -> tuple[RunLog, Recorder]:
    run: Any = Recorder(folder, tracked)
    shown = lambda image, side: np.zeros((side, side, 3), np.uint8)  # noqa: E731
    return RunLog(run, TrainOptions(**options), "abc", shown, ["cat"]), run


def examples(count: int = 2 * LOGGED_IMAGES) -> list[Example]:
    return [Example(f"{k}.jpg", k, (4, 4), [], [Box(0, 0.5, (0.0, 0.25, 0.5, 1.0))]) for k in range(count)]


@pytest.mark.parametrize(
    ("epochs", "interval", "expected"),
    [(3, -1, [0, 1, 2]), (30, -1, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29]), (6, 4, [0, 4, 5]), (5, 0, [])],
)
def test_the_epochs_with_examples(epochs: int, interval: int, expected: list[int]) -> None:
    """The same images each time, evenly spaced; made only if they are due and there is a tracker."""
    log, run = make_log(epochs=epochs, bbox_interval=interval)
    asked: list[int] = []
    for epoch in range(epochs):
        log.log_examples(lambda epoch=epoch: asked.append(epoch) or examples(), epoch)  # type: ignore[misc]
    assert asked == expected
    assert run.media == [{"examples/validation": examples()[::2]}] * len(expected)
    log.log_examples(list, 0)
    make_log(tracked=False)[0].log_examples(pytest.fail, 0)
    assert len(run.media) == len(expected)


def test_the_point_of_an_epoch() -> None:
    """Epochs count from 1."""
    log, run = make_log()
    progress = Progress(step=12, best=0.4, best_epoch=1, summary=SUMMARY)
    log.log_epoch({"epoch": 2, "train/loss": 0.5}, {"train_seconds": 3.0}, SUMMARY, progress)
    log.log_epoch({"epoch": 0}, {}, None, Progress())
    values = {"epoch": 3, "train/loss": 0.5, "epoch/train_seconds": 3.0, "class/AP/cat": 0.25}
    best = {"best/epoch": 2, "best/fitness": 0.4, "best/mAP_0.5": 0.5}
    assert run.points == [({**values, **best}, 12), ({"epoch": 1}, 0)]


def test_uploaded_weights() -> None:
    """They say what they are: the epoch and its metrics, the data set and the command."""
    log, run = make_log(upload_model=True)
    log.metadata = {"command": "train.py"}
    progress = Progress(epoch=3, best=0.4, best_epoch=1, summary=SUMMARY)
    log.log_epoch({"epoch": 2}, {}, replace(SUMMARY, metrics={"mAP_0.5": 0.25}), progress)
    log.log_results(progress)
    log.log_results(replace(progress, best_epoch=2))
    uploads = [(name, kind, {*aliases}, file.name, about) for name, kind, aliases, (file,), about in run.artifacts]
    name, best = "run_abc_model", {"command": "train.py", "epoch": 1, "metrics": {"mAP_0.5": 0.5}}
    assert uploads == [
        (name, "model", {"best", "epoch-1"}, "best.pt", best),
        (name, "model", {"latest", "epoch-2"}, "last.pt", {**best, "epoch": 2, "metrics": {"mAP_0.5": 0.25}}),
        (name, "model", {"latest", "best", "epoch-2"}, "best.pt", {**best, "epoch": 2}),
    ]


def test_a_data_set_as_references(tmp_path: Path) -> None:
    for name in ("a/0.jpg", "b/0.jpg", "0.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = {"train": [tmp_path / "a/0.jpg", tmp_path / "b/0.jpg"], "labels": [tmp_path / "0.txt", tmp_path / "1.txt"]}
    log, run = make_log(upload_dataset=True)
    log.upload_dataset(tmp_path / "my set.yaml", lambda: files, {"count": 2})
    references = [(tmp_path / "a/0.jpg", "train/a/0.jpg"), (tmp_path / "b/0.jpg", "train/b/0.jpg")]
    references.append((tmp_path / "0.txt", "labels/0.txt"))
    assert run.artifacts == [("my-set", "dataset", ["latest"], [], {"count": 2}, references)]
    log, run = make_log()  # without the flags
    log.log_results(Progress(epoch=3, best_epoch=1))
    log.upload_dataset(tmp_path / "a.yaml", dict, {})
    assert run.artifacts == []


def test_the_id_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({wandb_run_id() for _ in range(100)}) == 100
    monkeypatch.setenv("WANDB_RUN_ID", "sweep")
    assert wandb_run_id() == "sweep"
