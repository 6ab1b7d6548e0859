"""`python -m data.split my.yaml --val 0.2 --seed 0`: split a data set's images into training and validation.

`--folds 5` makes five such splits, and each image validates in one of them (cross-validation). Lists of images and a
data YAML are written into a folder of their own; the data set is not changed. The shares of all classes are as equal as
possible in both parts, and images of a group, such as the frames of a video, stay together.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from data.data_yaml import DataSpec
from data.dataset import data_source
from data.label_rows import BOXES
from data.labels import Labels, check_classes, load_labels
from utils.distributed.failure import run_main
from utils.errors import UserError, plural, shortened
from utils.files import replacing

YAML_FILE = "data.yaml"
PRINTED_CLASSES = 5  # classes without validation images to print, at most
WORKERS = 8  # processes that read labels, at most
MAX_FOLDS = 1000


class Pool(NamedTuple):
    """The images to split, all of training and validation, and their labels.

    Attributes:
        spec: data set that has the images
        images: image files, sorted
        labels: labels of the images
        entries: paths in the data YAML
        described: whether annotation files describe images, so that some have no label files
    """

    spec: DataSpec
    images: list[Path]
    labels: Labels
    entries: list[Path]
    described: bool


def read_pool(data: str) -> Pool:
    """Read all training and validation images of a data set, and their labels. Raises `UserError`."""
    spec = data_source(data, "data.detection:DetectionData").spec
    if not spec.names:
        raise UserError(
            f"{spec.file} has no `names`; list the classes there, or for folders of images per class give `split: 0.2` "
            "in a data YAML, which holds out a share of each class"
        )
    splits = [name for name in ("train", "val") if name in spec.entries or spec.holds_out]
    listings = [spec.listing(name) for name in splits]
    images = sorted({image for listing in listings for image in listing.images})
    annotated = [described for listing in listings for described in listing.annotated]
    labels = load_labels(images, "labels", WORKERS, spec.row_rules(BOXES), annotated)
    check_classes(labels, images, len(spec.names), spec.file)
    entries = list(dict.fromkeys(path for name in splits if name in spec.entries for path in spec.locations(name)))
    return Pool(spec, images, labels, entries, bool(annotated))


def group_names(images: Sequence[Path], pattern: str) -> tuple[list[str], int]:
    """Return the group of each image, and how many images do not match; each of those is its own group.

    Raises `UserError`.

    Args:
        pattern: regular expression to search for in the file's name, '' for no groups; its first parentheses, or else
            the whole match, name the group
    """
    try:
        expression = re.compile(pattern) if pattern else None
    except re.error as error:
        raise UserError(f"--group {shortened(pattern)} is not a regular expression ({error}); fix it") from None
    matches = [expression.search(image.name) if expression else None for image in images]
    names = [
        f"group/{match[1 if match.re.groups else 0]}" if match else f"{image.parent.name}/{image.name}"
        for match, image in zip(matches, images, strict=True)
    ]
    return names, matches.count(None) if expression else 0


def assigned(counts: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return the part of each group, int (groups,): iterative stratification (Sechidis et al., 2011).

    Groups with the rarest class are assigned first, each to the part that lacks most of it.

    Args:
        counts: number of images of each group with each class, (groups, classes); each image is counted in a column at
            least
        shares: share of each part
    """
    counts = counts.astype(np.int64)
    wanted = np.outer(shares, counts.sum(0))  # images of each class that each part still lacks
    parts = np.full(len(counts), -1)
    while (parts < 0).any():
        holders = (counts[parts < 0] > 0).sum(0)
        rarest = int(np.where(holders > 0, holders, len(counts) + 1).argmin())
        groups = np.flatnonzero((parts < 0) & (counts[:, rarest] > 0))
        for group in groups[np.argsort(-counts[groups, rarest], kind="stable")]:
            lacking = np.stack([wanted.sum(1), wanted[:, rarest]]).round(6)  # ties: the part that lacks most in total
            part = np.lexsort(lacking)[-1]
            parts[group] = part
            wanted[part] -= counts[group]
    return parts


