"""Pictures for the run folder: grids of images with boxes; and, as a command, all that its text files give.

    python -m utils.plots runs/train/exp                     all pictures of a run, into its folder
    python -m utils.plots runs/train/exp runs/train/exp2     several runs in one chart, and a table of their best epochs

Training starts this command in a process of its own, beside itself: nothing here may import torch.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import cv2
import numpy as np

from utils.errors import UserError, nearest
from utils.files import replacing
from utils.plots.charts import (
    Columns,
    Curves,
    Labels,
    best,
    confidence_figure,
    confusion_figure,
    drawn,
    f1,
    labels_figure,
    mean_curve,
    printable,
    recall_figure,
    results_figure,
)
from utils.plots.drawing import GAP, LINE, MOST_IMAGES, draw_boxes, fit_text, grid, resize, write_text

PHOTOS = 48  # validation images, in grids of 16
SMALLEST, LARGEST = 320, 480  # pixels, longer side of a photo in its grid: less is enlarged, more is shrunk
FORMATS = {  # by the end of the name; what OpenCV does without makes files of thrice the size
    ".png": (cv2.IMWRITE_PNG_COMPRESSION, 6, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_DEFAULT),
    ".jpg": (cv2.IMWRITE_JPEG_QUALITY, 85),
}
NICE = 10


# Text files


class Malformed(UserError):
    """A text file of the run folder that is not what it should be."""


class Table:
    """A CSV file: its head, and rows of as many cells. Raises `Malformed`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                rows = [row for row in csv.reader(file) if row]
        except OSError as error:
            raise self.malformed(f"cannot be read: {error.strerror}") from None
        except csv.Error as error:
            raise self.malformed(f"is no CSV file: {error}") from None
        if not rows:
            raise self.malformed("is empty")
        self.head, self.rows = rows[0], rows[1:]
        self.columns = [name.strip() for name in self.head]
        for number, row in enumerate(self.rows, 2):
            if len(row) != len(self.head):
                raise self.malformed(f"has {len(row)} cells in row {number} and {len(self.head)} in its head")

    def malformed(self, problem: str) -> Malformed:
        return Malformed(f"{self.path} {problem}")

    def texts(self, column: str) -> list[str]:
        """The cells of a column."""
        if column not in self.columns:
            raise self.malformed(f"has no column {column}")
        place = self.columns.index(column)
        return [row[place] for row in self.rows]

    def numbers(self, column: str) -> np.ndarray:
        """A column as numbers (n,), nan where a cell is empty."""
        return self._parsed(column, self.texts(column))

    def coordinates(self, columns: Sequence[str], rows: Sequence[int] | None = None) -> np.ndarray:
        """Columns as finite numbers (n, columns), of some `rows` only or of all."""
        some = range(len(self.rows)) if rows is None else rows
        found = np.empty((len(some), len(columns)))
        for place, column in enumerate(columns):
            texts = self.texts(column)
            found[:, place] = self._parsed(column, [texts[row] for row in some])
            if not np.isfinite(found[:, place]).all():
                raise self.malformed(f"has a cell in its column {column} that is no finite number")
        return found

    def _parsed(self, column: str, cells: Iterable[str]) -> np.ndarray:
        try:
            return np.array([float(cell.strip() or "nan") for cell in cells])
        except ValueError as error:
            raise self.malformed(f"has a cell in its column {column} that is no number ({error})") from None


