"""Times of the stages of an evaluation."""

from __future__ import annotations

import pytest

from utils import stage_times
from utils.console import LEAST_COLUMNS
from utils.stage_times import (
    INFERENCE,
    POSTPROCESSING,
    PREPARING,
    BatchTimes,
    StageTimer,
    format_times,
    milliseconds_per_image,
    without_warmup,
)


def test_a_stage_starts_at_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 11.0, 13.0, 20.0, 24.0, 100.0, 101.0])
    waits: list[int] = []
    monkeypatch.setattr(stage_times.time, "perf_counter", lambda: next(readings))
    timer = StageTimer(lambda: waits.append(1))
    timer.start_batch(2)
    for stage in (PREPARING, INFERENCE, "losses", POSTPROCESSING):
        timer.end_stage(stage)
    timer.start_batch(4)
    timer.end_stage(PREPARING)
    assert len(waits) == 7  # one per reading of the clock
    first, second = timer.batches
    assert first.images == 2
    assert {stage: first.seconds[stage] for stage in (PREPARING, INFERENCE, "losses", POSTPROCESSING)} == {
        PREPARING: 1.0, INFERENCE: 2.0, "losses": 7.0, POSTPROCESSING: 4.0,
    }  # fmt: skip
    assert (second.images, second.seconds[PREPARING]) == (4, 1.0)


def test_milliseconds_per_image_over_all_batches() -> None:
    batches = [
        BatchTimes(3, {PREPARING: 0.003, INFERENCE: 0.03, "losses": 9.0}),
        BatchTimes(1, {INFERENCE: 0.01, POSTPROCESSING: 0.002}),
    ]
    times = milliseconds_per_image(batches)
    assert times == pytest.approx({PREPARING: 0.75, INFERENCE: 10.0, POSTPROCESSING: 0.5})
    first, second = format_times({**times, INFERENCE: 4264.0})
    assert first == "per image: 0.75 ms preparing, 4264.00 ms inference, 0.50 ms post-processing,"
    assert second == "  without loading and the warm-up"
    assert len(first) <= LEAST_COLUMNS
    assert set(milliseconds_per_image([]).values()) == {0.0}


def test_the_first_batch_is_left_out_unless_it_is_the_only_one() -> None:
    batches = [BatchTimes(1, {}), BatchTimes(2, {}), BatchTimes(3, {})]
    assert without_warmup(batches) == batches[1:]
    assert without_warmup(batches[:1]) == batches[:1]
    assert without_warmup([]) == []
