"""The profile of a window of optimizer steps: which steps, which operators, and wrong windows."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import RunScript
from tests.utils.test_run import Recorder, run_in
from tests.utils.training.test_optimizer_steps import prepared, train
from utils.errors import UserError
from utils.training.profiler import largest_operators, parsed_window


@pytest.mark.parametrize(
    ("window", "expected"), [("", (1, 0)), ("1:1", (1, 1)), ("10:15", (10, 15)), ("010:15", (10, 15))]
)
def test_windows(window: str, expected: tuple[int, int]) -> None:
    assert parsed_window(window) == expected


@pytest.mark.parametrize("window", ["0:3", "5:4", "5", ":", "5:", "a:b", "1:2:3", "-1:3"])
def test_wrong_windows(window: str) -> None:
    with pytest.raises(UserError, match=f"--profile {window}: give the first and the last optimizer step"):
        parsed_window(window)


@pytest.mark.parametrize(("window", "steps"), [("1:2", 2), ("4:5", 2), ("5:99", 1)])
def test_the_steps_of_the_window_are_profiled(window: str, steps: int, tmp_path: Path) -> None:
    """And trackers get the files."""
    run, recorder = run_in(tmp_path), Recorder()
    run.start_trackers(lambda: [recorder], {}, 0)
    optimizer_steps, loader = prepared(run, profile=window, epochs=1)
    train(optimizer_steps, loader)
    trace = (run.path / "profile" / "profile_0.json").read_text()
    assert trace.count('"Optimizer.step#SGD.step"') == steps
    head, *rows = (run.path / "profile" / "operators.csv").read_text().splitlines()
    assert head == "operator,calls,cpu_ms,device_ms,share"
    assert len(rows) == 10


@pytest.mark.gpu
def test_a_gpu_is_profiled(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    flags = ("--cfg", "yolov5n.yaml", "--imgsz", "64", "--epochs", "1", "--no-wandb", "--profile", "1:2")
    run_script("train.py", "--data", str(small_data), "--weights", "", "--project", str(tmp_path), *flags)
    with (tmp_path / "exp/profile/operators.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert all(float(row["device_ms"]) > 0 for row in rows)


def test_a_window_after_the_end_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer_steps, loader = prepared(run_in(tmp_path), profile="6:8", epochs=1)
    train(optimizer_steps, loader)
    assert "warning: --profile 6:8: none of these optimizer steps is left" in capsys.readouterr().out
    assert not list(tmp_path.rglob("profile"))


def event(name: str, cpu: float, device: float = 0.0) -> Any:
    return SimpleNamespace(key=name, count=2, self_cpu_time_total=cpu, self_device_time_total=device)


def test_the_largest_operators() -> None:
    """By the time of the accelerator, if there is one."""
    events = [event(f"op{k}", 1000.0 * k) for k in range(20)]
    rows = largest_operators(events, "self_cpu_time_total")
    assert [name for name, *_ in rows] == [f"op{k}" for k in range(19, 9, -1)]
    assert rows[0] == ("op19", 2, "19.000", "0.000", "0.1000")
    on_device = [*events, event("kernel", 1.0, 3000.0), event("copy", 1.0, 1000.0)]
    (first, _, _, device_ms, share), (second, *_), *_ = largest_operators(on_device, "self_device_time_total")
    assert (first, device_ms, share, second) == ("kernel", "3.000", "0.7500", "copy")
