"""The best epoch, when to stop, and the state of the counters."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from utils.checkpoint.progress import Progress
from utils.summary import Summary


def record(progress: Progress, epoch: int, fitness: float) -> bool:
    progress.epoch = epoch
    return progress.record(Summary({}, fitness, [], []))


def test_the_best_epoch_is_the_first_of_equals() -> None:
    progress = Progress()
    assert [record(progress, epoch, fitness) for epoch, fitness in enumerate([0.0, 0.2, 0.2, 0.1, 0.3])] == [
        True,  # a fitness of 0 is better than none
        True,
        False,
        False,
        True,
    ]
    assert (progress.best, progress.best_epoch, progress.validated) == (0.3, 4, 4)
    assert progress.summary == Summary({}, 0.3, [], [])
    assert not progress.record(None)  # not validated
    assert progress.validated == 4


def test_nan_is_never_the_best() -> None:
    progress = Progress()
    assert not record(progress, 0, float("nan"))
    assert record(progress, 1, 0.1)
    assert not record(progress, 2, float("nan"))
    assert (progress.best, progress.best_epoch) == (0.1, 1)


def test_the_worst_fitness_is_better_than_none() -> None:
    progress = Progress()
    assert [record(progress, epoch, float("-inf")) for epoch in range(3)] == [True, False, False]
    assert progress.stalled(2)
    assert record(progress, 3, -5.0)


@pytest.mark.parametrize(("patience", "stops"), [(1, 2), (2, 3), (3, 4)])
def test_patience(patience: int, stops: int) -> None:
    """The best is epoch 1; `patience` epochs without a better one may follow."""
    progress = Progress()
    for epoch, fitness in enumerate([0.1, 0.5, 0.4, 0.5, 0.3]):
        record(progress, epoch, fitness)
        assert progress.stalled(patience) == (epoch >= stops), epoch


def test_a_better_epoch_starts_the_patience_anew() -> None:
    progress = Progress()
    for epoch, fitness in enumerate([0.5, 0.4, 0.6, 0.5]):
        record(progress, epoch, fitness)
        assert not progress.stalled(2)


def test_patience_0_never_stops() -> None:
    progress = Progress()
    for epoch in range(500):
        record(progress, epoch, 0.1)
        assert not progress.stalled(0)


def test_a_run_without_a_validation_is_not_stalled() -> None:
    assert not Progress().stalled(1)


# Epochs and states


def test_the_next_epoch_has_no_batches() -> None:
    progress = Progress(epoch=3, batch=7, step=40, best=0.5, best_epoch=2, validated=3, skipped=1, taken=6)
    progress.next_epoch()
    assert progress == Progress(epoch=4, step=40, best=0.5, best_epoch=2, validated=3, skipped=1)


SUMMARY = Summary({"metrics/mAP_0.5": 0.25}, 0.25, ["class images", "all 8"], ["disc 8"], {"val/box_loss": 0.1}, 9.5)


@pytest.mark.parametrize(
    "progress",
    [
        Progress(),
        Progress(epoch=3, batch=7, step=40, best=0.5, best_epoch=2, validated=3, summary=SUMMARY, skipped=1, taken=6),
        Progress(epoch=10, finished=True, summary=SUMMARY),
    ],
)
def test_the_state_is_plain_values(progress: Progress) -> None:
    """They can be read with `weights_only=True`, -inf included, the best of a run without a validation."""
    file = io.BytesIO()
    torch.save(progress.state(), file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    assert Progress.from_state(saved) == progress


@pytest.mark.parametrize(
    ("progress", "text"),
    [(Progress(epoch=3, batch=7), "in epoch 4, after batch 7"), (Progress(epoch=3), "in epoch 4")],
)
def test_its_text(progress: Progress, text: str) -> None:
    assert str(progress) == text
