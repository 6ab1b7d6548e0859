"""Label files: how rows are read, what is left out as a problem, and the cache away from the data."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import labels
from data.labels import (
    BOXES,
    OUTLINES,
    POLYGONS,
    Labels,
    RowRules,
    check_classes,
    label_name,
    load_labels,
    parse_rows,
    scan_image,
)
from tests.making import label_file, plain, spoil, write_image, write_label
from utils.errors import UserError

FILE = Path("/set/labels/a.txt")
examples = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SHARES = st.integers(0, 1000).map(lambda value: value / 1000)


def same(a: Labels, b: Labels) -> bool:
    arrays = ("rows", "offsets", "sizes")
    equal = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
    return equal and a.problems == b.problems


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Three images: one box, two boxes, background."""
    folder = tmp_path / "set/images"
    return [
        write_image(folder / "a.png", plain(20, 10), "1 0.5 0.5 0.5 0.25"),
        write_image(folder / "b.png", plain(16, 32), "0 0.25 0.25 0.5 0.5", "2 0.75 0.75 0.25 0.5"),
        write_image(folder / "c.png", plain(40, 40)),
    ]


def mark_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scan of an image return the problem `scanned`."""
    monkeypatch.setattr(labels, "scan_image", lambda *_: Labels.of_image((0, 0), problems=["scanned"]))


# Rows


@examples
@given(st.lists(st.tuples(SHARES, SHARES), min_size=3, max_size=9), st.integers(0, 2**20 - 1))
def test_the_box_of_an_outline_is_around_its_points(points: list[tuple[float, float]], label: int) -> None:
    """If it has an area; a box row is read as it stands."""
    words = " ".join(f"{value}" for point in points for value in point)
    rows, problems = parse_rows(f"{label} {words}\n", FILE)
    low, high = np.min(points, 0), np.max(points, 0)
    if (low == high).any():
        assert (rows, len(problems)) == ([], 1)
        return
    ((box, outline),), other = rows, parse_rows(f"{label} {words}\n", FILE, OUTLINES)[0]
    assert box == pytest.approx((label, *(low + high) / 2, *(high - low)))
    assert np.reshape(outline, (-1, 2)).tolist() == [list(point) for point in points]
    assert other in ([], rows)  # a line encloses nothing
    ((again, _),), _ = parse_rows(" ".join(map(str, box)), FILE)
    assert again == pytest.approx(box)


@pytest.mark.parametrize(
    "line",
    [
        *(f"{label} 0.5 0.5 0.25 0.25" for label in ("1.5", "-1", "-0.5", "nan", "inf", "1e300", "1048576", "9" * 999)),
        *("0 1.01 0.5 0.25 0.25", "0 0.5 -0.01 0.25 0.25", "0 0.5 0.5 0.25 -0.25", "0 0.1 0.1 0.9 0.1 0.9 1.5"),
        *("0 0.5 0.5 320 240", "0 1 1 639 1 639 479", "0 nan 0.5 0.25 0.25", "0 0.5 inf 0.25 0.25", "0 1e999 0 1 1"),
        *("0", "0 0.5 0.5 0.25", "0 0.5 0.5 0.25 0.25 0.9", "0 .1 .1 .9 .1 .9 .9 .5"),
        *("cat 0.5 0.5 0.25 0.25", "0 0,5 0.5 0.25 0.25", "# note", "1_0 0.5 0.5 0.25 0.25", "0 0.5 0.5 0.2_5 0.25"),
        *("0 .5 .5 .2 .2 .5 .5 2 .4 .4 1", "0 .5 .5 .2 .2 .5 .5 0"),  # key points
        *("\u0661 0.5 0.5 0.25 0.25", "0 0.5 0.5 0.\uff15 0.25"),
        *("0 0.5 0.5 0 0.25", "0 0.5 0.5 0.25 0", "0 0.1 0.5 0.9 0.5 0.4 0.5", "3 0.5 0.5 0.25 .250"),
    ],
)
def test_a_bad_row_is_left_out_and_named(line: str) -> None:
    """Around it are a mark of Windows, empty lines, and coordinates that miss the edge by rounding."""
    rows, problems = parse_rows(f"\n 3\t0.5 0.5 0.25 0.25\r\n{line}\n4.0 0.5 5e-1 1.0005 1\n", FILE)
    assert [row.box[0] for row in rows] == [3, 4]
    (problem,) = problems
    assert problem.startswith(f"{FILE}, line 3: ")
    assert ("kpt_shape" in problem) == line.startswith("0 .5 .5 .2 .2 .5 .5")


# One image


@pytest.mark.parametrize("content", ["1 .5 .5 .5 .5".encode("utf-16-le"), b"1 .5 .5 .5 .5\xe9", None, b"\nbad\n"])
def test_a_label_file_that_cannot_be_used_leaves_its_image_out(images: list[Path], content: bytes | None) -> None:
    file = label_file(images[2])
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    scanned = scan_image(images[2])
    assert (scanned.sizes.tolist(), len(scanned.rows)) == ([[0, 0]], 0)
    assert all(problem.startswith(str(file)) for problem in scanned.problems)


def test_a_pipe_is_left_out_without_waiting(images: list[Path]) -> None:
    image, label = images[0], label_file(images[1])
    for file in (image, label):
        file.unlink()
        os.mkfifo(file)
    loaded = load_labels(images, "labels", 0)
    assert loaded.sizes.tolist() == [[0, 0], [0, 0], [40, 40]]
    assert [problem.partition(":")[0] for problem in loaded.problems] == [str(image), f"{label} cannot be read"]
    assert same(load_labels(images, "labels", 0), loaded)


# Many images


@pytest.mark.parametrize("rules", [BOXES, POLYGONS, OUTLINES, None])
def test_the_labels_of_a_list_are_joined_in_its_order_by_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path, rules: RowRules | None
) -> None:
    """Image k has k % 4 equal triangles of class k, which count once; image 70 is not readable."""
    files = [
        write_image(tmp_path / f"images/{k:03}.bmp", plain(10 + k % 7, 12), *[f"{k} .2 .2 .4 .2 .4 .4"] * (k % 4))
        for k in range(140)
    ]
    files[70].write_bytes(b"")
    pool, opened = multiprocessing.Pool, []
    monkeypatch.setattr(multiprocessing, "Pool", lambda count: opened.append(count) or pool(count))
    monkeypatch.setattr(labels, "IMAGES_PER_PROCESS", 70)
    serial = load_labels(files, "labels", 0, rules)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "other"))
    parallel = load_labels(files, "labels", 2, rules)
    assert (opened, same(serial, parallel)) == ([2], True)
    assert (serial.rows.dtype, serial.offsets.dtype, serial.sizes.dtype) == (np.float32, np.int64, np.int32)
    assert serial.sizes.tolist() == [[10 + k % 7, 12] if k != 70 else [0, 0] for k in range(140)]
    labelled = [k for k in range(140) if k % 4 and k != 70 and rules]
    assert np.flatnonzero(serial.counts).tolist() == serial.rows[:, 0].tolist() == labelled
    assert len(serial.problems) == (1 if rules is None else 1 + 35 * (1 + 2) - 1)  # a row again, once or twice
    for polygons in (serial.polygons, parallel.polygons):
        assert (polygons is not None) == (rules in (POLYGONS, OUTLINES))
        assert polygons is None or np.diff(polygons.offsets).tolist() == [3] * len(labelled)


# The cache


def later(file: Path) -> None:
    """Let a file seem changed one nanosecond later."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [later, spoil, Path.unlink])