class Documents:
    """The text files of a run folder, each read once."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give a run folder such as runs/train/exp")
        self.folder = folder
        self.table = cache(lambda name: Table(folder / name))
        self.photos = lru_cache(1)(lambda batch: read_photos(self.table("val_boxes.csv"), batch, self.classes()))

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def classes(self) -> list[str]:
        """All classes in their order, where that is known."""
        return self.table("classes.csv").texts("class") if self.has("classes.csv") else []

    def results(self) -> Columns:
        """The columns of results.csv."""
        table = self.table("results.csv")
        if table.columns[0] != "epoch":
            raise table.malformed("does not begin with the column epoch")
        return {name: table.numbers(name) for name in table.columns}


def read_confusion(table: Table) -> tuple[np.ndarray, list[str]]:
    """Counts by true and predicted class (c, c), and the classes."""
    names = table.head[1:]
    if [row[0] for row in table.rows] != names:
        raise table.malformed("has other names in its first column than in its head")
    try:
        rows = [[int(cell) for cell in row[1:]] for row in table.rows]
        counts = np.array(rows, np.int64).reshape(len(names), len(names))
    except (ValueError, OverflowError):
        raise table.malformed("has a count that is no whole number") from None
    if (counts < 0).any():
        raise table.malformed("has a count below 0")
    return counts, names


def read_curves(table: Table, over: str, columns: Sequence[str]) -> list[Curves]:
    """For each of `columns`, the curves of all classes over the column `over`, which grows within a class."""
    classes, places = np.array(table.texts("class")), table.coordinates([over])[:, 0]
    starts = np.flatnonzero(np.append(True, (classes[1:] != classes[:-1]) | (places[1:] < places[:-1])))
    length = len(places) // len(starts)
    shape = (len(starts), length)
    if length * len(starts) != len(places) or (places.reshape(shape) != places[:length]).any():
        raise table.malformed(f"has a class with other values of {over} than the first")
    return [Curves(classes[starts].tolist(), places[:length], table.numbers(name).reshape(shape)) for name in columns]


def read_labels(table: Table) -> Labels:
    """How often each class is in each split."""
    splits, names = (list(dict.fromkeys(table.texts(column))) for column in ("split", "class"))
    counts = np.zeros((len(splits), len(names)))
    cells = zip(table.texts("split"), table.texts("class"), table.coordinates(["instances"])[:, 0], strict=True)
    for split, name, count in cells:
        counts[splits.index(split), names.index(name)] += count
    return Labels(names, splits, counts)


class Marks(NamedTuple):
    """Boxes of one kind in a photo."""

    boxes: np.ndarray  # (n, 4): xyxy in pixels of the photo as it is shown
    classes: list[int]
    texts: list[str]


class Photo(NamedTuple):
    """A validation image and what val_boxes.csv has for it."""

    path: str
    image: np.ndarray | None  # (h, w, 3) BGR as it is shown; None: it cannot be read
    marks: Mapping[str, Marks]  # by kind


def read_photos(table: Table, batch: int, classes: Sequence[str] = ()) -> list[Photo]:
    """The photos of a grid, shrunk or enlarged to what they are shown as. A class of `classes` has the colour that it
    has in training's pictures."""
    rows_of: dict[str, list[int]] = {}
    for row, path in enumerate(table.texts("image")):
        rows_of.setdefault(path, []).append(row)
    kinds, names = table.texts("kind"), table.texts("class")
    number = {name: k for k, name in enumerate(dict.fromkeys((*classes, *names)))}
    photos = []
    for path in list(rows_of)[:PHOTOS][batch * MOST_IMAGES : (batch + 1) * MOST_IMAGES]:
        image, share = _shown(Path(path))
        marks = {}
        for kind in ("label", "prediction"):
            rows = [row for row in rows_of[path] if kinds[row] == kind]
            texts = [names[row] for row in rows]
            boxes = table.coordinates(("x1", "y1", "x2", "y2"), rows) * share
            if kind == "prediction":
                sure = table.coordinates(["confidence"], rows)[:, 0]
                texts = [f"{text} {confidence:.2f}" for text, confidence in zip(texts, sure, strict=True)]
                order = np.argsort(sure, kind="stable")  # the surest are drawn over the others
                boxes, rows, texts = boxes[order], [rows[k] for k in order], [texts[k] for k in order]
            marks[kind] = Marks(boxes, [number[names[row]] for row in rows], texts)
        photos.append(Photo(path, image, marks))
    return photos


def _shown(path: Path) -> tuple[np.ndarray | None, float]:
    """An image file as it is shown, and the share of its sides that this has; None where it cannot be read."""
    try:
        image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)  # imread knows no odd names
    except (OSError, ValueError, cv2.error):  # ValueError: a name that no file can have
        image = None
    if image is None:
        return None, 1.0
    longest = max(image.shape[:2])
    share = min(LARGEST, max(longest, SMALLEST)) / longest
    return (image if share == 1 else resize(image, share)), share


