"""What a person sees while a run goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
REFRESH = 1.0  # seconds between two readings of the losses: each one waits for the device
BAR = "{desc} {percentage:3.0f}%|{bar:12}| {rate_fmt}{postfix}"
YELLOW = "33"


def painted(text: str, colour: str, stream: TextIO) -> str:
    """`text` in a colour where `stream` is a terminal whose user has not set NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{colour}m{text}\x1b[0m"


def show(*lines: str) -> None:
    """Print lines, above a bar where there is one; warnings are yellow on a terminal."""
    for line in lines:
        warning = line.startswith("warning: ")
        tqdm.write(painted(line, YELLOW, sys.stdout) if warning else line, file=sys.stdout)
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Remaining:
    """How long it will take to the end, by how long it took so far, validations included. todo: batches."""

    def __init__(self, todo: int) -> None:
        self.todo, self.done, self.since = todo, 0, time.monotonic()

    def seconds(self) -> float:
        """Until the end; 0 before the first batch is done."""
        return (time.monotonic() - self.since) / max(self.done, 1) * (self.todo - self.done) if self.done else 0.0


class Bar:
    """A progress bar over batches: images per second, and values that are shown when `due`.

    Where the output is not a terminal nothing is drawn; what is measured is measured all the same.
    """

    def __init__(self, title: str, images: int, shown: bool, done: int = 0) -> None:
        self.title, self.images, self.shown, self.done = title, images, shown, done
        self.waited = 0.0  # seconds for batches
        self.seconds = 0.0  # of the whole pass, once it is over

    @property
    def rate(self) -> float:
        """Images per second of the whole pass, once it is over."""
        return (self.images - self.done) / max(self.seconds, 1e-9) if self.seconds else 0.0

    def over(self, batches: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Iterate `batches`; `size` gives the images of a batch."""
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
            bar_format=BAR,
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
        """The share of the time so far in which this process waited for batches."""
        return self.waited / max(time.monotonic() - self.started, 1e-9)

    def due(self) -> bool:
        """Is it time to show new values?"""
        return not self._bar.disable and time.monotonic() - self._last > REFRESH

    def show(self, values: Mapping[str, str]) -> None:
        """Show values beside the bar."""
        self._last = time.monotonic()
        self._bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in values.items()), refresh=False)