@pytest.mark.parametrize("changed", ["label", "image", "image behind a link"])
def test_a_changed_file_is_scanned_again(
    images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], changed: str
) -> None:
    files = images
    if "link" in changed:
        (tmp_path / "links").symlink_to(images[0].parent)
        files = [tmp_path / "links" / image.name for image in images]
    first = load_labels(files, "labels", 0)
    mark_scans(monkeypatch)
    assert same(load_labels(files, "labels", 0), first)
    change(label_file(images[1]) if changed == "label" else images[1])
    assert load_labels(files, "labels", 0).problems == ("scanned",) * 3


def test_names_that_are_no_text_and_names_that_no_file_can_have_are_scanned(tmp_path: Path) -> None:
    strange = write_image(tmp_path / "images" / os.fsdecode(b"\xff.png"), plain(20, 10), "1 0.5 0.5 0.5 0.25", "bad")
    for _ in range(2):
        loaded = load_labels([strange, tmp_path / "images/a\0b.png"], "labels", 0)
        assert (loaded.sizes.tolist(), len(loaded.problems)) == ([[20, 10], [0, 0]], 2)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [pipe, cut])
def test_a_damaged_cache_file_is_replaced_by_a_new_scan(
    images: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    first = load_labels(images, "labels", 0)
    (file,) = (cache_home / "lockstep/labels").iterdir()
    damage(file)
    assert same(load_labels(images, "labels", 0), first)
    mark_scans(monkeypatch)
    assert same(load_labels(images, "labels", 0), first)


def test_an_unwritable_cache_folder_is_a_warning(
    images: list[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache_home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "file"))  # no folder can be made below a file, even by root
    assert load_labels(images, "labels", 0).rows[:, 0].tolist() == [1, 0, 2]
    assert capsys.readouterr().out.startswith(f"warning: {cache_home}/file/")


# What is made of labels


PARTS = st.sampled_from(["images", "labels", "a", "images.jpg", ".images", "Images", "ä"])
FILES = st.sampled_from(["a.jpg", "a.b.PNG", ".a.jpg", "images.jpg", "a..b.jpg", "images/images.jpg"])


@examples
@given(st.sampled_from(["", "/", "../"]), st.lists(PARTS, max_size=4), FILES)
def test_the_last_folder_images_becomes_labels(root: str, parts: list[str], file: str) -> None:
    image = Path(root, *parts, file)
    expected = list(image.parts)
    for k in [k for k, part in enumerate(expected[:-1]) if part == "images"][-1:]:
        expected[k] = "labels"
    assert label_name(str(image)) == str(Path(*expected).with_suffix(".txt"))


def three_boxes() -> Labels:
    """Return the labels of three images: 200x100 with two boxes, one that is left out, and 50x100 with one."""
    rows = [[2, 0.5, 0.5, 0.5, 0.5], [4, 0.5, 0.5, 0.25, 1], [3, 0.5, 0.5, 0.5, 0.25]]
    sizes = np.array([[200, 100], [0, 0], [50, 100]], np.int32)
    return Labels(np.array(rows, np.float32), np.array([0, 2, 2, 3]), sizes, ("p",))


def test_an_unknown_class_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    images = [tmp_path / f"images/{name}.jpg" for name in "abc"]
    file = write_label(images[0], "", "x", "2 0.5 0.5 0.5 0.5", "4.0 0.5 0.5 0.25 1")
    check_classes(three_boxes(), images, 5, Path("data.yaml"))
    for line in (", line 4", ""):
        with pytest.raises(UserError, match=f"^{file}{line} has class 4, .*data.yaml ends at 3;"):
            check_classes(three_boxes(), images, 4, Path("data.yaml"))
        file.write_text("")  # it has changed since the scan
    write_label(images[2], "3 0.5 0.5 0.5 0.25")
    with pytest.raises(UserError, match=r"/labels/c\.txt, line 1 has class 3"):
        check_classes(three_boxes().subset(np.array([False, True, True])), images[1:], 3, Path("data.yaml"))
    labels = three_boxes()
    from_one = replace(labels, rows=labels.rows - np.array((labels.rows[:, 0].min() - 1, 0, 0, 0, 0), np.float32))
    with pytest.raises(UserError, match="count from 0"):
        check_classes(from_one, images, int(from_one.rows[:, 0].max()), Path("data.yaml"))


# Polygons


def test_polygons_are_loaded_if_requested(images: list[Path]) -> None:
    """The first image has a box and two polygons, one of them twice, the second one polygon, the last none."""
    triangle, square = "2 0.1 0.2 0.3 0.2 0.3 0.6", "1 0.5 0.5 0.7 0.5 0.7 0.9 0.5 0.9"
    write_label(images[0], "0 0.5 0.5 0.5 0.5", triangle, square, triangle)
    write_label(images[1], triangle, "x")
    boxes = load_labels(images, "labels", 0)
    assert boxes.polygons is None
    for _ in ("scanned", "cached"):
        loaded = load_labels(images, "labels", 0, POLYGONS)
        assert same(replace(loaded, polygons=None), boxes)
        assert loaded.polygons is not None
        assert loaded.polygons.counts.tolist() == [0, 3, 4, 3]
        assert load_labels(images[2:], "labels", 0, POLYGONS).polygons is None  # there are none
        assert loaded.polygons.outline(1) == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.2], [0.3, 0.6]]), abs=1e-6)
    subset = loaded.subset(np.array([False, True, True])).polygons
    assert subset is not None
    assert np.array_equal(subset.points, loaded.polygons.outline(3))


