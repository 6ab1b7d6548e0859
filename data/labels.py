"""Label files, checked in parallel and cached outside of the data set's folder. Called by the data sets."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from data import remote, storage
from data.coco_json import AnnotatedImages, ImageRows
from data.images import examine_image
from data.polygons import Polygons, offsets_of
from utils.errors import StorageError, UserError, plural, shortened
from utils.files import cache_folder, one_at_a_time, replacing

CACHE_VERSION = 6
MAX_EDGES_AT_A_HEIGHT = 1000  # of an outline
FILES_PER_CHUNK = 64  # that a scanning process takes at a time
MIN_SECONDS_PER_PROCESS = 0.5  # of work, or starting another process takes longer than it saves
MIN_IMAGE_SIDE_PIXELS = 10  # a smaller image is left out
COORDINATE_TOLERANCE = 1e-3  # a coordinate may be so far outside [0, 1], by rounding
MIN_PIXEL_COORDINATE = 2.0  # such coordinates are taken for pixels instead of shares of a side
MAX_CLASS = 2**20  # exclusive bound of a class, which float32 holds exactly
MIN_OUTLINE_WIDTH = 1e-5  # share of a side: an outline that is narrower is a line

# To scan: no label files; their boxes; their outlines too, if there are any; outlines that enclose an area.
Content = Literal["images", "labels", "polygons", "outlines"]
OUTLINED: tuple[Content, ...] = ("polygons", "outlines")
Scanned = tuple[Path, "ImageRows | None"]  # an image, and its objects unless it has a label file


@dataclass(frozen=True)
class Labels:
    """The labels of n images in flat arrays, which loader processes share: of objects, each would get a copy.

    rows: float32 (m, 5), class and normalised xywh. offsets: int64 (n + 1); image i has rows offsets[i] to
    offsets[i + 1]. sizes: int32 (n, 2), width and height in pixels as displayed, (0, 0) if the image is left out.
    problems: sentences about what is left out. polygons: the outlines of the rows, if requested.
    """

    rows: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    problems: tuple[str, ...]
    polygons: Polygons | None = None

    def of(self, index: int) -> np.ndarray:
        """Return the rows of one image, (k, 5)."""
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of rows of each image, (n,)."""
        return np.diff(self.offsets)

    def subset(self, chosen: np.ndarray) -> Labels:
        """Return the labels of the images for which `chosen`, bool (n,), is true."""
        of_rows = np.repeat(chosen, self.counts)
        polygons = self.polygons and self.polygons.subset(of_rows)
        offsets = offsets_of(self.counts[chosen])
        return replace(self, rows=self.rows[of_rows], offsets=offsets, sizes=self.sizes[chosen], polygons=polygons)

    def as_single_class(self) -> Labels:
        """Return the same boxes with class 0."""
        rows = self.rows.copy()
        rows[:, 0] = 0
        return replace(self, rows=rows)

    def side_lengths(self, imgsz: int) -> np.ndarray:
        """Return width and height of every box in pixels, (m, 2), with the longer side of its image at `imgsz`."""
        scale = imgsz * self.sizes / self.sizes.max(1, keepdims=True)
        return np.repeat(scale, self.counts, axis=0) * self.rows[:, 3:5]


def load_labels(
    images: Sequence[Path],
    title: str,
    workers: int,
    content: Content = "labels",
    annotated: Sequence[AnnotatedImages] = (),
) -> Labels:
    """Return the labels of `images`: from the cache if no file has changed, else scanned with a progress bar.

    title: of the progress bar. workers: processes, at most. annotated: the images that have no label files. Raises
    `UserError` for a damaged annotation file.
    """
    cached = cache_folder() / "labels" / f"{_key(images, content, annotated)}.npz"
    with one_at_a_time(cached.with_suffix(".lock")):  # one of several processes scans, the others read the cache
        labels = _read_cache(cached, len(images), content in OUTLINED)
        if labels is None:
            labels = _scan(images, title, workers, content, annotated)
            _write_cache(cached, labels)
    return labels


