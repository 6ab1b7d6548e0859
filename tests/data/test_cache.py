"""Decoded images: the same pixels from files, memory and disk; what a ring has and replaces."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from multiprocessing.heap import Arena
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data import cache
from data.cache import Images, ImageStore
from data.images import image_size, read_reduced
from tests.conftest import OnProcesses
from tests.making import noise, spoil, write_image
from utils.distributed.launch import start
from utils.distributed.ranks import ranks, run_store
from utils.errors import UserError


def pixels(images: Images) -> list[np.ndarray]:
    return [images.read(index) for index in range(len(images.names))]


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def opened(files: list[Path], imgsz: int, smooth: bool, way: str, reduced: bool = False) -> Images:
    return Images(files, np.array(list(map(image_size, files))), imgsz, smooth, reduced, cache=way)


def cached_files(cache_home: Path) -> list[Path]:
    return sorted(path for path in cache_home.rglob("*") if path.is_file())


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four images: one of the right size, one to shrink, one to enlarge, one portrait."""
    sizes = ((32, 20), (64, 48), (16, 12), (21, 40))
    return [write_image(tmp_path / f"set/{k}.png", noise(*size, seed=k)) for k, size in enumerate(sizes)]


def unreadable(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    """Let only cached pixels of these files be read, without a change of the files."""
    read = cache.read_pixels

    def read_others(file: Path, *form: Any) -> np.ndarray:
        if file in files:
            raise UserError(f"{file} is read")
        return read(file, *form)

    monkeypatch.setattr(cache, "read_pixels", read_others)


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_large_photos_are_reduced_on_request(tmp_path: Path, way: str) -> None:
    sizes = ((2000, 1200), (64, 48))
    photos = [write_image(tmp_path / f"set/{k}.jpg", noise(*size, seed=k)) for k, size in enumerate(sizes)]
    expected = [read_reduced(file, *size, 32) for file, size in zip(photos, sizes, strict=True)]
    images = opened(photos, 32, False, way, reduced=True)
    for _ in range(2):
        assert same(pixels(images), expected)
        images = pickle.loads(ForkingPickler.dumps(images))  # as for spawned processes
    assert not same(pixels(opened(photos, 32, False, way)), expected)


# Memory


def test_images_that_do_not_fit_into_memory_are_read_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_image(tmp_path / f"set/{k}.bmp", noise(12, 12, seed=k)) for k in range(20)]
    expected = pixels(opened(files, 12, True, ""))
    free = round((10 * 12 * 12 * 3 + cache.PAGE_BYTES) / cache.CACHE_MEMORY_SHARE) + 1  # and a page for the tables
    monkeypatch.setattr(cache, "shared_memory", lambda size: Arena(size(free)))
    images = opened(files, 12, True, "ram")
    assert "room for 10 of 20 images" in capsys.readouterr().out
    assert same(pixels(images), expected)
    spoil(*files[:10])
    assert same(pixels(images), expected)
    spoil(files[10])
    with pytest.raises(UserError):
        images.read(10)


def read_after_the_first(files: list[Path]) -> tuple[int, list[int]]:
    """Return the size of the memory, and a sum of each image: read by the first process only, and then spoilt."""
    start("cpu", "no", 60.0)
    images, store = opened(files, 32, True, "ram"), run_store()
    assert store is not None
    if ranks().rank == 0:
        store.wait_for_value("opened")  # a process that has ended shares no memory
        pixels(images)
        spoil(*files)
        store.write_once("filled", True)
    else:
        store.write_once("opened", True)
        store.wait_for_value("filled")
    return images.stores[0].memory.size, [int(image.sum()) for image in pixels(images)]


def test_memory_is_one_for_all_processes(on_processes: OnProcesses, files: list[Path]) -> None:
    expected = [int(image.sum()) for image in pixels(opened(files, 32, True, ""))]
    first, second = on_processes(2, read_after_the_first, files)
    assert first == second
    assert first[1] == expected


# Disk


def test_disk_survives_a_restart_and_notices_a_changed_file(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even an edit that keeps size and time."""
    images = opened(files, 32, True, "disk")
    first = pixels(images)
    assert len(cached_files(cache_home)) == 4
    assert all((cache_home / "lockstep/images") in path.parents for path in cached_files(cache_home))
    status = files[0].stat()
    write_image(files[0], noise(32, 20, seed=9))
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    again = opened(files, 32, True, "disk")
    spoil(files[1])
    unreadable(monkeypatch, *files[2:])
    for way in (images, again):
        assert np.array_equal(way.read(0), np.asarray(Image.open(files[0]))[..., ::-1])
        assert not np.array_equal(way.read(0), first[0])
        with pytest.raises(UserError, match=str(files[1])):
            way.read(1)
        assert same([way.read(2), way.read(3)], first[2:])


@pytest.mark.parametrize("damage", [lambda whole: whole[:-7], lambda whole: whole[:20], lambda _: b"text"])
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


def test_a_full_disk_leaves_nothing(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pixels(opened(files, 32, True, ""))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert same(pixels(opened(files, 32, True, "disk")), expected)
    assert cached_files(cache_home) == []


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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.lists(st.one_of(st.none(), st.integers(0, 39), st.integers(0, 39).map(str)), max_size=40))
def test_a_new_image_replaces_the_oldest_that_is_not_being_read(capacity: int, steps: list[Any]) -> None:
    """A number puts an image, a text reads one, and None releases what was read."""
    ring, slots, following, held = ImageStore(SHAPES, capacity=capacity), {}, 0, {}
    for step in steps:
        if step is None:
            ring.release()
            held = {}
        elif isinstance(step, str):
            slot = next((slot for slot, image in slots.items() if image == int(step)), None)
            found = ring.get(int(step))
            assert (found is None) == (slot is None)
            held |= {slot: found} if slot is not None else {}
        elif step not in slots.values():
            ring.put(step, filled_image(step))
            free = [slot % capacity for slot in range(following, following + capacity) if slot % capacity not in held]
            if free:
                slots[free[0]], following = step, free[0] + 1
        assert all(np.array_equal(image, filled_image(slots[slot])) for slot, image in held.items())
    ring.release()
    assert stored(ring) == sorted(slots.values())


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


def test_what_does_not_fit_is_not_stored() -> None:
    """A few large images, and a file that has another size than its shape says."""
    shapes = np.array([(20, 20)] * 199 + [(200, 200)])
    ring = ImageStore(shapes, capacity=8)
    ring.put(199, np.zeros((200, 200, 3), np.uint8))
    ring.put(0, np.zeros((20, 21, 3), np.uint8))
    assert ring.get(199) is ring.get(0) is None
    ring.put(0, np.ones((20, 20, 3), np.uint8))
    assert ring.get(0) is not None
