"""The values that a run sends to its trackers, and when; tests/test_tracking.py has whole runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from utils.checkpoint import Progress
from utils.config.flags import TrainOptions
from utils.summary import Box, Example
from utils.tracking.run_log import LOGGED_IMAGES, RunLog, wandb_run_id


def examples(count: int = 2 * LOGGED_IMAGES) -> list[Example]:
    return [Example(f"{k}.jpg", k, (4, 4), [], [Box(0, 0.5, (0.0, 0.25, 0.5, 1.0))]) for k in range(count)]


@pytest.mark.parametrize(
    ("epochs", "interval", "expected"),
    [(3, -1, [0, 1, 2]), (30, -1, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29]), (6, 4, [0, 4, 5]), (5, 0, [])],
)
def test_the_epochs_with_examples(
    epochs: int, interval: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images each time, evenly spaced; made only if they are due and there is a tracker."""
    monkeypatch.setattr("utils.tracking.wandb.example_images", lambda examples, *_: examples)
    media, asked = list[Any](), list[int]()
    run: Any = SimpleNamespace(trackers=[None], log_media=lambda make: media.append(make()))
    log = RunLog(run, TrainOptions(epochs=epochs, bbox_interval=interval), "abc", lambda *_: np.empty(0), ["cat"])
    for epoch in range(epochs):
        log.log_examples(lambda epoch=epoch: asked.append(epoch) or examples(), epoch)  # type: ignore[misc]
    assert asked == expected
    assert media == [{"examples/validation": examples()[::2]}] * len(expected)
    log.log_examples(list, 0)
    run.trackers = []
    log.log_examples(pytest.fail, 0)
    assert len(media) == len(expected)


@pytest.mark.parametrize(
    ("best", "nosave", "uploaded"),
    [(2, False, ["best.pt"]), (1, False, ["best.pt", "last.pt"]), (2, True, ["best.pt"]), (1, True, ["last.pt"])],
)
def test_the_uploaded_weights(best: int, nosave: bool, uploaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --nosave best.pt is written only if the last epoch is the best."""
    files: list[str] = []
    monkeypatch.setattr(
        "utils.tracking.wandb.log_artifact", lambda *given: files.extend(file.name for file in given[4])
    )
    run: Any = SimpleNamespace(with_wandb=lambda job: job(None), path=Path())
    options = TrainOptions(nosave=nosave, upload_model=True)
    RunLog(run, options, "abc", lambda *_: np.empty(0), ["cat"]).log_results(Progress(epoch=3, best_epoch=best))
    assert files == uploaded


def test_the_id_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({wandb_run_id() for _ in range(100)}) == 100
    monkeypatch.setenv("WANDB_RUN_ID", "sweep")
    assert wandb_run_id() == "sweep"
