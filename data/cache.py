"""Decoded images at the size that training wants: from the files, from memory, or from a cache on disk."""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from data.images import read_image, resize_long_side, scaled_shape
from utils.distributed.shared_memory import shared_memory
from utils.errors import UserError
from utils.files import cache_folder, replacing

MEMORY_SHARE = 0.8  # of what is free now; the rest stays for training itself
DISK_SHARE = 0.8  # of what would be free without the cache, for all runs together; the rest stays free
BLOCK = 4096  # bytes, of which a file takes whole ones


class Files(Sequence[Path]):
    """Paths in one piece of memory: of a hundred thousand objects each loader process would come to hold a copy."""

    def __init__(self, paths: Sequence[Path]) -> None:
        names = [os.fsencode(path) for path in paths]
        self.text = b"".join(names)
        self.ends = np.cumsum([0, *map(len, names)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Path(os.fsdecode(self.text[self.ends[index] : self.ends[index + 1]]))


class Images:
    """The images of a split, with the longer side at `imgsz` pixels, or as they are where it is 0.

    `smooth` averages areas when one shrinks.
    """

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool) -> None:
        self.files, self.imgsz, self.smooth = Files(files), imgsz, smooth

    @property
    def messages(self) -> list[str]:
        """Sentences about what is kept."""
        return []

    def read(self, index: int) -> np.ndarray:
        """One image, uint8 (h, w, 3) BGR; not to be written to."""
        image = read_image(self.files[index])
        return resize_long_side(image, self.imgsz, self.smooth) if self.imgsz else image


class ImagesInMemory(Images):
    """Keeps the images that fit into the budget, the first ones, once for all processes of the machine.

    Nothing is read beforehand: whoever reads an image first puts it into memory that all share. `sizes` (n, 2): width
    and height of each file's image, so that its place is known before.
    """

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool, sizes: np.ndarray, cache: str = "ram") -> None:
        super().__init__(files, imgsz, smooth)
        self.cache = cache
        self.shapes = kept_shapes(sizes, imgsz)
        ends = len(files) + np.cumsum(self.shapes.prod(1, dtype=np.int64) * 3)  # a byte for each says if it is there
        self.starts = np.concatenate(([len(files)], ends[:-1]))
        self.memory = shared_memory(lambda free: int(ends[ends <= free * MEMORY_SHARE].max(initial=len(files))))
        self.fitting = int((ends <= len(self.memory)).sum())

    @property
    def messages(self) -> list[str]:
        when = "validation" if self.cache == "val" else "epoch"
        return [
            f"--cache {self.cache}: room for {self.fitting} of {len(self.files)} images, "
            f"{len(self.memory) / 2**30:.2f} GiB for all processes of a machine (at most {MEMORY_SHARE:.0%} of what is "
            f"free), filled in the first {when}"
        ]

    def read(self, index: int) -> np.ndarray:
        if index >= self.fitting:
            return super().read(index)
        height, width = self.shapes[index].tolist()
        start = int(self.starts[index])
        kept = self.memory[start : start + height * width * 3].reshape(height, width, 3)
        if not self.memory[index]:
            image = super().read(index)
            if image.shape != kept.shape:  # the file is another one now than when it was looked at
                return image
            kept[:] = image  # two that come at once write the same
            self.memory[index] = 1
        return kept

    def __reduce__(self) -> tuple[Any, ...]:
        return Images, (self.files, self.imgsz, self.smooth)  # where processes are spawned they share no memory


