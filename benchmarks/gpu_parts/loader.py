"""Images per second of the training loader at 640 by loader processes, without a cache and with `--cache ram`."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.gpu_parts.measuring import Machine, machine, rounded, row
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from utils.config.hyperparameters import Hyperparameters


def rate(here: Machine, workers: int, cache: str) -> float:
    """Return images per second of an epoch, after its first images and, with a cache, after a whole epoch."""
    options = DataOptions(cache=cache, workers=workers)
    data = DetectionData(
        read_spec(here.photos(links=True)), imgsz=64 if here.quick else 640, stride=32, options=options
    )
    split = data.split("train")
    loader: Any = data.train_loader(split, batch_size=8 if here.quick else 64, hyp=Hyperparameters(), seed=0)
    if cache:
        for _ in loader:
            pass
    images, begun = 0, 0.0
    for number, batch in enumerate(loader):
        if number == 0:
            begun = time.perf_counter()  # processes have started
        else:
            images += len(batch.images)
    return images / (time.perf_counter() - begun)


def main() -> None:
    """Measure growing numbers of processes."""
    here = machine()
    cores = len(os.sched_getaffinity(0))
    counts = [0, 1] if here.quick else [count for count in (1, 2, 4, 8, 12, 16) if count <= cores]
    for workers in counts:
        rates = {name or "no cache": rounded(rate(here, workers, name)) for name in ("", "ram")}
        row(f"Images per second of the loader, mosaic, of {cores} cores", **{"loader processes": workers}, **rates)


if __name__ == "__main__":
    main()
