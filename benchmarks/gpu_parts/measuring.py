"""What the parts of `benchmarks.gpu_report` share: their machine, flags of train.py, clocks, and rows of the report."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report import ROW
from benchmarks.versus import linked
from data.builtin import shapes
from tests.making import write_yaml
from utils.files import ROOT


@dataclass(frozen=True)
class Machine:
    """Where a part runs. device: as for --device of train.py. quick: tiny settings, to try the code."""

    device: str
    quick: bool
    carried: Path  # photos, weights and checkouts that `benchmarks.gpu_data` has put there
    scratch: Path

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    @property
    def precisions(self) -> Sequence[str]:
        """Values of --mixed-precision to compare: those that differ on this device."""
        return ("no", "bf16", "fp16") if self.on_gpu else ("no",)

    @property
    def precision(self) -> str:
        """The value of --mixed-precision that training has by default on this device."""
        return "bf16" if self.on_gpu else "no"

    @property
    def has_photos(self) -> bool:
        """Whether photos with COCO's classes are carried and used."""
        return (self.carried / "photos").is_dir() and not self.quick

    @property
    def weights(self) -> Path | None:
        """The official yolov5n.pt, if it is carried and its classes are those of the photos."""
        file = self.carried / "weights" / "yolov5n.pt"
        return file if file.is_file() and self.has_photos else None

    def photos(self, times: int = 1) -> Path:
        """Return the data YAML of the carried photos, each of them `times` times, or of drawn images."""
        folder = self.scratch / f"photos{times}"
        if not folder.is_dir() and self.has_photos:
            linked(self.carried / "photos", folder, times)
        elif not folder.is_dir():
            shapes.draw_dataset(folder, train=24 if self.quick else 512, val=8 if self.quick else 128)
            content = {"path": str(folder), "train": "images/train", "val": "images/val"}
            write_yaml(folder / "data.yaml", {**content, "names": dict(enumerate(shapes.names))})
        return folder / "data.yaml"

    def size(self, batch: int) -> tuple[int, int]:
        """Return the batch and image size of a measurement."""
        return (4, 64) if self.quick else (batch, 640)

    def flags(self, model: str, imgsz: int, batch: int, *more: str) -> list[str]:
        """Return flags of train.py for a run from scratch that draws nothing; `more` overrides them."""
        what = ["--data", str(self.photos()), "--weights", "", "--cfg", f"{model}.yaml", "--imgsz", str(imgsz)]
        how = ["--batch-size", str(batch), "--device", self.device, "--workers", "0", "--noplots", "--no-wandb"]
        anchors = ["--noautoanchor"] * model.startswith("yolov5")
        return [*what, *how, "--hyp", "low", *anchors, "--project", str(self.scratch / "runs"), *more]

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        """Give back what the last measurement allocated, and start a new count of the peak."""
        gc.collect()
        if self.on_gpu and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Return the peak memory of tensors in GiB; 0 without a GPU."""
        return rounded(torch.cuda.max_memory_allocated() / 2**30) if self.on_gpu else 0.0

    def seconds(self, call: Callable[[], object], warmup: int = 3, rounds: int = 10) -> float:
        """Return the median wall seconds of a call, after warm-up, with the device's work included."""
        times = []
        for _ in range(warmup + rounds):
            self.wait()
            begun = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[warmup:])


def run(*parts: Callable[[Machine], object]) -> None:
    """Run the part that the first argument names, on the machine that the flags describe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.__name__ for part in parts])
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--carried", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    os.environ |= {"WANDB_MODE": "disabled", "XDG_CACHE_HOME": str(options.scratch / "cache")}
    (part,) = [part for part in parts if part.__name__ == options.part]
    part(Machine(options.device, options.quick, options.carried, options.scratch))


def row(table: str, **columns: Any) -> None:
    """Print a row of a table of the report, with plain values by column."""
    print(ROW + json.dumps({"table": table, **columns}), flush=True)


def rounded(value: float, digits: int = 3) -> float:
    """Round to significant digits, whole numbers above a thousand."""
    return float(f"{value:.{digits}g}") if abs(value) < 1000 else float(round(value))


def script(name: str, *flags: str, launcher: Sequence[str] = ()) -> str:
    """Run a script of the repository, and return what it printed; raise RuntimeError if it fails."""
    command = [sys.executable, *launcher, str(ROOT / name), *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout
