"""The time that stages take."""

from __future__ import annotations

import time

import pytest

from utils import stage_times as stages
from utils.stage_times import AFTER, INFERENCE, PREPARING, Lap, Stages, counted, per_image, sentence


def test_stages_are_measured_from_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 11.0, 13.0, 20.0, 24.0, 100.0, 101.0])
    waits: list[int] = []
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(readings))
    watch = Stages(lambda: waits.append(1))
    watch.begin(2)
    for stage in (PREPARING, INFERENCE, "losses", AFTER):
        watch.done(stage)
    watch.begin(4)
    watch.done(PREPARING)
    assert len(waits) == 7  # each reading waits for the device first
    first, second = watch.laps
    assert first.images == 2
    assert {stage: first.seconds[stage] for stage in (PREPARING, INFERENCE, "losses", AFTER)} == {
        PREPARING: 1.0, INFERENCE: 2.0, "losses": 7.0, AFTER: 4.0,
    }  # fmt: skip
    assert (second.images, second.seconds[PREPARING]) == (4, 1.0)


def test_per_image_over_all_batches() -> None:
    laps = [Lap(3, {PREPARING: 0.003, INFERENCE: 0.03, "losses": 9.0}), Lap(1, {INFERENCE: 0.01, AFTER: 0.002})]
    times = per_image(laps)
    assert times == pytest.approx({PREPARING: 0.75, INFERENCE: 10.0, AFTER: 0.5})
    assert sentence(times) == "per image: 0.75 ms preparing, 10.00 ms inference, 0.50 ms post-processing"
    assert set(per_image([]).values()) == {0.0}


def test_the_first_batch_counts_where_it_is_alone() -> None:
    laps = [Lap(1, {}), Lap(2, {}), Lap(3, {})]
    assert counted(laps) == laps[1:]
    assert counted(laps[:1]) == laps[:1]
    assert counted([]) == []


def test_a_clock_that_nobody_set() -> None:
    watch = Stages()
    watch.begin(1)
    time.sleep(0.002)
    watch.done(INFERENCE)
    assert watch.laps[0].seconds[INFERENCE] >= 0.002