def split_images(pool: Pool, groups: Sequence[str], shares: Sequence[float], seed: int) -> np.ndarray:
    """Return the part of each image, int (n,). Raises `UserError` if there are fewer groups than parts.

    Args:
        groups: group of each image
        shares: share of each part
        seed: seed that decides between equal choices, by hashes of the groups' names
    """
    keys = {name: hashlib.sha256(os.fsencode(f"{seed}/{name}")).digest() for name in set(groups)}
    order = {name: number for number, name in enumerate(sorted(keys, key=keys.__getitem__))}
    if len(order) < len(shares):
        raise UserError(
            f"{pool.spec.file} has {plural(len(order), 'group')} of images for {len(shares)} parts; add images"
        )
    numbers = np.array([order[name] for name in groups])
    counts = np.zeros((len(order), len(pool.spec.names) + 1), np.int64)
    np.add.at(counts, numbers, presence(pool))
    parts = assigned(counts, shares)
    for part in set(range(len(shares))) - set(parts.tolist()):  # parts without a group: a small share of few groups
        most = np.bincount(parts, minlength=len(shares)).argmax()
        of_most = np.flatnonzero(parts == most)
        parts[of_most[counts[of_most].sum(1).argmin()]] = part
    return parts[numbers]


def presence(pool: Pool) -> np.ndarray:
    """Return which classes each image has, bool (n, classes + 1); the last column is for images without labels."""
    classes = len(pool.spec.names)
    present = np.zeros((len(pool.images), classes + 1), bool)
    present[np.repeat(np.arange(len(pool.images)), pool.labels.counts), pool.labels.rows[:, 0].astype(int)] = True
    present[:, classes] = pool.labels.counts == 0
    return present


def yaml_content(pool: Pool, lists: Mapping[str, Path]) -> dict[str, Any]:
    """Return the data YAML of a split.

    Args:
        lists: text file of each part
    """
    spec, files = pool.spec, {name: str(path) for name, path in lists.items()}
    content: dict[str, Any] = dict(files)
    if pool.described:  # the objects stay in the annotation files
        entries = list(map(str, pool.entries))
        folders = {folder for given in spec.image_folders.values() for folder in given}
        found = [str(path) for folder in sorted(folders) if (path := spec.find(folder))]
        content = {**{name: [*entries] for name in files}, "lists": files, **({"images": found} if found else {})}
    if (test := [spec.find(entry) for entry in spec.entries.get("test", ())]) and None not in test:
        content["test"] = list(map(str, test))
    content |= {"kpt_shape": list(spec.kpt_shape)} if spec.kpt_shape else {}
    if spec.defaults:
        content["defaults"] = dict(spec.defaults)
    return {**content, "names": dict(spec.names)}


def write_split(pool: Pool, validates: np.ndarray, folder: Path) -> None:
    """Write train.txt, val.txt and data.yaml. Raises `UserError`.

    Args:
        validates: whether each image is for validation, bool (n,)
    """
    lists = {name: folder / f"{name}.txt" for name in ("train", "val")}
    try:
        for part, file in enumerate(lists.values()):
            with replacing(file) as opened:
                opened.writelines(os.fsencode(f"{pool.images[k]}\n") for k in np.flatnonzero(validates == part))
        with replacing(folder / YAML_FILE) as opened:
            opened.write(yaml.safe_dump(yaml_content(pool, lists), sort_keys=False).encode())
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}); name another --out folder") from None


