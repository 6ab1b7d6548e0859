"""One epoch on 1, 2, 4 and 8 GPUs beside YOLOv5's published figures: yolov5l on COCO at 640, 16 images per GPU.

    python -m benchmarks.gpus --data data/coco.yaml [--counts 1 2 4 8] [--cfg yolov5l.yaml] [--imgsz 640]
        [--batch-per-gpu 16] [--device cuda] [flags of train.py]

Per count: one epoch from scratch by train.py, then one validation of its weights by val.py, on as many processes. Times
are without start, label scan and saving: they follow from the printed images per second, which train.py rounds to whole
numbers. Memory is the largest amount in use on a GPU during training according to nvidia-smi, with PyTorch's cache.

To try it without GPUs, in a minute: --device cpu --counts 1 2 --cfg yolov5n.yaml --imgsz 64 --batch-per-gpu 4 --data
data/shapes.yaml. Each process has one thread then, unless OMP_NUM_THREADS is set.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from job import VALIDATION_BATCH
from utils.files import ROOT

COCO = 118_287  # training images


class Times(NamedTuple):
    """Seconds of an epoch."""

    training: float
    validation: float


# By the number of GPUs, of 8 A100 in one machine, one of which validates:
# https://docs.ultralytics.com/yolov5/tutorials/multi-gpu-training
PUBLISHED = {1: Times(1239, 55), 2: Times(703, 57), 4: Times(357, 55), 8: Times(189, 57)}


class Outcome(NamedTuple):
    """The measurements of one count of processes."""

    times: Times
    rate: float  # images per second in training
    memory: float  # GiB, of the GPU that used most; 0 if it was not measured


def printed(script: str, flags: Sequence[str], device: str) -> str:
    """Run a script and return its output; exit if it fails."""
    environment = dict(os.environ)
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(ROOT / script), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{script} ended with exit code {done.returncode}")
    return done.stdout


def number(pattern: str, text: str) -> float:
    """Return the number in the group of `pattern`, at its last match in `text`."""
    return float(re.findall(pattern, text, re.MULTILINE)[-1])


@contextmanager
def gpu_memory(count: int, device: str) -> Iterator[list[float]]:
    """Sample the used memory of the first `count` GPUs every second; yield a list of the largest value, in GiB."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]
    ids = ids if all(ids) else [str(index) for index in range(count)]
    query = ["nvidia-smi", f"--id={','.join(ids)}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    most, over = [0.0], threading.Event()

    def sample() -> None:
        while not over.wait(1.0):
            try:
                values = subprocess.run(query, capture_output=True, text=True).stdout.split()
            except OSError:  # nvidia-smi is not installed
                return
            most.extend(int(mib) / 1024 for mib in values if mib.isdecimal())
            most[:] = [max(most)]

    thread = threading.Thread(target=sample, daemon=True)
    if device == "cuda":
        thread.start()
    try:
        yield most
    finally:
        over.set()
        if device == "cuda":
            thread.join()


def epoch(options: argparse.Namespace, extra: Sequence[str], count: int, project: Path) -> Outcome:
    """Train and validate on `count` processes."""
    batch = count * options.batch_per_gpu
    devices = ",".join(map(str, range(count))) if options.device == "cuda" else "cpu"
    common = ["--data", options.data, "--imgsz", str(options.imgsz), "--device", devices, "--processes", str(count)]
    common += ["--project", str(project)]
    job = ["--weights", "", "--cfg", options.cfg, "--epochs", "1"]
    job += ["--batch-size", str(batch), "--name", f"train{count}"]
    with gpu_memory(count, options.device) as most:
        text = printed("train.py", [*common, *job, "--noplots", "--no-wandb", *extra], options.device)
    rate = number(r"([\d.]+) img/s", text)
    training = math.ceil(number(r"^train: (\d+) images", text) / batch) * batch / rate
    weights = project / f"train{count}" / "weights" / "last.pt"
    batch = min(2 * batch, VALIDATION_BATCH)  # as train.py does
    job = ["--weights", str(weights), "--batch-size", str(batch), "--name", f"val{count}"]
    text = printed("val.py", [*common, *job], options.device)
    validation = number(r"^val: (\d+) images", text) / number(r"([\d.]+) images/s", text)
    return Outcome(Times(training, validation), rate, most[0])


def clock(seconds: float, tenths: bool = False) -> str:
    """Format seconds as min:s."""
    minutes, rest = divmod(round(10 * seconds) / 10 if tenths else round(seconds), 60)
    return f"{minutes:.0f}:{rest:04.1f}" if tenths else f"{minutes}:{rest:02d}"


def line(count: int, outcome: Outcome, first: tuple[int, float], comparable: bool) -> str:
    """Format a row of the table. first: count and training seconds of the first row."""
    times, memory = outcome.times, f"{outcome.memory:.1f}" if outcome.memory else "-"
    speed_up = first[1] / times.training
    training, validation = (clock(seconds, tenths=not comparable) for seconds in times)
    row = f"{count:>4} {training:>9} {outcome.rate:>9.0f} {validation:>10} {memory:>7}"
    row += f" {speed_up:>8.2f} {speed_up * first[0] / count:>10.2f}"
    if not comparable or not {count, first[0]} <= {*PUBLISHED}:
        return f"{row} {'-':>9} {'-':>10} {'-':>8}"
    theirs, gain = PUBLISHED[count], PUBLISHED[first[0]].training / PUBLISHED[count].training
    return f"{row} {clock(theirs.training):>9} {clock(theirs.validation):>10} {gain:>8.2f}"


def resolved(name: str) -> str:
    """Return the absolute path of an existing file, as the scripts run in another folder; other names unchanged."""
    return str(Path(name).resolve()) if Path(name).is_file() else name


def main() -> None:
    """Run all counts, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=resolved, required=True, help="data set YAML")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of processes")
    parser.add_argument("--cfg", type=resolved, default="yolov5l.yaml", help="model YAML")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch-per-gpu", type=int, default=16)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options, extra = parser.parse_known_args()
    job = (Path(options.data).stem, Path(options.cfg).stem, options.imgsz, options.batch_per_gpu)
    comparable = options.device == "cuda" and job == ("coco", "yolov5l", 640, 16)
    print(f"{'':<63} YOLOv5 on 8 A100")
    units = f"{'training':>9} {'images/s':>9} {'validation':>10} {'GiB':>7} {'speed-up':>8} {'efficiency':>10}"
    title = "GPUs" if options.device == "cuda" else "CPUs"
    print(f"{title} {units} {'training':>9} {'validation':>10} {'speed-up':>8}")
    first = None
    with tempfile.TemporaryDirectory() as project:
        for count in options.counts:
            outcome = epoch(options, extra, count, Path(project))
            first = first or (count, outcome.times.training)
            print(line(count, outcome, first, comparable), flush=True)


if __name__ == "__main__":
    main()
