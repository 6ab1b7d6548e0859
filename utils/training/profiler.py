"""The profile of a window of optimizer steps (--profile): traces, and the ten largest operators.

Called by optimizer_steps.py.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.utils import ProfileKwargs

from utils.errors import UserError
from utils.files import csv_text

if TYPE_CHECKING:
    from utils.run import Run
    from utils.training.optimizer import Schedule
    from utils.training.optimizer_steps import OptimizerOptions

TRACE_FOLDER = "profile"  # in the run folder
OPERATORS_FILE = "operators.csv"  # in that folder
LARGEST_OPERATORS = 10
MICROSECONDS_PER_MILLISECOND = 1000


class Operator(NamedTuple):
    """A row of operators.csv; times in milliseconds over the window, without those of the operators that it calls."""

    operator: str
    calls: int
    cpu_ms: float
    device_ms: float  # 0 without an accelerator
    share: float  # of the time of all operators, on the accelerator if there is one, 0 to 1


class StepProfiler:
    """Profiles the optimizer steps START to STOP of a run, counted from 1, both included. Every process has one.

    options: `profile` is START:STOP, '' for none. step: optimizer steps before this start. Raises `UserError` if the
    window is wrong.
    """

    def __init__(self, run: Run, options: OptimizerOptions, schedule: Schedule, step: int) -> None:
        self.run, window = run, options.profile
        self.artifact = f"run_{options.wandb_id}_profile"
        self.first, self.last = parsed_window(window)
        epoch_steps = math.ceil(schedule.batches / run.accelerator.gradient_accumulation_steps)
        self.last = min(self.last, options.epochs * epoch_steps)
        if window and max(self.first, step + 1) > self.last:
            run.print(
                f"warning: --profile {window}: none of these optimizer steps is left to train; nothing is profiled"
            )
        self._context: AbstractContextManager[Any] | None = None
        self._profile: Any = None
        self._prepare(step + 1)

    def after(self, step: int) -> None:
        """Start or end the profile at the end of an optimizer step. All processes must call it together."""
        if self._context and step == self.last:
            self._context.__exit__(None, None, None)
            self._context = None
            self.run.on_main(self._write)
        self._prepare(step + 1)

    def _prepare(self, step: int) -> None:
        """Start the profile if `step`, the next one, is the first of the window that is left."""
        if self._context is None and self.first <= step <= self.last:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints when it starts and stops
            kinds = ["cpu"] + ["cuda"] * (self.run.accelerator.device.type == "cuda")
            options = ProfileKwargs(activities=kinds, output_trace_dir=str(self.run.path / TRACE_FOLDER))
            self._context = self.run.accelerator.profile(options)
            self._profile = self._context.__enter__()

    def _write(self) -> None:
        """Write operators.csv, print it, and give both files to the trackers."""
        operators, run = largest_operators(self._profile), self.run
        folder = run.path / TRACE_FOLDER
        rows = [(o.operator, o.calls, f"{o.cpu_ms:.3f}", f"{o.device_ms:.3f}", f"{o.share:.4f}") for o in operators]
        text = csv_text(Operator._fields, rows)
        run.files.write_documents({f"{TRACE_FOLDER}/{OPERATORS_FILE}": text})
        run.print(f"profile of the optimizer steps {self.first} to {self.last}: {folder}", *table(operators))
        for tracker in run.trackers:
            tracker.log_documents({OPERATORS_FILE: text}, self.last, self.last)
            tracker.log_artifact(self.artifact, "profile", ["latest"], files=sorted(folder.iterdir()))


def parsed_window(window: str) -> tuple[int, int]:
    """Return the first and the last step of START:STOP, (1, 0) for ''. Raises `UserError`."""
    if not window:
        return 1, 0
    first, _, last = window.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(
            f"--profile {window}: give the first and the last optimizer step, counted from 1, such as 10:15"
        )
    return int(first), int(last)


def largest_operators(profile: Any) -> list[Operator]:
    """Return the operators of a torch profile that take most time themselves, the largest first."""
    averages = profile.key_averages()
    on_device = any(event.self_device_time_total for event in averages)

    def own_time(event: Any) -> float:
        return event.self_device_time_total if on_device else event.self_cpu_time_total

    total = sum(map(own_time, averages)) or 1.0
    return [
        Operator(
            event.key,
            event.count,
            event.self_cpu_time_total / MICROSECONDS_PER_MILLISECOND,
            event.self_device_time_total / MICROSECONDS_PER_MILLISECOND,
            own_time(event) / total,
        )
        for event in sorted(averages, key=own_time, reverse=True)[:LARGEST_OPERATORS]
    ]


def table(operators: list[Operator]) -> list[str]:
    """Return the lines of a table for the console."""
    row = "{:>44} {:>8} {:>10} {:>10} {:>6}"
    lines = [row.format("operator, without those it calls", "calls", "CPU ms", "GPU ms", "share")]
    for o in operators:
        name = o.operator if len(o.operator) <= 44 else f"{o.operator[:41]}..."
        lines.append(row.format(name, o.calls, f"{o.cpu_ms:.1f}", f"{o.device_ms:.1f}", f"{100 * o.share:.0f}%"))
    return lines
