"""Steps of a network whose kernels are recorded as a CUDA graph, and launched one by one: the same bytes? How fast?"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from benchmarks.gpu_parts.measuring import Machine, free_memory, machine, peak_gib, rounded, row, seconds_each
from benchmarks.gpu_parts.steps import assembled
from utils.distributed.accelerator import reset_accelerate

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


def digest(training: Any) -> str:
    """Return a hash of the model's and the EMA's tensors."""
    hashed = hashlib.sha256()
    for model in (training.steps.model.bare, training.steps.ema.model):
        for value in model.state_dict().values():
            hashed.update(value.float().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def steps(here: Machine, model: str, imgsz: int, batch: int, *flags: str) -> tuple[float, float, str]:
    """Return the median milliseconds of a step, the peak memory in GiB, and the hash after all steps."""
    free_memory(here.torch_device)
    training, shares = assembled(here, model, imgsz, batch, *flags)
    numbers = iter(range(10**9))
    rounds = (1, 2) if here.quick else (6, 10)
    seconds = seconds_each(lambda: training.train_on(shares, next(numbers)), here.torch_device, *rounds)
    found = rounded(seconds * 1000), peak_gib(here.torch_device), digest(training)
    recordings = training.add_gradients.recordings
    if "--no-cuda-graph" not in flags and here.on_gpu and not all(each.recording for each in recordings):
        found = (*found[:2], "nothing was recorded")
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
