"""Draw the pictures of a run folder from its text files: `python -m utils.plots.pictures FOLDER`. Imports no torch."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.console import Background
from utils.errors import first_line
from utils.files import ROOT
from utils.plots import charts, drawing
from utils.summary import DRAWN_IMAGES

# A PNG takes more time than by OpenCV's default, and about a third of the bytes.
COMPACT_PNG = (cv2.IMWRITE_PNG_COMPRESSION, 6, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_DEFAULT)
ENCODINGS = {".jpg": (cv2.IMWRITE_JPEG_QUALITY, 85), ".png": COMPACT_PNG}
TIMEOUT_SECONDS = 300.0  # time limit of the process that draws, and of all pictures at the end of a run
MIN_TILE_PIXELS, MAX_TILE_PIXELS = 320, 480  # limits of an image's longer side in its grid
UNREADABLE_GREY = 160
Pictures = Iterator[tuple[str, np.ndarray]]  # file names, and pictures, uint8 (h, w, 3) BGR


class Plotter:
    """Draws pictures into `folder` in the background, and calls `on_drawn` with their paths; a failure is a warning."""

    def __init__(self, folder: Path, on_drawn: Callable[[Mapping[str, Path]], object]) -> None:
        self.folder, self.on_drawn = folder, on_drawn
        self._background = Background("a picture cannot be drawn")
        # OpenCV sets up its image formats under a lock on first use. That must not happen in the thread: loader
        # processes forked in the meantime would inherit the locked lock.
        cv2.imencode(".jpg", np.zeros((1, 1, 3), np.uint8))

    def draw(self, pictures: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `pictures` returns by file name, uint8 (h, w, 3) BGR."""

        def write() -> None:
            for name, picture in pictures().items():
                drawing.write_picture(self.folder / name, picture)
                self.on_drawn({name: self.folder / name})

        self._background.submit(write)

    def draw_documents(self, *names: str) -> None:
        """Draw the pictures of these text files of the folder, by default of all, in a process."""
        self._background.submit(lambda: self._draw_documents(names))

    def _draw_documents(self, names: Sequence[str]) -> None:
        started = time.time()
        nice = "os.nice(5); " if names and hasattr(os, "nice") else ""  # named documents are drawn beside the training
        # Unlike `python -m`, this does not search the current folder for the module.
        code = f"import os, sys; {nice}sys.path[0] = {str(ROOT)!r}; from utils.plots.pictures import main; main()"
        process = subprocess.run(
            [sys.executable, "-c", code, str(self.folder), *(["--only", *names] if names else [])],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            start_new_session=True,  # Ctrl-C is for the training
        )
        pictures = [path for path in sorted(self.folder.iterdir()) if path.suffix in (".png", ".jpg")]
        self.on_drawn({path.name: path for path in pictures if path.stat().st_mtime >= started})
        if process.returncode:
            raise RuntimeError((process.stderr.strip() or f"exit code {process.returncode}").splitlines()[-1])

    def finish(self, patience: float) -> bool:
        """Wait at most `patience` seconds for all drawings; return whether they are done."""
        return self._background.finish(min(patience, TIMEOUT_SECONDS))


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures of a run folder, print their names, and exit: with 1 after a warning or an error."""
    parser = argparse.ArgumentParser("python -m utils.plots.pictures", description="Draw the pictures of a run folder.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="run folder")
    parser.add_argument("--only", nargs="+", choices=list(DRAWINGS), help="text files to draw from")
    options = parser.parse_args(argv)
    os.environ.pop("MPLBACKEND", None)  # notebooks set it to a back end that matplotlib may not find here
    cv2.setNumThreads(1)  # the other cores are the training's
    files = [file for name in options.only or DRAWINGS if (file := options.folder / name).is_file()]
    if not files:
        sys.exit(f"error: {drawing.printable(str(options.folder))} has nothing to draw from, such as results.csv")
    code = 0
    for file in files:
        try:
            for name, picture in DRAWINGS[file.name](file):
                drawing.write_picture(file.with_name(name), picture, ENCODINGS[Path(name).suffix])
                print(name)
        except Exception as error:  # the other pictures can be drawn
            reason = drawing.printable(f"{type(error).__name__}: {first_line(error)}")
            print(f"warning: {drawing.printable(str(file))} cannot be drawn ({reason})", file=sys.stderr)
            code = 1
    sys.exit(code)


# A function for each text file; a file without rows has no pictures


def _draw_results(file: Path) -> Pictures:
    table = read_columns(file)
    if table["epoch"]:
        results = {name: numbers(cells) for name, cells in table.items()}
        yield "results.png", charts.render(charts.results_figure, {**results, "epoch": results["epoch"] + 1})


def _draw_confusion(file: Path) -> Pictures:
    (_, *names), *rows = read_rows(file)
    counts = np.array([[int(cell) for cell in row[1:]] for row in rows], np.int64).reshape(len(names), len(names))
    if names:
        yield "confusion_matrix.png", charts.render(charts.confusion_figure, counts, names)


def _draw_confidence(file: Path) -> Pictures:
    table, prefix = read_columns(file), file.name.removesuffix("curves.csv")
    if table["class"]:
        precision, recall = (class_curves(table, "confidence", name) for name in ("precision", "recall"))
        f1_curves = precision._replace(values=charts.f1(precision.values, recall.values))
        operating_point = int(np.argmax(f1_curves.mean()))
        for letter, metric, curves in (("P", "precision", precision), ("R", "recall", recall), ("F1", "F1", f1_curves)):
            picture = charts.render(charts.confidence_figure, metric, curves, operating_point)
            yield f"{prefix}{letter}_curve.png", picture


def _draw_precision_recall(file: Path) -> Pictures:
    """Draw precision over recall, with the AP50 of classes.csv."""
    table, prefix = read_columns(file), file.name.removesuffix("PR_curve.csv")
    if table["class"]:
        curves = class_curves(table, "recall", "precision")
        classes = read_columns(file.with_name("classes.csv"))
        scores = dict(zip(classes["class"], numbers(classes.get(f"{prefix}AP50", [])), strict=False))
        ap50 = np.array([scores.get(name, np.nan) for name in curves.names])
        yield f"{prefix}PR_curve.png", charts.render(charts.recall_figure, curves, ap50)


def _draw_labels(file: Path) -> Pictures:
    table = read_columns(file)
    classes = {name: k for k, name in enumerate(dict.fromkeys(table["class"]))}
    counts = {split: np.zeros(len(classes)) for split in table["split"]}
    for split, name, count in zip(table["split"], table["class"], numbers(table["instances"]), strict=True):
        counts[split][classes[name]] += count
    if classes:
        boxes = read_columns(file.with_name("boxes.csv"))
        xywh = np.stack([numbers(boxes.get(side, [])) for side in ("x", "y", "width", "height")], 1)
        of_boxes = np.array([classes[name] for name in boxes["class"]], int)
        yield "labels.jpg", charts.render(charts.labels_figure, list(classes), counts, of_boxes, xywh)


def _draw_validation(file: Path) -> Pictures:
    """Draw grids of validation images with their labels, and with their predictions."""
    masks = defaultdict(list)
    for row in read_dicts(file.with_name("val_masks.csv")):
        masks[row["image"], row["kind"]].append(row["outline"])
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read_dicts(file):
        outlines = masks[row["image"], row["kind"]]
        rows[row["image"]].append({**row, "mask": outlines.pop(0) if outlines else ""})
    # All classes in order, so that colours match the pictures of training batches.
    names = [*read_columns(file.with_name("classes.csv"))["class"], *read_columns(file)["class"]]
    classes = {name: k for k, name in enumerate(dict.fromkeys(names))}
    paths = list(rows)[:DRAWN_IMAGES]
    for batch in range(0, len(paths), drawing.MAX_GRID_IMAGES):
        images = {path: _read_resized(path) for path in paths[batch : batch + drawing.MAX_GRID_IMAGES]}
        width = max([MIN_TILE_PIXELS, *(image.shape[1] for image, _ in images.values() if image is not None)])
        for kind, suffix in (("label", "labels"), ("prediction", "pred")):
            tiles = []
            for path, (image, scale) in images.items():
                name = os.path.basename(path)
                if image is None:
                    name, tile = f"{name} (cannot be read)", np.full((width // 2, width, 3), UNREADABLE_GREY, np.uint8)
                else:
                    tile = _with_boxes(image, scale, [row for row in rows[path] if row["kind"] == kind], classes)
                tiles.append(drawing.captioned(tile, [name], width))
            yield f"val_batch{batch // drawing.MAX_GRID_IMAGES}_{suffix}.jpg", drawing.grid(tiles)


def _read_resized(path: str) -> tuple[np.ndarray | None, float]:
    """Return an image file resized for its grid, or None if it is unreadable, and the scale of its sides."""
    try:
        image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    except (OSError, ValueError, cv2.error):  # ValueError: the name is not possible for a file
        image = None
    if image is None:
        return None, 1.0
    longer_side = max(image.shape[:2])
    scale = min(MAX_TILE_PIXELS, max(longer_side, MIN_TILE_PIXELS)) / longer_side
    return (image if scale == 1 else drawing.resize(image, scale)), scale


def _with_boxes(
    image: np.ndarray, scale: float, rows: Sequence[Mapping[str, str]], numbers_of: Mapping[str, int]
) -> np.ndarray:
    """Return a copy of an image with its rows of val_boxes.csv, the most confident on top, and their masks."""
    rows = sorted(rows, key=lambda row: float(row["confidence"] or 0))
    boxes = scale * np.array([[float(row[side]) for side in ("x1", "y1", "x2", "y2")] for row in rows]).reshape(-1, 4)
    classes = [numbers_of[row["class"]] for row in rows]
    texts = [f"{row['class']} {float(row['confidence']):.2f}" if row["confidence"] else row["class"] for row in rows]
    cells = ([row.get(key, "").split() for row in rows] for key in ("mask", "outline"))  # x y x y ...
    masks, outlines = ([scale * np.array(cell, float).reshape(-1, 2) for cell in column] for column in cells)
    image = image.copy()
    for outline, class_id in zip(masks, classes, strict=True):
        if len(outline):
            mask = np.zeros(image.shape[:2], np.uint8)
            cv2.fillPoly(mask, [np.round(outline).astype(np.int32)], 1)
            drawing.tint(image, mask > 0, class_id)
    drawing.draw_boxes(image, boxes, classes, texts, outlines=outlines)
    return image


DRAWINGS: dict[str, Callable[[Path], Pictures]] = {
    "results.csv": _draw_results,
    "confusion_matrix.csv": _draw_confusion,
    "curves.csv": _draw_confidence,
    "mask_curves.csv": _draw_confidence,
    "PR_curve.csv": _draw_precision_recall,
    "mask_PR_curve.csv": _draw_precision_recall,
    "labels.csv": _draw_labels,
    "val_boxes.csv": _draw_validation,
}


# Text files


def read_rows(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file, the first of which is its header."""
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as opened:
        return list(csv.reader(opened))


def read_columns(file: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV file by name; only an empty `class` if it does not exist."""
    head, *rows = read_rows(file) if file.is_file() else [["class"]]
    return {name: [row[number] for row in rows] for number, name in enumerate(head)}


def read_dicts(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column; none if it does not exist."""
    columns = read_columns(file)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def numbers(cells: Sequence[str]) -> np.ndarray:
    """Return cells as numbers, nan for an empty one."""
    return np.array([float(cell or "nan") for cell in cells])


def class_curves(table: Mapping[str, Sequence[str]], over: str, column: str) -> charts.Curves:
    """Return the curves of all classes over a column, which has the same rising values in each class."""
    classes, x = np.array(table["class"]), numbers(table[over])
    # `over` also starts again between two classes of the same name.
    starts = np.flatnonzero(np.append(True, (classes[1:] != classes[:-1]) | (x[1:] < x[:-1])))
    x = x.reshape(len(starts), -1)[0]
    return charts.Curves(classes[starts].tolist(), x, numbers(table[column]).reshape(len(starts), len(x)))


if __name__ == "__main__":
    main()
