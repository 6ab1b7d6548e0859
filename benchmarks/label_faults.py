"""Plant label faults into a copy of a YOLO data set, and score the rows of val.py --review that find them.

    python -m benchmarks.label_faults plant CHECKOUT OUT NAMES.yaml SEED
    python -m benchmarks.label_faults score OUT RUN/review/review.csv ...

`plant` draws three times 5 % of the boxes of CHECKOUT/labels: those of the first part are removed, of the second moved
by 0.25 to 0.5 of their sides (an overlap of 0.14 to 0.39), of the third given another class of `names` in NAMES.yaml.

`score` takes the review.csv of each fold, which has n faults of a kind: the share of these that the first n rows of
this kind find (an overlap of 0.5 with the box removed, moved or renamed), and what a random order of the rows would.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from models.tasks.predictions import SAME_OBJECT, overlap_matrix
from utils.files import read_yaml
from utils.plots.pictures import read_dicts

SHARE, MIN_SHIFT, MAX_SHIFT = 0.05, 0.25, 0.5
KINDS = ("missing label", "poor box", "wrong class")  # what a removed, a moved and a renamed box should be found as


def plant(checkout: Path, out: Path, names: Sequence[str], seed: int) -> None:
    """Write `out`: data.yaml, links to the images, labels with faults, and faults.csv."""
    draw = random.Random(seed)
    rows = {file: file.read_text().splitlines() for file in sorted(checkout.glob("labels/*/*.txt"))}
    boxes = [(file, number) for file, lines in rows.items() for number in range(len(lines))]
    count = round(SHARE * len(boxes))
    drawn = draw.sample(boxes, count * len(KINDS))
    faults = []
    for number, (file, row) in enumerate(drawn):
        kind = KINDS[number // count]
        name, *text = rows[file][row].split()
        x, y, w, h = map(float, text)
        image = next(checkout.glob(f"images/{file.parent.name}/{file.stem}.*"))
        if kind == "wrong class":
            name = str(draw.choice([k for k in range(len(names)) if k != int(name)]))
        elif kind == "poor box":  # towards the centre of the image, so that it stays inside
            x += w * draw.uniform(MIN_SHIFT, MAX_SHIFT) * (1 if x < 0.5 else -1)
            y += h * draw.uniform(MIN_SHIFT, MAX_SHIFT) * (1 if y < 0.5 else -1)
            x, y = (min(max(centre, side / 2), 1 - side / 2) for centre, side in ((x, w), (y, h)))
        corners = np.multiply((x - w / 2, y - h / 2, x + w / 2, y + h / 2), Image.open(image).size * 2)
        faults.append((image.name, kind, " ".join(map(str, corners.tolist()))))
        rows[file][row] = "" if kind == "missing label" else f"{name} {x:.6f} {y:.6f} {w:.6f} {h:.6f}"
    for file, lines in rows.items():
        label = out / file.relative_to(checkout)
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("".join(f"{line}\n" for line in lines if line))
    for image in checkout.glob("images/*/*"):
        link = out / image.relative_to(checkout)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(image.resolve())
    images = [f"images/{folder.name}" for folder in sorted(checkout.glob("images/*"))]
    data = {"path": str(out.resolve()), "train": images, "val": images[0], "names": list(names)}
    (out / "data.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    with (out / "faults.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("image", "kind", "box"), *faults])


def score(out: Path, reviews: Sequence[Path]) -> None:
    """Print for each kind the planted faults, and the shares found by the first rows and by a random order."""
    totals = np.zeros((len(KINDS), 3))  # planted, found by the first rows, expected of a random order
    for review in reviews:
        data = read_yaml(read_yaml(review.parents[1] / "settings.yaml")["data"])
        validated = {Path(image).name for image in Path(data["val"]).read_text().splitlines()}
        faults = [fault for fault in read_dicts(out / "faults.csv") if fault["image"] in validated]
        for number, kind in enumerate(KINDS):
            planted = [fault for fault in faults if fault["kind"] == kind]
            rows = [row for row in read_dicts(review) if row["kind"] == kind]
            found = [{k for k, fault in enumerate(planted) if finds(row, fault)} for row in rows]
            first, all_found = (len(set().union(*part)) for part in (found[: len(planted)], found))
            totals[number] += len(planted), first, all_found * min(1.0, len(planted) / max(1, len(rows)))
    for kind, (planted, first, by_chance) in zip(KINDS, totals.tolist(), strict=True):
        print(f"{kind}: {planted:.0f} planted, {first / planted:.2f} found, {by_chance / planted:.2f} by chance")


def finds(row: Mapping[str, str], fault: Mapping[str, str]) -> bool:
    """Return whether a row of review.csv finds a planted fault."""
    boxes = (np.array([row["box"].split()], float) for row in (row, fault))
    return Path(row["image"]).name == fault["image"] and overlap_matrix(*boxes).item() >= SAME_OBJECT


if __name__ == "__main__":
    if sys.argv[1] == "plant":
        checkout, out, names, seed = sys.argv[2:]
        plant(Path(checkout), Path(out), [*read_yaml(Path(names))["names"].values()], int(seed))
    else:
        score(Path(sys.argv[2]), [*map(Path, sys.argv[3:])])
