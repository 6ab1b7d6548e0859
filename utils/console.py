"""What a person sees while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
REFRESH = 1.0  # seconds between two readings of the losses: each one waits for the device


class Bar:
    """A progress bar over batches: images per second, time left, and values that are shown when `due`.

    Where the output is not a terminal nothing is drawn; `rate` is measured all the same.
    """

    def __init__(self, title: str, images: int, shown: bool, done: int = 0) -> None:
        self.title, self.images, self.shown, self.done = title, images, shown, done
        self.rate = 0.0  # images per second of the whole pass, once it is over

    def over(self, batches: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Iterate `batches`; `size` gives the images of a batch."""
        started = self._last = time.monotonic()
        disable = None if self.shown else True  # None: tqdm asks whether it writes to a terminal
        with tqdm(
            total=self.images, initial=self.done, desc=self.title, unit="image", disable=disable, leave=False
        ) as self._bar:
            for batch in batches:
                yield batch
                self._bar.update(size(batch))
        self.rate = (self.images - self.done) / max(time.monotonic() - started, 1e-9)

    def due(self) -> bool:
        """Is it time to show new values?"""
        return not self._bar.disable and time.monotonic() - self._last > REFRESH

    def show(self, values: Mapping[str, float]) -> None:
        """Show values beside the bar."""
        self._last = time.monotonic()
        self._bar.set_postfix({name: f"{value:.4f}" for name, value in values.items()}, refresh=False)
