"""Plant label faults into a copy of a YOLO data set, and score the rows of val.py --review that find them.

    python -m data.split MY.yaml --folds 3
    python -m benchmarks.label_faults plant MY-folds OUT SEED
    python -m benchmarks.label_faults score OUT RUNS UNPLANTED_RUNS

`plant` draws three times 5 % of the boxes: those of the first part are removed, of the second moved by 0.25 to 0.5 of
their sides (an overlap of 0.14 to 0.39), of the third given another class.

`score` takes the runs fold1, fold2, ... of val.py --review in two folders: with models trained on OUT/fold1 and so on,
and on MY-folds/fold1 and so on, where nothing is planted. Of a kind with n planted faults in a fold it prints

- the share that all rows of this kind find (same image, an overlap of 0.5 with the box removed, moved or renamed);
- the share that the first n rows find, and what a random order of the rows would;
- the same without known rows: those that the first n rows of the unplanted review have too (same image, an overlap of
  0.5). They are faults of the set itself and mistakes of the model, and a planted fault among them counts as not found.
  Mistakes that rank lower there, or not at all, remain.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from models.tasks.predictions import SAME_OBJECT, overlap_matrix
from utils.files import read_yaml
from utils.plots.pictures import read_dicts

SHARE, MIN_SHIFT, MAX_SHIFT = 0.05, 0.25, 0.5
KINDS = ("missing label", "poor box", "wrong class")  # what a removed, a moved and a renamed box should be found as


def plant(folds: Path, out: Path, seed: int) -> None:
    """Write `out`: the same folds with links to the images and labels with faults, and faults.csv.

    `folds` is what data.split --folds wrote.
    """
    draw = random.Random(seed)
    images = {label_file(image): image for image in validated(folds.glob("fold*"))}
    rows = {file: file.read_text().splitlines() for file in sorted(images) if file.exists()}
    boxes = [(file, number) for file, lines in rows.items() for number in range(len(lines))]
    count = round(SHARE * len(boxes))
    drawn = draw.sample(boxes, count * len(KINDS))
    names = read_yaml(next(folds.glob("fold*/data.yaml")))["names"]
    faults = []
    for number, (file, row) in enumerate(drawn):
        kind = KINDS[number // count]
        name, *text = rows[file][row].split()
        x, y, w, h = map(float, text)
        if kind == "wrong class":
            name = str(draw.choice([k for k in range(len(names)) if k != int(name)]))
        elif kind == "poor box":  # towards the centre of the image, so that it stays inside
            x += w * draw.uniform(MIN_SHIFT, MAX_SHIFT) * (1 if x < 0.5 else -1)
            y += h * draw.uniform(MIN_SHIFT, MAX_SHIFT) * (1 if y < 0.5 else -1)
            x, y = (min(max(centre, side / 2), 1 - side / 2) for centre, side in ((x, w), (y, h)))
        corners = np.multiply((x - w / 2, y - h / 2, x + w / 2, y + h / 2), Image.open(images[file]).size * 2)
        faults.append((images[file].name, kind, " ".join(map(str, corners.tolist()))))
        rows[file][row] = "" if kind == "missing label" else f"{name} {x:.6f} {y:.6f} {w:.6f} {h:.6f}"
    (out / "images").mkdir(parents=True)
    (out / "labels").mkdir()
    for file, image in images.items():
        (out / "images" / image.name).symlink_to(image.resolve())
        if file in rows:
            (out / "labels" / file.name).write_text("".join(f"{line}\n" for line in rows[file] if line))
    for fold in folds.glob("fold*"):
        (out / fold.name).mkdir()
        data = read_yaml(fold / "data.yaml")
        for part in ("train", "val"):
            listed = [out.resolve() / "images" / Path(line).name for line in Path(data[part]).read_text().splitlines()]
            data[part] = str(out.resolve() / fold.name / f"{part}.txt")
            Path(data[part]).write_text("".join(f"{image}\n" for image in listed))
        (out / fold.name / "data.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    with (out / "faults.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("image", "kind", "box"), *faults])


def validated(folds: Iterable[Path]) -> list[Path]:
    """Return the images that validate in any of the folds."""
    lists = [Path(read_yaml(fold / "data.yaml")["val"]) for fold in folds]
    return [Path(line) for file in lists for line in file.read_text().splitlines()]


def label_file(image: Path) -> Path:
    """Return the label file of an image in a folder `images`."""
    return Path("/labels/".join(str(image.with_suffix(".txt")).rsplit("/images/", 1)))


def score(out: Path, runs: Path, unplanted_runs: Path) -> None:
    """Print for each kind of fault the shares of the planted faults that rows of the folds' review.csv find."""
    totals = np.zeros((len(KINDS), 8))  # planted, found (3 columns), rows known before, found by the others (3 columns)
    for run in sorted(runs.glob("fold*")):
        images = {image.name for image in validated([out / run.name])}
        faults = [fault for fault in read_dicts(out / "faults.csv") if fault["image"] in images]
        reviews = [read_dicts(folder / run.name / "review" / "review.csv") for folder in (runs, unplanted_runs)]
        for number, kind in enumerate(KINDS):
            planted, rows, before = ([row for row in table if row["kind"] == kind] for table in (faults, *reviews))
            new = [row for row in rows if not any(same_object(row, known) for known in before[: len(planted)])]
            totals[number] += len(planted), *found(rows, planted), len(rows) - len(new), *found(new, planted)
    for kind, (planted, *columns) in zip(KINDS, totals.tolist(), strict=True):
        first, chance, every, known, new_first, new_chance, _ = columns
        print(
            f"{kind}: {planted:.0f} planted, all rows find {every / planted:.2f}; "
            f"first rows {first / planted:.2f}, by chance {chance / planted:.2f}; "
            f"without {known:.0f} known rows {new_first / planted:.2f}, by chance {new_chance / planted:.2f}"
        )


def found(rows: Sequence[Mapping[str, str]], planted: Sequence[Mapping[str, str]]) -> tuple[float, float, float]:
    """Return how many faults the first rows find, as many rows as faults; rows in random order; and all rows."""
    finds = [{k for k, fault in enumerate(planted) if same_object(row, fault)} for row in rows]
    first, every = (len(set().union(*part)) for part in (finds[: len(planted)], finds))
    return first, every * min(1.0, len(planted) / max(1, len(rows))), every


def same_object(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two rows, of review.csv or faults.csv, have boxes of one object."""
    boxes = (np.array([row["box"].split()], float) for row in (row, other))
    return Path(row["image"]).name == Path(other["image"]).name and overlap_matrix(*boxes).item() >= SAME_OBJECT


if __name__ == "__main__":
    if sys.argv[1] == "plant":
        folds, out, seed = sys.argv[2:]
        plant(Path(folds), Path(out), int(seed))
    else:
        score(*map(Path, sys.argv[2:]))
