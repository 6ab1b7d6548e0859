"""Decoded images: the same pixels from files, memory and disk; what a ring has and replaces."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import pytest
from PIL import Image

from data import cache
from data.cache import Images, ImageStore
from data.images import image_size, read_reduced
from tests.conftest import OnProcesses
from tests.making import noise, spoil, write_image
from utils.distributed.launch import start
from utils.distributed.ranks import SharedMemory, ranks, run_store
from utils.errors import UserError


def pixels(images: Images) -> list[np.ndarray]:
    return [images.read(index) for index in range(len(images.names))]


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def sizes_of(files: list[Path]) -> np.ndarray:
    """Return width and height of each image, or any if it cannot be read."""
    sizes = []
    for file in files:
        try:
            sizes.append(image_size(file))
        except OSError:
            sizes.append((16, 12))
    return np.array(sizes)


def opened(files: list[Path], imgsz: int, smooth: bool, way: str) -> Images:
    return Images(files, sizes_of(files), imgsz, smooth, cache=way)


def cached_files(cache_home: Path) -> list[Path]:
    return sorted(path for path in cache_home.rglob("*") if path.is_file())


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four images: one of the right size, one to shrink, one to enlarge, one portrait."""
    sizes = ((32, 20), (64, 48), (16, 12), (21, 40))
    return [write_image(tmp_path / f"set/{k}.png", noise(*size, seed=k)) for k, size in enumerate(sizes)]


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """A large photo and a small one."""
    sizes = ((2000, 1200), (64, 48))
    return [write_image(tmp_path / f"set/{k}.jpg", noise(*size, seed=k)) for k, size in enumerate(sizes)]


def unreadable(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    """Let only cached pixels of these files be read, without a change of the files."""
    read = cache.read_image

    def read_others(file: Path) -> np.ndarray:
        if file in files:
            raise UserError(f"{file} is read")
        return read(file)

    monkeypatch.setattr(cache, "read_image", read_others)


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_large_photos_are_reduced_on_request(photos: list[Path], way: str) -> None:
    sizes = sizes_of(photos)
    expected = [read_reduced(file, *size, 32) for file, size in zip(photos, sizes.tolist(), strict=True)]
    images = Images(photos, sizes, 32, reduced=True, cache=way)
    for _ in range(2):
        assert same(pixels(images), expected)
        images = pickle.loads(pickle.dumps(images))  # as for spawned processes
    assert not same(pixels(opened(photos, 32, False, way)), expected)


# Memory


def test_images_that_do_not_fit_into_memory_are_read_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_image(tmp_path / f"set/{k}.bmp", noise(12, 12, seed=k)) for k in range(20)]
    expected = pixels(opened(files, 12, True, ""))
    free = round((10 * 12 * 12 * 3 + cache.PAGE_BYTES) / cache.CACHE_MEMORY_SHARE) + 1  # and a page for the tables
    monkeypatch.setattr(cache, "shared_memory", lambda size: SharedMemory.of_size(size(free)))
    images = opened(files, 12, True, "ram")
    assert "room for 10 of 20 images" in capsys.readouterr().out
    assert same(pixels(images), expected)
    spoil(*files[:10])
    assert same(pixels(images), expected)
    spoil(files[10])
    with pytest.raises(UserError):
        images.read(10)


def read_after_the_first(files: list[Path], sizes: np.ndarray) -> tuple[int, list[int]]:
    """Return the size of the memory, and a sum of each image: read by the first process only, and then spoilt."""
    start("cpu", "no", 60.0)
    images, store = Images(files, sizes, 32, True, cache="ram"), run_store()
    assert store is not None
    if ranks().rank == 0:
        store.wait_for_value("opened")  # a process that has ended shares no memory
        pixels(images)
        spoil(*files)
        store.write_once("filled", True)
    else:
        store.write_once("opened", True)
        store.wait_for_value("filled")
    return len(images.stores[0].memory.bytes), [int(image.sum()) for image in pixels(images)]


def test_memory_is_one_for_all_processes(on_processes: OnProcesses, files: list[Path]) -> None:
    expected = [int(image.sum()) for image in pixels(opened(files, 32, True, ""))]
    first, second = on_processes(2, read_after_the_first, files, sizes_of(files))
    assert first == second
    assert first[1] == expected


# Disk


