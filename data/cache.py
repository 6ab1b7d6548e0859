"""Decoded images at training size: read from their files, or cached in memory or on disk (--cache).

The data sets call `open_images`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.image_ring import RING_MEMORY_SHARE, ImageRing
from data.images import read_image, read_reduced, resize_long_side, scaled_shape
from utils.distributed.shared_memory import shared_memory
from utils.errors import UserError
from utils.files import cache_folder, file_stamps, replacing

MIN_FREE_SHARE = 0.1  # share of the disk that the cache leaves free
CACHE_RULE = f"as long as {MIN_FREE_SHARE:.0%} of its disk stays free"
CACHE_MEMORY_SHARE = 0.8  # share of the memory that is free at the start; the rest is for training itself

writing_stopped = np.frombuffer(mmap.mmap(-1, 1), np.uint8)  # 1 once a disk is full; shared with forked processes


class Files(Sequence[Path]):
    """Paths in one block of memory, which loader processes share; a list of Path objects would be copied into each."""

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
    """The images of a split, with the longer side at `imgsz` pixels, or as in the file if `imgsz` is 0.

    Args:
        smooth: whether to average areas if an image shrinks
        sizes: (n, 2), width and height of each file's image, to read large photos by `read_reduced`; None to read all
            images in full
    """

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool, sizes: np.ndarray | None = None) -> None:
        self.files = files if isinstance(files, Files) else Files(files)
        self.imgsz, self.smooth, self.reduced_from = imgsz, smooth, sizes

    @property
    def messages(self) -> list[str]:
        """Lines about the cache for the console."""
        return []

    def read(self, index: int) -> np.ndarray:
        """Return one image, uint8 (h, w, 3) BGR, which must not be changed; it is valid until `release`."""
        if self.reduced_from is not None:
            width, height = self.reduced_from[index].tolist()
            return read_reduced(self.files[index], width, height, self.imgsz)
        image = read_image(self.files[index])
        return resize_long_side(image, self.imgsz, self.smooth) if self.imgsz else image

    def is_cached(self, index: int) -> bool:
        """Return whether `read` needs no decoding."""
        return False

    def release(self) -> None:
        """Release the images that were read: their memory may be reused."""


class ImagesInMemory(Images):
    """A cache in memory of the first images that fit, one for all processes of a machine.

    The process that reads an image first writes it into the shared memory; nothing is read in advance.

    Args:
        sizes: (n, 2), width and height of each file's image, which determine its position in the memory
        reduced: whether to read large photos by `read_reduced`
        cache: value of --cache, for messages
    """

    def __init__(
        self, files: Sequence[Path], imgsz: int, smooth: bool, sizes: np.ndarray, reduced: bool, cache: str
    ) -> None:
        super().__init__(files, imgsz, smooth, sizes if reduced else None)
        self.cache = cache
        self.shapes = cached_shapes(sizes, imgsz)
        # A byte per image, 1 once it is cached, then the pixels of all images.
        ends = len(files) + np.cumsum(self.shapes.prod(1, dtype=np.int64) * 3)
        self.starts = np.concatenate(([len(files)], ends[:-1]))
        self.memory = shared_memory(lambda free: int(ends[ends <= free * CACHE_MEMORY_SHARE].max(initial=len(files))))
        self.fitting = int((ends <= len(self.memory.bytes)).sum())

    @property
    def messages(self) -> list[str]:
        when = "validation" if self.cache == "val" else "epoch"
        room = f"room for {self.fitting} of {len(self.files)} images, {len(self.memory.bytes) / 2**30:.2f} GiB"
        return [
            f"--cache {self.cache}: {room} for all processes of a machine (at most {CACHE_MEMORY_SHARE:.0%} of what is "
            f"free), filled in the first {when}"
        ]

    def read(self, index: int) -> np.ndarray:
        if index >= self.fitting:
            return super().read(index)
        height, width = self.shapes[index].tolist()
        start, memory = int(self.starts[index]), self.memory.bytes
        cached = memory[start : start + height * width * 3].reshape(height, width, 3)
        if not memory[index]:
            image = super().read(index)
            if image.shape != cached.shape:  # the file has changed since its size was read
                return image
            cached[:] = image  # if two processes do this at the same time, they write the same
            memory[index] = 1
        return cached

    def is_cached(self, index: int) -> bool:
        return index < self.fitting


class ImagesOnDisk(Images):
    """A cache on disk: each image is written once, decoded, below the cache folder.

    Images that are there already are used; of the others, the first ones are cached that fit while a tenth of the disk
    stays free. Once less would be free, or a write fails, writing stops with one warning.

    Args:
        sizes: (n, 2), width and height of each file's image
        reduced: whether to read large photos by `read_reduced`
    """

    def __init__(self, files: Sequence[Path], imgsz: int, smooth: bool, sizes: np.ndarray, reduced: bool) -> None:
        super().__init__(files, imgsz, smooth, sizes if reduced else None)
        self.folder = cache_folder() / "images"
        self.written = np.array([os.path.exists(self._cache_file(file)) for file in self.files], bool)
        self.sizes = cached_shapes(sizes, imgsz).prod(1, dtype=np.int64) * 3
        available = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            available = available_bytes(self.folder)
        except OSError as error:
            self._stop_writing(error)
        self.cached = self.written | (np.cumsum(np.where(self.written, 0, self.sizes)) <= available)

    @property
    def messages(self) -> list[str]:
        return [
            f"--cache disk: room for {self.cached.sum()} of {len(self.files)} images, {self.written.sum()} cached "
            f"before, {self.sizes[self.cached].sum() / 2**30:.2f} GiB in {self.folder} ({CACHE_RULE}), "
            "filled in the first epoch"
        ]

    def read(self, index: int) -> np.ndarray:
        if not self.cached[index]:
            return super().read(index)
        path = self._cache_file(self.files[index])
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, EOFError, ValueError):  # not written yet, or damaged
            image = super().read(index)
        if not writing_stopped[0]:
            try:
                self._write(Path(path), image)
            except OSError as error:
                self._stop_writing(error)
        return image

    def is_cached(self, index: int) -> bool:
        return bool(self.cached[index])

    def _write(self, path: Path, image: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, image)  # np.save straight to a file on a full disk may lose the end without an error
        with replacing(path) as file:
            if available_bytes(path.parent) < image.nbytes:
                raise OSError(errno.ENOSPC, f"it may grow {CACHE_RULE}")
            file.write(content.getbuffer())

    def _stop_writing(self, error: OSError) -> None:
        if not writing_stopped[0]:
            writing_stopped[0] = 1
            warnings.warn(
                f"--cache disk: nothing more is written to {self.folder} ({error.strerror or error}); images "
                "that are not there are read from their files",
                stacklevel=3,
            )

    def _cache_file(self, file: Path) -> str:
        if not file.is_file():
            raise UserError(f"{file} cannot be read; fix or remove it")
        stamp = f"\0{file_stamps([str(file)])!r}\0{self.imgsz}\0{self.smooth}"
        if self.reduced_from is not None:
            stamp += "\0reduced"
        digest = hashlib.sha256(os.fsencode(file) + stamp.encode()).hexdigest()
        return f"{self.folder}/{digest[:2]}/{digest}.npy"


class ImagesInRing(Images):
    """Images of which the last `capacity` decoded ones stay in memory shared by all processes of a machine.

    Args:
        source: reader of the images that are not in the ring; it may have a cache
        sizes: (n, 2), width and height of each file's image
        capacity: number of images in the ring, at most
    """

    def __init__(self, source: Images, sizes: np.ndarray, capacity: int) -> None:
        super().__init__(source.files, source.imgsz, source.smooth)
        self.source = source
        self.wanted = min(capacity, len(self.files))
        self.ring = ImageRing(cached_shapes(sizes, self.imgsz), self.wanted)

    @property
    def messages(self) -> list[str]:
        short = (
            f"memory for {self.ring.capacity} of {self.wanted} decoded images, shared by all processes of a machine "
            f"(at most {RING_MEMORY_SHARE:.0%} of what is free): some images are decoded more than once"
        )
        return [*self.source.messages, *([short] if self.ring.capacity < self.wanted else [])]

    def read(self, index: int) -> np.ndarray:
        if self.source.is_cached(index):
            return self.source.read(index)
        image = self.ring.get(index)
        if image is None:
            image = self.source.read(index)
            self.ring.put(index, image)
        return image

    def release(self) -> None:
        self.ring.release()


def available_bytes(folder: Path) -> int:
    """Return the number of bytes that a cache may still write to a folder's disk."""
    usage = shutil.disk_usage(folder)
    return usage.free - int(usage.total * MIN_FREE_SHARE)


