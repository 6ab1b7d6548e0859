"""What the parts of `benchmarks.gpu_report` share: their flags, photos and weights, clocks, and rows of the report."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.gpu_report import ROW
from benchmarks.versus import linked
from data.builtin import shapes
from utils.files import ROOT

COCO_CLASSES = 80


@dataclass(frozen=True)
class Machine:
    """Where a part runs. device: a number as for --device, or cpu. quick: tiny settings, to try the code."""

    device: str
    quick: bool
    carried: Path  # photos, weights and checkouts that `benchmarks.gpu_data` has put there
    scratch: Path

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", 0)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def weights(self) -> Path | None:
        """The official yolov5n.pt, if it is carried."""
        file = self.carried / "weights" / "yolov5n.pt"
        return file if file.is_file() else None

    def photos(self, links: bool = False) -> Path:
        """Return the data YAML of the carried photos, or of drawn images. links: with each photo 16 times."""
        source, folder = self.carried / "photos", self.scratch / ("linked" if links else "photos")
        if not folder.is_dir():
            if source.is_dir() and links and not self.quick:
                linked(source, folder)
            elif source.is_dir() and not self.quick:
                link_photos(source, folder)
            else:
                shapes.draw_dataset(folder, train=24 if self.quick else 512, val=8 if self.quick else 128)
                names = dict(enumerate(shapes.NAMES))
                write_yaml(
                    folder / "data.yaml",
                    {"path": str(folder), "train": "images/train", "val": "images/val", "names": names},
                )
        return folder / "data.yaml"

    @property
    def has_photos(self) -> bool:
        """Whether the photos, with COCO's classes, are carried and used."""
        return (self.carried / "photos").is_dir() and not self.quick


def write_yaml(file: Path, content: Any) -> Path:
    """Write a YAML file and return it."""
    file.write_text(yaml.safe_dump(content))
    return file


def link_photos(source: Path, folder: Path) -> None:
    """Make a data set of carried photos, which train and validate."""
    folder.mkdir(parents=True)
    for part in ("images", "labels"):
        (folder / part).symlink_to((source / part).resolve())
    (place,) = {file.parent.name for file in (source / "images").rglob("*.jpg")}
    names = {number: str(number) for number in range(COCO_CLASSES)}
    paths = {"train": f"images/{place}", "val": f"images/{place}"}
    write_yaml(folder / "data.yaml", {"path": str(folder), **paths, "names": names})


def machine() -> Machine:
    """Read the flags of a part's process, and prepare its environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--carried", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    scratch = options.scratch or Path(tempfile.mkdtemp())
    os.environ["WANDB_MODE"] = "disabled"
    os.environ.setdefault("XDG_CACHE_HOME", str(scratch / "cache"))
    return Machine(options.device, options.quick, options.carried, scratch)


def row(table: str, **columns: Any) -> None:
    """Print a row of a table of the report, with plain values by column."""
    print(ROW + json.dumps({"table": table, **columns}), flush=True)


def rounded(value: float, digits: int = 3) -> float:
    """Round to significant digits, whole numbers above a thousand."""
    return float(f"{value:.{digits}g}") if abs(value) < 1000 else float(round(value))


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(call: Callable[[], object], device: torch.device, warmup: int, rounds: int) -> float:
    """Return the median wall seconds of a call, after warm-up, with the device's work included."""
    times = []
    for number in range(warmup + rounds):
        synchronise(device)
        begun = time.perf_counter()
        call()
        synchronise(device)
        if number >= warmup:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def free_memory(device: torch.device) -> None:
    """Give back what the last measurement allocated, and start a new count of the peak."""
    gc.collect()
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Return the peak memory of tensors in GiB; 0 without a GPU."""
    return rounded(torch.cuda.max_memory_allocated(device) / 2**30) if device.type == "cuda" else 0.0


def script(name: str, *flags: str, launcher: Sequence[str] = ()) -> str:
    """Run a script of the repository, and return what it printed; raise RuntimeError if it fails."""
    command = [sys.executable, *launcher, str(ROOT / name), *flags]
    environment = {**os.environ, "WANDB_MODE": "disabled"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def run_flags(here: Machine, name: str, precision: str, workers: int, *more: str) -> list[str]:
    """Return flags of train.py for a run of two epochs whose results are compared; the devices are not among them."""
    size = ["--imgsz", "64" if here.quick else "320", "--batch-size", "8" if here.quick else "32", "--epochs", "2"]
    what = ["--data", str(here.photos()), "--weights", "", "--cfg", "yolov5n.yaml", *size, "--noautoanchor"]
    how = ["--hyp", "low", "--mixed-precision", precision, "--workers", str(workers), "--noplots", "--no-wandb", *more]
    return [*what, *how, "--project", str(here.scratch / "runs"), "--name", name]


def training_flags(here: Machine, model: str, imgsz: int, batch: int, *more: str) -> list[str]:
    """Return flags of train.py for a measurement: nothing is drawn or validated, and one process loads."""
    what = ["--data", str(here.photos()), "--weights", "", "--cfg", f"{model}.yaml", "--imgsz", str(imgsz)]
    how = ["--batch-size", str(batch), "--device", here.device, "--workers", "0", "--noplots", "--no-wandb"]
    anchors = ["--noautoanchor"] * model.startswith("yolov5")
    return [*what, *how, "--hyp", "low", *anchors, "--project", str(here.scratch / "runs"), *more]