def test_disk_survives_a_restart(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pixels(opened(files, 32, True, "disk"))
    assert len(cached_files(cache_home)) == 4
    assert all((cache_home / "lockstep/images") in path.parents for path in cached_files(cache_home))
    unreadable(monkeypatch, *files)
    assert same(pixels(opened(files, 32, True, "disk")), first)


def test_disk_notices_a_changed_file(files: list[Path]) -> None:
    images = opened(files, 32, True, "disk")
    first = pixels(images)
    status = files[0].stat()
    write_image(files[0], noise(32, 20, seed=9))
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    for way in (images, opened(files, 32, True, "disk")):
        second = pixels(way)
        assert np.array_equal(second[0], np.asarray(Image.open(files[0]))[..., ::-1])
        assert not np.array_equal(second[0], first[0])
        assert same(second[1:], first[1:])


def test_disk_notices_an_edit_that_keeps_size_and_time(files: list[Path]) -> None:
    images = opened(files, 32, True, "disk")
    pixels(images)
    spoil(files[0])
    with pytest.raises(UserError, match=re.escape(str(files[0]))):
        images.read(0)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-7], id="cut short"),
        pytest.param(lambda content: content[:20], id="cut in its header"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: b"not an array", id="text"),
    ],
)
def test_a_damaged_file_on_disk_is_replaced(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    expected = pixels(opened(files, 32, True, "disk"))
    for path in cached_files(cache_home):
        path.write_bytes(damage(path.read_bytes()))
    assert same(pixels(opened(files, 32, True, "disk")), expected)
    unreadable(monkeypatch, *files)
    assert same(pixels(opened(files, 32, True, "disk")), expected)


def test_a_tenth_of_the_disk_stays_free(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pixels(opened(files, 32, True, ""))
    usage = SimpleNamespace(free=1000, total=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert same(pixels(opened(files, 32, True, "disk")), expected)
    assert cached_files(cache_home) == []
    usage.free += 32 * 24 * 3 + 1  # the largest but one
    assert same(pixels(opened(files[:3], 32, True, "disk")), expected[:3])
    assert len(cached_files(cache_home)) == 3


def failing(file: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pixels(opened(files, 32, True, ""))
    monkeypatch.setattr(os, "fsync", failing)
    assert same(pixels(opened(files, 32, True, "disk")), expected)
    assert cached_files(cache_home) == []


# Paths


# The ring

SHAPES = np.array([(20, 30), (30, 20), (10, 30), (30, 30)] * 10)


def filled_image(index: int) -> np.ndarray:
    return np.full((*SHAPES[index].tolist(), 3), index + 1, np.uint8)


def put(ring: ImageStore, *indices: int) -> None:
    for index in indices:
        ring.put(index, filled_image(index))


def stored(ring: ImageStore) -> list[int]:
    """Return the images in the ring, whose pixels must be whole."""
    found = []
    for index in range(len(SHAPES)):
        if (pixels := ring.get(index)) is not None:
            assert np.array_equal(pixels, filled_image(index))
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
    ring = ImageStore(SHAPES, capacity=3)
    assert stored(ring) == []
    put(ring, 7, 1, 4)
    assert stored(ring) == [1, 4, 7]
    put(ring, 9, 0)
    assert stored(ring) == [0, 4, 9]


def test_an_image_that_is_being_read_stays() -> None:
    ring = ImageStore(SHAPES, capacity=2)
    put(ring, 0, 1)
    pixels = ring.get(0)
    assert pixels is not None
    put(ring, 2, 3)  # both into the other place
    assert np.array_equal(pixels, filled_image(0))
    ring.release()
    assert stored(ring) == [0, 3]
    first, second = ring.get(0), ring.get(3)
    put(ring, 4)  # there is no place for it
    assert first is not None
    assert second is not None
    ring.release()
    assert stored(ring) == [0, 3]


def test_an_image_that_another_process_reads_stays() -> None:
    ring, both = ImageStore(SHAPES, capacity=2), multiprocessing.get_context("fork").Pipe()
    put(ring, 0, 1)

    def read_and_wait() -> None:
        assert ring.get(0) is not None
        both[1].send("reading")
        both[1].recv()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=read_and_wait)
    process.start()
    both[0].recv()
    put(ring, 2, 3)
    assert stored(ring) == [0, 3]
    both[0].send("stop")
    process.join(60)
    put(ring, 4, 5)
    assert stored(ring) == [4, 5]


class DeadlyImage:
    """An image that ends the process when its pixels are read."""

    shape, nbytes = (*SHAPES[5].tolist(), 3), 100

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_process_that_dies_leaves_no_lock() -> None:
    """Neither while it reads, nor while it writes an image, which is then not there."""
    ring = ImageStore(SHAPES, capacity=3)
    in_another_process(lambda: put(ring, 0, 1, 2))
    assert stored(ring) == [0, 1, 2]
    in_another_process(lambda: [ring.get(0), ring.get(1), ring.get(2)])

    in_another_process(lambda: ring.put(5, DeadlyImage()))  # type: ignore[arg-type]
    assert stored(ring) == [1, 2]
    put(ring, 5, 6, 7)
    assert stored(ring) == [5, 6, 7]


def write_and_read(ring: ImageStore, seed: int) -> None:
    """Read random images as a data set does: what is not in the ring is made and stored."""
    for index in np.random.default_rng(seed).integers(len(SHAPES), size=3000).tolist():
        held = [ring.get(index), ring.get((index + 1) % len(SHAPES))]
        for pixels, number in zip(held, (index, (index + 1) % len(SHAPES)), strict=True):
            if pixels is None:
                ring.put(number, filled_image(number))
            else:
                assert (pixels == number + 1).all()
        for pixels, number in zip(held, (index, (index + 1) % len(SHAPES)), strict=True):
            assert pixels is None or (pixels == number + 1).all()  # still
        ring.release()
    os._exit(0)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_never_see_half_an_image(method: str) -> None:
    ring, context = ImageStore(SHAPES, capacity=12), multiprocessing.get_context(method)
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
    ring = ImageStore(shapes, capacity=8)
    ring.put(199, np.zeros((200, 200, 3), np.uint8))
    ring.put(0, np.zeros((20, 21, 3), np.uint8))
    assert ring.get(199) is ring.get(0) is None
    ring.put(0, np.ones((20, 20, 3), np.uint8))
    assert ring.get(0) is not None


@pytest.mark.parametrize(("free", "capacity"), [(10**9, 40), (100_000, 5), (0, 0)])
def test_the_capacity_follows_from_the_free_memory(free: int, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of it at most: a page or two for the tables and 4 KiB for an image."""
    monkeypatch.setattr("utils.distributed.ranks.available_bytes", lambda: free)
    monkeypatch.setattr("utils.distributed.ranks.in_use", WeakSet())
    ring = ImageStore(SHAPES, capacity=40)
    assert ring.capacity == capacity
    assert len(ring.memory.bytes) <= max(free * cache.RING_MEMORY_SHARE, cache.PAGE_BYTES)
    put(ring, *range(40))
    assert len(stored(ring)) == capacity
