"""The step curves of a run: losses, learning rates, speed and memory between two points.

Called by optimizer_steps.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from utils.console import Bar
from utils.training.nonfinite_steps import DeviceValue

POINTS_PER_EPOCH, MAX_POINT_STEPS = 20, 50  # if no interval is given; optimizer steps between two points
BYTES_PER_GIB = 2**30


class Point(NamedTuple):
    """A point of the step curves: values known on the host, and those that the device is still computing."""

    step: int
    host_values: dict[str, float]
    device_values: DeviceValue


class StepLog:
    """Accumulates losses on the device between two points; nothing of it waits for the device.

    terms: names of the losses. gather: concatenates the tensors of all processes, as `Accelerator.gather` does.
    processes: how many. interval: optimizer steps between two points; 0 is a twentieth of an epoch of `steps` optimizer
    steps. enabled: False if no tracker takes the points. scaler: Accelerate's gradient scaler, if there is one.
    """

    def __init__(
        self,
        terms: Sequence[str],
        gather: Callable[[Tensor], Tensor],
        device: torch.device,
        processes: int,
        interval: int,
        steps: int,
        *,
        enabled: bool,
        scaler: Any = None,
    ) -> None:
        self.terms, self.gather, self.processes = terms, gather, processes
        self.enabled, self.scaler = enabled, scaler
        self.interval = interval or min(max(round(steps / POINTS_PER_EPOCH), 1), MAX_POINT_STEPS)
        self.sums = torch.zeros(len(terms), device=device)
        self.norm: Any = None  # of the gradient of the last step, set by the caller; None before the first
        self.start_epoch(Bar("", 0, False))

    def start_epoch(self, bar: Bar) -> None:
        """Start accumulating. bar: measures how long the epoch's batches are waited for."""
        self.bar = bar
        self._restart()

    def _restart(self) -> None:
        self.batches, self.waited, self.since = 0, self.bar.waited, time.monotonic()
        self.sums = torch.zeros_like(self.sums)

    def add_batch(self, losses: Tensor) -> None:
        """Add the loss terms (k,) of a batch, this process's share."""
        self.sums += losses
        self.batches += 1

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether there is a point at this optimizer step. last: of an epoch."""
        return self.enabled and (last or step % self.interval == 0)

    def point(self, step: int, epoch: float, optimizer: Any, batch_size: int) -> Point:
        """Return the point of this step. All processes must call it together. epoch: with its fraction."""
        seconds = max(time.monotonic() - self.since, 1e-9)
        rate = self.batches * batch_size / seconds
        host_values = {"step": step, "step/epoch": epoch}
        for number, group in enumerate(optimizer.param_groups):
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
            host_values |= {f"step/lr{number}": group["lr"], f"step/momentum{number}": momentum}
        host_values |= {
            "step/images_per_second": rate,
            "step/images_per_second_per_device": rate / self.processes,
        }
        if self.scaler is not None:
            host_values["step/loss_scale"] = self.scaler.get_scale()
        device_values = self._over_processes((self.bar.waited - self.waited) / seconds)
        self._restart()
        return Point(step, host_values, DeviceValue(device_values))

    def _over_processes(self, waiting: float) -> Tensor:
        """Return mean losses (k), gradient norm, mean share of waiting, the largest GPU memory in GiB: (k + 3,)."""
        device = self.sums.device
        norm = torch.as_tensor(float("nan") if self.norm is None else self.norm, dtype=torch.float32)
        on_host = torch.tensor([waiting, peak_memory(device)])
        if device.type == "cuda":
            on_host = on_host.pin_memory()
        share = (self.sums / self.batches, norm.detach().to(device).view(1), on_host.to(device, non_blocking=True))
        gathered = self.gather(torch.cat(share)[None])
        losses, norms, waits, memory = gathered.split([len(self.terms), 1, 1, 1], 1)
        return torch.cat((losses.sum(0), norms[0], waits.mean(0), memory.amax(0)))

    def values(self, point: Point) -> dict[str, float]:
        """Return all values of a point by key, without those that do not exist on this device."""
        *losses, norm, waiting, memory = point.device_values.read()
        values = {**point.host_values, **{f"step/{term}": loss for term, loss in zip(self.terms, losses, strict=True)}}
        if norm == norm or self.norm is not None:
            values["step/gradient_norm"] = norm
        values["step/data_wait"] = waiting
        if memory:
            values["step/gpu_memory"] = memory
        return values


def peak_memory(device: torch.device) -> float:
    """Return the largest amount of a GPU's memory that tensors took so far, in GiB; 0 on other devices."""
    return torch.cuda.max_memory_allocated(device) / BYTES_PER_GIB if device.type == "cuda" else 0.0


def used_memory(device: torch.device) -> float:
    """Return what this process takes, in GiB: at most so far of its GPU, or now of the machine's memory without one."""
    return peak_memory(device) or psutil.Process().memory_info().rss / BYTES_PER_GIB
