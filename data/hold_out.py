"""Choose the images that are held out for validation: `split:` of a data YAML. Called by the data sets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path


def held_out(images: Sequence[Path], share: float, seed: int) -> set[Path]:
    """Return the images that are held out for validation: at least one, but never all.

    A hash of folder name, file name and seed decides, so new images hardly change the choice and moving the folder does
    not change it.
    """

    def order(path: Path) -> tuple[bytes, Path]:
        return hashlib.sha256(os.fsencode(f"{seed}/{path.parent.name}/{path.name}")).digest(), path

    count = min(max(round(len(images) * share), 1), len(images) - 1)
    return set(sorted(images, key=order)[:count])
