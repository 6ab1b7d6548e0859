"""Write a drawn data set to disk: all images or none. Called by shapes.py and shapes_cls.py."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from utils.errors import UserError

DRAWN_SPLITS = ("train", "val")  # a split's number is its index here


@dataclass(frozen=True)
class BuiltinDataset:
    """The files of a drawn data set. In the path of a folder `{}` stands for the name of the split."""

    title: str  # name in messages
    version: int  # version of the drawing: folders of other versions are refused
    marker: str  # the file with version, seed, counts and class names
    names: tuple[str, ...]  # class names by number
    images: tuple[str, ...]  # folders: image `index` is in folder number `index` modulo their count
    labels: tuple[str, ...]  # folders of label files
    write: Callable[[Path, int, int, int], None]  # draws one image into the data set's folder by seed, split and index


def draw_builtin(dataset: BuiltinDataset, folder: Path, seed: int, counts: tuple[int, int]) -> Path:
    """Draw a data set into `folder` unless it exists, and return `folder`.

    The images are drawn into a hidden folder beside it, `.<name>-<pid>-<random>`, which is then renamed: `folder` is
    complete or absent. If several processes draw, the first to rename wins and the others use its drawing. A killed
    process leaves its hidden folder behind, which nothing reads.

    Raises `UserError` if `folder` exists with other content than this drawing, or cannot be written. Existing files are
    never changed or removed.

    Args:
        counts: number of images of each split
    """
    if seed < 0:
        raise UserError(f"seed {seed} is negative: give the {dataset.title} data set a seed of 0 or more")
    sizes = dict(zip(DRAWN_SPLITS, counts, strict=True))
    marker: dict[str, object] = {"drawing": dataset.version, "seed": seed, **sizes, "names": list(dataset.names)}
    if not os.path.lexists(folder):
        # mkdtemp would make a folder that only its owner may read, and that mode would survive the rename.
        part = folder.parent / f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            _draw_images(part, dataset, seed, counts)
            (part / dataset.marker).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            os.sync()  # else a power cut soon after the rename could leave the final name on empty files
            os.rename(part, folder)
        except OSError as error:
            if not os.path.lexists(folder):  # not drawn by a faster process
                raise UserError(
                    f"cannot write the {dataset.title} data set to '{folder}' ({error.strerror}): free disk space, fix "
                    "the permissions, or name another folder"
                ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)  # absent after the rename
    _check(folder, dataset, marker, counts)
    return folder


def _draw_images(folder: Path, dataset: BuiltinDataset, seed: int, counts: tuple[int, int]) -> None:
    for path in dataset.images + dataset.labels:
        for name in DRAWN_SPLITS:
            (folder / path.format(name)).mkdir(parents=True)
    work = [(split, index) for split, count in enumerate(counts) for index in range(count)]
    # disable=None: a progress bar on a terminal only
    for split, index in tqdm(work, desc=f"drawing {dataset.title}", unit="image", disable=None):
        dataset.write(folder, seed, split, index)


def _check(folder: Path, dataset: BuiltinDataset, marker: dict[str, object], counts: tuple[int, int]) -> None:
    """Raise `UserError` unless `folder` contains the complete drawing that `marker` describes."""
    try:
        content = json.loads((folder / dataset.marker).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"'{folder}' exists but is not a drawing of the {dataset.title} data set (it has no readable "
            f"{dataset.marker}): remove it or name another folder"
        ) from None
    if content != marker:
        described = content if isinstance(content, dict) else {}
        keys = [key for key in marker | described if described.get(key) != marker.get(key)]
        raise UserError(
            f"'{folder}' contains another drawing of the {dataset.title} data set (its {dataset.marker} differs in "
            f"{', '.join(keys)}): remove it to draw it again, or name another folder"
        )
    for split, total in zip(DRAWN_SPLITS, counts, strict=True):
        for first, path in enumerate(dataset.images):
            expected = len(range(first, total, len(dataset.images)))
            images = len(list((folder / path.format(split)).glob("*.jpg")))
            if images != expected:
                raise UserError(
                    f"'{folder}' is damaged ({images} instead of {expected} images in {path.format(split)}): "
                    "remove it to draw it again"
                )
