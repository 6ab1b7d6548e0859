"""A run: its folder, its log (console, charts, trackers) and the collectives. Called by the scripts.

The only module outside of utils/distributed/ that knows which process is the main one.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from utils.console import Bar, show
from utils.distributed.collectives import Collectives
from utils.distributed.watchdog import Watch
from utils.files import numbered_folder
from utils.plots.plotter import PATIENCE, Painter
from utils.run_folder import MainRunFolder, RunFolder
from utils.tracking.tracker import Tracker

LISTED_BATCHES = 2  # of each process, in its row of the process table


class Run:
    """One training or validation run. Every process makes the same calls; only the main one prints, draws and writes.

    path: the run folder, `project`/`name` or the first free `name2`, `name3`, ... (`exist_ok`: `name` in any case).
    files: writes into it. collectives: what the processes exchange. accelerator: Accelerate's own. quiet: print
    warnings and final results only.
    """

    def __init__(self, accelerator: Accelerator, project: str, name: str, exist_ok: bool, quiet: bool = False) -> None:
        self.accelerator, self.quiet = accelerator, quiet
        self.collectives = Collectives(accelerator)
        self.step = 0  # the optimizer step at which pictures are logged
        self._is_main = accelerator.is_main_process
        self._plotter: Painter | None = None
        folder = numbered_folder(Path(project), name, exist_ok).name if self._is_main else ""
        # The name is broadcast, not the path: another machine may have its runs elsewhere.
        self.path = Path(project) / self.collectives.broadcast(folder)
        self.files = (
            MainRunFolder(self.path, self.collectives, self.print, self._draw_results)
            if self._is_main
            else RunFolder(self.path, self.collectives)
        )
        self._watchdog = Watch(math.inf, self.path)

    def print(self, *lines: str, always: bool = False) -> None:
        """Print lines once; if the run is quiet, warnings and what is `always` printed."""
        if not self._is_main:
            return
        for line in lines:
            if always or not self.quiet or line.startswith("warning: "):
                show(line)
            for tracker in self.trackers:
                tracker.line(line)

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

    # Watchdog

    def watchdog(self, timeout: float) -> Watch:
        """Return a context manager that ends the run if a process has not called `beat` for `timeout` seconds."""
        self._watchdog = Watch(timeout, self.path)
        return self._watchdog

    def beat(self) -> None:
        """Reset the watchdog's timer: this process has come to its next batch."""
        self._watchdog.beat()

    # Pictures: drawn beside the training, which waits for them at the end only and never fails because of them

    def enable_plots(self) -> None:
        """Draw pictures from now on."""
        if self._is_main:
            self._plotter = Painter(self.path, self.print, self._log_pictures)

    def plot(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `draw` returns by file name, uint8 (h, w, 3) BGR, into the run folder."""
        if self._plotter:
            self._plotter.photos(draw)

    def charts(self, *names: str) -> None:
        """Draw these charts, or all, from the text files in the run folder."""
        if self._plotter:
            self._plotter.charts(*names)

    def _draw_results(self) -> None:
        if self._plotter:
            self._plotter.results()

    def _log_pictures(self, files: Mapping[str, Path]) -> None:
        for tracker in self.trackers:
            tracker.pictures({f"pictures/{Path(name).stem}": path for name, path in files.items()}, self.step)

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
        if self._plotter and not self._plotter.finish(min(patience, PATIENCE)):
            self.print(f"warning: the pictures were not drawn in time; python -m utils.plots {self.path} draws them")
        for tracker in self.trackers:
            tracker.finish(patience)
