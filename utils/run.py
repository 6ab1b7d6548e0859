"""A run: its folder, its log (console, charts, trackers) and the collectives. Called by the scripts.

The only module outside of utils/distributed/ that knows which process is the main one.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from utils.console import Bar, show
from utils.distributed.accelerator import describe
from utils.distributed.barrier import untimed_barrier
from utils.distributed.collectives import Collectives
from utils.distributed.devices import device_name, device_table
from utils.distributed.exit import StopRequested
from utils.distributed.graceful_stop import GracefulStop
from utils.distributed.watchdog import Watchdog
from utils.files import numbered_folder
from utils.plots.plotter import FINISH_TIMEOUT_SECONDS, Plotter
from utils.run_folder import MainRunFolder, RunFolder
from utils.tracking.tracker import Tracker

LISTED_BATCHES = 2  # of each process, in its row of the process table


@dataclass(frozen=True)
class FolderOptions:
    """The flags that name the run folder."""

    project: str
    name: str
    exist_ok: bool


class Run:
    """One training or validation run. Every process makes the same calls; only the main one prints, draws and writes.

    accelerator: Accelerate's own. collectives: what the processes exchange. path: the run folder, once it is opened:
    `project`/`name` or the first free `name2`, `name3`, ... (`exist_ok`: `name` in any case). files: writes into it.
    quiet: print warnings and final results only.
    """

    def __init__(self, accelerator: Accelerator, quiet: bool = False) -> None:
        self.accelerator, self.quiet = accelerator, quiet
        self.collectives = Collectives(accelerator)
        self.step = 0  # the optimizer step at which pictures are logged
        self.path, self.files = Path(), RunFolder(Path(), self.collectives)  # until `open_folder`
        self._is_main = accelerator.is_main_process
        self._plotter: Plotter | None = None
        self._watchdog = Watchdog(math.inf, self.path)
        self._stop = GracefulStop()

    def open_folder(self, options: FolderOptions) -> None:
        """Make the run folder, now that all input is found good. All processes must call it together."""
        project = Path(options.project)
        name = numbered_folder(project, options.name, options.exist_ok).name if self._is_main else ""
        # The name is broadcast, not the path: another machine may have its runs elsewhere.
        self.path = project / self.collectives.broadcast(name)
        self.files = (
            MainRunFolder(self.path, self.collectives, self.print, self._draw_results)
            if self._is_main
            else RunFolder(self.path, self.collectives)
        )

    def untimed_barrier(self) -> AbstractContextManager[None]:
        """Return a context in which a process may work as long as it needs, as to download; all leave it together."""
        return untimed_barrier()

    def device_lines(self, verbose: bool) -> list[str]:
        """Describe what the run runs on, with a line for each process's device if there are several or if `verbose`."""
        self.devices = self.collectives.gather([device_name(self.accelerator.device)])
        return [describe(self.accelerator), *device_table(self.devices, verbose)]

    def print(self, *lines: str, always: bool = False) -> None:
        """Print lines once; if the run is quiet, warnings and what is `always` printed."""
        if not self._is_main:
            return
        for line in lines:
            if always or not self.quiet or line.startswith("warning: "):
                show(line)
            for tracker in self.trackers:
                tracker.log_line(line)

    def bar(self, title: str, images: int, done: int = 0) -> Bar:
        """Return a progress bar, drawn by the main process only. done: images before it starts."""
        return Bar(title, images, self._is_main and not self.quiet, done)

    def on_main(self, work: Callable[[], object]) -> None:
        """Call `work` on the main process; the others do not wait for it."""
        if self._is_main:
            work()

    def process_table(self, batches: Any) -> list[str]:
        """Return a line for each process: host, rank, device, and the images of its first batches, by number.

        batches: an iterable of this process's batches, lists of sample indices.
        """
        first = itertools.islice(batches, LISTED_BATCHES)
        images = "; ".join(" ".join(str(sample.image) for sample in batch) for batch in first)
        accelerator, host = self.accelerator, socket.gethostname()
        process = f"process {accelerator.process_index} of {accelerator.num_processes} on {host}, {accelerator.device}"
        return self.collectives.gather([f"{process}: images {images}"])

    # Ending early

    def watchdog(self, timeout: float) -> Watchdog:
        """Return a context that ends a run of several processes if one has not called `beat` for `timeout` seconds."""
        self._watchdog = Watchdog(timeout, self.path)
        return self._watchdog

    def graceful_stop(self, time_limit: float) -> GracefulStop:
        """Return a context in which signals and the time limit, in hours, stop the run at the next `check_stop`."""
        self._stop = GracefulStop(time_limit)
        return self._stop

    def check_stop(self, step: int) -> None:
        """Raise `StopRequested` if all processes are to stop at the end of this optimizer step."""
        if reason := self._stop.after(step):
            raise StopRequested(reason)

    def stop_requested(self) -> str:
        """Return the signal that requests a stop, '' if none does: a validation need not be finished then."""
        return self._stop.requested()

    def stop_together(self, reason: str) -> None:
        """Raise `StopRequested` on every process if any of them has a reason. All must call it together."""
        if shared := next(filter(None, self.collectives.gather([reason])), ""):
            raise StopRequested(shared)

    def beat(self) -> None:
        """Reset the watchdog's timer: this process has come to its next batch."""
        self._watchdog.beat()

    # Pictures: drawn beside the training, which waits for them at the end only and never fails because of them

    def enable_plots(self, *charts: str) -> None:
        """Draw pictures from now on, these charts at once."""
        if self._is_main:
            self._plotter = Plotter(self.path, self.print, self._log_pictures)
            if charts:
                self._plotter.draw_charts(*charts)

    def plot(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `draw` returns by file name, uint8 (h, w, 3) BGR, into the run folder."""
        if self._plotter:
            self._plotter.draw(draw)

    def charts(self, *names: str) -> None:
        """Draw these charts, or all, from the text files in the run folder."""
        if self._plotter:
            self._plotter.draw_charts(*names)

    def _draw_results(self) -> None:
        if self._plotter:
            self._plotter.results_changed()

    def _log_pictures(self, files: Mapping[str, Path]) -> None:
        for tracker in self.trackers:
            tracker.log_pictures({f"pictures/{Path(name).stem}": path for name, path in files.items()}, self.step)

    # Trackers

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers of the main process; other processes have none."""
        return [tracker for tracker in self.accelerator.trackers if isinstance(tracker, Tracker)]

    @property
    def is_tracked(self) -> bool:
        """Whether the main process has a tracker, the same on every process. All must ask together."""
        return self.collectives.broadcast(bool(self.trackers))

    def start_trackers(self, make: Callable[[], list[Tracker]], config: Mapping[str, Any], step: int) -> None:
        """Start the trackers that `make` returns. config: every setting. step: the optimizer step at the start."""
        self.step = step
        if self._is_main:
            self.accelerator.log_with = make()
            self.accelerator.init_trackers("", dict(config))

    def log_point(self, values: Mapping[str, Any], step: int) -> None:
        """Log values by key at an optimizer step, without those that are None. The key "step" or "epoch" is their x."""
        self.step = step
        self.accelerator.log({key: value for key, value in values.items() if value is not None}, step=step)

    def finish(self, patience: float = math.inf) -> None:
        """Wait for pictures and for trackers, each at most `patience` seconds, and no longer than its own limit."""
        if self._plotter and not self._plotter.finish(min(patience, FINISH_TIMEOUT_SECONDS)):
            self.print(f"warning: the pictures were not drawn in time; python -m utils.plots {self.path} draws them")
        for tracker in self.trackers:
            tracker.finish(patience)