def draw_photos(photos: Sequence[Photo], kind: str) -> np.ndarray:
    """A grid of up to 16 photos with their marks of one `kind`, each above its name; grey where it cannot be read."""
    wide = max([SMALLEST, *(photo.image.shape[1] for photo in photos if photo.image is not None)])
    tiles = []
    for photo in photos:
        name = os.path.basename(photo.path)
        if photo.image is None:
            image = np.full((wide // 2, wide, 3), 160, np.uint8)
            name += " (cannot be read)"
        else:
            image = photo.image.copy()
            draw_boxes(image, *photo.marks[kind])
        height, width = image.shape[:2]
        tile = np.full((height + LINE + GAP, wide + GAP, 3), 255, np.uint8)
        left = (wide - width) // 2
        tile[:height, left : left + width] = image
        write_text(tile, fit_text(name, wide - left), (left, height + LINE - 4), (0, 0, 0))
        tiles.append(tile)
    return grid(tiles)


# The pictures of a run


def _results(documents: Documents) -> np.ndarray | None:
    columns = documents.results()
    return drawn(results_figure, {"": columns}) if len(columns["epoch"]) else None


def _confusion(by_share: bool, documents: Documents) -> np.ndarray | None:
    counts, names = read_confusion(documents.table("confusion_matrix.csv"))
    return drawn(confusion_figure, counts, names, by_share) if names else None


def _confidence(which: str, documents: Documents) -> np.ndarray | None:
    """The curves of "precision", "recall" or "F1"."""
    table = documents.table("curves.csv")
    if not table.rows:
        return None
    precision, recall = read_curves(table, "confidence", ("precision", "recall"))
    both = precision._replace(values=f1(precision.values, recall.values))
    operating = int(np.argmax(mean_curve(both.values)))
    curves = {"precision": precision, "recall": recall, "F1": both}[which]
    return drawn(confidence_figure, which, curves, operating)


def _precision_recall(documents: Documents) -> np.ndarray | None:
    """With the AP50 of classes.csv; where that has none, the mean of the precision over the recalls."""
    table = documents.table("PR_curve.csv")
    if not table.rows:
        return None
    (curves,) = read_curves(table, "recall", ["precision"])
    areas = np.where(np.isfinite(curves.values), curves.values, 0).mean(1)
    if documents.has("classes.csv"):
        classes = documents.table("classes.csv")
        if "AP50" in classes.columns:
            known = dict(zip(classes.texts("class"), classes.numbers("AP50"), strict=True))
            given = np.array([known.get(name, math.nan) for name in curves.names])
            areas = np.where(np.isfinite(given), given, areas)
    return drawn(recall_figure, curves, areas)


def _labels(documents: Documents) -> np.ndarray | None:
    labels = read_labels(documents.table("labels.csv"))
    if not labels.names:
        return None
    if not documents.has("boxes.csv"):
        return drawn(labels_figure, labels, np.zeros(0, int), np.zeros((0, 4)))
    table = documents.table("boxes.csv")
    number = {name: k for k, name in enumerate(labels.names)}
    try:
        classes = np.array([number[name] for name in table.texts("class")], int)
    except KeyError as error:
        raise table.malformed(f"has a class that is not in labels.csv: {error}") from None
    return drawn(labels_figure, labels, classes, table.coordinates(("x", "y", "width", "height")))


def _photos(batch: int, kind: str, documents: Documents) -> np.ndarray | None:
    photos = documents.photos(batch)
    return draw_photos(photos, kind) if photos else None


class Picture(NamedTuple):
    """The text files that a picture needs, and what draws it, uint8 (h, w, 3) BGR; None: there is nothing to draw."""

    files: tuple[str, ...]
    draw: Callable[[Documents], np.ndarray | None]


PICTURES: dict[str, Picture] = {
    "results.png": Picture(("results.csv",), _results),
    "confusion_matrix.png": Picture(("confusion_matrix.csv",), partial(_confusion, True)),
    "confusion_matrix_counts.png": Picture(("confusion_matrix.csv",), partial(_confusion, False)),
    "P_curve.png": Picture(("curves.csv",), partial(_confidence, "precision")),
    "R_curve.png": Picture(("curves.csv",), partial(_confidence, "recall")),
    "F1_curve.png": Picture(("curves.csv",), partial(_confidence, "F1")),
    "PR_curve.png": Picture(("PR_curve.csv",), _precision_recall),
    "labels.jpg": Picture(("labels.csv",), _labels),
}
for _batch in range(PHOTOS // MOST_IMAGES):  # both of a batch one after the other: its photos are read once
    PICTURES[f"val_batch{_batch}_labels.jpg"] = Picture(("val_boxes.csv",), partial(_photos, _batch, "label"))
    PICTURES[f"val_batch{_batch}_pred.jpg"] = Picture(("val_boxes.csv",), partial(_photos, _batch, "prediction"))


# The command


class Problems:
    """Warnings on stderr, each once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            print(f"warning: {printable(text)}", file=sys.stderr)


def draw_run(folder: Path, wanted: Sequence[str], say: Callable[[str], object]) -> bool:
    """Draw those of the `wanted` pictures whose text files are in `folder`, and `say` their names. Was all well?

    Raises `UserError` where there is nothing to draw from.
    """
    documents, warn = Documents(folder), Problems()
    possible = [name for name in wanted if all(map(documents.has, PICTURES[name].files))]
    if not possible:
        files = dict.fromkeys(file for name in wanted for file in PICTURES[name].files)
        raise UserError(f"{folder} holds nothing to draw from; there must be {' or '.join(files)}")
    for name in possible:
        try:
            picture = PICTURES[name].draw(documents)
            if picture is not None:
                write_picture(folder / name, picture)
                say(name)
        except UserError as error:
            warn(str(error))
        except Exception as error:  # the other pictures are drawn all the same
            warn(f"{folder / name} cannot be drawn ({type(error).__name__}: {error})")
    return not warn.said


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Write uint8 (h, w, 3) BGR in the format that the name ends with. Raises `UserError` where that cannot be done."""
    try:
        content = cv2.imencode(path.suffix, picture, FORMATS.get(path.suffix, ()))[1].tobytes()
    except cv2.error:
        raise UserError(f"{path} cannot be written: no such format; let the name end with .png or .jpg") from None
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def compare(folders: Sequence[Path], out: Path, say: Callable[[str], object]) -> bool:
    """Draw the results of several runs into one picture and `say` a table of their best epochs. Was all well?"""
    warn, runs = Problems(), {}
    for documents, name in zip(map(Documents, folders), run_names(folders), strict=True):
        try:
            columns = documents.results()
        except Malformed as error:
            warn(str(error))
            continue
        if len(columns["epoch"]):
            runs[name] = columns
    if not runs:
        raise UserError(f"there is no results.csv with an epoch in {', '.join(map(str, folders))}")
    write_picture(out, drawn(results_figure, runs))
    for line in best_epochs(runs):
        say(line)
    say(str(out))
    return not warn.said


def run_names(folders: Sequence[Path]) -> list[str]:
    """What the runs are called: their folders' names, or the whole paths where two have the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def best_epochs(runs: Mapping[str, Columns]) -> list[str]:
    """The lines of a table: of each run the epochs, and each metric's best value with its epoch."""
    metrics = list(dict.fromkeys(name for columns in runs.values() for name in columns if name.startswith("metrics/")))
    rows = [["run", "epochs", *(name.removeprefix("metrics/") for name in metrics)]]
    for run, columns in runs.items():
        found = [best(columns, name) if name in columns else (math.nan, math.nan) for name in metrics]
        cells = ["-" if math.isnan(value) else f"{value:.4f} in {epoch:g}" for value, epoch in found]
        rows.append([printable(run), str(len(columns["epoch"])), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command; ends the process."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which matplotlib may not know here
    try:
        sys.exit(run(argv))
    except KeyboardInterrupt:
        sys.exit(130)


def run(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m utils.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="run folder; several are compared")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="draw just these of a run: " + ", ".join(PICTURES))
    parser.add_argument("--out", type=Path, help="where several runs' chart goes; without it comparison.png")
    parser.add_argument("--background", action="store_true", help="give way to other processes; print warnings only")
    given = parser.parse_args(argv)
    if given.background:
        cv2.setNumThreads(1)
        if hasattr(os, "nice"):
            os.nice(NICE)
    say: Callable[[str], object] = (lambda _: None) if given.background else _print
    try:
        return 0 if _do(given, say) else 1
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def _print(line: str) -> None:
    with suppress(BrokenPipeError):  # whoever read it, such as `head`, has had enough
        print(line, flush=True)


def _do(given: argparse.Namespace, say: Callable[[str], object]) -> bool:
    several = len(given.folders) > 1
    if several and given.only:
        raise UserError("--only is for the pictures of one run; give one folder")
    if given.out and not several:
        raise UserError("--out is for the chart of several runs; give several folders")
    for name in given.only or ():
        if name not in PICTURES:
            raise UserError(f"there is no picture {name}{nearest(name, PICTURES)}; known are {', '.join(PICTURES)}")
    if several:
        return compare(given.folders, given.out or Path("comparison.png"), say)
    return draw_run(given.folders[0], given.only or list(PICTURES), say)


if __name__ == "__main__":
    main()
