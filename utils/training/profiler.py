"""The profile of a window of optimizer steps (--profile): traces, and torch's table of the ten largest operators.

Called by optimizer_steps.py.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accelerate.utils import ProfileKwargs

from utils.errors import UserError
from utils.files import csv_text

if TYPE_CHECKING:
    from utils.run import Run

TRACE_FOLDER = "profile"  # folder in the run folder
HEAD = ("operator", "calls", "cpu_ms", "device_ms", "share")  # columns of operators.csv; times over the whole window
LARGEST_OPERATORS = 10


class StepProfiler:
    """Profiles the optimizer steps START to STOP of a run, counted from 1, both included. Every process has one.

    Raises `UserError` for an invalid window.

    Args:
        window: START:STOP, '' for none
        step: number of optimizer steps before this start
        last_step: number of optimizer steps of the run
        artifact: name of the profile in the trackers
    """

    def __init__(self, run: Run, window: str, step: int, last_step: int, artifact: str) -> None:
        self.run, self.artifact = run, artifact
        self.first, last = parsed_window(window)
        self.last = min(last, last_step)
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
        """Start the profile if the next step, `step`, is the first remaining one of the window."""
        if self._context is None and self.first <= step <= self.last:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto prints when it starts and stops
            kinds = ["cpu"] + ["cuda"] * (self.run.accelerator.device.type == "cuda")
            options = ProfileKwargs(activities=kinds, output_trace_dir=str(self.run.path / TRACE_FOLDER))
            self._context = self.run.accelerator.profile(options)
            self._profile = self._context.__enter__()

    def _write(self) -> None:
        """Write operators.csv, print torch's table, and give the files to the trackers."""
        averages, run = self._profile.key_averages(), self.run
        folder = run.path / TRACE_FOLDER
        device = "device" if any(event.self_device_time_total for event in averages) else "cpu"
        text = csv_text(HEAD, largest_operators(averages, f"self_{device}_time_total"))
        run.files.write_documents({f"{TRACE_FOLDER}/operators.csv": text})
        table = averages.table(f"self_{device}_time_total", row_limit=LARGEST_OPERATORS, max_name_column_width=44)
        run.print(f"profile of the optimizer steps {self.first} to {self.last}: {folder}", *table.splitlines())
        for tracker in run.trackers:
            tracker.log_documents({"operators.csv": text}, self.last, self.last)
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


def largest_operators(averages: Any, own_time: str) -> list[tuple[Any, ...]]:
    """Return the rows of operators.csv, the largest first.

    Args:
        own_time: attribute of an event to rank by
    """
    total = sum(getattr(event, own_time) for event in averages) or 1.0
    ranked = sorted(averages, key=lambda event: getattr(event, own_time), reverse=True)
    return [
        (
            event.key,
            event.count,
            f"{event.self_cpu_time_total / 1000:.3f}",  # microseconds
            f"{event.self_device_time_total / 1000:.3f}",
            f"{getattr(event, own_time) / total:.4f}",
        )
        for event in ranked[:LARGEST_OPERATORS]
    ]