def check_classes(labels: Labels, images: Sequence[Path], classes: int, source: Path) -> None:
    """Raise a `UserError` that names the first row of a label file with a class outside of the data YAML's `names`.

    classes: number of names. source: the YAML.
    """
    wrong = np.flatnonzero(labels.rows[:, 0] >= classes)
    if len(wrong):
        image = images[int(np.searchsorted(labels.offsets, wrong[0], side="right")) - 1]
        file = Path(storage.label_name(os.fspath(image)))
        number = int(labels.rows[wrong[0], 0])
        raise UserError(
            f"{file}{_line_of(file, number)} has class {number}, but `names` of {source} ends at {classes - 1}; "
            f"fix the label or add the class ({plural(len(wrong), 'such row')} in all)"
        )


def _line_of(file: Path, number: int) -> str:
    """Return `, line 3` for the first line of a label file with this class, or '' if the file has changed."""
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        text = storage.read_bytes(file).decode("utf-8-sig")
    for line, words in enumerate(map(str.split, text.splitlines()), 1):
        with suppress(ValueError, IndexError):  # of a bad row
            if float(words[0]) == number:
                return f", line {line}"
    return ""


def _key(images: Sequence[Path], content: Content, annotated: Sequence[AnnotatedImages]) -> str:
    """Return a hash of the paths, and of size and modification time of every image, label and annotation file."""
    names = list(map(os.fspath, images))
    digest = hashlib.sha256(f"{content} {CACHE_VERSION} {len(names)}\0".encode())
    digest.update(os.fsencode("\0".join(names)))
    digest.update(storage.stamps(names))
    if content != "images":
        for each in annotated:
            digest.update(each.stamp())
            names = [name for name in names if name not in each.images]
        digest.update(storage.stamps(map(storage.label_name, names)))
    return digest.hexdigest()[:32]


def _read_cache(path: Path, images: int, outlined: bool) -> Labels | None:
    """Return the labels of `images` images, or None if the file is absent or was not written by this version."""
    try:
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        rows = arrays["offsets"][-1]
        kinds = {
            "rows": (np.float32, (rows, 5)),
            "offsets": (np.int64, (images + 1,)),
            "sizes": (np.int32, (images, 2)),
        }
        if outlined:
            kinds |= {"points": (np.float32, (arrays["ends"][-1], 2)), "ends": (np.int64, (rows + 1,))}
        if any((arrays[name].dtype, arrays[name].shape) != kind for name, kind in kinds.items()):
            return None
        problems = tuple(str(text) for text in arrays["problems"])
        polygons = Polygons(arrays["points"], arrays["ends"]) if outlined else None
        return Labels(arrays["rows"], arrays["offsets"], arrays["sizes"], problems, polygons)
    except Exception:  # numpy and zipfile raise many kinds for a damaged file
        return None


def _write_cache(path: Path, labels: Labels) -> None:
    try:
        with replacing(path) as file:
            problems = np.array(labels.problems, dtype=np.str_)
            outlines = labels.polygons
            arrays = {"rows": labels.rows, "offsets": labels.offsets, "sizes": labels.sizes, "problems": problems}
            if outlines:
                arrays |= {"points": outlines.points, "ends": outlines.offsets}
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stubs take it for `allow_pickle`
    except OSError as error:
        warnings.warn(
            f"the label cache {path} cannot be written ({error.strerror}); the next start scans again", stacklevel=2
        )


def _scan(
    images: Sequence[Path], title: str, workers: int, content: Content, annotated: Sequence[AnnotatedImages]
) -> Labels:
    described: dict[str, ImageRows] = {}
    problems: list[str] = []
    for each in annotated:
        rows = each.rows(content in OUTLINED)
        described = {**rows.images, **described}  # of an image that two files describe the first counts
        problems += rows.problems
    items = [(image, described.get(os.fspath(image))) for image in images]
    chunks = [items[start : start + FILES_PER_CHUNK] for start in range(0, len(items), FILES_PER_CHUNK)]
    parts: list[Labels] = []
    with tqdm(total=len(images), desc=f"checking {title}", unit="image", disable=None, leave=False) as bar:
        for part in _map_chunks(partial(_scan_chunk, content), chunks, workers):
            parts.append(part)
            bar.update(len(part.sizes))
    polygons = [part.polygons for part in parts if part.polygons is not None]
    return Labels(
        np.concatenate([part.rows for part in parts]),
        offsets_of(np.concatenate([part.counts for part in parts])),
        np.concatenate([part.sizes for part in parts]),
        (*problems, *(problem for part in parts for problem in part.problems)),
        Polygons.joined(polygons) if polygons else None,
    )


