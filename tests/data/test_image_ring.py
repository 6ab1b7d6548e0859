"""The ring of decoded images: what was stored is read, until it is replaced, in any process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from data.image_ring import PAGE_BYTES, RING_MEMORY_SHARE, ImageRing
from utils.distributed import shared_memory

SHAPES = np.array([(20, 30), (30, 20), (10, 30), (30, 30)] * 10)


def image(index: int) -> np.ndarray:
    return np.full((*SHAPES[index].tolist(), 3), index + 1, np.uint8)


def fill(ring: ImageRing, *indices: int) -> None:
    for index in indices:
        ring.put(index, image(index))


def stored(ring: ImageRing) -> list[int]:
    """Return the images in the ring, whose pixels must be whole."""
    found = []
    for index in range(len(SHAPES)):
        if (pixels := ring.get(index)) is not None:
            assert np.array_equal(pixels, image(index))
            found.append(index)
        ring.release()
    return found


def in_another_process(work: Callable[[], Any]) -> None:
    """Call `work` in a forked process, which must succeed, and which the system then ends."""
    if not (child := os.fork()):
        try:
            work()
        except BaseException:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_a_new_image_replaces_the_oldest() -> None:
    ring = ImageRing(SHAPES, capacity=3)
    assert stored(ring) == []
    fill(ring, 7, 1, 4)
    assert stored(ring) == [1, 4, 7]
    fill(ring, 9, 0)
    assert stored(ring) == [0, 4, 9]


def test_an_image_that_is_being_read_stays() -> None:
    ring = ImageRing(SHAPES, capacity=2)
    fill(ring, 0, 1)
    pixels = ring.get(0)
    assert pixels is not None
    fill(ring, 2, 3)  # both into the other place
    assert np.array_equal(pixels, image(0))
    ring.release()
    assert stored(ring) == [0, 3]
    first, second = ring.get(0), ring.get(3)
    fill(ring, 4)  # there is no place for it
    assert first is not None
    assert second is not None
    ring.release()
    assert stored(ring) == [0, 3]


def test_an_image_that_another_process_reads_stays() -> None:
    ring, both = ImageRing(SHAPES, capacity=2), multiprocessing.get_context("fork").Pipe()
    fill(ring, 0, 1)

    def read_and_wait() -> None:
        assert ring.get(0) is not None
        both[1].send("reading")
        both[1].recv()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=read_and_wait)
    process.start()
    both[0].recv()
    fill(ring, 2, 3)
    assert stored(ring) == [0, 3]
    both[0].send("stop")
    process.join(60)
    fill(ring, 4, 5)
    assert stored(ring) == [4, 5]


class DeadlyImage:
    """An image that ends the process when its pixels are read."""

    shape, nbytes = (*SHAPES[5].tolist(), 3), 100

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_process_that_dies_leaves_no_lock() -> None:
    """Neither while it reads, nor while it writes an image, which is then not there."""
    ring = ImageRing(SHAPES, capacity=3)
    in_another_process(lambda: fill(ring, 0, 1, 2))
    assert stored(ring) == [0, 1, 2]
    in_another_process(lambda: [ring.get(0), ring.get(1), ring.get(2)])

    in_another_process(lambda: ring.put(5, DeadlyImage()))  # type: ignore[arg-type]
    assert stored(ring) == [1, 2]
    fill(ring, 5, 6, 7)
    assert stored(ring) == [5, 6, 7]


def write_and_read(ring: ImageRing, seed: int) -> None:
    """Read random images as a data set does: what is not in the ring is made and stored."""
    for index in np.random.default_rng(seed).integers(len(SHAPES), size=3000).tolist():
        held = [ring.get(index), ring.get((index + 1) % len(SHAPES))]
        for pixels, number in zip(held, (index, (index + 1) % len(SHAPES)), strict=True):
            if pixels is None:
                ring.put(number, image(number))
            else:
                assert (pixels == number + 1).all()
        for pixels, number in zip(held, (index, (index + 1) % len(SHAPES)), strict=True):
            assert pixels is None or (pixels == number + 1).all()  # still
        ring.release()
    os._exit(0)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_never_see_half_an_image(method: str) -> None:
    ring, context = ImageRing(SHAPES, capacity=12), multiprocessing.get_context(method)
    processes: list[Any] = [context.Process(target=write_and_read, args=(ring, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0] * 4
    assert 6 <= len(stored(ring)) <= 12


def test_what_does_not_fit_is_not_stored() -> None:
    """A few large images, and a file that has another size than its shape says."""
    shapes = np.array([(20, 20)] * 199 + [(200, 200)])
    ring = ImageRing(shapes, capacity=8)
    ring.put(199, np.zeros((200, 200, 3), np.uint8))
    ring.put(0, np.zeros((20, 21, 3), np.uint8))
    assert ring.get(199) is ring.get(0) is None
    ring.put(0, np.ones((20, 20, 3), np.uint8))
    assert ring.get(0) is not None


@pytest.mark.parametrize(("free", "capacity"), [(10**9, 40), (100_000, 5), (0, 0)])
def test_the_capacity_follows_from_the_free_memory(free: int, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of it at most: a page or two for the tables and 4 KiB for an image."""
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: free)
    monkeypatch.setattr(shared_memory, "in_use", WeakSet())
    ring = ImageRing(SHAPES, capacity=40)
    assert ring.capacity == capacity
    assert len(ring.memory.bytes) <= max(free * RING_MEMORY_SHARE, PAGE_BYTES)
    fill(ring, *range(40))
    assert len(stored(ring)) == capacity
