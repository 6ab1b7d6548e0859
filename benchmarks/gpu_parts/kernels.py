"""What a training step spends its time with: its phases on host and device, and the device's kernels by kind.

A phase whose host time is near its whole time is bound by launches.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import train
from benchmarks.gpu_parts.measuring import Machine, free_memory, machine, rounded, row, synchronise
from benchmarks.gpu_parts.steps import take_steps
from models.tasks.contract import terms_of
from tests.whole_runs import Parts
from utils.distributed.launch import reset_accelerate

MODELS = (("yolov5n", 64), ("yolov5x", 32), ("yolov9t", 16))
WARM_UP, STEPS = 5, 5  # the kernels are recorded in the fourth
# Kinds of kernels by a part of their names, the first that fits.
KINDS = {
    "BatchNorm and SiLU, fused": ("_moments", "_normalise", "_gradients", "_input_gradient"),
    "BatchNorm": ("batch_norm", "bn_fw", "bn_bw", "batchnorm"),
    "max pooling": ("max_pool",),
    "convolution": ("conv", "xmma", "cudnn", "cutlass", "gemm", "sm90", "sm80", "dgrad", "wgrad", "implicit", "nhwc"),
    "optimizer, EMA and copies of many tensors": ("multi_tensor", "foreach"),
    "copies and types": ("copy", "Memcpy", "Memset", "CatArray", "fill"),
    "SiLU": ("silu",),
    "sums and norms": ("reduce", "norm"),
    "indexing and sorting": ("index", "scatter", "gather", "sort", "topk", "radix", "scan", "nonzero"),
    "elementwise": ("elementwise",),
}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "others")


class PhaseClock:
    """Adds up the host's and the whole time of calls by phase."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with a clock, which waits for the device before and after it."""

        def run(*given: Any, **named: Any) -> Any:
            synchronise(self.device)
            begun = time.perf_counter()
            result = call(*given, **named)
            queued = time.perf_counter()
            synchronise(self.device)
            for place, until in enumerate((queued, time.perf_counter())):
                self.seconds[name][place] += until - begun
            return result

        return run


def measure_phases(here: Machine, model: str, batch: int, imgsz: int) -> None:
    """Print a row for each phase of a step; the time of one that contains others includes theirs."""
    clock = PhaseClock(here.torch_device)

    def phases(parts: Parts, shares: Any) -> Generator[Any, None, float]:
        yield from [shares] * WARM_UP
        for owner, name in (
            (parts.model, "backward"),
            (parts.job.task, "inputs"),
            (parts.steps, "step"),
            (parts.steps, "update_averages"),
            (parts.steps, "finish"),
        ):
            setattr(owner, name, clock.timed(name, getattr(owner, name)))
        parts.model.modules = [clock.timed("forward", module) for module in parts.model.modules]  # type: ignore[misc]
        with patch.object(train, "terms_of", clock.timed("loss", terms_of)):
            begun = time.perf_counter()
            yield from [shares] * STEPS
            synchronise(here.torch_device)
        return (time.perf_counter() - begun) / STEPS * 1000

    whole = take_steps(here, model, imgsz, batch, phases)
    for name, (host, seconds) in clock.seconds.items():
        host, seconds = host / STEPS * 1000, seconds / STEPS * 1000
        about = {"model": model, "batch": batch, "phase": name}
        row(
            "Phases of a step, waiting after each, ms",
            **about,
            **{"host": rounded(host), "with the device": rounded(seconds), "share": rounded(seconds / whole, 2)},
        )
    reset_accelerate()


def measure_kernels(here: Machine, model: str, batch: int, imgsz: int) -> None:
    """Print a row for each kind of kernel, and the longest kernels."""
    activities = [ProfilerActivity.CUDA] if here.on_gpu else [ProfilerActivity.CPU]

    def profiled_steps(parts: Parts, shares: Any) -> Generator[Any, None, tuple[profile, float]]:
        yield from [shares] * WARM_UP
        synchronise(here.torch_device)
        with profile(activities=activities) as profiled:
            begun = time.perf_counter()
            yield from [shares] * STEPS
            synchronise(here.torch_device)
            return profiled, (time.perf_counter() - begun) / STEPS * 1e6

    profiled, whole = take_steps(here, model, imgsz, batch, profiled_steps)
    name = "self_device_time_total" if here.on_gpu else "self_cpu_time_total"
    events = [event for event in profiled.key_averages() if getattr(event, name)]
    times, counts = Counter[str](), Counter[str]()
    for event in events:
        times[kind_of(event.key)] += getattr(event, name) / STEPS
        counts[kind_of(event.key)] += event.count / STEPS
    about = {"model": model, "batch": batch}
    title = "Kernels of a step by kind"
    for kind, used in times.most_common():
        columns = {"kind": kind, "ms": rounded(used / 1000), "kernels": round(counts[kind])}
        row(title, **about, **columns, **{"share of the step": rounded(used / whole, 2)})
    busy = sum(times.values())
    row(title, **about, kind="all", ms=rounded(busy / 1000), kernels=round(sum(counts.values())),
        **{"share of the step": rounded(busy / whole, 2)})  # fmt: skip
    for event in sorted(events, key=lambda event: -getattr(event, name))[:12]:
        used = getattr(event, name) / STEPS
        row("Longest kernels", **about, kernel=event.key[:110], ms=rounded(used / 1000), calls=event.count // STEPS)
    reset_accelerate()


def main() -> None:
    """Measure a small and a large model, and one of many small layers."""
    here = machine()
    for model, batch in MODELS[:1] if here.quick else MODELS:
        batch, imgsz = (4, 64) if here.quick else (batch, 640)
        for measure in (measure_phases, measure_kernels):
            free_memory(here.torch_device)
            measure(here, model, batch, imgsz)


if __name__ == "__main__":
    main()
