"""Run folders of a detector with few or many classes, and of a segmenter, for tests of their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.making import plain
from tests.making import write_image as write_pixels
from utils.files import csv_text

VAL_BOXES_HEAD = "image,kind,class,confidence,x1,y1,x2,y2"
CLASS_NAMES = ["disc", "$x_$", "a long name of a class that goes on and on"]
# The pictures of a detector's folder with 16 validation images or fewer, in the order in which they are drawn.
DRAWN_PICTURES = [
    *("results.png", "confusion_matrix.png"),
    *("P_curve.png", "R_curve.png", "F1_curve.png", "PR_curve.png"),
    *("labels.jpg", "val_batch0_labels.jpg", "val_batch0_pred.jpg"),
]


def write_image(path: Path, width: int, height: int, value: int = 90) -> str:
    return str(write_pixels(path, plain(width, height, value)))


def make_run_folder(folder: Path, classes: int = 3, epochs: int = 3) -> Path:
    """Make a detector's run folder."""
    folder.mkdir()
    names = [CLASS_NAMES[k] if k < len(CLASS_NAMES) else f"class {k}" for k in range(classes)]
    known, positions = [*names, "background"], [0, 0.25, 0.5, 0.75, 1]
    image = write_image(folder.parent / f"{folder.name} photo.png", 320, 150)
    columns = ("epoch", "train/loss", "metrics/mAP_0.5", "metrics/recall", "val/loss", "x/lr0")
    documents: dict[str, tuple[Any, Any]] = {
        "results.csv": (columns, [(k, 1 / (k + 1), k / 4, 1 / (k + 2), "", 0.1) for k in range(epochs)]),
        "confusion_matrix.csv": (
            ("true \\ predicted", *known),
            [(name, *(9 * (k == j) + (j == 0) for j in range(len(known)))) for k, name in enumerate(known)],
        ),
        "curves.csv": (
            ("class", "confidence", "precision", "recall"),
            [(name, x, x, 1 - x) for name in names for x in positions],
        ),
        "PR_curve.csv": (("class", "recall", "precision"), [(name, x, 1 - x) for name in names for x in positions]),
        "classes.csv": (
            ("class", "images", "instances", "precision", "recall", "AP50", "AP50-95"),
            [(name, 1, 1, 1, 1, 0.5 if k else "", 1) for k, name in enumerate(names)],
        ),
        "labels.csv": (
            ("split", "class", "images", "instances"),
            [(split, name, 3, 5) for split in ("train", "val") for name in names],
        ),
        "boxes.csv": (("class", "x", "y", "width", "height"), [(name, 0.5, 0.5, 0.1, 0.2) for name in names]),
        "val_boxes.csv": (VAL_BOXES_HEAD.split(","), [(image, "label", names[0], "", 1, 2, 60, 70)]),
    }
    for name, (head, rows) in documents.items():
        (folder / name).write_text(csv_text(head, rows))
    return folder


def make_segmenter_folder(folder: Path) -> Path:
    """Make a segmenter's run folder: a detector's, with curves and outlines of masks."""
    make_run_folder(folder)
    for name in ("curves.csv", "PR_curve.csv"):
        (folder / f"mask_{name}").write_text((folder / name).read_text())
    path, kind, label, confidence, *_ = (folder / "val_boxes.csv").read_text().splitlines()[1].split(",")
    rows = [(path, kind, label, confidence, "1 2 60 2 60 70")]
    (folder / "val_masks.csv").write_text(csv_text(("image", "kind", "class", "confidence", "outline"), rows))
    return folder
