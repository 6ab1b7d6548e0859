"""Decoded images at training size: from their files, from memory that a machine's processes share, or from disk.

The data sets make `Images`. An image is decoded once for all mosaics that it is part of (`ImageStore` as a ring), once
per run (--cache ram), or once per machine (--cache disk).
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import InitVar, dataclass
from pathlib import Path

import numpy as np

from data.images import read_pixels, read_reduced, resize, scaled_shape, stacked_files
from data.labels import file_stamps
from data.tiles import Windows
from utils.batch import PHOTOS, PathArray, PixelFormat
from utils.console import log
from utils.distributed.ranks import shared_memory
from utils.errors import UserError
from utils.files import cache_folder, one_at_a_time, write_bytes

try:
    import fcntl
except ImportError:  # Windows has no such locks, so there is no ring
    fcntl = None  # type: ignore[assignment]

RING_MEMORY_SHARE = 0.25  # largest share of the memory that is free at the start
CACHE_MEMORY_SHARE = 0.8  # the same for --cache ram; the rest is for training itself
DISK_FREE_SHARE = 0.1  # share of the disk that --cache disk leaves free
LARGEST_STORED = 0.99  # quantile of the images' sizes that a ring's slots have; a few larger images are never stored
PAGE_BYTES = 4096
TABLE = 0  # the byte whose lock guards the tables; the lock of slot k is on byte 1 + k


class ImageStore:
    """Decoded images in memory that all processes of a machine share; each process reads and stores them.

    Without `capacity`, each of the first images that fit has a place of its own, and nothing is replaced. With it, the
    store is a ring of the most recently decoded images. A process locks a slot of a ring while it uses the pixels, and
    never waits for a lock: an image that cannot be stored at once is not stored. The system releases the locks of a
    process that dies, and a slot that it was writing counts as empty.

    Args:
        shapes: (n, 2), height and width of all images
        capacity: number of a ring's slots; fewer if memory is short
    """

    def __init__(self, shapes: np.ndarray, capacity: int | None = None, pixels: PixelFormat = PHOTOS) -> None:
        self.shapes, self.is_ring, self.pixels = shapes, capacity is not None, pixels
        self.sizes = shapes.prod(1, dtype=np.int64) * pixels.bytes()
        self.slot_bytes = _whole_pages(int(np.quantile(self.sizes, LARGEST_STORED, method="higher")))
        slots = self.sizes if capacity is None else np.full(capacity, self.slot_bytes)
        tables = _whole_pages(4 * (1 + len(shapes) + len(slots)))
        self.starts = tables + np.concatenate(([0], np.cumsum(slots)))
        limit = RING_MEMORY_SHARE if self.is_ring else CACHE_MEMORY_SHARE
        self.memory = shared_memory(lambda free: int(self.starts[self.starts <= free * limit].max(initial=tables)))
        self.capacity = int((self.starts[1:] <= self.memory.size).sum())
        self.reading: set[int] = set()  # slots of a ring that this process has locked

    @property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of the memory, int32, of numbers from 1, 0 for none: an image and its slot must name each other.

        They are the slot of a ring to be replaced next, (1,), the slot of each image, and the image in each slot.
        """
        count = 1 + len(self.shapes)
        numbers = np.frombuffer(self.memory.buffer, np.int32, count + self.capacity)
        return numbers[:1], numbers[1:count], numbers[count:]

    def get(self, index: int) -> np.ndarray | None:
        """Return an image, which does not change until `release`; None if it is not stored."""
        _, slots, images = self.tables
        slot = int(slots[index]) - 1
        if slot < 0:
            return None
        if self.is_ring:
            if not self._lock(1 + slot, fcntl.LOCK_SH):
                return None
            self.reading.add(slot)
        return self._pixels(slot, index) if images[slot] == index + 1 else None

    def put(self, index: int, image: np.ndarray) -> None:
        """Store an image, unless there is no slot for it, or its shape is not the expected one."""
        if image.shape[:2] != tuple(self.shapes[index].tolist()):  # the file has changed since its size was read
            return
        if self.is_ring:
            slot = self._take_slot() if image.nbytes <= self.slot_bytes else None
        else:
            slot = index if index < self.capacity else None
        if slot is None:
            return
        self._pixels(slot, index)[:] = image  # two processes may write the same image to its own place
        _, slots, images = self.tables
        images[slot], slots[index] = index + 1, slot + 1
        if self.is_ring:
            self._unlock(1 + slot)

    def release(self) -> None:
        """Let other images replace those that this process has read."""
        if self.reading:
            self._unlock(1, self.capacity)
            self.reading.clear()

    def _take_slot(self) -> int | None:
        """Empty and lock the oldest unused slot for writing; None if there is none."""
        if not self._lock(TABLE, fcntl.LOCK_EX):
            return None
        next_slot, slots, images = self.tables
        try:
            for _ in range(self.capacity):
                slot = int(next_slot[0]) % self.capacity
                next_slot[0] = slot + 1
                # This process's own locks do not exclude it.
                if slot not in self.reading and self._lock(1 + slot, fcntl.LOCK_EX):
                    replaced = int(images[slot]) - 1
                    images[slot] = 0
                    if replaced >= 0 and slots[replaced] == slot + 1:
                        slots[replaced] = 0
                    return slot
            return None
        finally:
            self._unlock(TABLE)

    def _pixels(self, slot: int, index: int) -> np.ndarray:
        start = int(self.starts[slot])
        shape, dtype = self.pixels.shape(*self.shapes[index].tolist()), self.pixels.dtype
        return np.frombuffer(self.memory.buffer, dtype, int(np.prod(shape)), start).reshape(shape)

    def _lock(self, byte: int, mode: int) -> bool:
        """Lock a byte for this process; return False if another process has locked it."""
        try:
            fcntl.lockf(self.memory.fd, mode | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def _unlock(self, first: int, count: int = 1) -> None:
        fcntl.lockf(self.memory.fd, fcntl.LOCK_UN, count, first)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(eq=False)
class Images:
    """The images of a split, with the longer side at `imgsz` pixels, or as in the file if `imgsz` is 0."""

    files: InitVar[Sequence[Path]]
    sizes: np.ndarray  # (n, 2), width and height of each file's image
    imgsz: int
    smooth: bool = False  # whether to average areas if an image shrinks
    reduced: bool = False  # whether to read large photos by `read_reduced`
    stretched: bool = False  # whether both sides become `imgsz`, instead of the longer one
    windows: Windows | None = None  # that the images are, if they are parts of files
    pixels: PixelFormat = PHOTOS
    cache: InitVar[str] = ""  # "ram" or "val" (in memory), "disk", or "" (read from the files each time)
    capacity: InitVar[int] = 0  # number of recent images that stay in memory

    def __post_init__(self, files: Sequence[Path], cache: str, capacity: int) -> None:
        self.names = (files if isinstance(files, PathArray) else PathArray(files)).names
        # A large file is decoded once for all of its windows: training has them on disk, an evaluation in turn.
        on_disk = cache == "disk" or (self.windows and self.reduced)
        self.folder = f"{cache_folder() / 'images'}" if on_disk else ""
        self.whole: tuple[Path, np.ndarray] | None = None  # the last file that windows were cut from, and its pixels
        self.stores: list[ImageStore] = []
        shapes = np.array([self.shape(*size)[::-1] for size in self.sizes.tolist()], np.int32).reshape(-1, 2)
        count, ring_slots = len(files), min(capacity, len(files))
        if on_disk:
            total = shapes.prod(1, dtype=np.int64).sum() * self.pixels.bytes() / 2**30
            title = f"{'tiles' if self.windows else '--cache disk'}: {count} images, {total:.2f} GiB"
            log(f"{title}, in {self.folder}, while {DISK_FREE_SHARE:.0%} is free")
        if cache and cache != "disk":
            store = ImageStore(shapes, pixels=self.pixels)
            room = f"room for {store.capacity} of {count} images, {store.memory.size / 2**30:.2f} GiB"
            log(f"--cache {cache}: {room}, at most {CACHE_MEMORY_SHARE:.0%} of the memory that is free")
            self.stores.append(store)
            ring_slots = ring_slots if store.capacity < count else 0
        if ring_slots and fcntl:
            self.stores.append(ImageStore(shapes, ring_slots, self.pixels))

    def shape(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a file's image as `read` returns it."""
        if self.stretched:
            return self.imgsz, self.imgsz
        return scaled_shape(width, height, self.imgsz) if self.imgsz else (width, height)

    def name(self, index: int) -> str:
        """Return the path of an image's file."""
        return os.fsdecode(self.names[index])

    def read(self, index: int) -> np.ndarray:
        """Return one image as `read_pixels` does, which must not be changed; it is valid until `release`."""
        for store in self.stores:
            if (image := store.get(index)) is not None:
                return image
        image = self._read_from_disk(index) if self.folder else self._decode(index)
        for store in self.stores:
            store.put(index, image)
        return image

    def release(self) -> None:
        """Release the images that were read: their memory may be reused."""
        self.whole = None
        for store in self.stores:
            store.release()

    def _decode(self, index: int) -> np.ndarray:
        file = Path(self.name(index))
        if self.windows:
            if self.whole is None or self.whole[0] != file:
                self.whole = file, read_pixels(file, self.pixels)
            left, top, right, bottom = self.windows.bounds[index].tolist()
            image = self.whole[1][top:bottom, left:right]
            if image.shape[:2] != (bottom - top, right - left):
                raise UserError(f"{file} is smaller than it was at the start; start again")
            return resize(image, self.shape(*image.shape[1::-1]), self.smooth or max(image.shape) >= 2 * self.imgsz)
        if self.reduced and not self.stretched and self.pixels == PHOTOS:
            width, height = self.sizes[index].tolist()
            return read_reduced(file, width, height, self.imgsz)
        image = read_pixels(file, self.pixels)
        return resize(image, self.shape(*image.shape[1::-1]), self.smooth or self.pixels != PHOTOS)

    def _read_from_disk(self, index: int) -> np.ndarray:
        """Return an image from the cache on disk. If it is not there, it is written, with all windows of its file."""
        (path,) = self._paths([index])
        with suppress(OSError, EOFError, ValueError):  # not written yet, or damaged
            return np.load(path, allow_pickle=False)
        of_file = np.flatnonzero(self.names == self.names[index]).tolist() if self.windows else []
        paths = self._paths([index, *of_file])
        with one_at_a_time(paths[1].with_suffix(".lock")) if self.windows else nullcontext():
            with suppress(OSError, EOFError, ValueError):
                return np.load(path, allow_pickle=False)
            image, pairs = self._decode(index), zip(paths, (index, *of_file), strict=True)  # until the disk is full
            all(self._write(file, image if k == index else self._decode(k)) for file, k in pairs)
        return image

    def _paths(self, indices: Sequence[int]) -> list[Path]:
        """Return the paths in the cache on disk of images from one file."""
        name, form = self.name(indices[0]), (self.imgsz, self.smooth, self.reduced, self.stretched)
        windows = [f" {self.windows.bounds[k].tolist()}" if self.windows else "" for k in indices]
        pixels = "" if self.pixels == PHOTOS else repr(self.pixels)
        stamps = file_stamps(map(str, stacked_files(Path(name), self.pixels.folders)))
        texts = (os.fsencode(f"{name} {form}{window}{pixels}") for window in windows)
        digests = [hashlib.sha256(text + stamps).hexdigest() for text in texts]
        return [Path(self.folder, digest[:2], f"{digest}.npy") for digest in digests]

    def _write(self, path: Path, image: np.ndarray) -> bool:
        """Write an image into the cache on disk if there is room; return whether there is."""
        content = io.BytesIO()
        np.save(content, image)  # np.save straight to a file on a full disk may lose the end without an error
        with suppress(OSError):  # it is read from its file again
            path.parent.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(path.parent)
            if disk.free - image.nbytes > DISK_FREE_SHARE * disk.total:
                write_bytes(path, content.getbuffer())
                return True
        return False
