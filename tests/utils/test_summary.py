"""The printed table, the fitness, evenly spaced indices, sparse counts, and times of stages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from utils import summary as module
from utils.errors import UserError
from utils.summary import (
    INFERENCE,
    POSTPROCESSING,
    PREPARING,
    StageTimer,
    Summary,
    confusion_text,
    fitness_weights,
    log_times,
    sparse_counts,
)


def test_the_table_has_a_row_for_each_class() -> None:
    summary = Summary({"recall": 1.0}, 0.0, [("Class", "Images"), ("all", 12)], [("disc", 0.5)])
    assert summary.table() == ["Class Images", "  all     12", " disc  0.500"]
    assert summary.table(brief=True) == ["Class Images", "  all     12"]
    assert replace(summary, losses={"loss": 2.0}).columns() == {"metrics/recall": 1.0, "val/loss": 2.0}


METRICS = ("precision", "recall", "mAP_0.5")


def test_the_fitness_is_a_weighted_sum() -> None:
    summary = Summary({"precision": 0.5, "recall": 0.25, "mAP_0.5": 0.125}, 0.4, [], [], headline={"mAP50": 0.125})
    assert summary.with_fitness({}) is summary  # the task's own
    weighed = summary.with_fitness(fitness_weights("metrics/precision=2, recall = -1", METRICS))
    assert (weighed.fitness, weighed.highest_fitness) == (0.75, 2.0)
    assert weighed.headline == {"mAP50": 0.125, "fitness": 0.75}
    assert weighed.metrics == summary.metrics
    assert summary.with_fitness(fitness_weights("recall=-1", METRICS)).fitness == -0.25
    nan = Summary({**summary.metrics, "recall": math.nan}, 0.4, [], [])
    assert nan.with_fitness({"recall": 1.0}).fitness == -math.inf  # the worst
    assert replace(nan, fitness=math.nan).with_fitness({}).fitness == -math.inf


@pytest.mark.parametrize(
    "text",
    [
        *("recal=1", "AP(cat)=1", "0.9,0.1", "recall", "recall=1,"),
        *("recall=0", "recall=0,precision=-0", "recall=nan", "recall=inf", "recall=much"),
    ],
)
def test_weights_that_order_no_epochs(text: str) -> None:
    with pytest.raises(UserError, match=r"^--fitness .*precision, recall, mAP_0\.5"):
        fitness_weights(text, METRICS)


def test_counts() -> None:
    matrix = np.array([[0, 3, 0], [0, 0, 0], [1, 0, 70000]])
    counts = sparse_counts(matrix)
    assert counts == [[0, 1, 3], [2, 0, 1], [2, 2, 70000]]
    assert {type(value) for row in counts for value in row} == {int}
    assert sparse_counts(np.zeros((2, 2), np.int64)) == []
    text = confusion_text([[0, 0, 2], [1, 0, 10], [1, 1, 70000]], ["a", 'b, "c"'])
    assert text == 'true \\ predicted,a,"b, ""c"""\na,2,0\n"b, ""c""",10,70000\n'


def test_a_stage_starts_at_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch counts only as long as it is the only one."""
    readings, waits = iter([10.0, 11.0, 13.0, 20.0, 100.0, 101.0, 200.0, 202.0]), []
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(readings))
    timer = StageTimer(lambda: waits.append(1))
    timer.start_batch(2)
    for stage in (PREPARING, INFERENCE, "losses"):
        timer.end_stage(stage)
    assert (timer.images, timer.seconds) == (2, {PREPARING: 1.0, INFERENCE: 2.0, "losses": 7.0})
    for images in (4, 3):
        timer.start_batch(images)
        timer.end_stage(PREPARING)
    assert len(waits) == 8  # one per reading of the clock
    assert (timer.batches, timer.images, timer.seconds) == (3, 7, {PREPARING: 3.0})


def test_milliseconds_per_image_over_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    first = (3, {PREPARING: 0.003, INFERENCE: 0.03, "losses": 9.0})
    log_times([first, (1, {INFERENCE: 0.01, POSTPROCESSING: 0.002})], 3)
    (line,) = capsys.readouterr().out.splitlines()
    assert [word for word in line.replace(",", "").split() if "." in word] == ["0.8", "10.0", "0.5", "88.9"]
    log_times([])
    assert "0.0 ms" in capsys.readouterr().out
