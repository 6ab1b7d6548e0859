"""Validation per image: preparing, inference, suppression, by precision and threshold."""

from __future__ import annotations

import val
from benchmarks.gpu_parts.measuring import free_memory, machine, peak_gib, rounded, row, script, training_flags
from utils.distributed.launch import reset_accelerate
from utils.stage_times import milliseconds_per_image, without_warmup

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
    for batch in (4,) if here.quick else (1, 32):
        for confidence in (0.001, 0.25):
            for precision, how in precisions.items():
                given = {"weights": (str(weights),), "data": str(here.photos()), "imgsz": imgsz, "task": "speed"}
                given |= {"batch_size": batch, "conf_thres": confidence, "device": here.device, "quiet": True, **how}
                given |= {"workers": 2, "noplots": True, "project": str(here.scratch / "val")}
                free_memory(here.torch_device)
                evaluate = val.validate(given)
                times = milliseconds_per_image(without_warmup(evaluate.timer.batches))
                about = {"batch": batch, "conf": confidence, "precision": precision}
                stages = {stage: rounded(value) for stage, value in times.items()}
                row(TITLE, **about, **stages, **{"peak GiB": peak_gib(here.torch_device)})
                reset_accelerate()


if __name__ == "__main__":
    main()