def report(pool: Pool, validates: np.ndarray) -> list[str]:
    """Return lines for the console: the number of images of each part, and how equal the classes' shares are."""
    present, names = presence(pool)[:, :-1], pool.spec.names
    total, held = present.sum(0), present[validates].sum(0)
    shares = held[total > 0] / total[total > 0]
    spread = f"; {shares.min():.0%} to {shares.max():.0%} of the images of each class" if len(shares) else ""
    lines = [f"train: {plural(int((~validates).sum()), 'image')}, val: {plural(int(validates.sum()), 'image')}{spread}"]
    absent = [f"'{names[k]}' ({plural(total[k], 'image')})" for k in names if total[k] and not held[k]]
    if absent:
        more = f" and {len(absent) - PRINTED_CLASSES} more" if len(absent) > PRINTED_CLASSES else ""
        lines.append(f"warning: val has no image of {', '.join(absent[:PRINTED_CLASSES])}{more}")
    return lines


def split(
    data: str,
    val: float = 0.2,
    seed: int = 0,
    group: str = "",
    out: str = "",
    exist_ok: bool = False,
    folds: int | None = None,
) -> list[str]:
    """Split the data set that `data` names, as for train.py --data, and return lines for the console.

    Raises `UserError`.

    Args:
        val: share of the images for validation; not used with `folds`
        seed: seed of the choice
        group: see `group_names`
        out: folder to write to, by default `<name>-split` or `<name>-folds` in the working folder
        exist_ok: whether to replace files in the folder
        folds: number of splits, each in a folder `fold1`, `fold2` ... with another part of the images for validation;
            None for a single split
    """
    if folds is not None and not 2 <= folds <= MAX_FOLDS:
        raise UserError(
            f"--folds {folds} must be the number of parts that validate in turn, 2 to {MAX_FOLDS}, such as 5"
        )
    if not folds and not 0 < val < 1:
        raise UserError(f"--val {val:g} must be the share of the images for validation, between 0 and 1, such as 0.2")
    name = Path(os.path.abspath(data))
    ending = "folds" if folds else "split"
    folder = Path(os.path.abspath(out or f"{name.name if name.is_dir() else name.stem}-{ending}"))
    if not exist_ok and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists already; name another --out folder, or add --exist-ok to replace its files")
    pool = read_pool(data)
    groups, alone = group_names(pool.images, group)
    parts = split_images(pool, groups, [1 / folds] * folds if folds else (1 - val, val), seed)
    lines = list(pool.spec.warnings)
    splits = {f"fold{number + 1}": parts == number for number in range(folds)} if folds else {"": parts == 1}
    for title, validates in splits.items():
        write_split(pool, validates, folder / title)
        lines += [f"{title} {line}".lstrip() for line in report(pool, validates)]
    if group:
        unmatched = f", {plural(alone, 'image')} without a match of --group" if alone else ""
        lines.append(f"{plural(len(set(groups)), 'group')}, each in one part only{unmatched}")
    files = [str(folder / title / YAML_FILE) for title in splits]
    return [*lines, f"train with --data {files[0]}" + f", and so on to {files[-1]}" * (len(files) > 1)]


def main() -> None:
    """Split the data set that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m data.split", description="Split a data set's images into training and validation."
    )
    parser.add_argument("data", help="a data YAML, a folder or a COCO .json, as for train.py --data")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--val", type=float, default=0.2, help="share of the images for validation; default: 0.2")
    how.add_argument("--folds", type=int, help="make this many splits, at least 2; each image validates in one of them")
    parser.add_argument("--seed", type=int, default=0, help="a different seed gives a different split; default: 0")
    parser.add_argument(
        "--group", default="", help="regular expression: images whose names match it with the same text stay together"
    )
    parser.add_argument("--out", default="", help="folder to write to; default: <name>-split, or <name>-folds")
    parser.add_argument("--exist-ok", action="store_true", help="replace files in the --out folder")
    given = parser.parse_args()
    chosen = (given.val, given.seed, given.group, given.out, given.exist_ok, given.folds)
    print(*split(given.data, *chosen), sep="\n")


if __name__ == "__main__":
    run_main(main)
