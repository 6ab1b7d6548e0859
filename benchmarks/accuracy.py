"""Fine-tune the official yolov5n on blood cells, and compare the result with YOLOv5's on the same split.

    python -m benchmarks.accuracy [--folder ../shared/data/bccd] [--weights ../shared/weights/yolov5n.pt]
        [--recipe low] [--seeds 2] [other flags of train.py, such as --epochs 10]

The folder holds Shenggan/BCCD_Dataset in YOLO form: images/{train,val} and labels/{train,val}, classes RBC, WBC,
Platelets. Image size 320, batch 16, 20 epochs, else defaults; the result is that of the last epoch on the val split,
with seeds 0, 1 ... The recipe is a file of data/hyps; YOLOv5's figures are those of its own, low, after 20 epochs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from utils.files import ROOT

# YOLOv5 at commit 5081342, same command, torch 2.15 on 2 CPU cores: mAP50, mAP50-95 by seed.
YOLOV5 = {0: (0.760, 0.425), 1: (0.810, 0.448)}
YOLOV5_MEAN = (0.785, 0.437)  # of the values before rounding


def fine_tune(folder: Path, weights: Path, seed: int, project: Path, extra: list[str]) -> tuple[float, float, float]:
    """Train, and return mAP50 and mAP50-95 of the last epoch and the seconds of the whole command."""
    data = project / "bccd.yaml"
    names = {0: "RBC", 1: "WBC", 2: "Platelets"}
    splits = {split: f"images/{split}" for split in ("train", "val")}
    data.write_text(yaml.safe_dump({"path": str(folder.resolve()), **splits, "names": names}))
    job = ["--weights", str(weights), "--data", str(data), "--img", "320", "--batch-size", "16", "--epochs", "20"]
    run = ["--seed", str(seed), "--project", str(project), "--name", f"seed{seed}"]
    started = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "train.py"), *job, *run, "--no-wandb", *extra], check=True, cwd=ROOT)
    with (project / f"seed{seed}" / "results.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    return float(last["metrics/mAP_0.5"]), float(last["metrics/mAP_0.5:0.95"]), time.monotonic() - started


def main() -> None:
    """Train with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT.parent / "shared" / "data" / "bccd")
    parser.add_argument("--weights", type=Path, default=ROOT.parent / "shared" / "weights" / "yolov5n.pt")
    parser.add_argument("--recipe", default="low")
    parser.add_argument("--seeds", type=int, default=len(YOLOV5), help="their number")
    options, extra = parser.parse_known_args()
    flags = ["--hyp", options.recipe, *extra]
    with tempfile.TemporaryDirectory() as project:
        outcomes = {
            seed: fine_tune(options.folder, options.weights.resolve(), seed, Path(project), flags)
            for seed in range(options.seeds)
        }
    print(f"{'seed':>6} {'mAP50':>8} {'mAP50-95':>9} {'YOLOv5':>8} {'':>8} {'seconds':>8}")
    for seed, (map50, map50_95, seconds) in outcomes.items():
        theirs = YOLOV5.get(seed, (float("nan"), float("nan")))
        print(f"{seed:>6} {map50:8.3f} {map50_95:9.3f} {theirs[0]:8.3f} {theirs[1]:8.3f} {seconds:8.0f}")
    columns = [[*column] for column in zip(*outcomes.values(), strict=True)][:2]
    means = [statistics.mean(column) for column in columns]
    print(f"{'mean':>6} {means[0]:8.3f} {means[1]:9.3f} {YOLOV5_MEAN[0]:8.3f} {YOLOV5_MEAN[1]:8.3f}")
    spreads = [max(column) - min(column) for column in columns]
    print(f"{'spread':>6} {spreads[0]:8.3f} {spreads[1]:9.3f}")


if __name__ == "__main__":
    main()
