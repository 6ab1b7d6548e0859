"""What the data sets of all tasks have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np

from data.problems import refuse
from data.sources import DataSpec
from utils.errors import UserError
from utils.files import csv_text


@dataclass
class DataSet:
    """A data set's YAML, and how its images are to be delivered."""

    spec: DataSpec
    _: KW_ONLY
    imgsz: int
    stride: int  # sides of an image are multiples of it
    single_class: bool
    workers: int
    cache: str
    strict: bool = False

    @property
    def train_cache(self) -> str:
        """How the images of a training are kept: `cache`, unless it means those of the validation alone."""
        return "" if self.cache == "val" else self.cache

    def usable(self, name: str, sizes: np.ndarray, problems: Sequence[str]) -> np.ndarray:
        """Which images (n,) of a split can be used, of `sizes` (n, 2) as they were found.

        Raises `UserError` where none can; `strict`: where there are `problems`.
        """
        if self.strict:
            refuse(problems, name)
        readable = sizes[:, 0] > 0
        if not readable.any():
            raise UserError(f"{self.spec.file}: no image of `{name}:` can be read; the first: {problems[0]}")
        return readable


def labels_text(names: Mapping[int, str], counts: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """labels.csv: in how many images of each split a class is, and how often. `counts`: both by class, (c,) each."""
    rows = [
        (split, name, int(images[k]), int(instances[k]))
        for split, (images, instances) in counts.items()
        for k, name in names.items()
    ]
    return csv_text(("split", "class", "images", "instances"), rows)


def identity(images: Sequence[Path], labels: bytes) -> dict[str, str]:
    """What tells whether these are the same images and labels as at another time, wherever they lie."""
    names = "\n".join(path.name for path in images)
    return {
        "count": str(len(images)),
        "files": hashlib.sha256(names.encode()).hexdigest(),
        "labels": hashlib.sha256(labels).hexdigest(),
    }