def test_outlines_with_the_same_box_are_several_objects() -> None:
    first, second = "0 .1 .1 .5 .1 .5 .5 .1 .5", "0 .1 .1 .5 .1 .3 .3 .5 .5 .1 .5"
    text = "\n".join((first, second, first))
    rows, problems = parse_rows(text, FILE, OUTLINES)
    assert len({row.box for row in rows}) == 1
    assert (len(rows), len(problems), len(parse_rows(text, FILE)[0])) == (2, 1, 1)  # boxes alone are one


@pytest.mark.parametrize("rules", [BOXES, POLYGONS, OUTLINES])
def test_points_just_outside_of_the_image_are_moved_to_its_edge(rules: RowRules) -> None:
    """Those that are outside by rounding stay as they are, and so does every row inside."""
    text = "0 -0.005 0.25 1.01 0.25 0.5 0.75\n1 -0.0005 0.25 0.5 0.25 0.5 0.75\n2 0.2 -0.011 0.4 0.2 0.1 0.3\n"
    rows, problems = parse_rows(f"{text}0 -0.005 0.2 -0.009 0.4 -0.008 0.3\n", FILE, rules)
    assert [row.points for row in rows] == [[0, 0.25, 1, 0.25, 0.5, 0.75], [-0.0005, 0.25, 0.5, 0.25, 0.5, 0.75]]
    assert rows[0].box == (0, 0.5, 0.5, 1, 0.5)
    assert [problem.partition(":")[0] for problem in problems] == [f"{FILE}, line {number}" for number in (3, 4)]
