"""AutoBatch's choice against what really fits: steps with its batch size, and with larger ones."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from benchmarks.gpu_parts.measuring import Machine, free_memory, machine, peak_gib, row, training_flags
from benchmarks.gpu_parts.steps import take_steps
from tests.whole_runs import Parts, within
from utils.distributed.launch import reset_accelerate
from utils.errors import UserError

SHARES = (1.0, 1.1, 1.2, 1.3, 1.5)  # of AutoBatch's choice, which leaves a fifth of the memory


def chosen(here: Machine, model: str, imgsz: int) -> int:
    """Return AutoBatch's batch size."""
    flags = training_flags(here, model, imgsz, -1, "--mixed-precision", "bf16")
    flags = ["--data", str(here.photos(links=True)), *flags[2:]]
    batch = within(flags, lambda parts: parts.steps.state.decisions.batch_size)
    reset_accelerate()
    return batch


def fits(here: Machine, model: str, imgsz: int, batch: int) -> str:
    """Take three steps; return the peak memory, or that there was too little."""
    free_memory(here.torch_device)

    def three(parts: Parts, shares: Any) -> Generator[Any, None, int]:
        yield from [shares] * 3
        return parts.steps.state.decisions.batch_size

    try:
        taken = take_steps(here, model, imgsz, batch, three, "--data", str(here.photos(links=True)))
    except (torch.OutOfMemoryError, UserError) as error:
        return f"no: {str(error)[:80]}"
    finally:
        reset_accelerate()
    return f"{peak_gib(here.torch_device)} GiB" if taken == batch else f"no: batches of {taken}"


def main() -> None:
    """Measure a large and a small model."""
    here = machine()
    for model in ("yolov5n",) if here.quick else ("yolov5x", "yolov5s"):
        imgsz = 64 if here.quick else 640
        batch = chosen(here, model, imgsz)
        outcomes = {
            f"{share:g} times": fits(here, model, imgsz, int(batch * share))
            for share in SHARES[: 2 if here.quick else None]
        }
        row(f"AutoBatch in bf16 at {imgsz} px, and steps with multiples of it", model=model, chosen=batch, **outcomes)


if __name__ == "__main__":
    main()
