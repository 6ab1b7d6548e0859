"""What a run reports: the points of the step curves, the profile, and row, line, timing and table of an epoch."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from models.tasks.classify import ClassificationTask, ImageRecord
from models.tasks.contract import Task
from models.tasks.detect import DetectionTask
from models.tasks.segment import SegmentationTask
from utils.checkpoint import Progress
from utils.console import TERMINAL, Bar
from utils.summary import Summary
from utils.training.log import StepLog, epoch_line, log_best_epoch, peak_flops, profile_window

LOSSES = {"cls_loss": 2.0, "box_loss": 1.0}
SUMMARY = Summary({"recall": 0.75, "mAP": 0.5}, 0.4, [["head"], ["all"]], [["a"], ["b"]], losses=LOSSES, rate=80.0)
TASKS: Any = [(DetectionTask, []), (SegmentationTask, []), (ClassificationTask, [ImageRecord(0, 0, (0,), 1.0)])]


@pytest.mark.parametrize(("task", "records"), TASKS)
@pytest.mark.parametrize("columns", ["", "120"])
def test_the_lines_of_each_task_fit(
    task: type[Task], records: list[Any], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 300 epochs and thousands of images per second; a wider terminal gets all digits."""
    monkeypatch.setenv("COLUMNS", columns)
    metrics = task({0: "a", 1: "b"}, task.recipe()).metrics()
    losses = dict.fromkeys(getattr(task, "heads", [task])[0].loss_names, 1 / 3)
    line = epoch_line(298, 300, losses, metrics.summarise(records), 1234.5)
    assert len(line) <= (int(columns) if columns else TERMINAL[0])
    # With three losses and 80 columns there is no room for the rate, which the bar shows.
    assert line.endswith(" img/s") == (columns == "120" or len(losses) < 3)
    assert (" 0.3333" in line) == (columns == "120" or len(losses) < 3)
    assert " 0.333" in line


def test_the_best_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """That of a segmenter is a sum over boxes and masks, of at most 2."""
    segmenter = SegmentationTask({0: "a"}, SegmentationTask.recipe()).metrics().summarise([])
    assert segmenter.highest_fitness == 2
    log_best_epoch(Progress(epoch=10, best=1.0552, best_epoch=6), replace(SUMMARY, highest_fitness=2.0))
    log_best_epoch(Progress(epoch=10, best=0.004, best_epoch=6), SUMMARY)
    first, second = capsys.readouterr().out.split("best epoch: 7 of 10, fitness ")[1:]
    assert first.startswith("1.0552 ")
    assert first.split()[-4:] == ["head", "all", "a", "b"]
    assert "docs/map-is-zero.md" in second


def step_log(batches: int = 8, tracked: bool = True) -> StepLog:
    """Return the log of a run of two epochs."""
    run: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), is_tracked=tracked)
    schedule: Any = SimpleNamespace(epochs=2, batches=batches)
    return StepLog(run, ("a", "b"), schedule, 16, Progress(), gflops=25.0)


def sgd(rate: float = 0.1) -> Any:
    group = {"lr": rate, "momentum": 0.9}
    return SimpleNamespace(param_groups=[group, {"lr": 2 * rate, "betas": (0.8, 0.999)}])


@pytest.mark.parametrize(("batches", "expected"), [(8, 1), (40, 2), (1850, 50)])
def test_the_interval_of_points(batches: int, expected: int) -> None:
    log = step_log(batches)
    due = [step for step in range(1, 200) if log.is_due(step, last=False)]
    assert due == list(range(expected, 200, expected))
    assert log.is_due(expected + 1, last=True)
    assert not step_log(batches, tracked=False).is_due(expected, last=True)


def test_the_peak_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By data sheet for known GPUs, whatever else is in their names; measured for others."""
    name = "NVIDIA L40S"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), "bf16") == 362e12
    assert peak_flops(torch.device("cuda"), "no") == 183e12
    name = "NVIDIA H100 PCIe"
    assert peak_flops(torch.device("cuda"), "fp16") == 756e12
    assert 1e8 < peak_flops(torch.device("cpu"), "no") < 1e14


def test_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means since the last point, speed, waiting, and values that are not finite."""
    now = [100.0]
    monkeypatch.setattr("utils.training.log.time.monotonic", lambda: now[0])
    monkeypatch.setattr("utils.training.log.peak_flops", lambda *_: 1.2e12)
    log, bar = step_log(), Bar("", 0, False)
    bar.waited = 3.0
    log.start_epoch(bar)
    for losses in ([1.0, 2.0], [3.0, math.inf]):
        log.add(torch.tensor([losses]))
    now[0], bar.waited = 104.0, 4.0
    first = log.values(log.point(1, 0.25, sgd(), lambda sums: sums[0]))
    assert (first["step"], first["step/epoch"], first["step/a"], first["step/b"]) == (1, 0.25, 2.0, math.inf)
    assert first["step/images_per_second"] == first["step/images_per_second_per_device"] == 8.0
    assert first["step/mfu"] == pytest.approx(3 * 25e9 * 8 / 1.2e12)
    assert first["step/data_wait"] == 0.25
    assert not {"step/gradient_norm", "step/loss_scale", "step/gpu_memory"} & first.keys()
    for norm in (5.0, math.inf):
        log.add(torch.tensor([[7.0, 8.0]]))
        log.norm = torch.tensor(norm)
        second = log.values(log.point(2, 0.5, sgd(0.05), lambda sums: sums[0]))
        assert (second["step/a"], second["step/b"], second["step/gradient_norm"]) == (7.0, 8.0, norm)
    assert [second[f"step/lr{k}"] for k in (0, 1)] == [0.05, 0.1]
    assert [second[f"step/momentum{k}"] for k in (0, 1)] == [0.9, 0.8]


@pytest.mark.parametrize("window", ["", "0:3", "5:4", "5", "a:b", "1:2:3"])
def test_windows(window: str) -> None:
    assert (profile_window(window), profile_window("010:15")) == ((0, 0), (10, 15))
