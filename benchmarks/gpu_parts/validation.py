"""Validation per image: preparing, inference, suppression, by precision and threshold."""

from __future__ import annotations

import torch

import val
from benchmarks.gpu_parts.measuring import free_memory, machine, peak_gib, rounded, row, script, training_flags
from utils.distributed.accelerator import reset_accelerate
from utils.stage_times import StageTimer, milliseconds_per_image, without_warmup

TITLE = "Milliseconds per image of yolov5n"


def main() -> None:
    """Validate with the thresholds of mAP and of use."""
    here = machine()
    weights, imgsz = here.weights, 64 if here.quick else 640
    if not (weights and here.has_photos):
        flags = training_flags(here, "yolov5n", imgsz, 8, "--epochs", "1", "--noval", "--name", "own")
        script("train.py", *flags)
        weights = here.scratch / "runs" / "own" / "weights" / "last.pt"
    batches = (4,) if here.quick else (1, 32)
    for batch in batches:
        for confidence in (0.001, 0.25):
            for precision in (
                (["--half"], ["--mixed-precision", "no"]) if here.on_gpu else (["--mixed-precision", "no"],)
            ):
                given = ["--weights", str(weights), "--data", str(here.photos()), "--imgsz", str(imgsz), "--square"]
                how = ["--batch-size", str(batch), "--conf-thres", str(confidence), "--device", here.device, "--quiet"]
                where = ["--workers", "2", "--noplots", "--project", str(here.scratch / "val")]
                free_memory(here.torch_device)
                validation = val.assemble([*given, *how, *where, *precision])
                validation.evaluate.timer = StageTimer(torch.cuda.synchronize if here.on_gpu else lambda: None)
                validation.evaluate(validation.models)
                times = milliseconds_per_image(without_warmup(validation.evaluate.timer.batches))
                about = {"batch": batch, "conf": confidence, "precision": " ".join(precision).removeprefix("--")}
                stages = {stage: rounded(value) for stage, value in times.items()}
                row(TITLE, **about, **stages, **{"peak GiB": peak_gib(here.torch_device)})
                reset_accelerate()


if __name__ == "__main__":
    main()
