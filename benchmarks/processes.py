"""How far the same fine-tuning drifts apart on 1, 2 and 4 processes, with --sync-bn and with --logical-processes 4.

    python -m benchmarks.processes [--data my.yaml] [--weights ../shared/weights/yolov5n.pt] [--imgsz 160]
        [--device cpu] [--counts 1 2 4] [--hyps low finetune] [--keep FOLDER] [--picture FILE]

Without --data: the blood cells of ../shared/data/bccd. For each recipe, way and number of processes it prints, after
epochs 1, 2, 5, 10 and 20, the largest relative difference of a training and of a validation loss from one process, and
mAP50-95; then images per second of the last epoch. N processes run on CUDA devices 0 to N - 1, or on one CPU thread
each. --keep: a folder for the runs; finished ones there are reused. --picture: a file for the curves.
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

import matplotlib.pyplot as plt
import yaml

from benchmarks.same_results import CELLS
from tests.curves import rows
from utils.errors import plural
from utils.files import ROOT

SHARED = ROOT.parent / "shared"
EPOCHS = (1, 2, 5, 10, 20)
WAYS = {"sync-bn": ["--sync-bn"], "logical": ["--logical-processes", "4"]}
SCORE = "metrics/mAP_0.5:0.95"


def launch(folder: Path, flags: Sequence[str]) -> None:
    """Train into `folder`, unless a finished run is there."""
    output = folder.with_suffix(".txt")
    if output.exists() and "results in" in output.read_text():
        return
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--project", str(folder.parent), "--name", folder.name]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with output.open("w") as file:
        subprocess.run([*command, "--exist-ok"], check=True, cwd=ROOT, env=environment, stdout=file)


def gap(run: Path, single: Path, kind: str, epoch: int) -> float:
    """Return the largest relative difference of a loss. kind: train or val."""
    pairs = zip(rows(run)[epoch - 1].items(), rows(single)[epoch - 1].values(), strict=True)
    return max(abs(value / other - 1) for (name, value), other in pairs if re.fullmatch(f"{kind}/.*loss", name))


def line(title: str, run: Path, single: Path) -> str:
    """Format a row of the table."""
    epochs = [epoch for epoch in EPOCHS if epoch <= len(rows(run))]
    cells = [
        f"{gap(run, single, 'train', epoch):.0e} {gap(run, single, 'val', epoch):.0e} {rows(run)[epoch - 1][SCORE]:.4f}"
        for epoch in epochs
    ]
    same = "same bytes" if (run / "results.csv").read_bytes() == (single / "results.csv").read_bytes() else ""
    rate = re.findall(r"(\d+) img/s", run.with_suffix(".txt").read_text())[-1]
    return " | ".join((title, *cells, rate, same))


def draw(project: Path, hyps: Sequence[str], counts: Sequence[int], file: Path) -> None:
    """Draw a validation loss and mAP50-95 over the epochs: a row for each recipe, a pair of charts for each way."""
    columns = [(way, name) for way in WAYS for name in ("val/cls_loss", SCORE)]
    figure, axes = plt.subplots(len(hyps), len(columns), figsize=(14, 3.2 * len(hyps)), squeeze=False)
    for hyp, row in zip(hyps, axes, strict=True):
        for (way, name), axis in zip(columns, row, strict=True):
            for count, style in zip(counts, ("-", "--", ":"), strict=False):
                values = [each[name] for each in rows(project / f"{hyp}-{way}-{count}")]
                axis.plot(range(1, len(values) + 1), values, style, linewidth=2, label=plural(count, "process"))
            axis.set_title(f"{hyp}, {' '.join(WAYS[way])}: {name.rpartition('/')[2]}", fontsize=9)
            axis.set_yscale("log" if "loss" in name else "linear")
    axes[0][0].legend(fontsize=8)
    figure.supxlabel("epoch", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=90)


def main() -> None:
    """Run all launches, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "yolov5n.pt")
    parser.add_argument("--imgsz", default="160")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hyps", nargs="+", default=["low", "finetune"])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--picture", type=Path)
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        project = (options.keep or Path(temporary)).resolve()
        project.mkdir(parents=True, exist_ok=True)
        cells = project / "cells.yaml"
        cells.write_text(yaml.safe_dump({"path": str(SHARED / "data" / "bccd"), **CELLS}))
        job = ["--data", str((options.data or cells).resolve()), "--weights", str(options.weights.resolve())]
        job += ["--imgsz", options.imgsz, "--batch-size", "16", "--epochs", str(EPOCHS[-1]), "--workers", "1"]
        job += ["--noplots", "--log-with", "none", "--mixed-precision", "no", *extra]
        for hyp in options.hyps:
            for way, flags in WAYS.items():
                for count in options.counts:
                    devices = ",".join(map(str, range(count))) if options.device == "cuda" else "cpu"
                    place, run = ["--device", devices, "--processes", str(count)], project / f"{hyp}-{way}-{count}"
                    launch(run, [*job, "--hyp", hyp, *flags, *place])
                    print(line(f"{hyp}, {way}, {count}", run, project / f"{hyp}-{way}-1"), flush=True)
        if options.picture:
            draw(project, options.hyps, options.counts, options.picture)


if __name__ == "__main__":
    main()
