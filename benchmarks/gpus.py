"""One epoch on 1, 2, 4 and 8 GPUs beside what YOLOv5 has published: yolov5l on COCO at 640, 16 images per GPU.

    python -m benchmarks.gpus --data data/coco.yaml [--counts 1 2 4 8] [--cfg yolov5l.yaml] [--imgsz 640]
        [--batch-per-gpu 16] [--device cuda] [flags of train.py]

Per count: one epoch from scratch by train.py, then one validation of its weights by val.py, on as many processes. Times
are those of the passes over the images, without start, label scan and saving, worked out of the images per second that
the two print: train.py's are whole numbers, so its time may be off by half an image per second. Memory is the most that
nvidia-smi saw in use on one of the GPUs during the training, all that PyTorch keeps for later included.

To try it without GPUs, in a minute: --device cpu --counts 1 2 --cfg yolov5n.yaml --imgsz 64 --batch-per-gpu 4 --data
data/shapes.yaml. Each process has one thread then, unless OMP_NUM_THREADS says otherwise.
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

from train import VALIDATION_BATCH
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
    """What a count came to."""

    times: Times
    rate: float  # images per second in training
    memory: float  # GiB, of the GPU that had most in use; 0 where there was nobody to look


def printed(script: str, flags: Sequence[str], device: str) -> str:
    """What a script printed; ends this one where it failed."""
    environment = dict(os.environ)
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(ROOT / script), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{script} ended with exit code {done.returncode}")
    return done.stdout


def number(pattern: str, text: str) -> float:
    """The last number in `text` that stands where `pattern` has its group."""
    return float(re.findall(pattern, text, re.MULTILINE)[-1])


@contextmanager
def watching(count: int, device: str) -> Iterator[list[float]]:
    """Within, looks every second at the memory in use on the first `count` GPUs, and keeps the largest, in GiB."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]
    ids = ids if all(ids) else [str(index) for index in range(count)]
    query = ["nvidia-smi", f"--id={','.join(ids)}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    most, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(1.0):
            try:
                found = subprocess.run(query, capture_output=True, text=True).stdout.split()
            except OSError:  # no such command here
                return
            most.extend(int(mib) / 1024 for mib in found if mib.isdecimal())
            most[:] = [max(most)]

    thread = threading.Thread(target=look, daemon=True)
    if device == "cuda":
        thread.start()
    try:
        yield most
    finally:
        over.set()
        if device == "cuda":
            thread.join()


def epoch(given: argparse.Namespace, extra: Sequence[str], count: int, project: Path) -> Outcome:
    """Train and validate on `count` processes."""
    batch = count * given.batch_per_gpu
    devices = ",".join(map(str, range(count))) if given.device == "cuda" else "cpu"
    common = ["--data", given.data, "--imgsz", str(given.imgsz), "--device", devices, "--processes", str(count)]
    common += ["--project", str(project)]
    job = ["--weights", "", "--cfg", given.cfg, "--epochs", "1", "--batch-size", str(batch), "--name", f"train{count}"]
    with watching(count, given.device) as most:
        text = printed("train.py", [*common, *job, "--noplots", "--no-wandb", "--noautoanchor", *extra], given.device)
    rate = number(r"([\d.]+) images/s", text)
    training = math.ceil(number(r"^train: (\d+) images", text) / batch) * batch / rate
    weights = project / f"train{count}" / "weights" / "last.pt"
    batch = min(2 * batch, VALIDATION_BATCH)  # train.py's own
    job = ["--weights", str(weights), "--batch-size", str(batch), "--name", f"val{count}"]
    text = printed("val.py", [*common, *job], given.device)
    validation = number(r"^val: (\d+) images", text) / number(r"([\d.]+) images/s", text)
    return Outcome(Times(training, validation), rate, most[0])


def clock(seconds: float, tenths: bool = False) -> str:
    """As min:s."""
    minutes, rest = divmod(round(10 * seconds) / 10 if tenths else round(seconds), 60)
    return f"{minutes:.0f}:{rest:04.1f}" if tenths else f"{minutes}:{rest:02d}"


def line(count: int, outcome: Outcome, first: tuple[int, float], comparable: bool) -> str:
    """A row of the table; `first`: count and training seconds of the first one."""
    times, memory = outcome.times, f"{outcome.memory:.1f}" if outcome.memory else "-"
    speed_up = first[1] / times.training
    training, validation = (clock(seconds, tenths=not comparable) for seconds in times)
    own = f"{count:>4} {training:>9} {outcome.rate:>9.0f} {validation:>10} {memory:>7}"
    own += f" {speed_up:>8.2f} {speed_up * first[0] / count:>10.2f}"
    if not comparable or not {count, first[0]} <= {*PUBLISHED}:
        return f"{own} {'-':>9} {'-':>10} {'-':>8}"
    theirs, gain = PUBLISHED[count], PUBLISHED[first[0]].training / PUBLISHED[count].training
    return f"{own} {clock(theirs.training):>9} {clock(theirs.validation):>10} {gain:>8.2f}"


def found(name: str) -> str:
    """A file of the working folder by its whole path, for the scripts run elsewhere; other names as they are."""
    return str(Path(name).resolve()) if Path(name).is_file() else name


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=found, required=True, help="data set YAML")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of processes")
    parser.add_argument("--cfg", type=found, default="yolov5l.yaml", help="model YAML")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch-per-gpu", type=int, default=16)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given, extra = parser.parse_known_args()
    job = (Path(given.data).stem, Path(given.cfg).stem, given.imgsz, given.batch_per_gpu)
    comparable = given.device == "cuda" and job == ("coco", "yolov5l", 640, 16)
    print(f"{'':<63} YOLOv5 on 8 A100")
    units = f"{'training':>9} {'images/s':>9} {'validation':>10} {'GiB':>7} {'speed-up':>8} {'efficiency':>10}"
    print(f"{'GPUs' if given.device == 'cuda' else 'CPUs'} {units} {'training':>9} {'validation':>10} {'speed-up':>8}")
    first = None
    with tempfile.TemporaryDirectory() as project:
        for count in given.counts:
            outcome = epoch(given, extra, count, Path(project))
            first = first or (count, outcome.times.training)
            print(line(count, outcome, first, comparable), flush=True)


if __name__ == "__main__":
    main()
