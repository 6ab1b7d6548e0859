"""Fault points: the places of a run in which a test lets something go wrong, by name.

`planted(...)` returns the environment of a run with a fault; `sitecustomize.py` beside this file, which PYTHONPATH
makes every Python process of that run import first, plants it.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

# name: module and function; the fault comes before the function runs
POINTS = {
    "sample": ("data.augment", "Augmenter.__call__"),  # in a loader process: a training image is made
    "loss": ("models.heads.anchors", "DetectionCriterion.__call__"),  # of a batch of this process
    "optimizer step": ("utils.distributed.failure", "GracefulStop.stop_reason"),  # it is done, and not yet saved
    "validation batch": ("models.tasks.metrics", "DetectionMetrics.update"),
    "file replacement": ("utils.run", "replacing"),  # such as results.csv's
    "row for W&B": ("utils.tracking.wandb", "WandbTracker._log"),  # in the thread that logs
    "flush to disk": ("os", "fsync"),
}
SIGNAL_SECONDS = 1.0  # in which the thread that receives a signal gets its turn


def planted(fault: str, point: str, number: int = 1, rank: int | None = None) -> dict[str, str]:
    """Return the environment of a run in which something goes wrong when a process reaches a point for a time.

    fault: a signal's name, or `raise`, `memory` (a GPU's is full), `stall` or `pause FOLDER` (see `pause`). number:
    counts from 1 in each process. rank: of the only process that it happens to.
    """
    assert point in POINTS
    fault = "|".join((fault, point, str(number), "" if rank is None else str(rank)))
    return {"FAULT": fault, "PYTHONPATH": str(Path(__file__).parent)}


def plant(fault: str) -> None:
    """Plant what `planted` returned as FAULT into this process. It happens once: not in processes started anew by a
    launcher."""
    what, point, number, rank = fault.split("|")
    module, function = POINTS[point]
    owner: Any = importlib.import_module(module)
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        concerned = not rank or os.environ.get("RANK", "0") == rank
        if calls == int(number) and concerned and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            go_wrong(what)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def go_wrong(fault: str) -> None:
    """Raise an error, sleep for ever, or send this process a signal."""
    if fault == "raise":
        raise ValueError("a planted fault")
    if fault == "memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if fault == "stall":
        time.sleep(1e6)
    if fault.startswith("pause "):
        return pause(Path(fault.removeprefix("pause ")))
    os.kill(os.getpid(), getattr(signal, fault))
    time.sleep(SIGNAL_SECONDS)


def pause(folder: Path) -> None:
    """Write the file `reached`, with the number of this process, and wait until somebody makes the file `go`."""
    (folder / "reached.part").write_text(str(os.getpid()))
    (folder / "reached.part").replace(folder / "reached")
    while not (folder / "go").exists():
        time.sleep(0.02)
