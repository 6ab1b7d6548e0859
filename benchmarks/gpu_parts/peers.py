"""Steps and suppression beside YOLOv5 and ultralytics, whose checkouts `benchmarks.gpu_data` has carried.

Each program is a process of its own with the same photos: its own loader, model, loss and average of weights, in its
default mixed precision on a GPU (fp16 with a scaler), ours in bf16. Goals: 2 times YOLOv5's step, 1.3 times that of
ultralytics, 3 times YOLOv5's suppression.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.measuring import Machine, rounded, row, run
from benchmarks.gpu_parts.steps import timed
from benchmarks.versus import THEIR_STEP, THEIRS, ULTRALYTICS, ULTRALYTICS_STEP
from models.heads.contract import DecodedView
from models.tasks.contract import Thresholds
from models.tasks.detect import detect

MODELS = ("yolov5n", "yolov5s", "yolov5x")
CANDIDATES = 25_200  # boxes of an image at 640 px
# Defines what the snippets of benchmarks.versus use, for a GPU.
CLOCK = """
import json, os, statistics, sys, time
import torch
RANK, PROCESSES, WORKERS = 0, 1, 0
MODEL, SIZE, FOLDER, BATCH = os.environ["MODEL"], os.environ["SIZE"], os.environ["FOLDER"], int(os.environ["BATCH"])
device = torch.device(os.environ["DEVICE"])
on_gpu = device.type == "cuda"
def wait():
    if on_gpu:
        torch.cuda.synchronize()
def measure(call, warmup, rounds):
    times = []
    for number in range(warmup + rounds):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begun)
    print("RESULT", json.dumps(statistics.median(times[warmup:])), flush=True)
    os._exit(0)
def take_steps(loss, model, optimizer, ema):
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
    def step():
        with torch.autocast(device.type, torch.float16, enabled=on_gpu):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update(model)
    measure(step, *((5, 10) if on_gpu else (1, 2)))
"""
STEPS = {"YOLOv5": ("yolov5", THEIRS + THEIR_STEP), "ultralytics": ("ultralytics", ULTRALYTICS + ULTRALYTICS_STEP)}
YOLOV5_SUPPRESSION = """
from utils.general import non_max_suppression
boxes = torch.load(os.environ["BOXES"], map_location=device)
measure(lambda: non_max_suppression(boxes, 0.001, 0.6, multi_label=True, max_det=300), 2, 5)
"""


def beside(here: Machine, ours: float, name: str, checkout: Path, code: str, **variables: Any) -> dict[str, Any]:
    """Run a snippet in a checkout; return its median milliseconds and their ratio to ours, or its last error line."""
    given = {"MODEL": "", "SIZE": 0, "BATCH": 0, "FOLDER": here.photos(times=16).parent, **variables}
    given |= {"DEVICE": here.torch_device.type, "YOLO_CONFIG_DIR": here.scratch}
    given["PYTHONPATH"] = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **{key: str(value) for key, value in given.items()}}
    command = [sys.executable, "-c", CLOCK + code]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        return {f"{name}, ms": (done.stderr.strip().splitlines() or ["no output"])[-1][:150]}
    seconds = json.loads(results[-1])
    return {f"{name}, ms": rounded(seconds * 1000), f"{name} / ours": rounded(seconds / ours)}


def compare_suppression(here: Machine, yolov5: Path) -> None:
    """Suppress the same random boxes, a thousand of them confident."""
    torch.manual_seed(0)
    count, images = (500, 1) if here.quick else (CANDIDATES, 16)
    boxes = torch.rand(images, count, 85)
    boxes[..., :4] *= 600
    boxes[..., 2:4] /= 10
    boxes[..., 4] *= torch.rand(images, count) < 1000 / count
    boxes[..., 5:] *= torch.rand(images, count, 80) ** 8
    torch.save(boxes, file := here.scratch / "boxes.pt")
    given = boxes.to(here.torch_device)
    ours = here.seconds(lambda: detect([DecodedView(given)], Thresholds()), 2, 5)
    columns: dict[str, Any] = {"images": images, "ours, ms": rounded(ours * 1000)}
    if yolov5.is_dir():
        columns |= beside(here, ours, "YOLOv5", yolov5, YOLOV5_SUPPRESSION, BOXES=file)
    row("Suppression of a thousand confident boxes of an image, conf 0.001, iou 0.6", **columns)


def peers(here: Machine) -> None:
    """Measure ours, and the peers that are carried."""
    compare_suppression(here, here.carried / "yolov5")
    batch, imgsz = here.size(16)
    for model in MODELS[:1] if here.quick else MODELS:
        ours = timed(here, model, imgsz, batch, "--data", str(here.photos(times=16))).seconds
        columns = {"model": model, "ours, ms": rounded(ours * 1000)}
        for name, (folder, code) in STEPS.items():
            if (here.carried / folder).is_dir():
                settings = {"MODEL": model, "SIZE": imgsz, "BATCH": batch}
                columns |= beside(here, ours, name, here.carried / folder, code, **settings)
        row(f"Steps, batch {batch} at {imgsz} px; peers if make gpu-data has carried them", **columns)


if __name__ == "__main__":
    run(peers)
