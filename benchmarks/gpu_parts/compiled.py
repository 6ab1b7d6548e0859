"""Training steps of a compiled model."""

from __future__ import annotations

from benchmarks.gpu_parts.measuring import machine
from benchmarks.gpu_parts.steps import COMPILERS, Peaks, measure

MODELS = ("yolov5n", "yolov9t", "yolov5x")


def main() -> None:
    """Measure a small model, one of many small layers and a large one; the last may not be reached."""
    here = machine()
    for model in MODELS[:1] if here.quick else MODELS:
        for compiler in [name for name in COMPILERS if name or not here.quick]:
            measure(here, model, compiler, True, Peaks(float("inf"), float("inf")))


if __name__ == "__main__":
    main()
