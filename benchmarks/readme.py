"""Run the built-in job once; write the picture, its caption and the row of the results in the README from that run.

    python -m benchmarks.readme [--root .] [flags of train.py, such as --epochs 1]

The run folder is runs/readme/exp in the root, which holds README.md and docs/images/training.jpg.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from utils.files import ROOT, read_yaml
from utils.summary import RESULT

CURVES_HEIGHT = 536  # pixels of results.png: its losses and metrics, without the learning rates
IMAGES_HEIGHT, IMAGES_WIDTH = 320, 1292  # pixels of val_batch0_pred.jpg: two rows of images, without the last column
PICTURE, JPEG_QUALITY = Path("docs/images/training.jpg"), 85
CAPTION = re.compile(r"(?<=\(docs/images/training\.jpg\)\n\n)\*.*?\*(?=\n\n)", re.DOTALL)
ROW = re.compile(r"(?m)^\| built-in job, .*\|$")
LINE_CHARACTERS = 125  # of the README


class Outcome(NamedTuple):
    """The result of a run of the built-in job."""

    epochs: int
    images: int  # to train on
    imgsz: int
    minutes: float  # of the whole command
    cores: int
    map50: float
    map50_95: float


def run_job(root: Path, flags: list[str]) -> tuple[Path, Outcome]:
    """Run train.py with these flags; return the run folder and the result."""
    result = root / "runs" / "readme" / "result.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), "--no-wandb", "--project", str(result.parent), *flags]
    environment, started = {**os.environ, RESULT: str(result)}, time.monotonic()
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    minutes = (time.monotonic() - started) / 60
    print(done.stdout, end="")
    values = json.loads(result.read_text())
    folder = Path(values["folder"])
    settings, images = read_yaml(folder / "settings.yaml"), re.search(r"(?m)^train: (\d+) image", done.stdout)
    assert images
    job = (settings["epochs"], int(images[1]), settings["imgsz"], minutes, os.cpu_count() or 1)
    return folder, Outcome(*job, values["metrics/mAP_0.5"], values["metrics/mAP_0.5:0.95"])


def picture(folder: Path) -> np.ndarray:
    """Return the curves of a run above its first detections, uint8 (h, w, 3) BGR."""
    curves, images = (cv2.imread(str(folder / name)) for name in ("results.png", "val_batch0_pred.jpg"))
    curves, images = curves[:CURVES_HEIGHT], images[:IMAGES_HEIGHT, :IMAGES_WIDTH]
    width = curves.shape[1]
    height = round(images.shape[0] * width / images.shape[1])
    return np.vstack((curves, cv2.resize(images, (width, height), interpolation=cv2.INTER_CUBIC)))


def with_outcome(readme: str, outcome: Outcome) -> str:
    """Return the README with the caption of the picture and the row of the job that an outcome gives."""
    scores = f"mAP50 {outcome.map50:.3f}, mAP50-95 {outcome.map50_95:.3f}"
    epochs = f"{outcome.epochs} epoch{'s' * (outcome.epochs > 1)}"
    caption = (
        f"*`python train.py`, the built-in job: yolov5n from scratch, {epochs} of {outcome.images} drawn images in "
        f"{outcome.minutes:.1f} minutes on {outcome.cores} CPU cores: {scores}. Curves of the run and detections on "
        "validation images, as the run drew them.*"
    )
    lines = textwrap.fill(caption, LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)
    row = (
        f"| built-in job, {outcome.images} drawn images, {outcome.imgsz} px, from scratch: mAP50, mAP50-95; minutes on "
        f"{outcome.cores} CPU cores | {outcome.map50:.3f}, {outcome.map50_95:.3f}; {outcome.minutes:.1f} | - |"
    )
    readme, captions = CAPTION.subn(lines, readme)
    readme, rows = ROW.subn(row, readme)
    assert (captions, rows) == (1, 1), "README.md has another form"
    return readme


def main(argv: list[str] | None = None) -> None:
    """Run the job, and write what the README shows of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the README.md to change")
    options, flags = parser.parse_known_args(argv)
    root: Path = options.root.resolve()
    folder, outcome = run_job(root, flags)
    (root / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(root / PICTURE), picture(folder), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    readme = root / "README.md"
    readme.write_text(with_outcome(readme.read_text(encoding="utf-8"), outcome), encoding="utf-8")
    print(f"{readme}, {root / PICTURE}: {outcome}")


if __name__ == "__main__":
    main()
