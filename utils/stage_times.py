"""Measure and format the time of the stages of an evaluation. Called by val.py and detect.py."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

PREPARING, INFERENCE, POSTPROCESSING = "preparing", "inference", "post-processing"


class BatchTimes(NamedTuple):
    """Number of images in a batch, and seconds by stage."""

    images: int
    seconds: dict[str, float]


class StageTimer:
    """Measures the stages of this process's batches.

    Args:
        synchronise: waits for the device, which works asynchronously; called before the clock is read
    """

    def __init__(self, synchronise: Callable[[], object] = lambda: None) -> None:
        self.synchronise = synchronise
        self.batches: list[BatchTimes] = []
        self._last = 0.0

    def start_batch(self, images: int) -> None:
        """Start a batch of `images` images."""
        self.batches.append(BatchTimes(images, defaultdict(float)))
        self.synchronise()
        self._last = time.perf_counter()

    def end_stage(self, stage: str) -> None:
        """Add the time since the last call, of this method or of `start_batch`, to `stage`."""
        self.synchronise()
        now = time.perf_counter()
        self.batches[-1].seconds[stage] += now - self._last
        self._last = now


def without_warmup(batches: Sequence[BatchTimes]) -> list[BatchTimes]:
    """Return all batches but the first, which may allocate memory and choose kernels, unless it is the only one."""
    return list(batches[1:] or batches)


def milliseconds_per_image(batches: Sequence[BatchTimes]) -> dict[str, float]:
    """Return the mean milliseconds per image of each printed stage."""
    images = max(sum(batch.images for batch in batches), 1)
    return {
        stage: 1000 * sum(batch.seconds.get(stage, 0.0) for batch in batches) / images
        for stage in (PREPARING, INFERENCE, POSTPROCESSING)
    }


def format_times(times: Mapping[str, float], batch_size: int = 0) -> list[str]:
    """Format per-image stage times in milliseconds for the console, in two lines; with a batch size the rate too."""
    each = ", ".join(f"{milliseconds:.2f} ms {stage}" for stage, milliseconds in times.items())
    rate = f": {1000 / max(sum(times.values()), 1e-9):.1f} images/s in batches of {batch_size}" if batch_size else ""
    return [f"per image: {each},", f"  without loading and the warm-up{rate}"]
