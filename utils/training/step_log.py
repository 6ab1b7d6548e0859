"""The step curves of a run: losses, learning rates, speed and memory. Called by optimizer_steps.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor

from utils.console import Bar
from utils.training.nonfinite_steps import DeviceValue

if TYPE_CHECKING:
    from accelerate import Accelerator

POINTS_PER_EPOCH, MAX_POINT_STEPS = 20, 50  # without an interval: points, and most steps between two of them
BYTES_PER_GIB = 2**30


class Point(NamedTuple):
    """A point of the step curves: values on the host, and values that the device is still computing."""

    step: int
    host_values: dict[str, float]
    device_values: DeviceValue


class StepLog:
    """Accumulates losses on the device between two points; nothing here waits for the device.

    Args:
        terms: names of the loss terms
        interval: optimizer steps between two points; 0 is a twentieth of an epoch of `steps` optimizer steps
        enabled: whether any tracker takes the points
        shares: number of logical processes of this process
    """

    def __init__(
        self,
        terms: Sequence[str],
        accelerator: Accelerator,
        interval: int,
        steps: int,
        *,
        enabled: bool,
        shares: int = 1,
    ) -> None:
        self.terms, self.accelerator, self.enabled = terms, accelerator, enabled
        self.interval = interval or min(max(round(steps / POINTS_PER_EPOCH), 1), MAX_POINT_STEPS)
        self.sums = torch.zeros(shares, len(terms), device=accelerator.device)
        self.norm: Any = None  # norm of the last step's gradient, set by the caller
        self.start_epoch(Bar("", 0, False))

    def start_epoch(self, bar: Bar) -> None:
        """Start accumulating.

        Args:
            bar: progress bar that measures how long the epoch waits for batches
        """
        self.bar = bar
        self._restart()

    def _restart(self) -> None:
        self.batches, self.waited, self.since = 0, self.bar.waited, time.monotonic()
        self.sums = torch.zeros_like(self.sums)

    def add_batch(self, losses: Tensor) -> None:
        """Add the share of each local logical process in the loss terms of a batch, (shares, k)."""
        self.sums += losses
        self.batches += 1

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether this optimizer step has a point.

        Args:
            last: whether the step is the last one of the epoch
        """
        return self.enabled and (last or step % self.interval == 0)

    def point(self, step: int, epoch: float, optimizer: Any, batch_size: int) -> Point:
        """Return the point of this step. All processes must call it together.

        Args:
            epoch: fractional epoch, such as 2.5
        """
        seconds = max(time.monotonic() - self.since, 1e-9)
        rate = self.batches * batch_size / seconds
        host_values = {"step": step, "step/epoch": epoch}
        for number, group in enumerate(optimizer.param_groups):
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
            host_values |= {f"step/lr{number}": group["lr"], f"step/momentum{number}": momentum}
        host_values |= {
            "step/images_per_second": rate,
            "step/images_per_second_per_device": rate / self.accelerator.num_processes,
        }
        if self.accelerator.scaler is not None:
            host_values["step/loss_scale"] = self.accelerator.scaler.get_scale()
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
        equal = torch.cat((norm.detach().to(device).view(1), on_host.to(device, non_blocking=True)))
        shares = torch.cat((self.sums / self.batches, equal.expand(len(self.sums), -1)), 1)
        gathered = self.accelerator.gather(shares)
        losses, norms, waits, memory = gathered.split([len(self.terms), 1, 1, 1], 1)
        return torch.cat((losses.sum(0), norms[0], waits.mean(0), memory.amax(0)))

    def values(self, point: Point) -> dict[str, float]:
        """Return the values of a point by key, without values that this device lacks."""
        *losses, norm, waiting, memory = point.device_values.read()
        values = {**point.host_values, **{f"step/{term}": loss for term, loss in zip(self.terms, losses, strict=True)}}
        if norm == norm or self.norm is not None:
            values["step/gradient_norm"] = norm
        values["step/data_wait"] = waiting
        if memory:
            values["step/gpu_memory"] = memory
        return values


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of tensors on a GPU so far, in GiB; 0 on other devices."""
    return torch.cuda.max_memory_allocated(device) / BYTES_PER_GIB if device.type == "cuda" else 0.0


def used_memory(device: torch.device) -> float:
    """Return this process's memory in GiB: the peak on its GPU or, without a GPU, the current resident memory."""
    return peak_memory(device) or psutil.Process().memory_info().rss / BYTES_PER_GIB
