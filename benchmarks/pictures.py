"""CPU-seconds to draw each picture of a run folder, with 1, 3 and 80 classes.

    python -m benchmarks.pictures [--data ../shared/data/coco128] [--classes 1 3 80] [--keep FOLDER]

The text files are synthetic: 100 epochs, curves of 200 points, 5000 training boxes; the validation boxes are the labels
of 48 of COCO's photos, and predictions near them. --keep keeps all in FOLDER, to view the pictures.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from utils.files import ROOT, csv_text
from utils.plots.charts import chart_style
from utils.plots.documents import Documents
from utils.plots.drawing import write_picture
from utils.plots.run_pictures import JPEG_QUALITY, PICTURES
from utils.summary import DRAWN_IMAGES

EPOCHS, POINTS, BOXES = 100, 200, 5000
TERMS = ("box_loss", "obj_loss", "cls_loss")
METRICS = {"precision": 0.75, "recall": 0.66, "mAP_0.5": 0.71, "mAP_0.5:0.95": 0.5}
LONG = "intermediate hinged traffic-sign"

Row = tuple[Any, ...]


def main() -> None:
    """Write the text files, draw the pictures, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "coco128")
    parser.add_argument("--classes", type=int, nargs="+", default=[1, 3, 80])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {count: (options.keep or Path(temporary)) / f"classes{count}" for count in options.classes}
        for count, folder in folders.items():
            write_documents(folder, count, options.data)
        with chart_style():  # imports matplotlib
            pass
        next(iter(PICTURES.values())).draw(Documents(folders[options.classes[0]]))
        rows = {name: [seconds(name, folder) for folder in folders.values()] for name in PICTURES}
        rows["all of these"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        rows["start of the command"] = [child("--help")] * len(folders)
        rows["the whole command"] = [child(str(folder)) for folder in folders.values()]
        print("| CPU-seconds by classes |", " | ".join(map(str, folders)), "|")
        print("|---|" + "---|" * len(folders))
        for name, values in rows.items():
            print(f"| {name} |", " | ".join(f"{value:.2f}" for value in values), "|")


def seconds(name: str, folder: Path) -> float:
    """Return the CPU-seconds of one picture, with reading and writing."""
    before = time.process_time()
    picture = PICTURES[name].draw(Documents(folder))
    if picture is not None:
        write_picture(folder / name, picture, JPEG_QUALITY, compact_png=True)
    return time.process_time() - before


def child(*flags: str) -> float:
    """Return the CPU-seconds of the command in a separate process, as training starts it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "utils.plots", *flags]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_documents(folder: Path, count: int, data: Path) -> None:
    """Write all text files of a run with `count` classes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(count)
    names = list(yaml.safe_load((ROOT / "data" / "coco128.yaml").read_text())["names"].values())[:count]
    if count > 1:
        names[1] = LONG
    peaks = np.sort(rng.beta(6, 3, count))[::-1]  # how well each class is detected
    documents: dict[str, tuple[Row, Iterator[Row]]] = {
        "results.csv": (results_head(), results(rng)),
        "confusion_matrix.csv": (("true \\ predicted", *names, "background"), confusion(rng, names, peaks)),
        "curves.csv": (("class", "confidence", "precision", "recall"), curves(rng, names, peaks)),
        "PR_curve.csv": (("class", "recall", "precision"), precision_recall(names, peaks)),
        "labels.csv": (("split", "class", "images", "instances"), labels(names)),
        "boxes.csv": (("class", "x", "y", "width", "height"), boxes(rng, names)),
        "val_boxes.csv": (
            ("image", "kind", "class", "confidence", "x1", "y1", "x2", "y2"),
            val_boxes(rng, names, data),
        ),
    }
    for name, (head, rows) in documents.items():
        (folder / name).write_text(csv_text(head, rows), encoding="utf-8", errors="surrogateescape")


def results_head() -> Row:
    parts = {"train": TERMS, "metrics": METRICS, "val": TERMS, "x": ("lr0", "lr1", "lr2")}
    return ("epoch", *(f"{part}/{name}" for part, names in parts.items() for name in names))


def results(rng: np.random.Generator) -> Iterator[Row]:
    for epoch in range(EPOCHS):
        losses = (np.array((0.045, 0.03, 0.02)) + 0.08 * np.exp(-epoch / 15)) * rng.normal(1, 0.01, 3)
        metrics = [peak / (1 + np.exp(-(epoch - 12) / 6)) * rng.normal(1, 0.03) for peak in METRICS.values()]
        val = losses * 0.9 * rng.normal(1, 0.03, 3) + 0.00005 * epoch
        rate = 0.01 * (1 - 0.99 * epoch / EPOCHS)
        rates = (max(rate, 0.1 - 0.03 * epoch), min(rate, 0.003 * epoch), min(rate, 0.003 * epoch))
        yield (epoch, *losses, *metrics, *val, *rates)


def confusion(rng: np.random.Generator, names: list[str], peaks: np.ndarray) -> Iterator[Row]:
    counts = frequencies(len(names)) // 10 + 1
    for k, (name, peak) in enumerate(zip(names, peaks, strict=True)):
        chances = rng.gamma(0.05, 1, len(names) + 1)
        chances[-1] += 2.0
        chances[k] = 0
        shares = (1 - peak) * chances / chances.sum()
        shares[k] += peak
        yield (name, *rng.multinomial(counts[k], shares / shares.sum()))
    yield ("background", *rng.poisson(counts * 0.3), 0)


def curves(rng: np.random.Generator, names: list[str], peaks: np.ndarray) -> Iterator[Row]:
    confidence = np.linspace(0, 1, POINTS)
    for name, peak in zip(names, peaks, strict=True):
        rough = np.cumsum(rng.normal(0, 0.004, POINTS))
        precision = np.clip(1 / (1 + np.exp(-(confidence - 0.35 + 0.3 * (peak - 0.5)) / 0.13)) + rough, 0, 1)
        recall = np.minimum.accumulate(
            np.clip(peak * 1.15 / (1 + np.exp((confidence - 0.4 - 0.4 * peak) / 0.09)) + rough, 0, 1)
        )
        yield from ((name, *row) for row in zip(confidence, precision, recall, strict=True))


def precision_recall(names: list[str], peaks: np.ndarray) -> Iterator[Row]:
    recall = np.linspace(0, 1, POINTS)
    for name, peak in zip(names, peaks, strict=True):
        precision = np.where(recall < min(1.2 * peak, 1), 1 - 0.35 * recall**2 / peak, 0) / (
            1 + np.exp((recall - peak) / 0.05)
        )
        yield from ((name, *row) for row in zip(recall, precision, strict=True))


def frequencies(count: int) -> np.ndarray:
    """Return the number of labels of each class; a few classes have most of them."""
    return np.maximum(20000 / (1 + np.arange(count)) ** 1.3, 3).astype(int)


def labels(names: list[str]) -> Iterator[Row]:
    for split, share in (("train", 1.0), ("val", 0.05)):
        for name, number in zip(names, frequencies(len(names)), strict=True):
            yield split, name, int(share * number / 2), int(share * number)


def boxes(rng: np.random.Generator, names: list[str]) -> Iterator[Row]:
    chances = frequencies(len(names)) / frequencies(len(names)).sum()
    classes = rng.choice(len(names), BOXES, p=chances)
    sides = np.clip(rng.lognormal(-2, 0.9, (BOXES, 2)), 0.01, 1)
    centres = sides / 2 + (1 - sides) * rng.beta(2, 2, (BOXES, 2))
    for k, centre, side in zip(classes, centres, sides, strict=True):
        yield (names[k], *centre, *side)


def val_boxes(rng: np.random.Generator, names: list[str], data: Path) -> Iterator[Row]:
    for file in sorted((data / "images").rglob("*.jpg"))[:DRAWN_IMAGES]:
        rows = data / "labels" / file.relative_to(data / "images").with_suffix(".txt")
        labels = [row for row in np.loadtxt(rows, ndmin=2) if row[0] < len(names)] if rows.is_file() else []
        if not labels:
            yield (file, "image", *[""] * 6)
        height, width = cv2.imread(str(file)).shape[:2]
        for k, *box in labels:
            centre, side = np.array(box).reshape(2, 2) * (width, height)
            yield (file, "label", names[int(k)], "", *(centre - side / 2), *(centre + side / 2))
            if rng.random() < 0.8:
                error = side * rng.normal(0, 0.04, 2)
                low, high = centre - side / 2 + error, centre + side / 2 - error / 2
                yield (file, "prediction", names[int(k)], rng.uniform(0.25, 0.95), *low, *high)


if __name__ == "__main__":
    main()
