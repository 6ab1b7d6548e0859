"""Steps of a network whose kernels are recorded as a CUDA graph, and launched one by one: the same bytes? How fast?"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import Any

import torch

from benchmarks.gpu_parts.measuring import Machine, free_memory, machine, peak_gib, rounded, row
from benchmarks.gpu_parts.steps import median_seconds, take_steps
from tests.whole_runs import Parts
from utils.distributed.launch import reset_accelerate

CASES = (
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


def digest(parts: Parts) -> str:
    """Return a hash of the model's and the EMA's tensors."""
    hashed = hashlib.sha256()
    for model in (parts.model.model, parts.steps.ema.model):
        for value in model.state_dict().values():
            hashed.update(value.float().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def steps(here: Machine, model: str, imgsz: int, batch: int, *flags: str) -> tuple[float, float, str]:
    """Return the median milliseconds of a step, the peak memory in GiB, and the hash after all steps."""
    free_memory(here.torch_device)

    def measured(parts: Parts, shares: Any) -> Generator[Any, None, tuple[float, float, str]]:
        seconds = yield from median_seconds(here, parts, shares)
        copies: Any = parts.model.copies if here.on_gpu and "--no-cuda-graph" not in flags else ()
        parts_of = [part for each in copies for part in each.recorder.parts.values()]
        recorded = all(
            part.recordings for part in [*parts_of, *(each.recorder.together.recorded for each in copies[1:])]
        )
        hashed = digest(parts) if recorded else "nothing was recorded"
        return rounded(seconds * 1000), peak_gib(here.torch_device), hashed

    found = take_steps(here, model, imgsz, batch, measured, *flags)
    reset_accelerate()
    return found


def main() -> None:
    """Measure one case after another."""
    here = machine()
    for model, batch, precision, *flags in CASES[:1] if here.quick else CASES:
        batch, imgsz = (4, 64) if here.quick else (batch, 640)
        how = ["--mixed-precision", precision, *flags]
        launched, peak, expected = steps(here, model, imgsz, batch, *how, "--no-cuda-graph")
        recorded, recorded_peak, got = steps(here, model, imgsz, batch, *how)
        row(
            f"Steps at {imgsz} px, kernels launched one by one and recorded, ms",
            model=model, batch=batch, precision=" ".join([precision, *flags]), launched=launched, recorded=recorded,
            **{"launched / recorded": rounded(launched / recorded), "peak GiB": f"{peak}, {recorded_peak}"},
            bytes="identical" if got == expected else got if " " in got else "different",
        )  # fmt: skip
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