class ImagesOnDisk(Images):
    """Writes each image once, decoded, below the cache folder, and reads it from there ever after.

    Those that are there are kept, and of the others the first ones that fit into the budget, which restarts do not
    make larger. When other programs have taken half of what should stay free, or writing fails, no more is written,
    which is a warning once. `sizes` (n, 2): width and height of each file's image.
    """

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool, sizes: np.ndarray) -> None:
        super().__init__(files, imgsz, smooth)
        self.folder = cache_folder() / "images"
        self.found = np.array([os.path.exists(self._place(file)) for file in self.files], bool)
        self.sizes = in_blocks(kept_shapes(sizes, imgsz).prod(1, dtype=np.int64) * 3)
        free = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            self._stop_writing(error)
        reserve = int((free + bytes_below(self.folder)) * (1 - DISK_SHARE))
        self.least = reserve // 2  # bytes that stay free whoever writes
        ends = np.cumsum(np.where(self.found, 0, self.sizes))
        fits = ends <= free - reserve - sum(images.coming for images in _on_disk)
        self.kept = self.found | fits
        self.coming: int = ends[fits].max(initial=0)  # bytes
        _on_disk.add(self)

    @property
    def messages(self) -> list[str]:
        return [
            f"--cache disk: room for {self.kept.sum()} of {len(self.files)} images, {self.found.sum()} found from "
            f"before, {self.sizes[self.kept].sum() / 2**30:.2f} GiB in {self.folder} (which takes at most "
            f"{DISK_SHARE:.0%} of what would be free without it), filled in the first epoch"
        ]

    def read(self, index: int) -> np.ndarray:
        if not self.kept[index]:
            return super().read(index)
        path = self._place(self.files[index])
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, EOFError, ValueError):  # not written yet, or damaged
            image = super().read(index)
        if not _full[0]:
            try:
                self._write(Path(path), image)
            except OSError as error:
                self._stop_writing(error)
        return image

    def _write(self, path: Path, image: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, image)  # straight into a file it may lose the end on a full disk, and say nothing
        with replacing(path) as file:
            if (free := shutil.disk_usage(path.parent).free - image.nbytes) < self.least:
                raise OSError(errno.ENOSPC, f"it would leave {max(free, 0) / 2**30:.2f} GiB free")
            file.write(content.getbuffer())

    def _stop_writing(self, error: OSError) -> None:
        if not _full[0]:
            _full[0] = 1
            warnings.warn(
                f"--cache disk: no more is written into {self.folder} ({error.strerror or error}); images "
                "that are not there are read from their files",
                stacklevel=3,
            )

    def _place(self, file: Path) -> str:
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}; mend or remove it") from None
        stamp = f"\0{status.st_size}\0{status.st_mtime_ns}\0{self.imgsz}\0{self.smooth}"
        digest = hashlib.sha256(os.fsencode(file) + stamp.encode()).hexdigest()
        return f"{self.folder}/{digest[:2]}/{digest}.npy"


def bytes_below(folder: Path) -> int:
    """What all files there take, at any depth."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process has just renamed it
                total += in_blocks(os.stat(f"{parent}/{name}").st_size)
    return total


def in_blocks(size: Any) -> Any:
    """What a file of `size` bytes and a short header takes on the disk; a number, or an array of them."""
    return (size // BLOCK + 1) * BLOCK


_on_disk: WeakSet[ImagesOnDisk] = WeakSet()  # of this process: what they will write is not free for the next one
_full = np.frombuffer(mmap.mmap(-1, 1), np.uint8)  # 1 when no more is written, for all that this process forks


def kept_shapes(sizes: np.ndarray, imgsz: int) -> np.ndarray:
    """Height and width, int32 (n, 2), that images of `sizes` (n, 2), width and height, have with `imgsz`."""
    if imgsz:
        sizes = np.array([scaled_shape(width, height, imgsz) for width, height in sizes.tolist()])
    return sizes[:, ::-1].astype(np.int32)


def open_images(files: Sequence[Path], imgsz: int, smooth: bool, cache: str, sizes: np.ndarray) -> Images:
    """The images by the way that `--cache` names: '' (files), 'disk', or 'ram', which 'val' is too where it is meant.

    `sizes` (n, 2): width and height.
    """
    if cache in ("ram", "val"):
        return ImagesInMemory(files, imgsz, smooth, sizes, cache)
    if cache == "disk":
        return ImagesOnDisk(files, imgsz, smooth, sizes)
    return Images(files, imgsz, smooth)
