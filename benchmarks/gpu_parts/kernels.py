"""What the device does in a training step: its kernels by kind, and BatchNorm and SiLU by fused and by torch's ones."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.measuring import Machine, rounded, row, run
from benchmarks.gpu_parts.steps import take_steps, timed
from models import triton_kernels
from models.layers import norm_and_activate
from models.yolo import build_model
from tests.whole_runs import Parts

MODELS: Sequence[tuple[str, int, Sequence[str]]] = (
    ("yolov5n", 64, ()),
    ("yolov5x", 32, ()),
    ("yolov9t", 16, ()),
    ("yolov5s", 16, ()),
    ("yolov5s", 16, ("--logical-processes", "4")),
)
WARM_UP, STEPS = 5, 5  # kernels are captured in the fourth step
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
    "others": ("",),
}
NORM_MODELS = ("yolov5x", "yolov5n")
PASSES, TORCH_PASSES = 8, 13  # of a map through memory
CACHE_BYTES = 2**28  # maps that are used in turn are larger together than the device's cache


def kernels(here: Machine) -> None:
    """Print a row for each kind of kernel of a small, a large and a deep model, and the longest kernels."""
    activity = ProfilerActivity.CUDA if here.on_gpu else ProfilerActivity.CPU
    time_of = "self_device_time_total" if here.on_gpu else "self_cpu_time_total"

    def profiled_steps(parts: Parts, shares: Any) -> Generator[Any, None, tuple[Any, float]]:
        yield from [shares] * WARM_UP
        here.wait()
        with profile(activities=[activity]) as profiled:
            begun = time.perf_counter()
            yield from [shares] * STEPS
            here.wait()
            seconds = time.perf_counter() - begun
        return profiled.key_averages(), seconds / STEPS

    for model, batch, flags in MODELS[:1] if here.quick else MODELS:
        batch, imgsz = here.size(batch)
        events, whole = take_steps(here, model, imgsz, batch, profiled_steps, *flags)
        about = {"model": " ".join((model, *flags)), "batch": batch}
        seconds, counts = Counter[str](), Counter[str]()
        for event in events:
            kinds = [kind for kind, names in KINDS.items() if any(name in event.key for name in names)]
            for kind in (kinds[0], "all"):
                seconds[kind] += getattr(event, time_of) / STEPS / 1e6  # type: ignore[assignment]
                counts[kind] += event.count / STEPS
        for kind, used in seconds.most_common():
            columns = {"kind": kind, "ms": rounded(used * 1000), "kernels": round(counts[kind])}
            row("Kernels of a step by kind", **about, **columns, **{"share of the step": rounded(used / whole, 2)})
        for event in sorted(events, key=lambda event: -getattr(event, time_of))[:12]:
            columns = {"kernel": event.key[:110], "ms": rounded(getattr(event, time_of) / STEPS / 1000)}
            row("Longest kernels", **about, **columns, calls=event.count // STEPS)


@contextmanager
def fused(wanted: bool) -> Iterator[None]:
    """Use the fused kernels if they can be used, or never."""
    with patch.object(triton_kernels, "can_fuse", triton_kernels.can_fuse if wanted else lambda *given: False):
        yield


def maps(here: Machine, model: str, imgsz: int) -> Counter[tuple[int, ...]]:
    """Return the shapes (c, h, w) that a network normalises before a SiLU, and how often."""
    shapes: Counter[tuple[int, ...]] = Counter()
    plain = norm_and_activate

    def counted(x: Tensor, norm: nn.Module, activation: nn.Module) -> Tensor:
        if isinstance(activation, nn.SiLU):
            shapes[tuple(x.shape[1:])] += 1
        return plain(x, norm, activation)

    with patch("models.layers.norm_and_activate", counted), torch.no_grad():
        network = build_model(f"{model}.yaml", imgsz=imgsz).to(here.torch_device)
        shapes.clear()
        network.eval()(torch.zeros(1, 3, imgsz, imgsz, device=here.torch_device))
    return shapes


def replayed_seconds(here: Machine, call: Callable[[], object]) -> float:
    """Return the seconds of a call's kernels, captured as a CUDA graph; of the call itself without a GPU."""
    if not here.on_gpu:
        return here.seconds(call, 1, 2)
    for _ in range(2):
        call()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times[2:])


def map_seconds(here: Machine, shape: tuple[int, ...], wanted: bool) -> float:
    """Return the seconds of forward and backward for a bf16 map (b, c, h, w) in channels_last."""
    norm, activation = nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.03, device=here.torch_device), nn.SiLU()
    turns = min(16, math.ceil(CACHE_BYTES / (2 * math.prod(shape))))
    here.free_memory()
    inputs, upstream = (
        [
            torch.randn(shape, device=here.torch_device).to(torch.bfloat16, memory_format=torch.channels_last)
            for _ in range(turns)
        ]
        for _ in range(2)
    )

    def call() -> None:
        for x, gradient in zip(inputs, upstream, strict=True):
            y = norm_and_activate(x.requires_grad_(), norm, activation)
            torch.autograd.grad(y, [x, norm.weight, norm.bias], gradient)

    with fused(wanted):
        return replayed_seconds(here, call) / turns


def bandwidth(here: Machine) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source, target = torch.zeros(2, 2**16 if here.quick else 2**30, device=here.torch_device)
    return 2 * source.nbytes / here.seconds(lambda: target.copy_(source))


def norms(here: Machine) -> None:
    """Compare the maps of a large and a small network, by shape and in all, with the peak of a copy; then steps."""
    batch, imgsz = here.size(16)
    peak = bandwidth(here)
    models = NORM_MODELS[1:] if here.quick else NORM_MODELS
    for model in models:
        title = f"BatchNorm and SiLU of {model}'s maps, bf16, batch {batch} at {imgsz} px, forward and backward"
        total = [0.0, 0.0, 0.0]
        for shape, number in sorted(maps(here, model, imgsz).items(), key=lambda item: -math.prod(item[0])):
            by_torch, ours = (map_seconds(here, (batch, *shape), wanted) for wanted in (False, True))
            one_pass = 2 * batch * math.prod(shape) / peak
            row(title, map=" x ".join(map(str, shape)), number=number, **columns_of(by_torch, ours, one_pass))
            measured = (by_torch, ours, one_pass)
            total = [so_far + number * seconds for so_far, seconds in zip(total, measured, strict=True)]
        row(title, map="all", **columns_of(*total))
    for model, *flags in (*((model,) for model in models), (models[-1], "--no-cuda-graph")):
        found = []
        for wanted in (False, True):
            with fused(wanted):
                found.append(timed(here, model, imgsz, batch, *flags))
        (by_torch, torch_peak, _), (ours, our_peak, _) = found
        columns = {"torch": rounded(by_torch * 1000), "fused": rounded(ours * 1000), "ratio": rounded(by_torch / ours)}
        columns |= {"torch, peak GiB": torch_peak, "fused, peak GiB": our_peak}
        row(f"Steps in bf16, batch {batch} at {imgsz} px, ms", model=" ".join((model, *flags)), **columns)


def columns_of(by_torch: float, ours: float, one_pass: float) -> dict[str, float]:
    """Return the columns of a map. one_pass: seconds in which it is read or written once, at the measured peak."""
    return {
        "torch, ms": rounded(by_torch * 1000),
        "fused, ms": rounded(ours * 1000),
        "torch / fused": rounded(by_torch / ours),
        "torch, share of peak": rounded(TORCH_PASSES * one_pass / by_torch, 2),
        "fused, share of peak": rounded(PASSES * one_pass / ours, 2),
    }


if __name__ == "__main__":
    run(kernels, norms)
