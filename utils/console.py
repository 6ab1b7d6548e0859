"""Console output of a run: lines, colours, progress bars and remaining time. Called by utils/run.py and the scripts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
REFRESH_SECONDS = 1.0  # between two updates of the values beside a bar; each synchronises the device
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar:12}| {rate_fmt}{postfix}"
YELLOW, PLAIN = "\x1b[33m", "\x1b[0m"  # ANSI codes
_silent: list[bool] = []  # not empty after a call of `silence`


def silence() -> None:
    """Stop this process from printing help and errors of the command line; another process prints them."""
    _silent.append(True)


def is_silent() -> bool:
    """Return whether `silence` was called."""
    return bool(_silent)


def show(*lines: str) -> None:
    """Print lines above the progress bar; warnings are yellow on a terminal, unless the user has set NO_COLOR."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in lines:
        tqdm.write(f"{YELLOW}{line}{PLAIN}" if coloured and line.startswith("warning: ") else line, file=sys.stdout)
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RemainingTime:
    """Estimates the remaining time of a run from the mean time per batch, validations included.

    batches: remaining batches of the run at the start. The caller increments `done`.
    """

    def __init__(self, batches: int) -> None:
        self.batches, self.done, self._started = batches, 0, time.monotonic()

    def seconds(self) -> float:
        """Return the remaining seconds; 0 before the first batch is done."""
        if not self.done:
            return 0.0
        return (time.monotonic() - self._started) / self.done * (self.batches - self.done)


class Bar:
    """A progress bar over batches, with images per second and other values.

    images: of the whole pass, `done` of them before its start. shown: whether to draw the bar, which is drawn on
    terminals only. Times are measured in any case.
    """

    def __init__(self, title: str, images: int, shown: bool, done: int = 0) -> None:
        self.title, self.images, self.shown, self.done = title, images, shown, done
        self.waited = 0.0  # seconds that this process waited for batches
        self.seconds = 0.0  # of the whole pass, after its end

    @property
    def rate(self) -> float:
        """Images per second of the whole pass, 0 before its end."""
        return (self.images - self.done) / max(self.seconds, 1e-9) if self.seconds else 0.0

    def over(self, batches: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Iterate over `batches`. size: returns the number of images in a batch."""
        self.started = self._last = time.monotonic()
        disable = None if self.shown else True  # None: on terminals only
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
            asked = time.monotonic()
            for batch in source:
                self.waited += time.monotonic() - asked
                yield batch
                self._bar.update(size(batch))
                asked = time.monotonic()
        self.seconds = time.monotonic() - self.started

    @property
    def waiting(self) -> float:
        """The fraction of the time so far in which this process waited for batches."""
        return self.waited / max(time.monotonic() - self.started, 1e-9)

    def due(self) -> bool:
        """Return whether it is time to show new values."""
        return not self._bar.disable and time.monotonic() - self._last > REFRESH_SECONDS

    def show(self, values: Mapping[str, str]) -> None:
        """Show values beside the bar."""
        self._last = time.monotonic()
        self._bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in values.items()), refresh=False)
