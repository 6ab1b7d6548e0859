"""Decoded images by three ways: the same pixels from files, memory and disk, and nothing written beside the files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from PIL import Image

from data import cache
from data.cache import Images, open_images
from tests.conftest import OnProcesses
from utils.distributed import shared_memory
from utils.distributed.accelerator import start
from utils.distributed.ranks import ranks
from utils.distributed.store import run_store
from utils.errors import UserError


def write_image(file: Path, width: int, height: int, seed: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def pixels(images: Images) -> list[np.ndarray]:
    return [images.read(index) for index in range(len(images.files))]


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def opened(files: list[Path], imgsz: int, smooth: bool, way: str) -> Images:
    sizes = []
    for file in files:
        try:
            with Image.open(file) as image:
                sizes.append(image.size)
        except FileNotFoundError:
            sizes.append((16, 12))
    return open_images(files, imgsz, smooth, way, np.array(sizes))


def kept_files(cache_home: Path) -> list[Path]:
    return sorted(path for path in cache_home.rglob("*") if path.is_file())


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four images: one of the right size, one to shrink, one to enlarge, one portrait."""
    sizes = ((32, 20), (64, 48), (16, 12), (21, 40))
    return [write_image(tmp_path / f"set/{k}.png", *size, seed=k) for k, size in enumerate(sizes)]


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes every later reading of an image file fail the test."""

    def forbid() -> None:
        monkeypatch.setattr(cache, "read_image", lambda file: pytest.fail(f"read {file}"))

    return forbid


def free_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


def free_disk(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(size)))


@pytest.fixture(autouse=True)
def new_run() -> Iterator[None]:
    """As in a process of its own, in which nothing has failed yet."""
    cache._on_disk.clear()
    yield
    cache._full[0] = 0


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_the_longer_side_has_the_size_asked_for(files: list[Path], way: str) -> None:
    found = pixels(opened(files, 32, True, way))
    assert [image.shape for image in found] == [(20, 32, 3), (24, 32, 3), (24, 32, 3), (32, 17, 3)]  # 16.8
    assert np.array_equal(found[0], np.asarray(Image.open(files[0]))[..., ::-1])
    # a half in each direction: the mean of every four pixels, rounded
    quarters = np.asarray(Image.open(files[1]))[..., ::-1].reshape(24, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(found[1] - quarters).max() <= 0.5


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_without_a_size_images_stay_as_they_are(files: list[Path], way: str) -> None:
    wanted = [np.asarray(Image.open(file))[..., ::-1] for file in files]
    images = opened(files, 0, False, way)
    for _ in range(2):
        assert same(pixels(images), wanted)
    assert same(pixels(opened(files, 32, False, way))[:1], wanted[:1])
    assert pixels(opened(files, 32, False, way))[1].shape == (24, 32, 3)  # at another time with a size


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("way", ["ram", "disk"])
def test_kept_images_are_those_of_the_files(files: list[Path], way: str, smooth: bool) -> None:
    wanted = pixels(opened(files, 32, smooth, ""))
    images = opened(files, 32, smooth, way)
    for _ in range(2):
        assert same(pixels(images), wanted)


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_the_data_folder_stays_as_it_is(files: list[Path], tmp_path: Path, way: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    pixels(opened(files, 32, True, way))
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before


@pytest.mark.parametrize("way", ["", "ram", "disk"])
def test_an_image_that_went_missing_is_named(files: list[Path], way: str) -> None:
    files[2].unlink()
    with pytest.raises(UserError, match=r"2\.png"):
        pixels(opened(files, 32, True, way))


# memory


def test_memory_is_filled_by_reading(files: list[Path], no_reading: Callable[[], None]) -> None:
    wanted = pixels(opened(files, 32, True, ""))
    images = opened(files, 32, True, "ram")
    assert same(pixels(images), wanted)
    no_reading()
    assert same([images.read(2), images.read(0)], [wanted[2], wanted[0]])


def test_what_a_forked_process_reads_is_there_for_all(files: list[Path], no_reading: Callable[[], None]) -> None:
    wanted = pixels(opened(files, 32, True, ""))
    images = opened(files, 32, True, "ram")
    if not (child := os.fork()):
        pixels(images)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    no_reading()
    assert same(pixels(images), wanted)


def test_what_does_not_fit_into_memory_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_image(tmp_path / f"set/{k:03}.bmp", 12, 12, seed=k) for k in range(200)]
    wanted = pixels(opened(files, 12, True, ""))
    read, seen = cache.read_image, []
    monkeypatch.setattr(cache, "read_image", lambda file: seen.append(file) or read(file))
    monkeypatch.setattr(shared_memory, "reserved_bytes", [])
    free_memory(monkeypatch, round((100 * 12 * 12 * 3 + 200) / cache.CACHE_MEMORY_SHARE) + 1)
    images = opened(files, 12, True, "ram")
    assert "room for 100 of 200 images" in images.messages[0]
    for _ in range(2):
        assert same(pixels(images), wanted)
    assert seen == files + files[100:]


def test_a_file_that_has_changed_its_size_since_it_was_looked_at(files: list[Path]) -> None:
    images = open_images(files, 32, True, "ram", np.array([(32, 32)] * 4))
    for _ in range(2):
        assert same(pixels(images), pixels(opened(files, 32, True, "")))


def kept_by_all(files: list[Path]) -> tuple[int, list[int]]:
    """Of two processes the second reads what the first has put there; with which sizes they made the memory."""
    images = opened(files, 32, True, "ram")
    store = run_store()
    assert store is not None
    if ranks().rank == 0:
        pixels(images)
        store.write_once("filled", True)
    store.wait_for_value("filled")
    with patch.object(cache, "read_image", side_effect=AssertionError("read")):
        return len(images.memory), [int(image.sum()) for image in pixels(images)]


def start_and_keep(files: list[Path]) -> tuple[int, list[int]]:
    start("cpu", "no", 60.0)
    return kept_by_all(files)


def test_memory_is_one_for_all_processes(on_processes: OnProcesses, files: list[Path]) -> None:
    first, second = on_processes(2, start_and_keep, files)
    assert first == second
    assert first[1] == [int(image.sum()) for image in pixels(opened(files, 32, True, ""))]


# disk


def test_disk_survives_a_restart(files: list[Path], cache_home: Path, no_reading: Callable[[], None]) -> None:
    first = pixels(opened(files, 32, True, "disk"))
    assert len(kept_files(cache_home)) == 4
    assert all((cache_home / "lockstep/images") in path.parents for path in kept_files(cache_home))
    no_reading()
    assert same(pixels(opened(files, 32, True, "disk")), first)


def test_disk_notices_a_changed_file(files: list[Path]) -> None:
    images = opened(files, 32, True, "disk")
    first = pixels(images)
    status = files[0].stat()
    write_image(files[0], 32, 20, seed=9)
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    for way in (images, opened(files, 32, True, "disk")):
        second = pixels(way)
        assert np.array_equal(second[0], np.asarray(Image.open(files[0]))[..., ::-1])
        assert not np.array_equal(second[0], first[0])
        assert same(second[1:], first[1:])


def test_disk_keeps_sizes_and_kinds_of_shrinking_apart(files: list[Path]) -> None:
    for imgsz, smooth in ((24, True), (24, False), (40, True)):
        wanted = pixels(opened(files, imgsz, smooth, ""))
        for _ in range(2):
            assert same(pixels(opened(files, imgsz, smooth, "disk")), wanted)


def test_disk_keeps_equal_names_in_different_folders_apart(tmp_path: Path) -> None:
    files = [write_image(tmp_path / folder / "a.png", 12, 12, seed=k) for k, folder in enumerate("xy")]
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
def test_a_damaged_file_on_disk_is_made_anew(
    files: list[Path], cache_home: Path, no_reading: Callable[[], None], damage: Callable[[bytes], bytes]
) -> None:
    wanted = pixels(opened(files, 32, True, "disk"))
    for path in kept_files(cache_home):
        path.write_bytes(damage(path.read_bytes()))
    assert same(pixels(opened(files, 32, True, "disk")), wanted)
    no_reading()
    assert same(pixels(opened(files, 32, True, "disk")), wanted)


def test_an_unwritable_disk_is_a_warning(files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = pixels(opened(files, 32, True, ""))
    (cache_home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "file"))  # no folder can be made below a file, even by root
    with pytest.warns(UserWarning, match=r"--cache disk: no more is written into .*/images \(") as said:
        found = [pixels(images := opened(files, 32, True, "disk")) for _ in range(2)]
    assert len(said) == 1
    assert "room for 0 of 4 images, 0 found" in images.messages[0]
    assert same(found[0], wanted)


def test_a_write_that_is_interrupted_leaves_nothing(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(file: int) -> NoReturn:
        assert kept_files(cache_home)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(files, 32, True, "disk").read(0)
    assert kept_files(cache_home) == []


def test_disk_keeps_file_names_of_any_bytes(tmp_path: Path, no_reading: Callable[[], None]) -> None:
    files = [write_image(tmp_path / "a.png", 16, 12, seed=0).rename(tmp_path / os.fsdecode(b"\xff.png"))]
    wanted = pixels(opened(files, 16, True, "disk"))
    no_reading()
    assert same(pixels(opened(files, 16, True, "disk")), wanted)


# the budget of the disk: each of the four images takes one block


FOR_TWO = 2.5 * cache.DISK_BLOCK_BYTES / cache.CACHE_DISK_SHARE  # bytes that are free where two of them fit


def test_what_does_not_fit_on_the_disk_is_read_from_its_file(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = pixels(opened(files, 32, True, ""))
    read, seen = cache.read_image, []
    monkeypatch.setattr(cache, "read_image", lambda file: seen.append(file) or read(file))
    free_disk(monkeypatch, FOR_TWO)
    images = opened(files, 32, True, "disk")
    (said,) = images.messages
    assert "--cache disk: room for 2 of 4 images, 0 found from before, 0.00 GiB in" in said
    assert str(cache_home / "lockstep/images") in said
    for _ in range(2):
        assert same(pixels(images), wanted)
    assert seen == files + files[2:]
    assert len(kept_files(cache_home)) == 2


def test_gigabytes_on_disk_are_those_of_the_pixels(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk(monkeypatch, 100 * 2**30)
    images = open_images(files, 0, False, "disk", np.array([(16384, 8192)] * 4))  # 0.375 GiB each
    assert "room for 4 of 4 images, 0 found from before, 1.50 GiB in" in images.messages[0]
    free_disk(monkeypatch, (0.375 * 3 + 0.01) * 2**30 / cache.CACHE_DISK_SHARE)
    cache._on_disk.clear()
    images = open_images(files, 0, False, "disk", np.array([(16384, 8192)] * 4))
    assert "room for 3 of 4 images, 0 found from before, 1.13 GiB in" in images.messages[0]


def test_a_restart_finds_what_is_on_disk_and_takes_no_more_room(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_disk(monkeypatch, FOR_TWO)
    wanted = pixels(opened(files, 32, True, "disk"))
    free_disk(monkeypatch, FOR_TWO - 2 * cache.DISK_BLOCK_BYTES)
    for order in (files, files[::-1]):  # what is there counts wherever it stands in the list
        images = opened(order, 32, True, "disk")
        assert "room for 2 of 4 images, 2 found from before" in images.messages[0]
        assert same(pixels(images), wanted if order is files else wanted[::-1])
        assert len(kept_files(cache_home)) == 2
    free_disk(monkeypatch, 0)
    assert "room for 2 of 4 images, 2 found from before" in opened(files, 32, True, "disk").messages[0]
    free_disk(monkeypatch, FOR_TWO - cache.DISK_BLOCK_BYTES)  # somebody made room
    assert "room for 3 of 4 images, 2 found from before" in opened(files, 32, True, "disk").messages[0]


def test_neither_restarts_nor_other_runs_eat_up_what_should_stay_free(
    tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_image(tmp_path / f"set/{k:02}.png", 32, 20, seed=k) for k in range(16)]
    for imgsz in (32, 32, 24):
        free_disk(
            monkeypatch,
            10.5 * cache.DISK_BLOCK_BYTES / cache.CACHE_DISK_SHARE
            - len(kept_files(cache_home)) * cache.DISK_BLOCK_BYTES,
        )
        splits = [opened(part, imgsz, True, "disk") for part in (files[:12], files[12:])]
        for images in splits:
            pixels(images)
        assert len(kept_files(cache_home)) == 10
        del images, splits


def test_a_file_that_has_changed_is_not_found(files: list[Path]) -> None:
    pixels(opened(files, 32, True, "disk"))
    write_image(files[1], 64, 48, seed=9)
    os.utime(files[2], ns=(0, 0))
    images = opened(files, 32, True, "disk")
    assert "room for 4 of 4 images, 2 found from before" in images.messages[0]
    assert same(pixels(images), pixels(opened(files, 32, True, "")))


def test_two_splits_share_the_room_on_disk(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk(monkeypatch, FOR_TWO)
    first, second = (opened(part, 32, True, "disk") for part in (files[:1], files[1:]))
    assert "room for 1 of 1 images" in first.messages[0]
    assert "room for 1 of 3 images" in second.messages[0]
    del first, second
    # Nothing of theirs is pending any more.
    assert "room for 2 of 4 images" in opened(files, 32, True, "disk").messages[0]


def test_the_disk_is_left_to_others_that_fill_it(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = pixels(opened(files, 32, True, ""))
    free_disk(monkeypatch, 10 * cache.DISK_BLOCK_BYTES)
    images = opened(files, 32, True, "disk")
    images.read(0)
    free_disk(
        monkeypatch, cache.DISK_BLOCK_BYTES
    )  # half of what should have stayed free, which the next image would go below
    with pytest.warns(UserWarning, match=r"no more is written .* \(it would leave 0\.00 GiB free\)") as said:
        assert same(pixels(images), wanted)
    assert len(said) == 1
    assert len(kept_files(cache_home)) == 1


def failing(file: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_warning_and_leaves_nothing(
    files: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = pixels(opened(files, 32, True, ""))
    images, others = opened(files, 32, True, "disk"), opened(files[:2], 24, True, "disk")
    images.read(1)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", failing)
        with pytest.warns(UserWarning, match=r"\(No space left on device\)") as said:
            found = [pixels(way) for way in (images, others)]
    assert len(said) == 1
    assert same(found[0], wanted)
    assert len(kept_files(cache_home)) == 1
    pixels(images)  # nothing more is tried in this run
    assert len(kept_files(cache_home)) == 1


def test_loader_processes_warn_of_a_full_disk_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    images = opened(files, 32, True, "disk")
    monkeypatch.setattr(os, "fsync", failing)
    with warnings.catch_warnings(), multiprocessing.get_context("fork").Pool(1) as pool:
        warnings.simplefilter("ignore")
        pool.map(images.read, range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels(images)


def test_a_file_that_the_disk_cuts_short_is_not_kept(tmp_path: Path, cache_home: Path) -> None:
    """The kernel takes the first bytes of an image and refuses the last few hundred, as a disk that becomes full."""
    files = [write_image(tmp_path / "large.bmp", 600, 600, seed=0)]
    images = opened(files, 0, False, "disk")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600 * 600 * 3 - 1000, hard))
    try:
        with pytest.warns(UserWarning, match=r"no more is written .* \(File too large\)"):
            assert same(pixels(images), pixels(opened(files, 0, False, "")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept_files(cache_home) == []


def test_a_started_process_gets_the_images_on_disk(files: list[Path]) -> None:
    images = opened(files, 32, True, "disk")
    wanted = pixels(images)
    there = pickle.loads(pickle.dumps(images))
    assert (there.messages, same(pixels(there), wanted)) == (images.messages, True)


def fill(files: list[Path], turn: int, start: Any, found: Any) -> None:
    """As a training process or one of its loaders: each in another order, several times."""
    images = opened(files, 32, True, "disk")
    start.wait(60)
    for k in range(3):
        order = np.random.default_rng(10 * turn + k).permutation(len(files))
        sums = {index: int(images.read(index).sum()) for index in order.tolist()}
    found.put((images.messages[0], [sums[index] for index in range(len(files))]))


def test_processes_fill_the_disk_together(
    tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch, no_reading: Callable[[], None]
) -> None:
    files = [write_image(tmp_path / f"set/{k:02}.png", 32, 20, seed=k) for k in range(40)]
    wanted = pixels(opened(files, 32, True, ""))
    free_disk(monkeypatch, 30.5 * cache.DISK_BLOCK_BYTES / cache.CACHE_DISK_SHARE)
    fork = multiprocessing.get_context("fork")
    start, found = fork.Barrier(4), fork.Queue()
    processes = [fork.Process(target=fill, args=(files, turn, start, found)) for turn in range(4)]
    for process in processes:
        process.start()
    results = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({said for said, _ in results}) == 1
    assert "room for 30 of 40 images, 0 found from before" in results[0][0]
    assert [sums for _, sums in results] == [[int(image.sum()) for image in wanted]] * 4
    assert len(kept_files(cache_home)) == 30  # each once, nothing beside them
    no_reading()
    assert same(pixels(opened(files[:30], 32, True, "disk")), wanted[:30])


# paths


def test_paths_in_one_piece(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jpg", Path("b c/\N{GREEK SMALL LETTER ALPHA}.png"), Path(os.fsdecode(b"\xff.jpg"))]
    files = cache.Files(paths)
    assert list(files) == paths
    assert (len(files), files[2], files[1:]) == (3, paths[2], paths[1:])
    with pytest.raises(IndexError):
        files[3]


def test_memory_is_called_by_the_flag_that_asked_for_it(files: list[Path]) -> None:
    for way, when in (("ram", "epoch"), ("val", "validation")):
        (said,) = opened(files, 32, True, way).messages
        assert said.startswith(f"--cache {way}: room for 4 of 4 images")
        assert said.endswith(f"filled in the first {when}")
