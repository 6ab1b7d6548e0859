"""A run: its folder, its log (console, charts, trackers) and the collectives. Called by the scripts.

The only module outside utils/distributed/ that knows which process is the main one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from utils.checkpoint.run_folder import RunFolder
from utils.console import Bar, log
from utils.distributed.failure import Watchdog, on_failure
from utils.distributed.launch import Precision, log_devices
from utils.distributed.ranks import Collectives
from utils.distributed.stop import GracefulStop, StopRequested
from utils.errors import without_secrets
from utils.files import numbered_folder
from utils.plots.pictures import Plotter
from utils.tracking.trackers import Tracker
from utils.tracking.wandb import pictures


class Run:
    """A training or validation run. Every process makes the same calls; only the main one prints, draws and writes.

    Args:
        quiet: whether to print warnings and final results only

    Attributes:
        path: the run folder, after `open_folder`
        files: the writer of the run folder, after `open_folder`
        devices: device of each process, in words
    """

    def __init__(self, accelerator: Accelerator, precision: Precision, quiet: bool = False) -> None:
        self.accelerator, self.quiet = accelerator, quiet
        self.collectives = Collectives(accelerator)
        self.step = 0  # optimizer step at which pictures are logged
        self._is_main = accelerator.is_main_process
        self.path, self.files = Path(), RunFolder(Path(), False)  # until `open_folder`
        self._plotter: Plotter | None = None
        self._first_charts: tuple[str, ...] = ()  # not yet drawn
        self._watchdog = Watchdog(math.inf, self.path)
        self._stop = GracefulStop()
        log.hold(self._is_main, quiet)
        self.devices = log_devices(accelerator, precision)

    def open_folder(self, project: str, name: str, exist_ok: bool) -> None:
        """Make the run folder. All processes must call this together, after all input has been checked."""
        name = numbered_folder(Path(project), name, exist_ok).name if self._is_main else ""
        # The name is broadcast, not the path: --project may differ between machines.
        self.path = Path(project) / self.collectives.broadcast(name)
        self.files = RunFolder(self.path, self._is_main)
        log.release(lambda line: self.with_wandb(lambda run: run.write_logs(f"{line}\n")))

    def bar(self, title: str, images: int, done: int = 0) -> Bar:
        """Return a progress bar, drawn by the main process only.

        Args:
            done: number of images that were done before the start
        """
        return Bar(title, images, self._is_main and not self.quiet, done)

    def on_main(self, work: Callable[[], object]) -> None:
        """Call `work` on the main process; the others do not wait for it."""
        if self._is_main:
            work()

    # Ending early

    def watchdog(self, timeout: float) -> Watchdog:
        """Return a context that ends a run of several processes if one of them has no `beat` for `timeout` seconds."""
        self._watchdog = Watchdog(timeout, self.path)
        return self._watchdog

    def graceful_stop(self, time_limit: float) -> GracefulStop:
        """Return a context in which signals and the time limit, in hours, stop the run at the next `check_stop`."""
        self._stop = GracefulStop(time_limit)
        return self._stop

    def check_stop(self, step: int, behind: int = 0) -> None:
        """Raise `StopRequested` if all processes must stop at the end of this step; see `GracefulStop.after`."""
        if reason := self._stop.after(step, behind):
            raise StopRequested(reason)

    def stop_requested(self) -> str:
        """Return the signal that requests a stop, '' if there is none; a validation may then end early."""
        return self._stop.requested()

    def stop_together(self, reason: str) -> None:
        """Raise `StopRequested` on every process if any has a reason. All processes must call this together."""
        if shared := next(filter(None, self.collectives.gather([reason])), ""):
            raise StopRequested(shared)

    def beat(self) -> None:
        """Reset the watchdog's timer: this process starts its next batch."""
        self._watchdog.beat()

    # Pictures: drawn in the background; their errors are warnings

    def enable_plots(self, *documents: str) -> None:
        """Enable `plot` and `charts`; draw these text files after the first picture, so that no step is delayed."""
        if self._is_main:
            self._plotter = Plotter(self.path, lambda files: self.log_media(partial(pictures, files)))
            self._first_charts = documents

    def plot(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `draw` returns, uint8 (h, w, 3) BGR by file name, into the run folder."""
        if self._plotter:
            self._plotter.draw(draw)
            if self._first_charts:
                self._plotter.draw_documents(*self._first_charts)
                self._first_charts = ()

    def charts(self, *documents: str) -> None:
        """Draw the pictures of these text files in the run folder, by default of all."""
        if self._plotter:
            self._plotter.draw_documents(*documents)

    # Trackers

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers of the main process; other processes have none."""
        return [tracker for tracker in self.accelerator.trackers if isinstance(tracker, Tracker)]

    @property
    def is_tracked(self) -> bool:
        """Whether the main process has a tracker. All processes must read this together."""
        return self.collectives.broadcast(bool(self.trackers))

    def start_trackers(self, make: Callable[[], list[Tracker]], config: Mapping[str, Any], step: int) -> None:
        """Start the trackers that `make` returns.

        Args:
            config: all settings; secrets are removed before the trackers get them
            step: number of optimizer steps before the start
        """
        self.step = step
        if self._is_main:
            self.accelerator.log_with = make()
            self.accelerator.init_trackers("", {name: _public(value) for name, value in config.items()})
            on_failure(self._fail_trackers)

    def _fail_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.fail()

    def log_point(self, values: Mapping[str, Any], step: int) -> None:
        """Log values by key at an optimizer step, skipping None. The key "step" or "epoch" is their x axis."""
        self.step = step
        self.accelerator.log({key: value for key, value in values.items() if value is not None}, step=step)

    def log_media(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Log what `make` returns, called in a thread: W&B's pictures, tables and charts by key."""
        for tracker in self.trackers:
            tracker.log_media(make, self.step)

    def with_wandb(self, job: Callable[[Any], object]) -> None:
        """Call `job` with W&B's run, if there is one, in its thread."""
        for tracker in self.trackers:
            tracker.with_wandb(job)

    def finish(self, patience: float = math.inf) -> None:
        """Wait for pictures and trackers, for each at most `patience` seconds and at most its own time limit."""
        if self._plotter and not self._plotter.finish(patience):
            log(f"warning: the pictures are not finished; draw them with python -m utils.plots {self.path}")
        for tracker in self.trackers:
            tracker.finish(patience)


def _public(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_public, value))
    return without_secrets(value) if isinstance(value, str) else value
