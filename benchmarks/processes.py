"""Agreement and speed of the same fine-tuning on 1, 2 and 4 processes, with and without --sync-bn.

    python -m benchmarks.processes [--folder ../shared/data/coco128] [--weights ../shared/weights/yolov5n.pt]
        [--device cpu] [--counts 1 2 4]

Per launch, compared with the first one: the largest relative difference of any loss, the difference of mAP50, the
relative norm of the weights' difference, and images per second in the last epoch. N processes run on CUDA devices 0 to
N - 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from torch import Tensor

from tests.curves import floats, rows
from utils.files import ROOT

SHARED = ROOT.parent / "shared"


class Outcome(NamedTuple):
    """The results of one launch."""

    rows: list[dict[str, float]]
    weights: Tensor
    rate: float  # images per second


def photos(folder: Path, project: Path) -> Path:
    """Write a data YAML that trains and validates on all photos of `folder`, labelled with COCO's classes."""
    names = yaml.safe_load((ROOT / "data" / "coco128.yaml").read_text(encoding="utf-8"))["names"]
    file = project / "photos.yaml"
    file.write_text(yaml.safe_dump({"path": str(folder), "train": "images", "val": "images", "names": names}))
    return file


def launch(name: str, flags: Sequence[str], threads: int, project: Path) -> Outcome:
    """Train with `threads` threads per process."""
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--project", str(project), "--name", name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    printed = subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True).stdout
    rate = float(re.findall(r"(\d+) img/s", printed)[-1])
    return Outcome(rows(project / name), floats(project / name), rate)


def line(title: str, outcome: Outcome, first: Outcome) -> str:
    """Format a row of the table."""
    pairs = list(zip(outcome.rows, first.rows, strict=True))
    losses = [abs(row[key] / other[key] - 1) for row, other in pairs for key in row if "loss" in key]
    score = abs(outcome.rows[-1]["metrics/mAP_0.5"] - first.rows[-1]["metrics/mAP_0.5"])
    weights = (outcome.weights - first.weights).norm() / first.weights.norm()
    return f"{title:<32} {max(losses):9.1e} {score:9.1e} {weights:9.1e} {outcome.rate:9.0f}"


def main() -> None:
    """Run all launches, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SHARED / "data" / "coco128")
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "yolov5n.pt")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    options, extra = parser.parse_known_args()
    job = ["--weights", str(options.weights.resolve()), "--imgsz", "320", "--batch-size", "16", "--epochs", "2"]
    job += ["--noautoanchor", "--noplots", "--no-wandb", "--workers", "1", "--mixed-precision", "no", *extra]
    print(f"{'':<32} {'losses':>9} {'mAP50':>9} {'weights':>9} {'images/s':>9}")
    first = None
    with tempfile.TemporaryDirectory() as project:
        job += ["--data", str(photos(options.folder.resolve(), Path(project)))]
        for count in options.counts:
            for flag in [[]] if count == 1 else [["--sync-bn"], []]:
                devices = ",".join(map(str, range(count))) if options.device == "cuda" else "cpu"
                placement = ["--device", devices, "--processes", str(count)]
                name = f"{count}{''.join(flag)}"
                outcome = launch(name, [*job, *placement, *flag], 1, Path(project))
                first = first or outcome
                print(line(f"{count} of 1 thread {''.join(flag)}", outcome, first), flush=True)
        cores = os.cpu_count() or 1
        alone = launch("threads", [*job, "--device", "0" if options.device == "cuda" else "cpu"], cores, Path(project))
        print(line(f"1 of {cores} threads", alone, first or alone))


if __name__ == "__main__":
    main()
