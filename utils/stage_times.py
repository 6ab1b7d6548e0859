"""How long the stages of a validation take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

PREPARING, INFERENCE, AFTER = "preparing", "inference", "post-processing"


class Lap(NamedTuple):
    """One batch: its images, and the seconds of each of its stages."""

    images: int
    seconds: dict[str, float]


class Stages:
    """A stopwatch over the batches of this process. `wait` is called before it is read: where a device works beside the
    program, only waiting for it tells how long it took."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait
        self.laps: list[Lap] = []
        self._last = 0.0

    def begin(self, images: int) -> None:
        """A batch of so many images begins."""
        self.laps.append(Lap(images, defaultdict(float)))
        self.done("before")

    def done(self, stage: str) -> None:
        """What was done since the last call was this stage."""
        self.wait()
        now = time.perf_counter()
        self.laps[-1].seconds[stage] += now - self._last
        self._last = now


def counted(laps: Sequence[Lap]) -> list[Lap]:
    """Of a process's batches those that tell something: the first one, if there are others, has made memory ready and
    chosen kernels."""
    return list(laps[1:] or laps)


def per_image(laps: Sequence[Lap]) -> dict[str, float]:
    """Milliseconds per image of each stage that is shown, over batches of all processes."""
    images = max(sum(lap.images for lap in laps), 1)
    return {
        stage: 1000 * sum(lap.seconds.get(stage, 0.0) for lap in laps) / images
        for stage in (PREPARING, INFERENCE, AFTER)
    }


def sentence(times: Mapping[str, float]) -> str:
    """The same as a sentence."""
    return "per image: " + ", ".join(f"{milliseconds:.2f} ms {stage}" for stage, milliseconds in times.items())
