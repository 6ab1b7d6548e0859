"""A ring of decoded images in shared memory, so that an image is decoded once for all mosaics that it is part of.

Called by data/cache.py. May import utils.
"""

from __future__ import annotations

import numpy as np

from utils.distributed.shared_memory import shared_memory

try:
    import fcntl
except ImportError:  # Windows has no such locks, so there is no ring
    fcntl = None  # type: ignore[assignment]

RING_MEMORY_SHARE = 0.25  # largest share of the memory that is free at the start
LARGEST_STORED = 0.99  # quantile of the images' sizes that slots have; a few larger images are never stored
PAGE_BYTES = 4096
TABLE = 0  # the byte whose lock guards the tables; the lock of slot k is on byte 1 + k


class ImageRing:
    """A per-machine ring buffer of the `capacity` most recently decoded images.

    Every process reads and stores images. It locks a slot while it uses the pixels, and never waits for a lock: an
    image that cannot be stored at once is not stored. The system releases the locks of a process that dies, and a slot
    that it was writing counts as empty.

    Args:
        shapes: (n, 2), height and width of all images
        capacity: number of images to hold; fewer are held if memory is short
    """

    def __init__(self, shapes: np.ndarray, capacity: int) -> None:
        self.shapes = shapes
        sizes = shapes.prod(1, dtype=np.int64) * 3
        self.slot_bytes = _whole_pages(int(np.quantile(sizes, LARGEST_STORED, method="higher")))
        self.start = _whole_pages(4 * (1 + len(shapes) + capacity))

        def size(free: int) -> int:
            slots = (int(free * RING_MEMORY_SHARE) - self.start) // self.slot_bytes
            return self.start + min(capacity, max(slots, 0)) * self.slot_bytes

        self.memory = shared_memory(size)
        self.capacity = (len(self.memory.bytes) - self.start) // self.slot_bytes
        self.reading: set[int] = set()  # slots that this process has locked

    @staticmethod
    def is_supported() -> bool:
        """Return whether this system has the file locks that the ring needs."""
        return fcntl is not None

    # The tables at the start of the memory, int32. An image and its slot must name each other.

    @property
    def next_slot(self) -> np.ndarray:
        """The slot to be replaced next, (1,)."""
        return self.memory.bytes[:4].view(np.int32)

    @property
    def slots(self) -> np.ndarray:
        """The slot of each image plus one, 0 for none, (n,)."""
        return self.memory.bytes[4 : 4 + 4 * len(self.shapes)].view(np.int32)

    @property
    def images(self) -> np.ndarray:
        """The image in each slot plus one, 0 for none, (capacity,)."""
        first = 4 + 4 * len(self.shapes)
        return self.memory.bytes[first : first + 4 * self.capacity].view(np.int32)

    def get(self, index: int) -> np.ndarray | None:
        """Return an image, uint8 (h, w, 3), which does not change until `release`; None if it is not in the ring."""
        slot = int(self.slots[index]) - 1
        if slot < 0 or not self._lock(1 + slot, fcntl.LOCK_SH):
            return None
        self.reading.add(slot)
        return self._pixels(slot, index) if self.images[slot] == index + 1 else None

    def put(self, index: int, image: np.ndarray) -> None:
        """Store an image, unless no slot is free, it is too large, or its shape is not the expected one."""
        if image.shape[:2] != tuple(self.shapes[index].tolist()) or image.nbytes > self.slot_bytes:
            return
        if (slot := self._take_slot()) is None:
            return
        self._pixels(slot, index)[:] = image
        self.images[slot], self.slots[index] = index + 1, slot + 1
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
        try:
            for _ in range(self.capacity):
                slot = int(self.next_slot[0]) % self.capacity
                self.next_slot[0] = slot + 1
                # This process's own locks do not exclude it.
                if slot not in self.reading and self._lock(1 + slot, fcntl.LOCK_EX):
                    replaced = int(self.images[slot]) - 1
                    self.images[slot] = 0
                    if replaced >= 0 and self.slots[replaced] == slot + 1:
                        self.slots[replaced] = 0
                    return slot
            return None
        finally:
            self._unlock(TABLE)

    def _pixels(self, slot: int, index: int) -> np.ndarray:
        height, width = self.shapes[index].tolist()
        start = self.start + slot * self.slot_bytes
        return self.memory.bytes[start : start + height * width * 3].reshape(height, width, 3)

    def _lock(self, byte: int, kind: int) -> bool:
        """Lock a byte for this process; return False if another process has locked it."""
        try:
            fcntl.lockf(self.memory.file, kind | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def _unlock(self, first: int, count: int = 1) -> None:
        fcntl.lockf(self.memory.file, fcntl.LOCK_UN, count, first)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
