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
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_parts.measuring import Machine, machine, rounded, row, seconds_each
from benchmarks.gpu_parts.steps import median_seconds, settings, take_steps
from benchmarks.versus import THEIR_STEP, THEIRS, ULTRALYTICS, ULTRALYTICS_STEP
from models.heads.contract import DecodedView
from models.tasks.contract import Thresholds
from models.tasks.detect import detect

MODELS = ("yolov5n", "yolov5s", "yolov5x")
CANDIDATES = 25_200  # boxes of an image at 640 px
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
    os._exit(0)
"""
YOLOV5_SUPPRESSION = """
from utils.general import non_max_suppression
boxes = torch.load(os.environ["BOXES"], map_location=device)
measure(lambda: non_max_suppression(boxes, 0.001, 0.6, multi_label=True, max_det=300), 2, 5)
os._exit(0)
"""


def theirs(here: Machine, checkout: Path, code: str, **variables: str) -> float:
    """Run a snippet in a checkout; return its median seconds. Raises RuntimeError with its last line."""
    folder = here.photos(links=True).parent
    given = {"FOLDER": str(folder), "DEVICE": here.torch_device.type, "WANDB_MODE": "disabled", **variables}
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **given, "YOLO_CONFIG_DIR": str(here.scratch), "PYTHONPATH": path}
    command = [sys.executable, "-c", CLOCK + code]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return float(json.loads(results[-1].removeprefix("RESULT ")))


def compare_steps(here: Machine, peers: dict[str, tuple[Path, str]]) -> None:
    """Print a row for each model."""
    batch, imgsz = (4, 64) if here.quick else (16, 640)
    for model in MODELS[: 1 if here.quick else None]:
        with settings("", True):
            photos = ("--data", str(here.photos(links=True)))
            ours = take_steps(here, model, imgsz, batch, partial(median_seconds, here), *photos)
        columns = {"model": model, "ours, ms": rounded(ours * 1000)}
        for name, (checkout, code) in peers.items():
            try:
                seconds = theirs(here, checkout, code, MODEL=model, SIZE=str(imgsz), BATCH=str(batch))
                columns |= {f"{name}, ms": rounded(seconds * 1000), f"{name} / ours": rounded(seconds / ours)}
            except RuntimeError as error:
                columns |= {f"{name}, ms": str(error)[:150]}
        row(f"Steps, batch {batch} at {imgsz} px", **columns)


def compare_suppression(here: Machine, checkout: Path | None) -> None:
    """Suppress the same random boxes, a thousand of them confident."""
    torch.manual_seed(0)
    count, images = (500, 1) if here.quick else (CANDIDATES, 16)
    boxes = torch.rand(images, count, 85)
    boxes[..., :4] *= 600
    boxes[..., 2:4] /= 10
    boxes[..., 4] *= torch.rand(images, count) < 1000 / count
    boxes[..., 5:] *= torch.rand(images, count, 80) ** 8
    given, file = boxes.to(here.torch_device), here.scratch / "boxes.pt"
    torch.save(boxes, file)
    ours = seconds_each(lambda: detect([DecodedView(given)], Thresholds()), here.torch_device, 2, 5) / images
    columns = {"ours, ms per image": rounded(ours * 1000)}
    if checkout:
        try:
            seconds = theirs(here, checkout, YOLOV5_SUPPRESSION, MODEL="", SIZE="0", BATCH="0", BOXES=str(file))
            columns |= {
                "YOLOv5, ms": rounded(seconds / images * 1000),
                "YOLOv5 / ours": rounded(seconds / images / ours),
            }
        except RuntimeError as error:
            columns |= {"YOLOv5, ms": str(error)[:150]}
    row("Suppression of a thousand confident boxes of an image, conf 0.001, iou 0.6", **columns)


def main() -> None:
    """Measure ours, and the peers that are carried."""
    here = machine()
    known = {"yolov5": ("YOLOv5", THEIRS + THEIR_STEP), "ultralytics": ("ultralytics", ULTRALYTICS + ULTRALYTICS_STEP)}
    peers = {
        title: (here.carried / name, code) for name, (title, code) in known.items() if (here.carried / name).is_dir()
    }
    if not peers:
        row("Peers", note="not measured: no checkout is carried (make gpu-data)")
    compare_suppression(here, peers["YOLOv5"][0] if "YOLOv5" in peers else None)
    compare_steps(here, peers)


if __name__ == "__main__":
    main()
