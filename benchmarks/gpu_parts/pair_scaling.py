"""Images per second of training on one device and on two: `benchmarks.gpus` on the carried photos."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.gpu_parts.measuring import machine, rounded, row
from benchmarks.gpus import epoch


def main() -> None:
    """Measure yolov5l at 640, 16 images per device."""
    here = machine()
    job = (
        {"imgsz": 64, "batch_per_gpu": 4, "cfg": "yolov5n.yaml"}
        if here.quick
        else {"imgsz": 640, "batch_per_gpu": 16, "cfg": "yolov5l.yaml"}
    )
    options = Namespace(**job, data=str(here.photos(links=True)), device="cuda" if here.on_gpu else "cpu")
    first = 0.0
    for count in (1, 2):
        outcome = epoch(options, ["--workers", "1" if here.quick else "8", "--sync-bn"], count, here.scratch)
        first = first or outcome.rate
        about = {"devices": count, "images/s": rounded(outcome.rate), "times one": rounded(outcome.rate / first)}
        row(f"Training of {job['cfg']} at {job['imgsz']} px", **about, **{"GiB": rounded(outcome.memory)})


if __name__ == "__main__":
    main()
