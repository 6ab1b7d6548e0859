"""Ours and YOLOv5 in turn on the same files: CPU and wall time of the loader, the label scan, the start and the step.

    python -m benchmarks.versus --data ../datasets/coco128 --yolov5 ../yolov5 [--python ../yolov5/.venv/bin/python]

`--data`: a folder with images/<split> and labels/<split> of photos. They are linked 16 times. Without `--yolov5` only
ours is measured. Each measurement is a process of its own with one thread; medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = 16  # that each photo is linked
FIRST, BATCHES = 2, 12  # batches that are not timed, and that are
# What a child does: `begin()` and `end(images)` stand around what is timed. FOLDER holds images/ and labels/.
CLOCK = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
def begin():
    global at
    at = time.process_time(), time.perf_counter()
def end(images):
    spent = time.process_time() - at[0], time.perf_counter() - at[1]
    print("RESULT", json.dumps([seconds / images * 1000 for seconds in spent]))
FOLDER, FIRST, BATCHES = os.environ["FOLDER"], int(os.environ["FIRST"]), int(os.environ["BATCHES"])
def drain(loader):
    batches = iter(loader)
    for _ in range(FIRST):
        next(batches)
    begin()
    for _ in range(BATCHES):
        next(batches)
    end(BATCHES * 16)
"""
OURS = """
from pathlib import Path
from data.detection import DetectionData
from data.sources import read_spec
from utils.config import Hyperparameters
spec = read_spec(Path(FOLDER) / "data.yaml")
def loader(cache="", near=True):
    data = DetectionData(spec, imgsz=640, stride=32, single_class=False, workers=0, cache=cache)
    split = data.split("train")
    made = data.train_loader(split, batch_size=16, hyp=Hyperparameters(), seed=0, rect=False, near=near)
    if cache:
        for index in range(len(split.images)):
            made.dataset.images.read(index)
    return made
"""
THEIRS = """
import yaml
import cv2
from utils.dataloaders import create_dataloader
cv2.setNumThreads(0)
hyp = yaml.safe_load(open("data/hyps/hyp.scratch-low.yaml"))
def loader(cache=None):
    made, _ = create_dataloader(FOLDER + "/images/train", 640, 16, 32, hyp=hyp, augment=True, cache=cache, workers=0,
                                shuffle=True)
    return made
"""
PARTS: dict[str, dict[str, str]] = {
    "loader, mosaic of any images": {"ours": OURS + "drain(loader(near=False))", "yolov5": THEIRS + "drain(loader())"},
    "loader, mosaic of neighbours": {"ours": OURS + "drain(loader())", "yolov5": THEIRS + "drain(loader())"},
    "loader, images in memory": {"ours": OURS + "drain(loader('ram'))", "yolov5": THEIRS + "drain(loader('ram'))"},
}


def main() -> None:
    """Measure each part, ours and theirs in turn, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with images/ and labels/ of photos")
    parser.add_argument("--yolov5", type=Path, help="a YOLOv5 checkout")
    parser.add_argument("--python", default=sys.executable, help="the Python that YOLOv5's packages are installed for")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", default="", help="only parts whose name contains this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = linked(given.data, Path(place))
        sides = {"ours": (sys.executable, ROOT)}
        if given.yolov5:
            sides["yolov5"] = (given.python, given.yolov5)
        print(f"{'milliseconds per image':40} {'':8} {'CPU':>8} {'wall':>8}")
        for name, snippets in PARTS.items():
            if given.part in name:
                report(name, {side: [] for side in sides}, sides, snippets, folder, given.rounds)


def report(
    name: str,
    found: dict[str, list[list[float]]],
    sides: dict[str, tuple[str, Path]],
    snippets: dict[str, str],
    folder: Path,
    rounds: int,
) -> None:
    """Measure one part so many times and print it."""
    for _ in range(rounds):
        for side, (python, checkout) in sides.items():
            found[side].append(measured(python, checkout, snippets[side], folder))
    medians = {side: [statistics.median(column) for column in zip(*rows, strict=True)] for side, rows in found.items()}
    for side, (cpu, wall) in medians.items():
        print(f"{name:40} {side:8} {cpu:8.2f} {wall:8.2f}", flush=True)
    if len(medians) > 1:
        ratios = [theirs / own for own, theirs in zip(*medians.values(), strict=True)]
        print(f"{name:40} {'ratio':8} {ratios[0]:8.2f} {ratios[1]:8.2f}", flush=True)


def measured(python: str, checkout: Path, snippet: str, folder: Path) -> list[float]:
    """CPU and wall milliseconds per image of one run in a process of its own."""
    cache = folder.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    for leftover in folder.rglob("*.cache"):  # YOLOv5's label cache
        leftover.unlink()
    numbers = {"FOLDER": str(folder), "FIRST": str(FIRST), "BATCHES": str(BATCHES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", CLOCK + snippet],
        cwd=checkout,
        env={**os.environ, **numbers, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.exit(f"{checkout}: {done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def linked(source: Path, place: Path) -> Path:
    """A data set of the photos in `source`, each linked so many times; labels are copied."""
    folder = place / "set"
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for photo in sorted((source / "images").rglob("*.jpg")):
        label = Path(str(photo).replace("/images/", "/labels/")).with_suffix(".txt")
        for number in range(TIMES):
            name = f"{photo.stem}_{number:02d}"
            (folder / "images" / "train" / f"{name}.jpg").symlink_to(photo.resolve())
            if label.is_file():
                shutil.copy(label, folder / "labels" / "train" / f"{name}.txt")
    (folder / "data.yaml").write_text("train: images/train\nval: images/train\nnc: 80\n")
    return folder


if __name__ == "__main__":
    main()