def _map_chunks(
    scan: Callable[[Sequence[Scanned]], Labels], chunks: Sequence[Sequence[Scanned]], workers: int
) -> Iterator[Labels]:
    """Yield the labels of each chunk, in order. Processes are started once the work proves to be enough for them."""
    start = time.monotonic()
    for done, chunk in enumerate(chunks):
        elapsed, remaining = time.monotonic() - start, len(chunks) - done
        processes = min(workers, remaining, int(elapsed * remaining / done / MIN_SECONDS_PER_PROCESS) if done else 1)
        if processes > 1:
            with multiprocessing.Pool(processes) as pool:
                yield from pool.imap(scan, chunks[done:])
            return
        yield scan(chunk)


def _scan_chunk(content: Content, images: Sequence[Scanned]) -> Labels:
    unread = [(os.fspath(image), rows) for image, rows in images if storage.image_size(image) is None]
    labels = [storage.label_name(name) for name, rows in unread if rows is None and content != "images"]
    storage.prefetch([*(name for name, _ in unread), *labels])
    scans = [scan_image(image, content, described) for image, described in images]
    outlines = [outline for scan in scans for outline in scan.outlines]
    return Labels(
        np.concatenate([scan.rows for scan in scans]),
        offsets_of([len(scan.rows) for scan in scans]),
        np.array([scan.size for scan in scans], np.int32),
        tuple(problem for scan in scans for problem in scan.problems),
        Polygons.of(outlines) if content in OUTLINED else None,
    )


class Scan(NamedTuple):
    """The result for one image and its label file: see `Labels`. outlines: (k, 2) per row, if requested."""

    size: tuple[int, int] = (0, 0)
    rows: np.ndarray = np.zeros((0, 5), np.float32)
    problems: Sequence[str] = ()
    outlines: Sequence[np.ndarray] = ()


def scan_image(image: Path, content: Content = "labels", described: ImageRows | None = None) -> Scan:
    """Check one image and its label file. A bad image or row is left out, and is a problem.

    So is an image if its label file cannot be read, or has rows but no good one. described: the objects of an image
    without a label file.
    """
    name = remote.shown_path(image)
    try:
        storage.require_regular_file(image)
        size, missing = examine_image(image)
    except StorageError:
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged file
        return Scan(problems=[f"{name}: not readable as an image ({error}); left out"])
    if min(size) < MIN_IMAGE_SIDE_PIXELS:
        return Scan(problems=[f"{name}: {size[0]}x{size[1]} pixels, smaller than {MIN_IMAGE_SIDE_PIXELS}; left out"])
    truncated = (f"{name}: truncated, {missing:.2%} of its pixels are missing and grey; used",) if missing else ()
    if content == "images":
        return Scan(size, problems=truncated)
    try:
        labels = described or _read_label_file(image, content)
    except FileNotFoundError:
        return Scan(size, problems=truncated)  # background
    except (OSError, UnicodeDecodeError) as error:
        file = remote.shown_path(storage.label_name(os.fspath(image)))
        return Scan(problems=[f"{file}: cannot be read as text ({error}); its image is left out"])
    if labels.size and not _have_one_shape(size, labels.size):
        sizes = f"{size[0]}x{size[1]} pixels, but its annotation is for {labels.size[0]}x{labels.size[1]}"
        return Scan(problems=[f"{name}: {sizes}; left out"])
    rows, problems = parse_rows(labels.text, labels.origin, content == "outlines", labels.ids)
    problems = [*truncated, *problems]
    if problems and not rows:  # it may have objects, so it is no background
        file = f"annotations of {name}" if described else labels.origin
        return Scan(problems=[*problems, f"{file}: no row can be used; its image is left out"])
    outlines = list(map(_outline, rows.values())) if content in OUTLINED else ()
    return Scan(size, np.array([row[:5] for row in rows], np.float32).reshape(-1, 5), problems, outlines)


def _read_label_file(image: Path, content: Content) -> ImageRows:
    """Return the content of an image's label file. Raises OSError or UnicodeDecodeError if it cannot be read."""
    file = storage.label_name(os.fspath(image))
    storage.require_regular_file(file)
    text = storage.read_label(file, content in OUTLINED).decode("utf-8-sig")
    return ImageRows(text, None, remote.shown_path(file), ())


def _have_one_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two sizes are of one shape, up to the rounding of a pixel."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= max(*one, *other)


