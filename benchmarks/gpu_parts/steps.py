"""Training steps on one batch that is on the device already: their time and memory, captured, compiled; what waits."""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_parts.measuring import Machine, rounded, row, run
from data.builtin import shapes_cls, shapes_seg
from tests.making import write_yaml
from tests.whole_runs import Parts, within
from utils.distributed.launch import reset_accelerate
from utils.errors import UserError
from utils.files import ROOT
from utils.training import cuda_graph

T = TypeVar("T")
MODELS = ("yolov5n", "yolov5s", "yolov5m", "yolov5l", "yolov5x", "yolov9t", "yolov9s")
COMPILED = ("yolov5n", "yolov9t", "yolov5x")
RECORDED = (
    ("yolov5n", 16, "bf16"),
    ("yolov5s", 16, "bf16"),
    ("yolov9t", 16, "bf16"),
    ("yolov5x", 16, "bf16"),
    ("yolov5n", 64, "bf16"),
    ("yolov5n", 16, "no"),
    ("yolov5n", 16, "fp16"),
    ("yolov9t", 16, "no"),
    ("yolov5s", 16, "bf16", "--logical-processes", "4"),
    ("yolov5n", 16, "bf16", "--freeze", "backbone"),
)
BATCH = 64
MAX_COST = 1.25  # of a step of --logical-processes 4, times a plain one
MULTIPLES = (1.0, 1.1, 1.2, 1.3, 1.5)  # of AutoBatch's choice, which leaves a fifth of the memory


def take_steps(
    here: Machine,
    model: str,
    imgsz: int,
    batch: int,
    measure: Callable[[Parts, Any], Generator[Any, None, T]],
    *flags: str,
) -> T:
    """Train with all gradients of a batch a step, in bf16 but for `flags`; return what `measure` returns.

    Args:
        measure: takes the parts of the run and a batch; a step is taken each time it yields that batch
    """
    hyp = write_yaml(here.scratch / f"every-{batch}.yaml", {"nbs": batch})
    given = here.flags(model, imgsz, batch, "--mixed-precision", "bf16", "--hyp", str(hyp), *flags)
    here.free_memory()
    try:
        return within(given, lambda parts: parts.take_steps(measure(parts, next(iter(parts.loader)))))
    finally:
        reset_accelerate()


def step_seconds(here: Machine, shares: Any) -> Generator[Any, None, float]:
    """Take steps, and return the median wall seconds of one, after warm-up, with the device's work included."""
    warmup, rounds = (1, 2) if here.quick else (6, 10)
    times = []
    for _ in range(warmup + rounds):
        here.wait()
        begun = time.perf_counter()
        yield shares
        here.wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[warmup:])


class Timed(NamedTuple):
    """The median seconds of a step, the peak memory in GiB, and the share of the device's peak, as `step/mfu`."""

    seconds: float
    peak_gib: float
    mfu: float


def timed(here: Machine, model: str, imgsz: int, batch: int, *flags: str) -> Timed:
    """Measure a step."""

    def measured(parts: Parts, shares: Any) -> Generator[Any, None, Timed]:
        seconds = yield from step_seconds(here, shares)
        return Timed(seconds, here.peak_gib(), batch / seconds * parts.steps.log.image_mfu)

    return take_steps(here, model, imgsz, batch, measured, *flags)


def cost(here: Machine) -> None:
    """Compare steps of --logical-processes 4 with plain ones. Raises SystemExit if they are too long on a GPU."""
    batch, imgsz = here.size(16)
    model, flags = "yolov5n" if here.quick else "yolov5s", ("--logical-processes", "4")
    plain, four = timed(here, model, imgsz, batch), timed(here, model, imgsz, batch, *flags)
    ratio = four.seconds / plain.seconds
    columns = {"plain": rounded(plain.seconds * 1000), "4 logical processes": rounded(four.seconds * 1000)}
    columns |= {"ratio": rounded(ratio), "peak GiB": f"{plain.peak_gib}, {four.peak_gib}"}
    row(f"Steps in bf16, batch {batch} at {imgsz} px, ms", model=model, **columns)
    if here.on_gpu and ratio > MAX_COST:
        sys.exit(f"a step of --logical-processes 4 takes {ratio:.2f} times as long as a plain one, over {MAX_COST}")


