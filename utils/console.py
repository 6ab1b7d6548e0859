"""Console output: the log of a run, progress bars and tables. Imported everywhere."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from tqdm import tqdm

from utils.errors import first_line, public

# If they are closed (`>&-`), and in pythonw.exe, they are None.
sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
T = TypeVar("T")
REFRESH_SECONDS = 1.0  # between two drawings of a bar, each with new values, which synchronise the device
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar:5}| {rate_fmt}{postfix}"
STYLE: Any = {"bar_format": BAR_FORMAT, "unit": " img", "leave": False, "dynamic_ncols": True, "miniters": 1}
WRAPPED: Any = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}  # wide lines
TERMINAL = 80, 24  # columns and lines of an output that is not a terminal
SHORTEST_NAME = 8  # characters that a name in a table keeps, however narrow the table


class Log:
    """Prints lines on the main process, wrapped on a terminal; if `quiet`, only warnings and lines with `always`.

    A run holds its lines until its folder is open: if it cannot start, only the error is printed.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, is_main: bool = True, quiet: bool = False, hold: bool = False) -> None:
        """Start a run, whose lines are held if `hold`; by default print all lines, as before a run."""
        self.is_main, self.quiet = is_main, quiet
        self._held: list[str] | None = [] if hold else None
        self._listener: Callable[[str], object] = len

    def release(self, listener: Callable[[str], object]) -> None:
        """Print the lines that were held; from now on `listener` gets each line too."""
        held, self._held, self._listener = self._held or [], None, listener
        self(*held)

    def __call__(self, *lines: str, always: bool = False) -> None:
        """Print lines above the progress bar, without the empty ones; what stdout cannot encode is escaped."""
        if self._held is not None:
            self._held += lines
            return
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        for line in filter(None, map(public, lines) if self.is_main else ()):
            if always or not self.quiet or line.startswith("warning: "):
                with suppress(OSError, ValueError):  # its reader has ended, or its disk is full
                    width = shutil.get_terminal_size(TERMINAL).columns if sys.stdout.isatty() else len(line)
                    text = textwrap.fill(line, width, **WRAPPED) if len(line) > width else line
                    tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))
                    sys.stdout.flush()
            self._listener(line)


log = Log()


def table(rows: Sequence[Sequence[str | float]]) -> list[str]:
    """Return the lines of a right-aligned table; floats have three decimals, and names fit the terminal's width."""
    cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    longest, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)] or [0]
    room = shutil.get_terminal_size(TERMINAL).columns - sum(widths) - len(widths)
    room = min(longest, max(room, SHORTEST_NAME))
    return [" ".join([public(name, room).rjust(room), *map(str.rjust, row, widths)]) for name, *row in cells]


class Bar:
    """A progress bar over the batches of `images` images, `done` of them before the start; drawn on terminals only."""

    def __init__(self, title: str, images: int, visible: bool, done: int = 0) -> None:
        self.images = images - done
        self.waited = self.seconds = 0.0  # time that this process waited for batches, and that it took; always measured
        self.waiting = self.rate = 0.0  # the former as a share of the latter; images per second, once all have passed
        self.due = False  # whether the bar has just been drawn, so that it is time to show new values
        disable = None if visible else True  # None: on terminals only
        self._bar = tqdm(total=images, initial=done, desc=title, mininterval=REFRESH_SECONDS, disable=disable, **STYLE)

    def iterate(self, batches: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Iterate over `batches`; `size` maps a batch to its number of images."""
        started_at = requested_at = time.monotonic()
        with self._bar:
            for batch in batches:
                self.waited += time.monotonic() - requested_at
                yield batch
                self.due = bool(self._bar.update(size(batch)))
                self.seconds = (requested_at := time.monotonic()) - started_at
                self.waiting = self.waited / max(self.seconds, 1e-9)
        self.rate = self.images / max(self.seconds, 1e-9)

    def show(self, values: Sequence[str]) -> None:
        """Show values beside the bar: as many as the terminal has room for."""
        room, state = shutil.get_terminal_size(TERMINAL).columns, {**self._bar.format_dict, "ncols": None}
        while values and len(tqdm.format_meter(**{**state, "postfix": ", ".join(values)})) >= room:
            values = values[:-1]
        self._bar.set_postfix_str(", ".join(values))


@functools.cache
def start_programs_between_forks() -> None:
    """Make every fork wait while another thread starts a program, as W&B's thread and the one that draws do.

    Otherwise the forked loader process has the program's pipes too, and the thread waits until that process ends.
    """
    lock, start = threading.RLock(), subprocess.Popen.__init__

    def start_alone(*arguments: Any, **options: Any) -> None:
        with lock:
            start(*arguments, **options)

    if hasattr(os, "register_at_fork"):  # not on Windows
        subprocess.Popen.__init__ = start_alone  # type: ignore[method-assign]
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Background:
    """Runs jobs one after another in a thread; the first failure is a warning, which begins with `failure`."""

    abandoned = False  # whether any thread has not ended in time; the process must then exit without waiting for it

    def __init__(self, failure: str) -> None:
        self.failure = failure
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.submit = self._jobs.put  # runs a job after the jobs before it
        start_programs_between_forks()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def finish(self, patience: float) -> bool:
        """Wait for all jobs, at most `patience` seconds; return whether all have ended. Later ones are not run."""
        self._jobs.put(None)
        self.thread.join(patience)
        Background.abandoned |= self.thread.is_alive()
        return not self.thread.is_alive()

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            try:
                job()
            except BaseException as error:  # a package may try to exit
                if self.failure:
                    reason = f"{type(error).__name__}: {first_line(error, 1000)}"
                    log(f"warning: {self.failure} ({reason}); training continues")
                self.failure = ""