def cached_shapes(sizes: np.ndarray, imgsz: int) -> np.ndarray:
    """Return height and width of cached images, int32 (n, 2).

    Args:
        sizes: (n, 2), width and height of each file's image
    """
    if imgsz:
        sizes = np.array([scaled_shape(width, height, imgsz) for width, height in sizes.tolist()])
    return sizes[:, ::-1].astype(np.int32)


def open_images(
    files: Sequence[Path],
    imgsz: int,
    smooth: bool,
    cache: str,
    sizes: np.ndarray,
    capacity: int = 0,
    reduced: bool = False,
) -> Images:
    """Return the images of `files`.

    Args:
        cache: "ram" or "val" (in memory), "disk", or "" (read from the files each time)
        sizes: (n, 2), width and height of each file's image
        capacity: number of images outside of the cache that stay in memory
        reduced: whether to read large photos by `read_reduced`
    """
    images = Images(files, imgsz, smooth, sizes if reduced else None)
    if cache in ("ram", "val"):
        images = ImagesInMemory(files, imgsz, smooth, sizes, reduced, cache)
    elif cache == "disk":
        images = ImagesOnDisk(files, imgsz, smooth, sizes, reduced)
    if capacity and ImageRing.is_supported() and not all(map(images.is_cached, range(len(files)))):
        return ImagesInRing(images, sizes, capacity)
    return images