def _outline(words: Sequence[str]) -> np.ndarray:
    """Return the points of a row's polygon, (k, 2), or none for a box."""
    points = words[1:] if len(words) > 5 else ()
    return np.array(list(map(float, points)), np.float32).reshape(-1, 2)


def _check_outline(points: np.ndarray) -> None:
    """Raise ValueError for an outline (k, 2) without an area, or one that would take seconds to fill."""
    if _is_line(points):
        raise ValueError("the outline has no area")
    # The edges at a height, on average; OpenCV's time to fill the outline grows with the square of it.
    if np.abs(np.diff(points[:, 1], append=points[:1, 1])).sum() > MAX_EDGES_AT_A_HEIGHT:
        raise ValueError(f"the outline goes up and down more than {MAX_EDGES_AT_A_HEIGHT // 2} times")


def _is_line(points: np.ndarray) -> bool:
    """Return whether all points (k, 2) are on one line."""
    x, y = (points - points[0]).astype(np.float64).T
    farthest = np.argmax(x * x + y * y)
    across = np.abs(x * y[farthest] - y * x[farthest]).max()  # distance from the line, times the line's length
    return bool(across < MIN_OUTLINE_WIDTH * np.hypot(x[farthest], y[farthest]))


def parse_rows(
    text: str, file: Path | str, enclosing: bool = False, ids: Sequence[Any] = ()
) -> tuple[dict[tuple[float, ...], list[str]], list[str]]:
    """Return the rows of a label file, and problems with lines that are left out.

    A line is a box, `class x y w h`, or a polygon, `class x1 y1 x2 y2 x3 y3 ...`, normalised. Rows are the words of
    each line by (class, x, y, w, h), in the order of the file. enclosing: a polygon that is a line is a problem too,
    and its points follow in the key, so that objects with the same box but other outlines are several rows. ids: name
    the lines in problems instead of their numbers, as in `ImageRows`, whose `origin` is then `file`.
    """

    def place(number: int) -> str:
        return f"{file} {ids[number - 1]}" if ids else f"{file}, line {number}"

    rows: dict[tuple[float, ...], list[str]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.split():
            try:
                row = _parse_row(words)
                if enclosing and len(words) > 5:
                    _check_outline(_outline(words))
                    row += tuple(map(float, words[1:]))
            except ValueError as error:
                problems.append(f"{place(number)}: {error}; row left out")
                continue
            if row in rows:
                problems.append(f"{place(number)}: the same {'outline' if row[5:] else 'box'} again; row left out")
            rows.setdefault(row, words)
    return rows, problems


def _parse_row(words: Sequence[str]) -> tuple[float, ...]:
    """Return class and xywh of a row. Raises ValueError with what is wrong."""
    text = "".join(words)
    try:
        row = tuple(map(float, words)) if text.isascii() and "_" not in text else ()  # float reads 1_0 as 10
    except ValueError:
        row = ()
    if not row:
        raise ValueError("not all words are numbers")
    if len(row) == 5:
        label, x, y, width, height = row
        if 0 <= label == label // 1 < MAX_CLASS and 0 <= x <= 1 and 0 <= y <= 1 and 0 < width <= 1 and 0 < height <= 1:
            return row  # nearly all rows
    label, *values = row
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise ValueError(f"{len(words)} numbers instead of 5 (box) or an odd count from 7 (polygon)")
    if not 0 <= label == label // 1 < MAX_CLASS:
        raise ValueError(f"class {shortened(words[0])} is not a whole number from 0")
    if not all(map(math.isfinite, values)):
        raise ValueError("a coordinate is not finite")
    if max(values) >= MIN_PIXEL_COORDINATE:
        raise ValueError("coordinates in pixels; divide x and width by the image's width, y and height by its height")
    if not all(-COORDINATE_TOLERANCE <= value <= 1 + COORDINATE_TOLERANCE for value in values):
        raise ValueError("coordinates outside 0 to 1 (they are shares of the image's width and height)")
    x, y, width, height = values if len(values) == 4 else _polygon_box(values)
    if width <= 0 or height <= 0:
        raise ValueError("the box has no area")
    return label, x, y, width, height


def _polygon_box(points: Sequence[float]) -> tuple[float, float, float, float]:
    """Return centre and size of the box around x1 y1 x2 y2 ..."""
    xs, ys = points[0::2], points[1::2]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    return (low_x + high_x) / 2, (low_y + high_y) / 2, high_x - low_x, high_y - low_y
