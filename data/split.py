"""`python -m data.split my.yaml --val 0.2 --seed 0`: split a data set's images into training and validation.

`--folds 5` makes five such splits, and each image validates in one of them (cross-validation). Lists of images and a
data YAML are written into a folder; the data set is not changed. Both parts have all classes in about the same shares.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import yaml

from data.dataset import data_source
from data.labels import BOXES, check_classes, load_labels
from utils.console import log
from utils.distributed.failure import run_main
from utils.errors import UserError, plural

WORKERS = 8  # processes that read labels, at most


def assign_parts(counts: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return the part of each image, int (n,): iterative stratification (Sechidis et al., 2011).

    Images with the rarest class are assigned first, each to the part that lacks most of it. `counts`, int (n, classes),
    is 1 for each class that an image has, otherwise 0; each image has one at least.
    """
    lacking = np.outer(shares, counts.sum(0))  # images of each class that each part still lacks
    parts = np.full(len(counts), -1)
    while (parts < 0).any():
        holders = counts[parts < 0].sum(0)
        rarest = int(np.where(holders > 0, holders, len(counts) + 1).argmin())
        for image in np.flatnonzero((parts < 0) & (counts[:, rarest] > 0)):
            keys = np.stack([lacking.sum(1), lacking[:, rarest]]).round(6)  # ties: the part that lacks most in total
            parts[image] = np.lexsort(keys)[-1]
            lacking[parts[image]] -= counts[image]
    return parts


def split(data: str, val: float = 0.2, seed: int = 0, folds: int = 0) -> None:
    """Split the data set that `data` names, as for train.py --data.

    Writes into `<name>-split`, or with `folds` into `<name>-folds`, in the working folder. Hashes of the images' names
    and of `seed` decide between equal choices. Raises `UserError`.
    """
    source = data_source(data, "data.detection:DetectionData")
    spec, classes = source.spec, len(source.names())
    listings = [spec.listing(name) for name in ("train", "val") if name in spec.entries or spec.holds_out]
    if spec.sets:
        raise UserError(f"{spec.file} lists data sets; split each of them, and list the YAMLs that this writes")
    if any(listing.annotated for listing in listings):
        raise UserError(f"{spec.file} has annotations instead of label files; write `split: {val:g}` into a data YAML")
    images = sorted({image for listing in listings for image in listing.images})
    labels = load_labels(images, "labels", WORKERS, spec.row_rules(BOXES))
    check_classes(labels, images, classes, spec.file)
    if not 0 < val < 1 or (folds and not 2 <= folds <= len(images)):
        raise UserError(f"--val {val:g} must be between 0 and 1, --folds {folds} from 2 to the {len(images)} images")
    present = np.zeros((len(images), classes + 1), np.int64)  # classes of each image; the last column: no labels
    present[np.repeat(np.arange(len(images)), labels.counts), labels.rows[:, 0].astype(int)] = 1
    present[:, classes] = labels.counts == 0
    keys = [os.fsencode(f"{seed}/{image.parent.name}/{image.name}") for image in images]
    order = sorted(range(len(images)), key=lambda k: hashlib.sha256(keys[k]).digest())
    parts = np.empty(len(images), int)
    parts[order] = assign_parts(present[order], [1 / folds] * folds if folds else (1 - val, val))
    if 0 in np.bincount(parts, minlength=folds or 2):
        raise UserError(f"{spec.file} has too few images: a part would be empty; add images, or give another --val")
    path = Path(os.path.abspath(data))
    top = Path.cwd() / f"{path.name if path.is_dir() else path.stem}-{'folds' if folds else 'split'}"
    test: list[str] = []
    with suppress(UserError):  # no `test:`, or its images are not here
        test = list(map(str, spec.locations("test")))
    other_keys = {"test": test, "kpt_shape": list(spec.kpt_shape), "defaults": dict(spec.defaults), "names": spec.names}
    other_keys["tiles"] = spec.tiles and vars(spec.tiles)
    log(*spec.warnings)
    for number in range(folds or 1):
        folder, validates = top / f"fold{number + 1}" if folds else top, parts == (number if folds else 1)
        files = {name: str(folder / f"{name}.txt") for name in ("train", "val")}
        try:
            folder.mkdir(parents=True)
            for file, is_listed in zip(files.values(), (~validates, validates), strict=True):
                Path(file).write_bytes(b"".join(os.fsencode(f"{images[k]}\n") for k in np.flatnonzero(is_listed)))
            content = {**files, **{key: value for key, value in other_keys.items() if value}}
            (folder / "data.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); remove it, or call elsewhere") from None
        log(f"{folder / 'data.yaml'}: {plural((~validates).sum(), 'image')} train, {validates.sum()} validate")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data.split")
    parser.add_argument("data", help="a data YAML or a folder with one, as for train.py --data")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--val", type=float, default=0.2, help="share of the images for validation; default: 0.2")
    how.add_argument("--folds", type=int, default=0, help="number of splits; each image validates in one of them")
    parser.add_argument("--seed", type=int, default=0, help="a different seed gives a different split; default: 0")
    split(**vars(parser.parse_args()))


if __name__ == "__main__":
    run_main(main)
