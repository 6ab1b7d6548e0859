"""Validation per image: preparing, inference, losses, suppression and records, by precision and threshold.

The host waits for the device at the end of each stage of a batch. The first batch, which compiles, does not count.
"""

from __future__ import annotations

import val
from benchmarks.gpu_parts.measuring import free_memory, machine, peak_gib, rounded, row, script, training_flags
from utils.distributed.launch import reset_accelerate
from utils.summary import without_warmup

TITLE = "Milliseconds per image of yolov5n"


def main() -> None:
    """Validate with the thresholds of mAP and of use."""
    here = machine()
    weights, imgsz = here.weights, 64 if here.quick else 640
    if not (weights and here.has_photos):
        flags = training_flags(here, "yolov5n", imgsz, 8, "--epochs", "1", "--noval", "--name", "own")
        script("train.py", *flags)
        weights = here.scratch / "runs" / "own" / "weights" / "last.pt"
    precisions = {"no": {"mixed_precision": "no"}, **({"half": {"half": True}} if here.on_gpu else {})}
    for batch, confidence in ((4, 0.001),) if here.quick else ((1, 0.001), (32, 0.001), (32, 0.25)):
        for precision, how in precisions.items():
            given = {"weights": (str(weights),), "data": str(here.photos()), "imgsz": imgsz, "task": "speed"}
            given |= {"batch_size": batch, "conf_thres": confidence, "device": here.device, "quiet": True, **how}
            given |= {"workers": 2, "noplots": True, "project": str(here.scratch / "val")}
            free_memory(here.torch_device)
            batches = without_warmup(val.validate(given).timer.batches)
            images = sum(one.images for one in batches)
            stages = {
                stage: rounded(1000 * sum(one.seconds[stage] for one in batches) / images)
                for stage in batches[0].seconds
            }
            about = {"batch": batch, "conf": confidence, "precision": precision}
            row(TITLE, **about, **stages, **{"peak GiB": peak_gib(here.torch_device)})
            reset_accelerate()


if __name__ == "__main__":
    main()
