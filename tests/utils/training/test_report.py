"""The report of an epoch: row, console line, timing and table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from utils.checkpoint.progress import Progress
from utils.console import Bar, RemainingTime
from utils.summary import Summary
from utils.training.report import bar_values, best_epoch_table, epoch_line, epoch_timing, results_row

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


@pytest.mark.parametrize(
    ("summary", "rate", "skipped", "end"),
    [
        (SUMMARY, 81.6, 0, ", recall 0.7500, mAP 0.5000, 82 images/s"),
        (None, 81.6, 0, ", 82 images/s"),
        (None, 0.0, 0, ""),  # a resumed run that had only to validate
        (None, 7.0, 2, ", 7 images/s, steps skipped so far, not finite: 2"),
    ],
)
def test_the_line_of_an_epoch(summary: Summary | None, rate: float, skipped: int, end: str) -> None:
    line = epoch_line(0, 3, LOSSES, summary, rate, skipped)
    assert line == f"epoch 1/3: box_loss 0.5000, cls_loss 0.2500{end}"


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


@pytest.mark.parametrize(("brief", "rows"), [(True, []), (False, ["a", "b"])])
def test_the_table_of_the_best_epoch(brief: bool, rows: list[str]) -> None:
    progress = Progress(epoch=10, best=0.4, best_epoch=6)
    assert best_epoch_table(progress, SUMMARY, brief) == [
        "best epoch: 7 of 10, fitness 0.4000",
        "head",
        "all",
        *rows,
    ]


def test_values_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("utils.console.time.monotonic", lambda: now[0])
    remaining = RemainingTime(40)
    bar = Bar("", 64, shown=False)
    batches = bar.over([1, 2], lambda _: 8)
    next(batches)
    now[0], remaining.done, bar.waited = 120.0, 10, 5.0
    values = bar_values(LOSSES, SUMMARY, bar, remaining, torch.device("cpu"))
    memory = values["memory"]
    assert 0 < float(memory.removesuffix(" GiB")) < 1000
    assert list(values.items()) == [
        ("box", "0.5000"),
        ("cls", "0.2500"),
        ("best mAP", "0.500"),  # the last metric
        ("wait", "25%"),
        ("memory", memory),
        ("left", "1:00"),  # 30 batches at 2 s
    ]
    assert "best mAP" not in bar_values(LOSSES, None, bar, remaining, torch.device("cpu"))
