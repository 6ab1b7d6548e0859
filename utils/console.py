"""Console output of a run: lines, colours, progress bars and remaining time. Called by utils/run.py and the scripts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
REFRESH_SECONDS = 1.0  # between two updates of the values beside a bar: each waits for the device
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar:12}| {rate_fmt}{postfix}"
YELLOW = "33"  # ANSI code
_silent: list[bool] = []  # not empty once `silence` has been called


def silence() -> None:
    """Stop this process from printing help and errors of the command line: another one of the machine does."""
    _silent.append(True)


def is_silent() -> bool:
    """Return whether another process of the machine prints help and errors of the command line."""
    return bool(_silent)


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return `text` in an ANSI colour if `stream` is a terminal and the user has not set NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{colour}m{text}\x1b[0m"


def show(*lines: str) -> None:
    """Print lines, above the progress bar if there is one; warnings are yellow on a terminal."""
    for line in lines:
        warning = line.startswith("warning: ")
        tqdm.write(coloured(line, YELLOW, sys.stdout) if warning else line, file=sys.stdout)
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RemainingTime:
    """Estimates the time to the end of a run from the time of its batches so far, validations included.

    batches: of the whole run that are left at its start. The caller counts `done`.
    """

    def __init__(self, batches: int) -> None:
        self.batches, self.done, self._started = batches, 0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds to the end; 0 before the first batch is done."""
        if not self.done:
            return 0.0
        return (time.monotonic() - self._started) / self.done * (self.batches - self.done)


class Bar:
    """A progress bar over batches, with images per second, and values that are shown when `due`.

    images: of the whole pass; `done` of them are over when it starts. shown: whether to draw the bar. It is drawn on
    terminals only; times are measured in any case.
    """

    def __init__(self, title: str, images: int, shown: bool, done: int = 0) -> None:
        self.title, self.images, self.shown, self.done = title, images, shown, done
        self.waited = 0.0  # seconds that this process waited for batches
        self.seconds = 0.0  # of the whole pass, once it is over

    @property
    def rate(self) -> float:
        """Images per second of the whole pass, 0 until it is over."""
        return (self.images - self.done) / max(self.seconds, 1e-9) if self.seconds else 0.0

    def over(self, batches: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Iterate over `batches`. size: returns the number of images in a batch."""
        self.started = self._last = time.monotonic()
        disable = None if self.shown else True  # None: tqdm asks whether it writes to a terminal
        with tqdm(
            total=self.images,
            initial=self.done,
            desc=self.title,
            unit=" images",
            disable=disable,
            leave=False,
            dynamic_ncols=True,
            bar_format=BAR_FORMAT,
        ) as self._bar:
            source = iter(batches)
            while True:
                before = time.monotonic()
                try:
                    batch = next(source)
                except StopIteration:
                    break
                self.waited += time.monotonic() - before
                yield batch
                self._bar.update(size(batch))
        self.seconds = time.monotonic() - self.started

    @property
    def waiting(self) -> float:
        """The share of the time so far that this process waited for batches, 0 to 1."""
        return self.waited / max(time.monotonic() - self.started, 1e-9)

    def due(self) -> bool:
        """Return whether it is time to show new values."""
        return not self._bar.disable and time.monotonic() - self._last > REFRESH_SECONDS

    def show(self, values: Mapping[str, str]) -> None:
        """Show values beside the bar."""
        self._last = time.monotonic()
        self._bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in values.items()), refresh=False)
