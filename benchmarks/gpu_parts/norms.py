"""BatchNorm and SiLU by fused kernels and by torch's: maps of a network, forward and backward, and whole steps."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.gpu_parts.measuring import Machine, free_memory, machine, peak_gib, rounded, row, seconds_each
from benchmarks.gpu_parts.steps import measure_peaks, median_seconds, take_steps
from models import layers, norm_silu
from models.yolo import build_model
from utils.distributed.launch import reset_accelerate

MODELS = ("yolov5x", "yolov5n")
PASSES, TORCH_PASSES = 8, 13  # of a map through memory
CACHE_BYTES = 2**28  # maps that are used in turn are larger together than the device's cache


@contextmanager
def fused(wanted: bool) -> Iterator[None]:
    """Use the fused kernels where they can be used, or never."""
    with patch.object(norm_silu, "can_fuse", norm_silu.can_fuse if wanted else lambda *given: False):
        yield


def maps(here: Machine, model: str, imgsz: int) -> Counter[tuple[int, ...]]:
    """Return the shapes (c, h, w) that a network normalises before a SiLU, and how often."""
    shapes: Counter[tuple[int, ...]] = Counter()
    plain = layers.norm_and_activate

    def recorded(x: Tensor, norm: nn.Module, activation: nn.Module) -> Tensor:
        if isinstance(activation, nn.SiLU):
            shapes[tuple(x.shape[1:])] += 1
        return plain(x, norm, activation)

    with patch("models.layers.norm_and_activate", recorded), torch.no_grad():
        network = build_model(f"{model}.yaml", imgsz=imgsz).to(here.torch_device)
        shapes.clear()
        network.eval()(torch.zeros(1, 3, imgsz, imgsz, device=here.torch_device))
    return shapes


def replayed_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call's kernels, recorded as a CUDA graph; of the call itself without a GPU."""
    if device.type == "cpu":
        return seconds_each(call, device, 1, 2)
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


def map_seconds(here: Machine, shape: tuple[int, ...]) -> float:
    """Return the seconds of forward and backward for a bf16 map (b, c, h, w) in channels_last."""
    device, activation = here.torch_device, nn.SiLU()
    norm = nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.03, device=device)
    turns = min(16, math.ceil(CACHE_BYTES / (2 * math.prod(shape))))
    make = partial(torch.randn, *shape, device=device)
    inputs, upstream = (
        [make().to(torch.bfloat16, memory_format=torch.channels_last) for _ in range(turns)] for _ in "xg"
    )

    def call() -> None:
        for x, gradient in zip(inputs, upstream, strict=True):
            y = layers.norm_and_activate(x.requires_grad_(), norm, activation)
            torch.autograd.grad(y, [x, norm.weight, norm.bias], gradient)

    return replayed_seconds(call, device) / turns


def measure_maps(here: Machine, model: str, batch: int, imgsz: int, peak: float) -> None:
    """Print a row for each shape of a network's maps, and one for all."""
    title = f"BatchNorm and SiLU of {model}'s maps, bf16, batch {batch} at {imgsz} px, forward and backward"
    total = [0.0, 0.0, 0.0]
    for shape, count in sorted(maps(here, model, imgsz).items(), key=lambda item: -math.prod(item[0])):
        seconds = []
        for wanted in (False, True):
            free_memory(here.torch_device)
            with fused(wanted):
                seconds.append(map_seconds(here, (batch, *shape)))
        floor = 2 * batch * math.prod(shape) / peak
        measured = [*seconds, floor]
        total = [so_far + count * one for so_far, one in zip(total, measured, strict=True)]
        row(title, map=" x ".join(map(str, shape)), number=count, **columns(*measured))
    row(title, map="all", number="", **columns(*total))


def columns(by_torch: float, ours: float, floor: float) -> dict[str, float]:
    """Return the columns of a row. floor: seconds of one pass through memory at the measured peak."""
    return {
        "torch, ms": rounded(by_torch * 1000),
        "fused, ms": rounded(ours * 1000),
        "torch / fused": rounded(by_torch / ours),
        "torch, share of peak": rounded(TORCH_PASSES * floor / by_torch, 2),
        "fused, share of peak": rounded(PASSES * floor / ours, 2),
    }


def measure_steps(here: Machine, model: str, batch: int, imgsz: int, *flags: str) -> None:
    """Print a row of the steps of a model, with torch's kernels and with the fused ones."""
    found = []
    for wanted in (False, True):
        free_memory(here.torch_device)
        with fused(wanted):
            seconds = take_steps(here, model, imgsz, batch, partial(median_seconds, here), *flags)
        found.append((rounded(seconds * 1000), peak_gib(here.torch_device)))
        reset_accelerate()
    (by_torch, memory), (ours, our_memory) = found
    row(
        f"Steps in bf16, batch {batch} at {imgsz} px, ms",
        model=" ".join([model, *flags]), torch=by_torch, fused=ours, **{"torch / fused": rounded(by_torch / ours)},
        **{"torch, peak GiB": memory, "fused, peak GiB": our_memory},
    )  # fmt: skip


def main() -> None:
    """Measure maps first, then steps."""
    here = machine()
    batch, imgsz, models = (2, 64, MODELS[1:]) if here.quick else (16, 640, MODELS)
    peak = measure_peaks(here).bytes
    for model in models:
        measure_maps(here, model, batch, imgsz, peak)
    for model in models:
        measure_steps(here, model, batch, imgsz)
    measure_steps(here, models[-1], batch, imgsz, "--no-cuda-graph")


if __name__ == "__main__":
    main()
