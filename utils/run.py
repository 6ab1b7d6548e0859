"""A run: its folder, log, files and shared work. Only here is it decided what the main process does alone."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import nn

from utils.checkpoint.background_writer import Writer
from utils.checkpoint.state_files import States, serialised, weights_content
from utils.console import Bar, show
from utils.distributed.watchdog import Watch
from utils.files import PART, lock_folder, numbered_folder
from utils.plots.plotter import FINISH_TIMEOUT_SECONDS, Plotter
from utils.tracking.tracker import Tracker

T = TypeVar("T")
BATCHES = 2  # how many of its first batches a process is listed with


class Run:
    """One training or validation run. Every process calls the same; the main process alone writes and speaks."""

    def __init__(self, accelerator: Accelerator, project: str, name: str, exist_ok: bool) -> None:
        self.accelerator = accelerator
        self.main = accelerator.is_main_process
        # The name is agreed, not the path: another machine may keep its runs elsewhere.
        self.folder = Path(project) / self.agree(
            numbered_folder(Path(project), name, exist_ok).name if self.main else ""
        )
        self.held = lock_folder(self.folder) if self.main else None
        self.states = States(self.folder / "checkpoint")
        self.writer = Writer(self.say)
        self.plotter: Plotter | None = None
        self.quiet = False
        self.step = 0  # the optimizer step that pictures are logged at
        self.rows: list[str] = []  # of results.csv
        self._watch = Watch(float("inf"), self.folder)

    def say(self, *lines: str, always: bool = False) -> None:
        """Print lines, once; where the run is to be quiet, warnings and what is `always` said."""
        if not self.main:
            return
        for line in lines:
            if always or not self.quiet or line.startswith("warning: "):
                show(line)
            for tracker in self.trackers:
                tracker.log_line(line)

    def bar(self, title: str, images: int, done: int = 0) -> Bar:
        """A progress bar that only the main process draws; `done` images are over."""
        return Bar(title, images, self.main and not self.quiet, done)

    def watch(self, timeout: float) -> Watch:
        """Within a `with`, a process that has not moved for so many seconds is found out: it moves by `beat`."""
        self._watch = Watch(timeout, self.folder)
        return self._watch

    def beat(self) -> None:
        """This process moves on to its next batch."""
        self._watch.beat()

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """settings.yaml: every resolved setting."""
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True).encode()
        self._write_now("settings.yaml", text)

    def write_problems(self, problems: Sequence[str]) -> None:
        """problems.txt: what was left out of the data set, where anything was."""
        if problems:
            self._write_now("problems.txt", "".join(f"{problem}\n" for problem in problems).encode())

    def write_documents(self, documents: Mapping[str, str]) -> None:
        """Text files by name."""
        for name, text in documents.items():
            self._write_now(name, text.encode(errors="surrogateescape"))  # names of files may be any bytes

    def alone(self, work: Callable[[], object]) -> None:
        """Do what is for files and for people alone, once; the other processes go on."""
        if self.main:
            work()

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Add a row to results.csv: 9 significant digits, empty where nothing was measured.

        The file is written anew each time, so that it is always whole.
        """
        if not self.rows:
            self.rows.append(",".join(row))
        self.rows.append(",".join("" if value is None else f"{value:.9g}" for value in row.values()))
        self._write_rows()
        if self.plotter:
            self.plotter.results_changed()

    def _write_rows(self) -> None:
        self._write_now("results.csv", "".join(f"{line}\n" for line in self.rows).encode())

    def save(
        self,
        files: Sequence[str],
        model: nn.Module,
        then: Callable[[], object] = lambda: None,
        **described: Mapping[Any, Any],
    ) -> None:
        """weights/ of these names, all alike: the model and its description, as `weights_content` takes it.

        then: is called when they are written.
        """
        if self.main and files:
            content = serialised(weights_content(model, **described))
            self.writer.files([self.folder / "weights" / name for name in files], content, then)

    def save_state(self, content: Mapping[str, Any]) -> None:
        """checkpoint/: what --resume needs to go on from here."""
        if self.main:
            state = serialised({**content, "rows": self.rows})
            self.writer.do({self.states.folder: lambda: self.states.write(state)})

    def read_state(self) -> dict[str, Any] | None:
        """The last whole state of this folder, on every process; nothing is changed."""
        return self.agree(self.states.read(self.say) if self.main else None)

    def take_up(self, state: Mapping[str, Any] | None) -> None:
        """Make the folder what it was when `state` was saved: results.csv, and nothing half written.

        Without one the states of an earlier run are removed.
        """
        if not self.main:
            return
        for part in (*self.folder.glob(f".*{PART}"), *self.folder.glob(f"*/.*{PART}")):
            part.unlink(missing_ok=True)
        if state is None:
            self.states.clear()
        elif state["rows"]:
            self.rows = list(state["rows"])
            self._write_rows()

    def finish_writing(self) -> None:
        """Wait until all is written. Raises `UserError` for what could not be."""
        self.writer.finish(self.folder)

    # Pictures and trackers: nothing of it is waited for before the end, and nothing of it fails the run

    def paint(self) -> None:
        """From here on pictures are drawn."""
        if self.main:
            self.plotter = Plotter(self.folder, self.say, self._drawn)

    def plots(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `draw` makes, by name, uint8 (h, w, 3) BGR, into the run folder."""
        if self.plotter:
            self.plotter.draw(draw)

    def charts(self, *names: str) -> None:
        """Draw these charts, or all, from the text files of the run folder."""
        if self.plotter:
            self.plotter.draw_charts(*names)

    def _drawn(self, files: Mapping[str, Path]) -> None:
        for tracker in self.trackers:
            tracker.log_pictures({f"pictures/{Path(name).stem}": path for name, path in files.items()}, self.step)

    @property
    def trackers(self) -> list[Tracker]:
        """Those of the main process; others have none."""
        return [tracker for tracker in self.accelerator.trackers if isinstance(tracker, Tracker)]

    @property
    def tracked(self) -> bool:
        """Has the main process any tracker? The same on every process."""
        return self.agree(bool(self.trackers))

    def track(self, make: Callable[[], list[Tracker]], config: Mapping[str, Any], step: int) -> None:
        """Begin to log into the trackers that `make` makes, at an optimizer step. config: every setting."""
        self.step = step
        if self.main:
            self.accelerator.log_with = make()
            self.accelerator.init_trackers("", dict(config))

    def point(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers by key at an optimizer step; one of the keys is "step" or "epoch", their x."""
        self.step = step
        self.accelerator.log({key: value for key, value in values.items() if value is not None}, step=step)

    def finish(self, patience: float = math.inf) -> None:
        """Draw and send what is left; each may take so many seconds, and no longer than it may by its own measure."""
        if self.plotter and not self.plotter.finish(min(patience, FINISH_TIMEOUT_SECONDS)):
            self.say(f"warning: the pictures were not drawn in time; python -m utils.plots {self.folder} draws them")
        for tracker in self.trackers:
            tracker.finish(patience)

    def _write_now(self, name: str, content: bytes) -> None:
        if self.main:
            self.writer.files([self.folder / name], content)
            self.writer.wait()

    def agree(self, value: T) -> T:
        """The main process's value, on every process, so that all decide alike."""
        return broadcast_object_list([value])[0]

    def align(self, model: nn.Module) -> None:
        """Give every process the main process's parameters and buffers."""
        broadcast(model.state_dict())

    def processes(self, batches: Any) -> list[str]:
        """A line for every process: host, rank, device, and the images of its first batches, by number.

        batches: an iterable of lists of draws.
        """
        own = self.accelerator
        images = "; ".join(" ".join(str(draw.image) for draw in batch) for batch in itertools.islice(batches, BATCHES))
        host = socket.gethostname()
        return self.gather(
            [f"process {own.process_index} of {own.num_processes} on {host}, {own.device}: images {images}"]
        )

    def own(self, shares: Sequence[T]) -> T | None:
        """Of what `gather` collected, one item from each process, this one's; None where they were others."""
        here = self.accelerator
        return shares[here.process_index] if len(shares) == here.num_processes else None

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of `items`: dealt out one by one, each to one process."""
        return list(items[self.accelerator.process_index :: self.accelerator.num_processes])

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, on every process."""
        return gather_object(items)
