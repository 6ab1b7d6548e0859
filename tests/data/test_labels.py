"""Label files: how rows are read, what is left out and said about it, and the cache beside nobody's files."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data import labels
from data.labels import Labels, check_classes, image_size, load_labels, parse_rows, scan_image
from data.sources import label_file
from tests.conftest import OnProcesses
from utils.errors import UserError

FILE = Path("/set/labels/a.txt")


def rows_of(text: str) -> list[list[float]]:
    """The boxes of a label text that must be free of problems."""
    rows, problems = parse_rows(text, FILE)
    assert problems == []
    assert rows.dtype == np.float32
    return rows.tolist()


def problem_of(text: str) -> str:
    """The one problem of a label text between two good rows, which must survive it."""
    rows, problems = parse_rows(f"3 0.5 0.5 0.25 0.25\n{text}\n4 0.5 0.5 0.25 0.25\n", FILE)
    assert rows[:, 0].tolist() == [3, 4]
    assert len(problems) == 1
    start = f"{FILE}, line 2: "
    assert problems[0].startswith(start)
    assert problems[0].endswith("; row left out")
    return problems[0][len(start) :]


def write_image(file: Path, width: int = 16, height: int = 16, label: str | None = None, **options: Any) -> Path:
    """A plain image, and its label file where `label` is given."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (90, 120, 30)).save(file, **options)
    if label is not None:
        rows = labels.label_file(file)
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text(label)
    return file


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[labels.EXIF_ORIENTATION] = orientation
    return exif


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder, folders too: time of change and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def same(a: Labels, b: Labels) -> bool:
    arrays = ("rows", "offsets", "sizes")
    equal = all(
        np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for name in arrays
    )
    return equal and a.problems == b.problems


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Three images of a data set: one box, two boxes, background."""
    folder = tmp_path / "set/images"
    return [
        write_image(folder / "a.png", 20, 10, "1 0.5 0.5 0.5 0.25\n"),
        write_image(folder / "b.png", 16, 32, "0 0.25 0.25 0.5 0.5\n2 0.75 0.75 0.25 0.5\n"),
        write_image(folder / "c.png", 40, 40),
    ]


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes every later scan of an image fail the test."""

    def forbid() -> None:
        monkeypatch.setattr(labels, "scan_image", lambda image: pytest.fail(f"scanned {image}"))

    return forbid


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The images scanned so far."""
    seen: list[Path] = []
    scan = labels.scan_image

    def spy(image: Path) -> labels.Scanned:
        seen.append(image)
        return scan(image)

    monkeypatch.setattr(labels, "scan_image", spy)
    return seen


# rows


def test_a_box_row_is_kept_as_it_is() -> None:
    assert rows_of("2 0.5 0.25 0.125 0.0625\n") == [[2, 0.5, 0.25, 0.125, 0.0625]]


def test_a_polygon_row_becomes_the_box_around_it() -> None:
    # x: 0.25, 0.75, 0.5 -> 0.25 to 0.75; y: 0.5, 0.625, 0.125 -> 0.125 to 0.625
    assert rows_of("7 0.25 0.5 0.75 0.625 0.5 0.125") == [[7, 0.5, 0.375, 0.5, 0.5]]


def test_a_polygon_may_have_any_number_of_corners() -> None:
    # x: 0, 0.5, 0.5, 0.25, 0; y: 0.5, 0.5, 1, 0.75, 1
    assert rows_of("0 0 0.5 0.5 0.5 0.5 1 0.25 0.75 0 1") == [[0, 0.25, 0.75, 0.5, 0.5]]


def test_boxes_and_polygons_may_be_mixed_and_keep_their_order() -> None:
    text = "1 0.5 0.5 1 1\n0 0.25 0.25 0.75 0.25 0.75 0.5\n3 0.25 0.25 0.5 0.5\n"
    assert rows_of(text) == [[1, 0.5, 0.5, 1, 1], [0, 0.5, 0.375, 0.5, 0.25], [3, 0.25, 0.25, 0.5, 0.5]]


def test_a_class_may_be_written_as_a_float_and_coordinates_with_an_exponent() -> None:
    assert rows_of("1.0 5e-1 0.5 2.5e-1 0.25") == [[1, 0.5, 0.5, 0.25, 0.25]]


def test_spaces_tabs_and_blank_lines_do_not_matter() -> None:
    assert rows_of("\n  1\t0.5 0.5   0.25 0.25  \n\n \n") == [[1, 0.5, 0.5, 0.25, 0.25]]


@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_no_rows_are_a_background(text: str) -> None:
    rows, problems = parse_rows(text, FILE)
    assert (rows.shape, rows.dtype, problems) == ((0, 5), np.float32, [])


def test_a_box_given_again_is_left_out_and_named() -> None:
    text = "1 0.5 0.5 0.25 0.25\n1 0.5 0.5 0.25 0.5\n2 0.5 0.5 0.25 0.25\n1 0.50 0.5 0.25 .25\n"
    rows, problems = parse_rows(text, FILE)
    assert rows.tolist() == [[1, 0.5, 0.5, 0.25, 0.25], [1, 0.5, 0.5, 0.25, 0.5], [2, 0.5, 0.5, 0.25, 0.25]]
    assert problems == [f"{FILE}, line 4: the same box again; row left out"]


@pytest.mark.parametrize("label", ["1.5", "-1", "-0.5", "nan", "inf"])
def test_a_class_that_is_no_whole_number_is_refused(label: str) -> None:
    assert problem_of(f"{label} 0.5 0.5 0.25 0.25").startswith(f"class {label} is not a whole number from 0")


@pytest.mark.parametrize(
    "words",
    [
        "0 1.01 0.5 0.25 0.25",
        "0 0.5 -0.01 0.25 0.25",
        "0 0.5 0.5 0.25 -0.25",
        "0 0.1 0.1 0.9 0.1 0.9 1.5",
    ],
)
def test_coordinates_outside_the_image_are_refused(words: str) -> None:
    assert problem_of(words).startswith("coordinates outside 0 to 1")


@pytest.mark.parametrize("words", ["0 0.5 0.5 320 240", "0 10 20 30 40", "0 1 1 639 1 639 479"])
def test_coordinates_in_pixels_are_called_so(words: str) -> None:
    assert problem_of(words).startswith("coordinates in pixels; divide x and width by the image's width")


@pytest.mark.parametrize("words", ["0 nan 0.5 0.25 0.25", "0 0.5 0.5 0.25 NaN", "0 0.5 inf 0.25 0.25", "0 1e999 0 1 1"])
def test_coordinates_that_are_not_finite_are_refused(words: str) -> None:
    assert problem_of(words).startswith("a coordinate is not finite")


def test_a_coordinate_may_miss_the_edge_by_rounding() -> None:
    assert len(rows_of("0 0.5 0.5 1.0005 1\n0 -0.0005 0.1 0.5 0.1 0.5 0.9")) == 2


@pytest.mark.parametrize(
    ("words", "count"),
    [("0", 1), ("0 0.5 0.5 0.25", 4), ("0 0.5 0.5 0.25 0.25 0.9", 6), ("0 .1 .1 .9 .1 .9 .9 .5", 8)],
)
def test_a_wrong_count_of_numbers_is_refused(words: str, count: int) -> None:
    assert problem_of(words).startswith(f"{count} numbers instead of 5 (box) or an odd count from 7 (polygon)")


@pytest.mark.parametrize("words", ["cat 0.5 0.5 0.25 0.25", "0 0,5 0.5 0.25 0.25", "0, 0.5, 0.5, 0.25, 0.25", "# note"])
def test_words_that_are_no_numbers_are_refused(words: str) -> None:
    assert problem_of(words).startswith("not all words are numbers")


@pytest.mark.parametrize(
    "words", ["0 0.5 0.5 0 0.25", "0 0.5 0.5 0.25 0", "0 0.1 0.5 0.9 0.5 0.4 0.5", "0 0.5 0.1 0.5 0.9 0.5 0.4"]
)
def test_a_box_without_area_is_refused(words: str) -> None:
    assert problem_of(words).startswith("the box has no area")


def test_every_problem_has_the_number_of_its_own_line() -> None:
    _, problems = parse_rows("\nx\n\n0 0.5 0.5 0.5 0.5\n1.5 0.5 0.5 0.5 0.5\r\n0 2 2 2 2", FILE)
    assert [re.findall(r"line (\d+)", problem) for problem in problems] == [["2"], ["5"], ["6"]]


cells = st.one_of(
    st.sampled_from(["0", "1", "1.0", "0.5", ".25", "-0.0", "1.0005", "-0.0005", "1.5", "nan", "inf", "1e-400", "1_0"]),
    st.floats(-0.01, 1.01).map(str),
    st.floats().map(str),
    st.just("x"),
)
text_lines = st.lists(cells, min_size=4, max_size=8).map(" ".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text_lines)
def test_the_quick_look_at_a_box_keeps_what_the_thorough_one_keeps(line: str) -> None:
    words = line.split()
    quick = labels._plain_box(words)
    if quick is not None:
        assert repr(quick) == repr(labels._parse_row(words))


texts = st.lists(st.one_of(text_lines, st.sampled_from(["", "\ufeff", "ä", "\x85"])), max_size=4)
line_ends = st.sampled_from(["\n", "\r\n", "\r", "\x0b", "\x1c", "\u2028"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(st.tuples(texts, line_ends).map(lambda both: both[1].join(both[0]).encode()), st.binary(max_size=9)))
def test_plain_text_is_read_as_text_is(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.txt")
        file.write_bytes(content)
        plain = labels._read_ascii(str(file))
        if plain is not None:
            assert plain.splitlines() == file.read_text(encoding="utf-8-sig").splitlines()
        else:
            assert not content.isascii()


def test_a_long_label_file_is_read_whole(images: list[Path]) -> None:
    rows = [f"{k} 0.5 0.5 0.25 0.25" for k in range(labels.LABEL_READ_BYTES // 20)]
    labels.label_file(images[0]).write_text("\n".join(rows))
    assert labels._read_ascii(str(labels.label_file(images[0]))) is None
    assert scan_image(images[0]).rows[:, 0].tolist() == list(range(len(rows)))


# one image


def test_an_image_is_scanned_with_its_size_and_rows(images: list[Path]) -> None:
    size, rows, problems, _ = scan_image(images[1])
    assert size == (16, 32)
    assert rows.tolist() == [[0, 0.25, 0.25, 0.5, 0.5], [2, 0.75, 0.75, 0.25, 0.5]]
    assert problems == []


def test_an_image_without_a_label_file_is_background(images: list[Path]) -> None:
    size, rows, problems, _ = scan_image(images[2])
    assert (size, rows.shape, problems) == ((40, 40), (0, 5), [])


def test_a_byte_order_mark_and_windows_line_ends_are_read(images: list[Path]) -> None:
    labels.label_file(images[0]).write_bytes(b"\xef\xbb\xbf1 0.5 0.5 0.25 0.25\r\n2 0.5 0.5 0.5 0.5\r\n")
    _, rows, problems, _ = scan_image(images[0])
    assert rows.tolist() == [[1, 0.5, 0.5, 0.25, 0.25], [2, 0.5, 0.5, 0.5, 0.5]]
    assert problems == []


@pytest.mark.parametrize("content", ["1 0.5 0.5 0.5 0.5".encode("utf-16"), b"\xff\xfe\x00\x01"])
def test_a_label_file_that_is_no_text_is_named_and_its_image_kept(images: list[Path], content: bytes) -> None:
    file = labels.label_file(images[0])
    file.write_bytes(content)
    size, rows, problems, _ = scan_image(images[0])
    assert (size, len(rows), len(problems)) == ((20, 10), 0, 1)
    assert problems[0].startswith(f"{file}: cannot be read as text")


def test_a_folder_in_place_of_a_label_file_is_named(images: list[Path]) -> None:
    labels.label_file(images[2]).mkdir()
    size, rows, problems, _ = scan_image(images[2])
    assert (size, len(rows), len(problems)) == ((40, 40), 0, 1)
    assert problems[0].startswith(f"{labels.label_file(images[2])}: cannot be read as text")


@pytest.mark.parametrize(("width", "height", "out"), [(9, 40, True), (40, 9, True), (10, 10, False)])
def test_an_image_under_ten_pixels_is_left_out_with_a_sentence(
    tmp_path: Path, width: int, height: int, out: bool
) -> None:
    image = write_image(tmp_path / "images/a.png", width, height, "0 0.5 0.5 0.5 0.5")
    size, rows, problems, _ = scan_image(image)
    if out:
        assert (size, len(rows)) == ((0, 0), 0)
        assert problems == [f"{image}: {width}x{height} pixels, smaller than 10; left out"]
    else:
        assert (size, len(rows), problems) == ((10, 10), 1, [])


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n\x00\x00"])
def test_an_unreadable_image_is_left_out_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    image = write_image(tmp_path / "images/a.png", label="0 0.5 0.5 0.5 0.5")
    image.write_bytes(content)
    size, rows, problems, _ = scan_image(image)
    assert (size, len(rows), len(problems)) == ((0, 0), 0, 1)
    assert problems[0].startswith(f"{image}: not readable as an image (")
    assert problems[0].endswith("; left out")


def test_an_absent_image_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    size, _, problems, _ = scan_image(tmp_path / "images/a.png")
    assert size == (0, 0)
    assert problems[0].startswith(f"{tmp_path}/images/a.png: not readable as an image (")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_upright_image(tmp_path: Path, orientation: int) -> None:
    image = write_image(tmp_path / "a.jpg", 40, 24, exif=oriented(orientation))
    assert image_size(image) == ((24, 40) if orientation >= 5 else (40, 24))


def test_a_sideways_image_keeps_its_rows(tmp_path: Path) -> None:
    image = write_image(tmp_path / "images/a.jpg", 40, 24, "0 0.25 0.5 0.5 0.5", exif=oriented(6))
    size, rows, problems, _ = scan_image(image)
    assert (size, rows.tolist(), problems) == ((24, 40), [[0, 0.25, 0.5, 0.5, 0.5]], [])


# many images


def test_the_labels_of_a_list_are_joined_in_its_order(images: list[Path]) -> None:
    found = load_labels(images, "labels", 0)
    assert (found.rows.dtype, found.offsets.dtype, found.sizes.dtype) == (np.float32, np.int64, np.int32)
    assert found.rows[:, 0].tolist() == [1, 0, 2]
    assert found.offsets.tolist() == [0, 1, 3, 3]
    assert found.counts.tolist() == [1, 2, 0]
    assert found.sizes.tolist() == [[20, 10], [16, 32], [40, 40]]
    assert found.of(0).tolist() == [[1, 0.5, 0.5, 0.5, 0.25]]
    assert found.of(1).tolist() == [[0, 0.25, 0.25, 0.5, 0.5], [2, 0.75, 0.75, 0.25, 0.5]]
    assert found.of(2).shape == (0, 5)


def test_without_boxes_only_images_are_looked_at(images: list[Path], scans: list[Path]) -> None:
    labels.label_file(images[0]).write_text("bad\n")
    images[1].write_bytes(b"")
    found = load_labels(images, "images", 0, boxes=False)
    assert [problem.partition(":")[0] for problem in found.problems] == [str(images[1])]
    assert found.sizes.tolist() == [[20, 10], [0, 0], [40, 40]]
    assert found.counts.tolist() == [0, 0, 0]
    assert found.rows.shape == (0, 5)
    assert len(load_labels(images, "labels", 0).problems) == 2  # another cache
    assert scans == images
    assert same(load_labels(images, "images", 0, boxes=False), found)


def test_without_boxes_a_changed_label_file_changes_nothing(images: list[Path], cache_home: Path) -> None:
    found = load_labels(images, "images", 0, boxes=False)
    (kept,) = cache_home.rglob("*.npz")
    written = kept.stat().st_mtime_ns
    labels.label_file(images[0]).write_text("0 0.5 0.5 1 1\n")
    labels.label_file(images[1]).unlink()
    assert same(load_labels(images, "images", 0, boxes=False), found)
    assert list(cache_home.rglob("*.npz")) == [kept]
    assert kept.stat().st_mtime_ns == written
    write_image(images[2], 50, 60)
    assert load_labels(images, "images", 0, boxes=False).sizes.tolist() == [[20, 10], [16, 32], [50, 60]]


def test_problems_of_all_images_are_told_in_order(images: list[Path]) -> None:
    labels.label_file(images[0]).write_text("bad\n1 0.5 0.5 0.5 0.5\nbad\n")
    images[1].write_bytes(b"")
    found = load_labels(images, "labels", 0)
    assert [problem.split(":")[0] for problem in found.problems] == [
        f"{labels.label_file(images[0])}, line 1",
        f"{labels.label_file(images[0])}, line 3",
        str(images[1]),
    ]
    assert found.sizes.tolist() == [[20, 10], [0, 0], [40, 40]]
    assert found.counts.tolist() == [1, 0, 0]


def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> None:
    files = [
        write_image(tmp_path / f"images/{k:03}.bmp", 10 + k % 7, 12 + k % 5, f"{k} 0.5 0.5 0.5 0.5\n" * (k % 4))
        for k in range(140)
    ]
    files[70].write_bytes(b"")
    pool, opened = multiprocessing.Pool, []
    monkeypatch.setattr(multiprocessing, "Pool", lambda count: opened.append(count) or pool(count))
    monkeypatch.setattr(labels, "MIN_SECONDS_PER_PROCESS", 1e-9)
    serial = load_labels(files, "labels", 0)
    assert opened == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "other"))
    parallel = load_labels(files, "labels", 2)
    assert opened == [2]
    assert same(serial, parallel)
    assert serial.counts[:6].tolist() == [0, 1, 1, 1, 0, 1]  # the same row two or three times counts once
    assert serial.of(139).tolist() == [[139, 0.5, 0.5, 0.5, 0.5]]
    assert serial.sizes[[69, 70, 139]].tolist() == [[16, 16], [0, 0], [16, 16]]
    # of every 4 images one repeats its row once and one twice; image 70, one of the former, has another problem instead
    assert len(serial.problems) == 35 * (1 + 2)


def test_a_short_scan_starts_no_process(images: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "Pool", lambda count: pytest.fail(f"{count} processes"))
    assert load_labels(images * 50, "labels", 8).sizes.shape == (150, 2)


# the cache


def scans_of_one(images: list[Path]) -> int:
    """How often this process scans, where a scan takes long."""
    scan, count = labels._scan, []

    def slowly(*arguments: Any) -> Labels:
        count.append(1)
        time.sleep(1)
        return scan(*arguments)

    labels._scan = slowly
    found = load_labels(images, "labels", 0)
    assert found.sizes.shape == (3, 2)
    return len(count)


def test_of_many_processes_one_scans(images: list[Path], cache_home: Path, on_processes: OnProcesses) -> None:
    assert sorted(on_processes(3, scans_of_one, images)) == [0, 0, 1]


def test_a_second_load_does_not_scan(images: list[Path], no_scan: Callable[[], None]) -> None:
    labels.label_file(images[0]).write_text("1 0.5 0.5 0.5 0.25\nbad\n")
    first = load_labels(images, "labels", 0)
    assert len(first.problems) == 1
    no_scan()
    assert same(load_labels(images, "labels", 0), first)


def test_the_cache_is_one_file_below_the_cache_folder(images: list[Path], cache_home: Path) -> None:
    load_labels(images, "labels", 0)
    files = [path for path in cache_home.rglob("*") if path.is_file()]
    assert [path.parent for path in files] == [cache_home / "lockstep/labels"]
    assert files[0].suffix == ".npz"


def test_without_the_variable_the_cache_is_below_the_home_folder(
    images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_labels(images, "labels", 0)
    assert len(list((tmp_path / "home/.cache/lockstep/labels").glob("*.npz"))) == 1


def later(file: Path) -> None:
    """Let a file seem changed one nanosecond after it was."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def longer(file: Path) -> None:
    """Change a file's size and let it seem unchanged since."""
    status = file.stat()
    file.write_bytes(file.read_bytes() + b"\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [later, longer, Path.unlink])
@pytest.mark.parametrize("which", ["label", "image"])
def test_a_changed_file_is_scanned_again(
    images: list[Path], scans: list[Path], change: Callable[[Path], None], which: str
) -> None:
    load_labels(images, "labels", 0)
    scans.clear()
    change(images[1] if which == "image" else labels.label_file(images[1]))
    load_labels(images, "labels", 0)
    assert images[1] in scans


def test_a_changed_file_behind_a_link_is_scanned_again(images: list[Path], scans: list[Path], tmp_path: Path) -> None:
    links = tmp_path / "links/images"
    links.mkdir(parents=True)
    files = [links / image.name for image in images]
    for file, image in zip(files, images, strict=True):
        file.symlink_to(image)
    load_labels(files, "labels", 0)
    scans.clear()
    load_labels(files, "labels", 0)
    assert scans == []
    later(images[1])
    load_labels(files, "labels", 0)
    assert scans == files


def test_names_that_are_no_text_and_names_that_no_file_can_have_are_scanned(tmp_path: Path) -> None:
    strange = write_image(tmp_path / "images" / os.fsdecode(b"\xff.png"), 20, 10, "1 0.5 0.5 0.5 0.25")
    impossible = tmp_path / "images/a\0b.png"
    for _ in range(2):
        found = load_labels([strange, impossible], "labels", 0)
        assert found.sizes.tolist() == [[20, 10], [0, 0]]
        assert len(found.problems) == 1


def test_a_scan_after_a_change_gives_the_new_rows_and_the_next_load_keeps_them(
    images: list[Path], no_scan: Callable[[], None]
) -> None:
    load_labels(images, "labels", 0)
    labels.label_file(images[2]).write_text("5 0.5 0.5 1 1\n")  # a background no more
    assert load_labels(images, "labels", 0).of(2).tolist() == [[5, 0.5, 0.5, 1, 1]]
    no_scan()
    assert load_labels(images, "labels", 0).of(2).tolist() == [[5, 0.5, 0.5, 1, 1]]


def test_another_list_of_images_has_its_own_cache(images: list[Path], no_scan: Callable[[], None]) -> None:
    load_labels(images, "labels", 0)
    assert load_labels(images[::-1], "labels", 0).rows[:, 0].tolist() == [0, 2, 1]
    assert load_labels(images[:1], "labels", 0).rows[:, 0].tolist() == [1]
    no_scan()
    assert load_labels(images, "labels", 0).rows[:, 0].tolist() == [1, 0, 2]


def damage_cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_array(file: Path) -> None:
    with open(file, "wb") as opened:
        np.save(opened, np.zeros(3))


def damage_keys(file: Path) -> None:
    with open(file, "wb") as opened:
        np.savez(opened, rows=np.zeros((0, 5), np.float32))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage_cut, id="cut short"),
        pytest.param(lambda file: file.write_bytes(b""), id="empty"),
        pytest.param(lambda file: file.write_bytes(b"not a cache"), id="text"),
        pytest.param(lambda file: file.write_bytes(b"PK\x03\x04 not a cache"), id="no zip"),
        pytest.param(damage_array, id="one array"),
        pytest.param(damage_keys, id="keys missing"),
    ],
)
def test_a_damaged_cache_file_is_scanned_anew_and_mended(
    images: list[Path],
    cache_home: Path,
    no_scan: Callable[[], None],
    damage: Callable[[Path], object],
) -> None:
    first = load_labels(images, "labels", 0)
    (file,) = (cache_home / "lockstep/labels").iterdir()
    damage(file)
    assert same(load_labels(images, "labels", 0), first)
    no_scan()
    assert same(load_labels(images, "labels", 0), first)


