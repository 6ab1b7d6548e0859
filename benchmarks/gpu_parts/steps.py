"""Training steps of yolov5n to x at 640: time, memory, and what bounds them: the device's arithmetic or its memory.

Floating-point operations are counted by torch; bytes are those of all inputs and outputs of all operations of an eager
step, so more than a fused step moves. The peaks are measured: a bf16 product of matrices, and a copy.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_parts.measuring import (
    Machine,
    free_memory,
    machine,
    peak_gib,
    rounded,
    row,
    seconds_each,
    synchronise,
    training_flags,
    write_yaml,
)
from tests.whole_runs import Parts, within
from utils.distributed.launch import reset_accelerate

T = TypeVar("T")
MODELS = ("yolov5n", "yolov5s", "yolov5m", "yolov5l", "yolov5x", "yolov9t", "yolov9s")
BATCH, IMGSZ = 64, 640
LAYOUTS = ("models.tasks.detect.layout", "utils.distributed.logical.layout")  # where the loop asks for it
COMPILERS = {"": {}, "compiled": {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}}  # settings of Accelerate


class Traffic(TorchDispatchMode):
    """Adds up the bytes of tensors that operations read and write."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, torch.Tensor)]
            self.total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


class Peaks(NamedTuple):
    """Measured peaks of the device: floating-point operations and bytes per second."""

    flops: float
    bytes: float


def measure_peaks(here: Machine) -> Peaks:
    """Measure a bf16 product of matrices and a copy."""
    device, side, count = here.torch_device, 128 if here.quick else 8192, 2**16 if here.quick else 2**30
    first, second = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = seconds_each(lambda: first @ second, device, 3, 10)
    source = torch.zeros(count, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    copied = seconds_each(lambda: target.copy_(source), device, 3, 10)
    return Peaks(2 * side**3 / product, 2 * source.numel() * source.element_size() / copied)


@contextmanager
def settings(compiler: str, channels_last: bool) -> Iterator[None]:
    """Set how the next run is compiled, and its memory format."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, COMPILERS[compiler]))
        if not channels_last:
            for place in LAYOUTS:
                stack.enter_context(patch(place, lambda device: torch.contiguous_format))
        yield


def take_steps(
    here: Machine,
    model: str,
    imgsz: int,
    batch: int,
    measure: Callable[[Parts, Any], Generator[Any, None, T]],
    *flags: str,
) -> T:
    """Train in bf16 on one batch that is on the device already; return what `measure` returns.

    Args:
        measure: takes the parts of the run and the batch; a step is taken each time it yields that batch
    """
    hyp = write_yaml(here.scratch / f"every-{batch}.yaml", {"nbs": batch})
    more = ("--mixed-precision", "bf16", "--hyp", str(hyp), *flags)

    def work(parts: Parts) -> T:
        return parts.take_steps(measure(parts, next(iter(parts.loader))))

    return within(training_flags(here, model, imgsz, batch, *more), work)


def median_seconds(here: Machine, parts: Parts, shares: Any) -> Generator[Any, None, float]:
    """Take steps, and return the median wall seconds of one, after warm-up, with the device's work included."""
    warmup, rounds = (1, 2) if here.quick else (6, 10)
    times = []
    for _ in range(warmup + rounds):
        synchronise(here.torch_device)
        begun = time.perf_counter()
        yield shares
        synchronise(here.torch_device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[warmup:])


def bounds(shares: Any, peaks: Peaks) -> Generator[Any, None, tuple[float, float, float]]:
    """Return the floating-point operations of a step, and the seconds that they and its bytes need at least."""
    yield shares
    with FlopCounterMode(display=False) as counter:
        yield shares
    with Traffic() as traffic:
        yield shares
    flops = counter.get_total_flops()
    return flops, flops / peaks.flops, traffic.total / peaks.bytes


def bound(arithmetic: float, traffic: float, seconds: float) -> str:
    """Name what bounds a step of `seconds`: arithmetic or memory, or neither if both need less than half of it."""
    if max(arithmetic, traffic) < seconds / 2:
        return "launches, or inefficient kernels"
    return "arithmetic" if arithmetic > traffic else "memory"


def measure(here: Machine, model: str, compiler: str, channels_last: bool, peaks: Peaks) -> None:
    """Print the row of a model and its settings."""
    batch, imgsz = (4, 64) if here.quick else (BATCH, IMGSZ)
    name = ", ".join(filter(None, ["" if channels_last else "contiguous", compiler])) or "as it is"
    about = {"model": model, "settings": name}
    free_memory(here.torch_device)

    def measured(parts: Parts, shares: Any) -> Generator[Any, None, dict[str, Any]]:
        seconds = yield from median_seconds(here, parts, shares)
        peak = peak_gib(here.torch_device)
        rate = {"ms": rounded(seconds * 1000), "images/s": rounded(batch / seconds), "peak GiB": peak}
        if compiler or not channels_last:
            return rate
        flops, arithmetic, traffic = yield from bounds(shares, peaks)
        return {
            **rate,
            "TFLOP": rounded(flops / 1e12),
            "share of peak FLOP/s": rounded(arithmetic / seconds, 2),
            "bytes at peak bandwidth, share of the step": rounded(traffic / seconds, 2),
            "bound": bound(arithmetic, traffic, seconds),
        }

    try:
        with settings(compiler, channels_last):
            rate = take_steps(here, model, imgsz, batch, measured)
    except Exception as error:  # a compiler's, or no memory: the next row is still of use
        rate = {"ms": None, "note": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        reset_accelerate()
    row(f"Steps in bf16, batch {batch} at {imgsz} px", **about, **rate)


def measure_logical(here: Machine) -> None:
    """Print a row for each number of logical processes on one device."""
    model, batch, imgsz = ("yolov5n", 4, 64) if here.quick else ("yolov5s", BATCH, IMGSZ)
    for count in (0, 1, 4):
        free_memory(here.torch_device)
        flags = ["--logical-processes", str(count)] if count else []
        seconds = take_steps(here, model, imgsz, batch, partial(median_seconds, here), *flags)
        about = {"model": model, "--logical-processes": count or "not given"}
        row(f"Cost of --logical-processes in bf16, batch {batch} at {imgsz} px", **about, ms=rounded(seconds * 1000))
        reset_accelerate()


def main() -> None:
    """Measure all models as they are first, then the other settings."""
    here = machine()
    peaks = measure_peaks(here)
    row(
        "Peaks of this device, measured",
        **{"TFLOP/s, bf16": rounded(peaks.flops / 1e12), "GB/s": rounded(peaks.bytes / 1e9)},
    )
    for model in MODELS[:1] if here.quick else MODELS:
        measure(here, model, "", True, peaks)
    for model in ("yolov5n",) if here.quick else ("yolov5n", "yolov5x"):
        measure(here, model, "", False, peaks)
    measure_logical(here)


if __name__ == "__main__":
    main()
