"""Decoded images: the same pixels from files, memory and disk, and nothing written beside the files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image

from data import cache
from data.cache import Images, open_images
from data.images import image_size, read_reduced
from tests.conftest import OnProcesses
from tests.making import noise, spoil, write_image
from utils.distributed.launch import start
from utils.distributed.ranks import ranks, run_store
from utils.distributed.shared_memory import SharedMemory
from utils.errors import UserError


def pixels(images: Images) -> list[np.ndarray]:
    return [images.read(index) for index in range(len(images.files))]


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
    return open_images(files, imgsz, smooth, way, sizes_of(files))


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


def free_disk(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Let the caches write `size` bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(size), total=0))


@pytest.fixture(autouse=True)
def new_run() -> Iterator[None]:
    """Let the next test write to the disk again."""
    yield
    cache.writing_stopped[0] = 0


def test_the_longer_side_has_the_requested_size(files: list[Path]) -> None:
    images = pixels(opened(files, 32, True, ""))
    assert [image.shape for image in images] == [(20, 32, 3), (24, 32, 3), (24, 32, 3), (32, 17, 3)]  # 16.8
    assert np.array_equal(images[0], np.asarray(Image.open(files[0]))[..., ::-1])
    # a half in each direction: the mean of every four pixels, rounded
    quarters = np.asarray(Image.open(files[1]))[..., ::-1].reshape(24, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(images[1] - quarters).max() <= 0.5


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_without_a_size_images_stay_as_they_are(files: list[Path], way: str) -> None:
    expected = [np.asarray(Image.open(file))[..., ::-1] for file in files]
    images = opened(files, 0, False, way)
    for _ in range(2):
        assert same(pixels(images), expected)
    assert pixels(opened(files, 32, False, way))[1].shape == (24, 32, 3)  # the next time with a size


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("way", ["ram", "disk"])
def test_cached_images_are_those_of_the_files(files: list[Path], way: str, smooth: bool) -> None:
    expected = pixels(opened(files, 32, smooth, ""))
    images = opened(files, 32, smooth, way)
    for _ in range(2):
        assert same(pixels(images), expected)


def test_a_truncated_photo_is_the_same_from_every_cache(tmp_path: Path) -> None:
    files = [write_image(tmp_path / f"{k}.jpg", noise(640, 480, k)) for k in range(2)]
    files[0].write_bytes(files[0].read_bytes()[:-20])
    plain = pixels(opened(files, 320, True, ""))
    for way in ("ram", "disk"):
        images = opened(files, 320, True, way)
        assert all(same(pixels(images), plain) for _ in range(2))


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_large_photos_are_reduced_on_request(photos: list[Path], way: str) -> None:
    sizes = sizes_of(photos)
    expected = [read_reduced(file, *size, 32) for file, size in zip(photos, sizes.tolist(), strict=True)]
    images = open_images(photos, 32, False, way, sizes, reduced=True)
    for _ in range(2):
        assert same(pixels(images), expected)
        images = pickle.loads(pickle.dumps(images))  # as for spawned processes
    assert not same(pixels(opened(photos, 32, False, way)), expected)


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_the_data_folder_stays_as_it_is(files: list[Path], tmp_path: Path, way: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    pixels(opened(files, 32, True, way))
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_a_missing_image_is_named(files: list[Path], way: str) -> None:
    files[2].unlink()
    with pytest.raises(UserError, match=r"2\.png"):
        pixels(opened(files, 32, True, way))


# Memory


def test_memory_is_filled_by_reading(files: list[Path]) -> None:
    expected = pixels(opened(files, 32, True, ""))
    images = opened(files, 32, True, "ram")
    assert same(pixels(images), expected)
    spoil(*files)
    assert same([images.read(2), images.read(0)], [expected[2], expected[0]])


def test_images_that_a_forked_process_reads_are_cached_for_all(files: list[Path]) -> None:
    expected = pixels(opened(files, 32, True, ""))
    images = opened(files, 32, True, "ram")
    if not (child := os.fork()):
        pixels(images)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    spoil(*files)
    assert same(pixels(images), expected)


def test_images_that_do_not_fit_into_memory_are_read_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_image(tmp_path / f"set/{k}.bmp", noise(12, 12, seed=k)) for k in range(20)]
    expected = pixels(opened(files, 12, True, ""))
    free = round((10 * 12 * 12 * 3 + 20) / cache.CACHE_MEMORY_SHARE) + 1  # and a byte per image
    monkeypatch.setattr(cache, "shared_memory", lambda size: SharedMemory.of_size(size(free)))
    images = opened(files, 12, True, "ram")
    assert "room for 10 of 20 images" in images.messages[0]
    assert same(pixels(images), expected)
    spoil(*files[:10])
    assert same(pixels(images), expected)
    spoil(files[10])
    with pytest.raises(UserError):
        images.read(10)


def test_a_file_whose_size_has_changed_since_the_scan_is_read(files: list[Path]) -> None:
    images = open_images(files, 32, True, "ram", np.array([(32, 32)] * 4))
    for _ in range(2):
        assert same(pixels(images), pixels(opened(files, 32, True, "")))


def read_after_the_first(files: list[Path], sizes: np.ndarray) -> tuple[int, list[int]]:
    """Return the size of the memory, and a sum of each image: read by the first process only, and then spoilt."""
    start("cpu", "no", 60.0)
    images, store = open_images(files, 32, True, "ram", sizes), run_store()
    assert store is not None
    if ranks().rank == 0:
        store.wait_for_value("opened")  # a process that has ended shares no memory
        pixels(images)
        spoil(*files)
        store.write_once("filled", True)
    else:
        store.write_once("opened", True)
        store.wait_for_value("filled")
    return len(images.memory.bytes), [int(image.sum()) for image in pixels(images)]


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


def test_disk_keeps_sizes_and_kinds_of_shrinking_apart(files: list[Path]) -> None:
    for imgsz, smooth in ((24, True), (24, False), (40, True)):
        expected = pixels(opened(files, imgsz, smooth, ""))
        for _ in range(2):
            assert same(pixels(opened(files, imgsz, smooth, "disk")), expected)


def test_disk_keeps_reduced_photos_apart(photos: list[Path]) -> None:
    for reduced in (True, False, True):
        expected = pixels(open_images(photos, 32, False, "", sizes_of(photos), reduced=reduced))
        assert same(pixels(open_images(photos, 32, False, "disk", sizes_of(photos), reduced=reduced)), expected)


def test_disk_keeps_equal_names_in_different_folders_apart(tmp_path: Path) -> None:
    files = [write_image(tmp_path / folder / "a.png", noise(12, 12, seed=k)) for k, folder in enumerate("xy")]
    for file in files:
        os.utime(file, ns=(0, 0))
    for _ in range(2):
        found = pixels(opened(files, 12, True, "disk"))
        assert same(found, pixels(opened(files, 12, True, "")))


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


def test_an_unwritable_disk_is_a_warning(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pixels(opened(files, 32, True, ""))
    (cache_home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "file"))  # no folder can be made below a file, even by root
    with pytest.warns(UserWarning, match=r"--cache disk: nothing more is written to .*/images \(") as warned:
        found = [pixels(images := opened(files, 32, True, "disk")) for _ in range(2)]
    assert len(warned) == 1
    assert "room for 0 of 4 images, 0 cached" in images.messages[0]
    assert same(found[0], expected)


def test_a_write_that_is_interrupted_leaves_nothing(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(file: int) -> NoReturn:
        assert cached_files(cache_home)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(files, 32, True, "disk").read(0)
    assert cached_files(cache_home) == []


def test_disk_caches_files_whose_names_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_image(tmp_path / "a.png", noise(16, 12, seed=0)).rename(tmp_path / os.fsdecode(b"\xff.png"))]
    expected = pixels(opened(files, 16, True, "disk"))
    unreadable(monkeypatch, *files)
    assert same(pixels(opened(files, 16, True, "disk")), expected)


# The room on the disk


def room_for(files: list[Path], count: int) -> int:
    """Return the bytes that some images at 32 pixels take on disk, and some more."""
    shapes = cache.cached_shapes(sizes_of(files), 32).astype(int)
    return int(shapes.prod(1)[:count].sum() * 3 + 100)


def test_a_tenth_of_the_disk_stays_free(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=1000 + room_for(files, 2), total=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    images = opened(files, 32, True, "disk")
    assert "room for 2 of 4 images" in images.messages[0]
    usage.free = 1000 + room_for(files, 2) // 2  # another program has written
    with pytest.warns(UserWarning, match="10% of its disk stays free") as warned:
        pixels(images)
    assert len(warned) == 1


def test_images_that_do_not_fit_on_the_disk_are_read_from_their_files(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pixels(opened(files, 32, True, ""))
    free_disk(monkeypatch, room_for(files, 2))
    images = opened(files, 32, True, "disk")
    (message,) = images.messages
    assert "--cache disk: room for 2 of 4 images, 0 cached before, 0.00 GiB in" in message
    assert str(cache_home / "lockstep/images") in message
    assert same(pixels(images), expected)
    assert len(cached_files(cache_home)) == 2
    unreadable(monkeypatch, *files[:2])
    assert same(pixels(images), expected)
    unreadable(monkeypatch, files[2])
    with pytest.raises(UserError):
        images.read(2)


def test_a_restart_finds_what_is_on_disk(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk(monkeypatch, room_for(files, 2))
    images = opened(files, 32, True, "disk")
    images.read(0)
    images.read(1)
    free_disk(monkeypatch, 0)
    for order in (files, files[::-1]):  # what is there counts wherever it stands in the list
        assert "room for 2 of 4 images, 2 cached before" in opened(order, 32, True, "disk").messages[0]
    assert len(cached_files(cache_home)) == 2


def test_a_changed_file_is_not_taken_for_cached(files: list[Path]) -> None:
    pixels(opened(files, 32, True, "disk"))
    write_image(files[1], noise(64, 48, seed=9))
    os.utime(files[2], ns=(0, 0))
    images = opened(files, 32, True, "disk")
    assert "room for 4 of 4 images, 2 cached before" in images.messages[0]
    assert same(pixels(images), pixels(opened(files, 32, True, "")))


def failing(file: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_warning_and_leaves_nothing(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pixels(opened(files, 32, True, ""))
    images, others = opened(files, 32, True, "disk"), opened(files[:2], 24, True, "disk")
    images.read(1)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", failing)
        with pytest.warns(UserWarning, match=r"\(No space left on device\)") as warned:
            found = [pixels(way) for way in (images, others)]
    assert len(warned) == 1
    assert same(found[0], expected)
    assert len(cached_files(cache_home)) == 1
    pixels(images)  # nothing more is tried in this run
    assert len(cached_files(cache_home)) == 1


def test_loader_processes_warn_of_a_full_disk_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    images = opened(files, 32, True, "disk")
    monkeypatch.setattr(os, "fsync", failing)
    with warnings.catch_warnings(), multiprocessing.get_context("fork").Pool(1) as pool:
        warnings.simplefilter("ignore")
        pool.map(images.read, range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels(images)


def test_a_file_that_the_disk_cuts_short_is_removed(tmp_path: Path, cache_home: Path) -> None:
    """The kernel takes the first bytes of an image and refuses the last few hundred, as a disk that becomes full."""
    files = [write_image(tmp_path / "large.bmp", noise(600, 600, seed=0))]
    images = opened(files, 0, False, "disk")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600 * 600 * 3 - 1000, hard))
    try:
        with pytest.warns(UserWarning, match=r"nothing more is written .* \(File too large\)"):
            assert same(pixels(images), pixels(opened(files, 0, False, "")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert cached_files(cache_home) == []


def test_images_on_disk_are_pickled_for_spawned_processes(files: list[Path]) -> None:
    images = opened(files, 32, True, "disk")
    expected = pixels(images)
    there = pickle.loads(pickle.dumps(images))
    assert (there.messages, same(pixels(there), expected)) == (images.messages, True)


def fill(files: list[Path], turn: int, start: Any, found: Any) -> None:
    """As a training process or one of its loaders: each in another order, several times."""
    images = opened(files, 32, True, "disk")
    start.wait(60)
    for k in range(3):
        order = np.random.default_rng(10 * turn + k).permutation(len(files))
        sums = {index: int(images.read(index).sum()) for index in order.tolist()}
    found.put((images.messages[0], [sums[index] for index in range(len(files))]))


def test_processes_fill_the_disk_together(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_image(tmp_path / f"set/{k:02}.png", noise(32, 20, seed=k)) for k in range(40)]
    expected = pixels(opened(files, 32, True, ""))
    free_disk(monkeypatch, room_for(files, 30))
    fork = multiprocessing.get_context("fork")
    start, found = fork.Barrier(4), fork.Queue()
    processes = [fork.Process(target=fill, args=(files, turn, start, found)) for turn in range(4)]
    for process in processes:
        process.start()
    results = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({message for message, _ in results}) == 1
    assert "room for 30 of 40 images, 0 cached before" in results[0][0]
    assert [sums for _, sums in results] == [[int(image.sum()) for image in expected]] * 4
    assert len(cached_files(cache_home)) == 30  # each once, nothing beside them
    unreadable(monkeypatch, *files)
    assert same(pixels(opened(files[:30], 32, True, "disk")), expected[:30])


# Paths


def test_files_is_a_sequence_of_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jpg", Path("b c/\N{GREEK SMALL LETTER ALPHA}.png"), Path(os.fsdecode(b"\xff.jpg"))]
    files = cache.Files(paths)
    assert list(files) == paths
    assert (len(files), files[2], files[1:]) == (3, paths[2], paths[1:])
    with pytest.raises(IndexError):
        files[3]


def test_the_ring_and_its_images_share_the_paths(files: list[Path]) -> None:
    """Of a million images they are large, and slow to make."""
    images = open_images(files, 32, False, "", sizes_of(files), capacity=2)
    assert isinstance(images, cache.ImagesInRing)
    assert images.files is images.source.files
    assert list(images.files) == files


def test_messages_name_the_flag(files: list[Path]) -> None:
    for way, when in (("ram", "epoch"), ("val", "validation")):
        (message,) = opened(files, 32, True, way).messages
        assert message.startswith(f"--cache {way}: room for 4 of 4 images")
        assert message.endswith(f"filled in the first {when}")