def test_an_unwritable_cache_folder_is_a_warning(
    images: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache_home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "file"))  # no folder can be made below a file, even by root
    with pytest.warns(UserWarning, match=r"the label cache .* cannot be written \(.*\); the next start scans again"):
        found = load_labels(images, "labels", 0)
    assert found.rows[:, 0].tolist() == [1, 0, 2]


def test_a_write_that_is_interrupted_leaves_nothing(
    images: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(file: Any, **arrays: np.ndarray) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(KeyboardInterrupt):
        load_labels(images, "labels", 0)
    assert list((cache_home / "lockstep/labels").iterdir()) == []


def test_the_data_folder_stays_as_it_is_even_where_it_is_read_only(images: list[Path], tmp_path: Path) -> None:
    write_image(tmp_path / "set/images/small.png", 4, 4)
    write_image(tmp_path / "set/images/side.jpg", 40, 24, "bad", exif=oriented(6))
    damaged = write_image(tmp_path / "set/images/cut.jpg", 40, 40)
    damaged.write_bytes(damaged.read_bytes()[:-2])  # without its end marker: YOLOv5 would rewrite this file
    files = sorted((tmp_path / "set/images").iterdir())
    folders = [tmp_path / "set", tmp_path / "set/images", tmp_path / "set/labels"]
    for folder in folders:
        folder.chmod(0o555)
    before = snapshot(tmp_path / "set")
    try:
        for _ in range(2):
            assert len(load_labels(files, "labels", 0).sizes) == 6
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert snapshot(tmp_path / "set") == before


# what is made of labels


def three_boxes() -> Labels:
    """Two images, 200x100 with two boxes and 50x100 with one."""
    rows = [[2, 0.5, 0.5, 0.5, 0.5], [4, 0.5, 0.5, 0.25, 1], [3, 0.5, 0.5, 0.5, 0.25]]
    return Labels(
        np.array(rows, np.float32), np.array([0, 2, 2, 3]), np.array([[200, 100], [0, 0], [50, 100]], np.int32), ("p",)
    )


def test_keep_drops_images_with_their_rows() -> None:
    kept = three_boxes().subset(np.array([False, False, True]))
    assert kept.rows.tolist() == [[3, 0.5, 0.5, 0.5, 0.25]]
    assert kept.offsets.tolist() == [0, 1]
    assert kept.sizes.tolist() == [[50, 100]]
    assert kept.problems == ("p",)
    both = three_boxes().subset(np.array([True, False, True]))
    assert both.counts.tolist() == [2, 1]
    assert both.of(1)[:, 0].tolist() == [3]
    none = three_boxes().subset(np.zeros(3, bool))
    assert (none.rows.shape, none.offsets.tolist(), none.sizes.shape) == ((0, 5), [0], (0, 2))


def test_single_class_changes_the_classes_alone() -> None:
    found = three_boxes()
    single = found.as_single_class()
    assert single.rows[:, 0].tolist() == [0, 0, 0]
    assert np.array_equal(single.rows[:, 1:], found.rows[:, 1:])
    assert found.rows[:, 0].tolist() == [2, 4, 3]


def test_side_lengths_are_those_at_the_training_size() -> None:
    # at 100 pixels the images are 100x50 and 50x100
    lengths = three_boxes().subset(np.array([True, False, True])).side_lengths(100)
    assert lengths.tolist() == [[50, 25], [25, 50], [25, 25]]


def test_an_unknown_class_is_named_with_its_file() -> None:
    images = [Path(f"/set/images/{name}.jpg") for name in "abc"]
    check_classes(three_boxes(), images, 5, Path("data.yaml"))
    with pytest.raises(UserError) as caught:
        check_classes(three_boxes(), images, 4, Path("data.yaml"))
    assert str(caught.value) == (
        "/set/labels/a.txt has class 4, but `names` of data.yaml ends at 3; "
        "fix the label or add the class (1 such rows in all)"
    )
    with pytest.raises(UserError, match=r"^/set/labels/a\.txt has class 2, .* \(3 such rows in all\)$"):
        check_classes(three_boxes(), images, 2, Path("data.yaml"))


def test_the_file_of_an_unknown_class_is_found_behind_background_images() -> None:
    images = [Path(f"/set/images/{name}.jpg") for name in "abcde"]
    rows = np.array([[0, 0.5, 0.5, 0.5, 0.5], [9, 0.5, 0.5, 0.5, 0.5]], np.float32)
    found = Labels(rows, np.array([0, 0, 1, 1, 2, 2]), np.full((5, 2), 20, np.int32), ())
    with pytest.raises(UserError, match=r"/set/labels/d\.txt has class 9"):
        check_classes(found, images, 1, Path("data.yaml"))


# polygons

OUTLINED = (
    "0 0.5 0.5 0.5 0.5\n2 0.1 0.2 0.3 0.2 0.3 0.6\n1 0.5 0.5 0.7 0.5 0.7 0.9 0.5 0.9\n2 0.1 0.2 0.3 0.2 0.3 0.6\n"
)


@pytest.fixture
def outlined(images: list[Path]) -> list[Path]:
    """The first image has a box and two polygons, one of them twice, the last one no label, the other its own rows."""
    for image, text in zip(images, (OUTLINED, "3 0.2 0.2 0.4 0.2 0.4 0.4\nx", ""), strict=True):
        label_file(image).parent.mkdir(parents=True, exist_ok=True)
        label_file(image).write_text(text)
    return images


def points_of(found: Labels, image: int) -> list[list[list[float]]]:
    assert found.polygons is not None
    points, starts = found.polygons.of(*found.offsets[image : image + 2].tolist())
    assert points.dtype == np.float32
    return [np.round(part, 6).tolist() for part in np.split(points, starts)][: len(found.of(image))]


def test_polygons_are_kept_where_they_are_asked_for(outlined: list[Path]) -> None:
    plain = load_labels(outlined, "labels", 0)
    assert plain.polygons is None
    for _ in ("scanned", "cached"):
        found = load_labels(outlined, "labels", 0, polygons=True)
        assert same(replace(found, polygons=None), plain)
        assert [len(points) for points in points_of(found, 0)] == [0, 3, 4]
        assert points_of(found, 0)[1] == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.2], [0.3, 0.6]]), abs=1e-6)
        assert np.shape(points_of(found, 1)) == (1, 3, 2)
        assert points_of(found, 2) == []


def test_polygons_go_with_their_images(outlined: list[Path]) -> None:
    found = load_labels(outlined, "labels", 0, polygons=True)
    kept = found.subset(np.array([False, True, True])).as_single_class()
    assert points_of(kept, 0) == points_of(found, 1)
    assert points_of(kept, 1) == []
    assert points_of(found.subset(np.array([True, False, False])), 0) == points_of(found, 0)


def test_polygons_of_many_images_are_put_together(
    outlined: list[Path], monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    many = outlined * 50
    serial = load_labels(many, "labels", 0, polygons=True)
    monkeypatch.setattr(labels, "MIN_SECONDS_PER_PROCESS", 1e-9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "other"))
    for found in (serial, load_labels(many, "labels", 2, polygons=True)):
        for k in range(150):
            assert points_of(found, k) == points_of(serial, k % 3)
