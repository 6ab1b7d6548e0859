"""The report of an epoch: row, console line, timing and table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.tasks.classification.metrics import ImageRecord
from models.tasks.classification.task import ClassificationTask
from models.tasks.contract import Task
from models.tasks.detection.records import image_records
from models.tasks.detection.task import DetectionTask
from models.tasks.segmentation.task import SegmentationTask
from utils.checkpoint.progress import Progress
from utils.console import LEAST_COLUMNS, Bar, RemainingTime
from utils.summary import Summary
from utils.training.report import bar_values, best_epoch_table, epoch_lines, epoch_timing, results_row

LOSSES = {"box_loss": 0.5, "cls_loss": 0.25}
SUMMARY = Summary(
    {"recall": 0.75, "mAP": 0.5}, 0.4, ["head", "all"], ["a", "b"], losses={"cls_loss": 2.0, "box_loss": 1.0}, rate=80.0
)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.02, 0.03)]
    return torch.optim.SGD(groups, lr=1.0)


def test_a_row_of_results_csv(optimizer: torch.optim.Optimizer) -> None:
    row = results_row(3, LOSSES, SUMMARY, ("recall", "mAP"), optimizer)
    assert list(row.items()) == [
        ("epoch", 3),
        ("train/box_loss", 0.5),
        ("train/cls_loss", 0.25),
        ("metrics/recall", 0.75),
        ("metrics/mAP", 0.5),
        ("val/box_loss", 1.0),
        ("val/cls_loss", 2.0),
        ("x/lr0", 0.1),
        ("x/lr1", 0.02),
        ("x/lr2", 0.03),
    ]


def test_a_row_of_an_epoch_without_validation(optimizer: torch.optim.Optimizer) -> None:
    row = results_row(0, LOSSES, None, ("recall", "mAP"), optimizer)
    assert list(row) == list(results_row(0, LOSSES, SUMMARY, ("recall", "mAP"), optimizer))
    assert {name for name, value in row.items() if value is None} == {
        *("metrics/recall", "metrics/mAP", "val/box_loss", "val/cls_loss")
    }


SKIPPED = "  2 optimizer steps skipped so far: gradients that are not finite"


@pytest.mark.parametrize(
    ("summary", "rate", "skipped", "end", "more"),
    [
        (SUMMARY, 81.6, 0, ", recall 0.750 mAP 0.500, 82 img/s", []),
        (replace(SUMMARY, headline={"mAP50": 0.5}), 81.6, 0, ", mAP50 0.500, 82 img/s", []),
        (None, 81.6, 0, ", 82 img/s", []),
        (None, 0.0, 0, "", []),  # a resumed run that had only to validate
        (None, 7.0, 2, ", 7 img/s", [SKIPPED]),
    ],
)
def test_the_lines_of_an_epoch(summary: Summary | None, rate: float, skipped: int, end: str, more: list[str]) -> None:
    lines = epoch_lines(0, 3, LOSSES, summary, rate, skipped)
    assert lines == [f"epoch 1/3: box 0.5000 cls 0.2500{end}", *more]


TASKS: Any = [
    (DetectionTask, image_records([], [])),
    (SegmentationTask, []),
    (ClassificationTask, [ImageRecord(0, 0, (0,), 1.0)]),
]


@pytest.mark.parametrize(("task", "records"), TASKS)
@pytest.mark.parametrize("columns", ["", "120"])
def test_the_lines_of_each_task_fit(
    task: type[Task], records: list[Any], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 300 epochs and thousands of images per second; a wider terminal gets all digits."""
    monkeypatch.setenv("COLUMNS", columns)
    metrics = task({0: "a", 1: "b"}, task.recipe()).metrics()
    losses = dict.fromkeys(task.loss_names, 1 / 3)
    (line,) = epoch_lines(298, 300, losses, metrics.summarise(records), 1234.5, 0)
    assert len(line) <= (int(columns) if columns else LEAST_COLUMNS)
    # With four losses and 80 columns there is no room for the rate, which the bar shows.
    assert line.endswith(" img/s") == (columns == "120" or len(losses) < 4)
    assert (" 0.3333" in line) == (columns == "120" or len(losses) < 3)
    assert " 0.333" in line


def test_an_epoch_line_that_fits_no_width_has_two_digits() -> None:
    losses = {f"part{number}_loss": 1 / 3 for number in range(6)}
    (line,) = epoch_lines(0, 3, losses, SUMMARY, 81.6, 0)
    assert line == f"epoch 1/3: {' '.join(f'part{k} 0.33' for k in range(6))}, recall 0.750 mAP 0.500"


def measured_bar(images: int, seconds: float, waited: float) -> Bar:
    """Return the bar of a finished epoch."""
    bar = Bar("", images, shown=False)
    bar.seconds, bar.waited = seconds, waited
    return bar


def test_the_timing_of_an_epoch() -> None:
    assert epoch_timing(measured_bar(200, 8.0, 2.0), 1.5, Progress(skipped=3)) == {
        "images_per_second": 25.0,
        "train_seconds": 8.0,
        "validation_seconds": 1.5,
        "data_wait": 0.25,
        "steps_skipped": 3,
    }
    untrained = epoch_timing(measured_bar(0, 0.0, 0.0), 1.5, Progress())
    assert (untrained["images_per_second"], untrained["data_wait"]) == (0.0, 0.0)


HINT = "the fitness is near 0: docs/map-is-zero.md lists the causes"


@pytest.mark.parametrize(
    ("brief", "fitness", "rows"),
    [(True, 0.4, []), (True, 0.004, []), (False, 0.4, ["a", "b"]), (False, 0.004, ["a", "b", HINT])],
)
def test_the_table_of_the_best_epoch(brief: bool, fitness: float, rows: list[str]) -> None:
    progress = Progress(epoch=10, best=fitness, best_epoch=6)
    assert best_epoch_table(progress, SUMMARY, brief) == [
        f"best epoch: 7 of 10, fitness {fitness:.4f}",
        "head",
        "all",
        *rows,
    ]


def test_the_fitness_is_printed_between_0_and_1() -> None:
    """That of a segmenter is a sum over boxes and masks, of at most 2."""
    summary = replace(SUMMARY, highest_fitness=2.0)
    head, *_ = best_epoch_table(Progress(epoch=10, best=1.0552, best_epoch=6), summary, brief=True)
    assert head == "best epoch: 7 of 10, fitness 0.5276 (1.0552 of 2)"
    segmenter = SegmentationTask({0: "a"}, SegmentationTask.recipe()).metrics().summarise([])
    assert segmenter.highest_fitness == 2


def test_values_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("utils.console.time.monotonic", lambda: now[0])
    remaining = RemainingTime(40)
    bar = Bar("", 64, shown=False)
    batches = bar.over([1, 2], lambda _: 8)
    next(batches)
    now[0], remaining.done, bar.waited = 120.0, 10, 5.0
    monkeypatch.setattr("utils.training.report.used_memory", lambda _: 1.25)
    assert bar_values(LOSSES, SUMMARY, bar, remaining, torch.device("cpu")) == [
        "left 1:00",  # 30 batches at 2 s
        "box 0.500 cls 0.250",
        "best mAP 0.500",  # the last metric
        "0 img/s",
        "wait 25%",
        "memory 1.2 GiB",
    ]
    headline = replace(SUMMARY, headline={"a": 0.1, "b": 0.2})
    assert "best b 0.200" in bar_values(LOSSES, headline, bar, remaining, torch.device("cpu"))
    assert len(bar_values(LOSSES, None, bar, remaining, torch.device("cpu"))) == 5
