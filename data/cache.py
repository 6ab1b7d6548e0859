"""Decoded images at the size that training wants: from the files, from memory, or from a cache on disk."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from data.images import read_image, resize_long_side
from utils.errors import UserError
from utils.files import cache_folder, replacing
from utils.place import place, speaks

MEMORY_SHARE = 0.8  # of what is free now; the rest stays for training itself


class Images:
    """The images of a split, with the longer side at `imgsz` pixels, or as they are where it is 0.

    `smooth` averages areas when one shrinks.
    """

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool) -> None:
        self.files, self.imgsz, self.smooth = files, imgsz, smooth

    def read(self, index: int) -> np.ndarray:
        """One image, uint8 (h, w, 3) BGR; not to be written to."""
        image = read_image(self.files[index])
        return resize_long_side(image, self.imgsz, self.smooth) if self.imgsz else image


class ImagesInMemory(Images):
    """Keeps as many images as fit into memory, read before the loader's processes start so that all share one copy."""

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool, workers: int) -> None:
        super().__init__(files, imgsz, smooth)
        self.kept: list[np.ndarray] = []
        budget = MEMORY_SHARE * psutil.virtual_memory().available / place().local_processes  # each keeps its own
        hidden = None if speaks() else True  # None: tqdm asks whether it writes to a terminal
        with (
            ThreadPoolExecutor(max(workers, 1)) as pool,
            tqdm(total=len(files), desc="reading images", unit="image", disable=hidden, leave=False) as bar,
        ):
            for start in range(0, len(files), 64):
                if sum(image.nbytes for image in self.kept) > budget:
                    warnings.warn(f"--cache ram: {start} of {len(files)} images fit into memory", stacklevel=2)
                    break
                self.kept += pool.map(super().read, range(start, min(start + 64, len(files))))
                bar.update(len(self.kept) - bar.n)

    def read(self, index: int) -> np.ndarray:
        return self.kept[index] if index < len(self.kept) else super().read(index)


class ImagesOnDisk(Images):
    """Writes each image once, decoded, below the cache folder, and reads it from there ever after."""

    def read(self, index: int) -> np.ndarray:
        kept = self._place(self.files[index])
        try:
            return np.load(kept, allow_pickle=False)
        except (OSError, EOFError, ValueError):  # not written yet, or damaged
            image = super().read(index)
        try:
            with replacing(kept) as file:
                np.save(file, image)
        except OSError as error:
            warnings.warn(f"--cache disk: {kept} cannot be written ({error.strerror})", stacklevel=2)
        return image

    def _place(self, file: Path) -> Path:
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}; mend or remove it") from None
        key = f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{self.imgsz}\0{self.smooth}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        return cache_folder() / "images" / digest[:2] / f"{digest}.npy"


def open_images(files: Sequence[Path], imgsz: int, smooth: bool, cache: str, workers: int) -> Images:
    """The images by the way that `--cache` names: '' (files), 'ram' or 'disk'."""
    if cache == "ram":
        return ImagesInMemory(files, imgsz, smooth, workers)
    return (ImagesOnDisk if cache == "disk" else Images)(files, imgsz, smooth)