def operations(here: Machine, model: str, imgsz: int, batch: int) -> int:
    """Return the floating-point operations of a step."""

    def counted(parts: Parts, shares: Any) -> Generator[Any, None, int]:
        yield shares
        with FlopCounterMode(display=False) as counter:
            yield shares
        return counter.get_total_flops()

    return take_steps(here, model, imgsz, batch, counted, "--no-cuda-graph")  # those of a replay are not seen


def steps(here: Machine) -> None:
    """Measure all models, and what share of the device's arithmetic they use: that of a bf16 product of matrices."""
    side = 128 if here.quick else 8192
    first, second = (torch.randn(side, side, device=here.torch_device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * side**3 / here.seconds(lambda: first @ second)
    row("Peak of this device, measured", **{"TFLOP/s, bf16": rounded(peak / 1e12)})
    batch, imgsz = here.size(BATCH)
    for model in MODELS[:1] if here.quick else MODELS:
        seconds, peak_gib, mfu = timed(here, model, imgsz, batch)
        flops = operations(here, model, imgsz, batch)
        columns = {"ms": rounded(seconds * 1000), "images/s": rounded(batch / seconds), "peak GiB": peak_gib}
        columns |= {"step/mfu": rounded(mfu, 2), "TFLOP": rounded(flops / 1e12)}
        columns["share of peak FLOP/s"] = rounded(flops / seconds / peak, 2)
        row(f"Steps in bf16, batch {batch} at {imgsz} px", model=model, **columns)


def compiled(here: Machine) -> None:
    """Measure compiled models: a small one, one of many small layers, and a large one, which may not be reached."""
    batch, imgsz = here.size(BATCH)
    for model in COMPILED[:1] if here.quick else COMPILED:
        try:
            with patch.dict(os.environ, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}):
                measured = timed(here, model, imgsz, batch)
            columns: dict[str, Any] = {"ms": rounded(measured.seconds * 1000), "peak GiB": measured.peak_gib}
        except Exception as error:  # a compiler's: the next row is still of use
            columns = {"note": f"{type(error).__name__}: {str(error)[:200]}"}
        row(f"Steps of a compiled model in bf16, batch {batch} at {imgsz} px", model=model, **columns)


def digest(parts: Parts) -> str:
    """Return a hash of the model's and the EMA's tensors."""
    hashed = hashlib.sha256()
    for model in (parts.model.model, parts.steps.ema.model):
        for value in model.state_dict().values():
            hashed.update(value.float().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def recorded(here: Machine) -> None:
    """Compare networks whose kernels are captured as CUDA graphs, and launched one by one: the same bytes? How fast?"""

    def measured(parts: Parts, shares: Any) -> Generator[Any, None, tuple[float, float, str]]:
        seconds = yield from step_seconds(here, shares)
        return seconds, here.peak_gib(), digest(parts)

    for model, batch, precision, *flags in RECORDED[:1] if here.quick else RECORDED:
        batch, imgsz = here.size(batch)
        how = ("--mixed-precision", precision, *flags)
        launched, peak, expected = take_steps(here, model, imgsz, batch, measured, *how, "--no-cuda-graph")
        with patch.object(cuda_graph, "Capture", wraps=cuda_graph.Capture) as capture:
            seconds, recorded_peak, actual = take_steps(here, model, imgsz, batch, measured, *how)
        columns: dict[str, Any] = {"launched": rounded(launched * 1000), "recorded": rounded(seconds * 1000)}
        columns |= {"launched / recorded": rounded(launched / seconds), "peak GiB": f"{peak}, {recorded_peak}"}
        columns |= {"recordings": capture.call_count, "bytes": "identical" if actual == expected else "different"}
        about = {"model": model, "batch": batch, "precision": " ".join((precision, *flags))}
        row(f"Steps at {imgsz} px, kernels launched one by one and recorded, ms", **about, **columns)


def fits(here: Machine, model: str, imgsz: int, batch: int) -> str:
    """Take three steps; return the peak memory, or that there was too little."""

    def three(parts: Parts, shares: Any) -> Generator[Any, None, int]:
        yield from [shares] * 3
        return parts.steps.state.measured.batch_size

    try:
        taken = take_steps(here, model, imgsz, batch, three, "--data", str(here.photos(times=16)))
    except (torch.OutOfMemoryError, UserError) as error:
        return f"no: {str(error)[:80]}"
    return f"{here.peak_gib()} GiB" if taken == batch else f"no: batches of {taken}"


def fitting(here: Machine) -> None:
    """Compare AutoBatch's choice for a large and a small model with what really fits."""
    for model in ("yolov5n",) if here.quick else ("yolov5x", "yolov5s"):
        _, imgsz = here.size(1)
        flags = here.flags(model, imgsz, -1, "--mixed-precision", "bf16", "--data", str(here.photos(times=16)))
        chosen = within(flags, lambda parts: parts.steps.state.measured.batch_size)
        reset_accelerate()
        multiples = MULTIPLES[:2] if here.quick else MULTIPLES
        outcomes = {f"{times:g} times": fits(here, model, imgsz, int(times * chosen)) for times in multiples}
        row(f"AutoBatch in bf16 at {imgsz} px, and steps with multiples of it", model=model, chosen=chosen, **outcomes)


def places(here: Machine, parts: Parts) -> Generator[Any, None, Counter[str]]:
    """Take eight steps with a tracker's step log; return where the last six wait for the GPU, and how often."""
    parts.steps.log.enabled = True
    batches = list(itertools.islice(itertools.cycle(list(parts.loader)), 8))
    yield from batches[:2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if here.on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        yield from batches[2:]
        if here.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    lines = [f"{os.path.relpath(each.filename, ROOT)}:{each.lineno}" for each in caught if "synchroniz" in str(each)]
    return Counter(lines)


def waits(here: Machine) -> None:
    """Name the operations of the loop that wait for the GPU, by task and precision."""
    outlines = shapes_seg.draw_dataset(here.scratch / "outlines", train=32, val=4)
    classes = shapes_cls.draw_dataset(here.scratch / "classes", train=32, val=4)
    names = dict(enumerate(shapes_seg.names))
    content = {"path": str(outlines), "train": "images/train", "val": "images/val", "names": names}
    segments = write_yaml(here.scratch / "outlines.yaml", content)
    folders = write_yaml(here.scratch / "classes.yaml", {"path": str(classes), "train": "train", "val": "val"})
    tasks = {
        "yolov5n": (here.photos(), {"nbs": 8}),
        "yolov5n-seg": (segments, {"nbs": 8}),
        "resnet18": (folders, {"lr0": 0.01}),
    }
    for model, (data, recipe) in tasks.items():
        hyp = write_yaml(here.scratch / f"{model}.yaml", recipe)
        for precision in here.precisions:
            how = ["--data", str(data), "--hyp", str(hyp), "--mixed-precision", precision]
            flags = here.flags(model, 64 if here.quick else 320, 8, *how)
            found = within(flags, lambda parts: parts.take_steps(places(here, parts)))
            reset_accelerate()
            title = "Waits in six batches, every one a step; stated: the verdict on the last step, and fp16's scale"
            where = ", ".join(f"{place} ({count})" for place, count in found.items())
            row(title, model=model, precision=precision, waits=found.total(), where=where)


if __name__ == "__main__":
    run(steps, cost, compiled, recorded, fitting, waits)
