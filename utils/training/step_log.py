"""The curves of a run between two logs: what the optimizer's steps were like, over all processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from utils.console import Bar
from utils.training.nonfinite_steps import Later

PER_EPOCH, FARTHEST = 20, 50  # points of an epoch where no interval is given, and the most steps between two
GIB = 2**30


class Point(NamedTuple):
    """A point of the step curves: numbers that the host knows, and those that the device is yet to find out."""

    step: int
    known: dict[str, float]
    found: Later


class Meter:
    """Adds up losses on the device between two points. terms: names of the losses. interval: optimizer steps, or 0.

    What depends on the processes is gathered with the losses: nothing of it waits for the device.
    """

    def __init__(self, terms: Sequence[str], accelerator: Any, interval: int, steps: int, read: bool) -> None:
        """steps: of an epoch. read: is there somebody who will look at the points?"""
        self.terms, self.accelerator, self.read = terms, accelerator, read
        self.interval = interval or min(max(round(steps / PER_EPOCH), 1), FARTHEST)
        self.sums = torch.zeros(len(terms), device=accelerator.device)
        self.norm: Any = None  # of the gradient of the last step
        self.follow(Bar("", 0, False))

    def follow(self, bar: Bar) -> None:
        """An epoch begins, and `bar` knows how long its batches are waited for."""
        self.bar = bar
        self._restart()

    def _restart(self) -> None:
        self.batches, self.waited, self.since = 0, self.bar.waited, time.monotonic()
        self.sums = torch.zeros_like(self.sums)

    def saw(self, losses: Tensor) -> None:
        """Add a batch's loss terms (k,), this process's share."""
        self.sums += losses
        self.batches += 1

    def due(self, step: int, last: bool) -> bool:
        """Does an interval end with this optimizer step? last: of an epoch."""
        return self.read and (last or step % self.interval == 0)

    def point(self, step: int, epoch: float, optimizer: Any, batch_size: int) -> Point:
        """The point of this step; all processes must come. epoch: with a fraction."""
        accelerator = self.accelerator
        seconds = max(time.monotonic() - self.since, 1e-9)
        rate = self.batches * batch_size / seconds
        known = {"step": step, "step/epoch": epoch}
        for number, group in enumerate(optimizer.param_groups):
            known[f"step/lr{number}"] = group["lr"]
            known[f"step/momentum{number}"] = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
        known |= {"step/images_per_second": rate, "step/images_per_second_per_device": rate / accelerator.num_processes}
        if accelerator.scaler is not None:
            known["step/loss_scale"] = accelerator.scaler.get_scale()
        found = self._over_all((self.bar.waited - self.waited) / seconds)
        self._restart()
        return Point(step, known, Later(found))

    def _over_all(self, share: float) -> Tensor:
        """Of all processes: mean losses (k), gradient norm, mean share of waiting, the fullest GPU's GiB."""
        device = self.sums.device
        norm = torch.as_tensor(float("nan") if self.norm is None else self.norm, dtype=torch.float32)
        own = torch.tensor([share, peak_memory(device)])
        if device.type == "cuda":
            own = own.pin_memory()
        own = own.to(device, non_blocking=True)
        own = torch.cat((self.sums / self.batches, norm.detach().to(device).view(1), own))
        every = self.accelerator.gather(own[None])
        losses, norms, waits, memory = every.split([len(self.terms), 1, 1, 1], 1)
        return torch.cat((losses.sum(0), norms[0], waits.mean(0), memory.amax(0)))

    def values(self, point: Point) -> dict[str, float]:
        """All numbers of a point by key; those that there are none of are left out."""
        *losses, norm, waiting, memory = point.found.read()
        values = {**point.known, **{f"step/{term}": value for term, value in zip(self.terms, losses, strict=True)}}
        if norm == norm or self.norm is not None:
            values["step/gradient_norm"] = norm
        values["step/data_wait"] = waiting
        if memory:
            values["step/gpu_memory"] = memory
        return values


def peak_memory(device: torch.device) -> float:
    """The most memory that tensors took on a GPU so far, in GiB; 0 on other devices."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def memory(device: torch.device) -> float:
    """What this process takes, in GiB: on its GPU, or of the machine's memory where it has none."""
    return peak_memory(device) or psutil.Process().memory_info().rss / GIB
