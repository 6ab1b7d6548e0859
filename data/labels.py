"""Label files: checked once, in parallel, and cached outside of the data set's folders. Called by the data sets."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile
from tqdm import tqdm

from data.images import JPEG_END, PNG_END, lacks_only_end_marker, plain_size
from data.sources import label_file, label_name
from utils.errors import UserError
from utils.files import cache_folder, one_at_a_time, replacing

CACHE_VERSION = 3
FILES_PER_CHUNK = 64  # that a scanning process takes at a time
MIN_SECONDS_PER_PROCESS = 0.5  # of work that makes the start of another process worth it
LABEL_READ_BYTES = 2**16  # of a label file, at once; few are longer
MIN_IMAGE_SIDE_PIXELS = 10  # a smaller image is left out
EXIF_ORIENTATION = 0x0112
COORDINATE_TOLERANCE = 1e-3  # how far outside [0, 1] a coordinate may be (rounding) before its row is refused
MIN_PIXEL_COORDINATE = 2.0  # a larger coordinate is not a share of a side, but a number of pixels
END_MARKERS = {"JPEG": JPEG_END, "PNG": PNG_END}  # the last bytes of a whole file


@dataclass(frozen=True)
class Polygons:
    """The outlines of a list of rows, in two flat arrays.

    points: float32 (p, 2), normalised x and y; offsets: int64 (m + 1), row j has points offsets[j] to offsets[j + 1],
    none if it is a box.
    """

    points: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_outlines(cls, outlines: Sequence[np.ndarray]) -> Polygons:
        """Make polygons of an array (k, 2) for each row."""
        points = np.concatenate([np.zeros((0, 2), np.float32), *outlines])
        return cls(points, np.cumsum([0, *map(len, outlines)], dtype=np.int64))

    def of(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the points of rows `first` to `end` - 1, and the index of the first point of each but the first."""
        offsets = self.offsets[first : end + 1]
        return self.points[offsets[0] : offsets[-1]], offsets[1:-1] - offsets[0]

    def subset(self, chosen: np.ndarray) -> Polygons:
        """Return the polygons of the rows for which `chosen`, bool (m,), is true."""
        counts = np.diff(self.offsets)
        return Polygons(self.points[np.repeat(chosen, counts)], np.concatenate(([0], np.cumsum(counts[chosen]))))


@dataclass(frozen=True)
class Labels:
    """The labels of a list of images, in a few flat arrays, which loader processes share instead of copying objects.

    rows: float32 (m, 5), class and normalised xywh; offsets: int64 (n + 1), image i has rows offsets[i] to
    offsets[i + 1]; sizes: int32 (n, 2), width and height in pixels as displayed, (0, 0) if the image is left out;
    problems: sentences. polygons: the outlines of the rows, if they were requested.
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
        offsets = np.concatenate(([0], np.cumsum(self.counts[chosen])))
        polygons = self.polygons and self.polygons.subset(of_rows)
        return replace(self, rows=self.rows[of_rows], offsets=offsets, sizes=self.sizes[chosen], polygons=polygons)

    def as_single_class(self) -> Labels:
        """Return the same boxes, all of class 0."""
        rows = self.rows.copy()
        rows[:, 0] = 0
        return replace(self, rows=rows)

    def side_lengths(self, imgsz: int) -> np.ndarray:
        """Return width and height of every box, (m, 2), in pixels of images whose longer side is `imgsz`."""
        scale = imgsz * self.sizes / self.sizes.max(1, keepdims=True)
        return np.repeat(scale, self.counts, axis=0) * self.rows[:, 3:5]


class Scanned(NamedTuple):
    """The result of scanning one image."""

    size: tuple[int, int]
    rows: np.ndarray
    problems: list[str]
    outlines: Sequence[np.ndarray] = ()  # of each row (k, 2), if they were requested


Scan = Callable[[Path], Scanned]


def load_labels(images: Sequence[Path], title: str, workers: int, boxes: bool = True, polygons: bool = False) -> Labels:
    """Return the labels of `images`: from the cache if no file has changed, else scanned with a progress bar.

    title: of the progress bar. workers: processes, at most. boxes: read label files; without, there are no rows.
    polygons: read outlines too.
    """
    what = "polygons" if polygons else "labels" if boxes else "images"
    cached = cache_folder() / "labels" / f"{_key(images, what)}.npz"
    with one_at_a_time(cached.with_suffix(".lock")):  # one of several processes scans, the others read the cache
        labels = _read_cache(cached)
        if labels is None:
            scans = {"labels": scan_image, "images": scan_pixels, "polygons": scan_outlines}
            labels = _scan(images, title, workers, scans[what])
            _write_cache(cached, labels)
    return labels


def check_classes(labels: Labels, images: Sequence[Path], classes: int, source: Path) -> None:
    """Raise a `UserError` that names the first label file with a class which the data YAML's `names` do not have."""
    wrong = np.flatnonzero(labels.rows[:, 0] >= classes)
    if len(wrong):
        image = images[int(np.searchsorted(labels.offsets, wrong[0], side="right")) - 1]
        number = int(labels.rows[wrong[0], 0])
        raise UserError(
            f"{label_file(image)} has class {number}, but `names` of {source} ends at {classes - 1}; "
            f"fix the label or add the class ({len(wrong)} such rows in all)"
        )


def _key(images: Sequence[Path], what: str) -> str:
    """Return a hash of the list and of size and modification time of every image and label file. what: is read."""
    names = list(map(os.fspath, images))
    digest = hashlib.sha256(f"{what} {CACHE_VERSION} {len(names)}\0".encode())
    digest.update(os.fsencode("\0".join(names)))
    digest.update(_stamps(names))
    if what != "images":
        digest.update(_stamps(map(label_name, names)))
    return digest.hexdigest()[:32]


def _stamps(files: Iterable[str]) -> bytes:
    """Return size in bytes and modification time in ns of each file, as int64 (n, 2); -1 and -1 if there is none."""
    stamps: list[int] = []
    for file in files:
        try:
            status = os.stat(file)
        except (OSError, ValueError):  # the latter for a name that no file can have
            stamps += (-1, -1)
        else:
            stamps += (status.st_size, status.st_mtime_ns)
    return np.array(stamps, np.int64).tobytes()


def _read_cache(path: Path) -> Labels | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            problems = tuple(str(text) for text in arrays["problems"])
            polygons = Polygons(arrays["points"], arrays["ends"]) if "points" in arrays else None
            return Labels(arrays["rows"], arrays["offsets"], arrays["sizes"], problems, polygons)
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return None  # absent, or not written by this version: scan again


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


def _scan(images: Sequence[Path], title: str, workers: int, scan: Scan) -> Labels:
    chunks = [images[start : start + FILES_PER_CHUNK] for start in range(0, len(images), FILES_PER_CHUNK)]
    parts: list[Labels] = []
    with tqdm(total=len(images), desc=f"checking {title}", unit="image", disable=None, leave=False) as bar:
        for part in _map_chunks(partial(_scan_chunk, scan), chunks, workers):
            parts.append(part)
            bar.update(len(part.sizes))
    counts = np.concatenate([part.counts for part in parts])
    outlines = [part.polygons for part in parts if part.polygons]
    return Labels(
        np.concatenate([part.rows for part in parts]),
        np.concatenate(([0], np.cumsum(counts))),
        np.concatenate([part.sizes for part in parts]),
        tuple(problem for part in parts for problem in part.problems),
        _joined(outlines) if outlines else None,
    )


def _joined(parts: Sequence[Polygons]) -> Polygons:
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    return Polygons(np.concatenate([part.points for part in parts]), np.concatenate(([0], np.cumsum(counts))))


def _map_chunks(
    scan: Callable[[Sequence[Path]], Labels], chunks: Sequence[Sequence[Path]], workers: int
) -> Iterator[Labels]:
    """Yield the labels of each chunk, in order; from processes, once the work turns out to be enough for them."""
    start = time.monotonic()
    for done, chunk in enumerate(chunks):
        elapsed, remaining = time.monotonic() - start, len(chunks) - done
        processes = min(workers, remaining, int(elapsed * remaining / done / MIN_SECONDS_PER_PROCESS) if done else 1)
        if processes > 1:
            with multiprocessing.Pool(processes) as pool:
                yield from pool.imap(scan, chunks[done:])
            return
        yield scan(chunk)


def _scan_chunk(scan: Scan, images: Sequence[Path]) -> Labels:
    results = [scan(image) for image in images]
    return Labels(
        np.concatenate([result.rows for result in results]),
        np.concatenate(([0], np.cumsum([len(result.rows) for result in results]))),
        np.array([result.size for result in results], np.int32),
        tuple(problem for result in results for problem in result.problems),
        Polygons.from_outlines([one for result in results for one in result.outlines])
        if scan is scan_outlines
        else None,
    )


def scan_pixels(image: Path) -> Scanned:
    """Check one image. A bad one has size (0, 0) and a problem."""
    nothing = np.zeros((0, 5), np.float32)
    try:
        size = image_size(image)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        return Scanned((0, 0), nothing, [f"{image}: not readable as an image ({error}); left out"])
    if min(size) < MIN_IMAGE_SIDE_PIXELS:
        return Scanned(
            (0, 0), nothing, [f"{image}: {size[0]}x{size[1]} pixels, smaller than {MIN_IMAGE_SIDE_PIXELS}; left out"]
        )
    return Scanned(size, nothing, [])


def scan_outlines(image: Path) -> Scanned:
    """Check one image and its label file, and return the outlines of the rows too."""
    return scan_image(image, outlined=True)


def scan_image(image: Path, outlined: bool = False) -> Scanned:
    """Check one image and its label file. A bad image is left out, of a bad row only the row; both are problems."""
    scanned = scan_pixels(image)
    size, nothing, *_ = scanned
    if scanned.problems:
        return scanned
    file = label_name(os.fspath(image))
    try:
        text = _read_ascii(file) or Path(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return Scanned(size, nothing, [])  # background
    except (OSError, UnicodeDecodeError) as error:
        return Scanned(size, nothing, [f"{file}: cannot be read as text ({error}); taken as having no rows"])
    rows, problems = _parse(text, file)
    outlines = [_outline(words) for words in rows.values()] if outlined else ()
    return Scanned(size, _as_array(rows), problems, outlines)


def _read_ascii(file: str) -> str | None:
    """Return the content of a short file of plain ASCII text; None for any other file. Raises FileNotFoundError."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        content = os.read(handle, LABEL_READ_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)
    return content.decode("ascii") if len(content) < LABEL_READ_BYTES and content.isascii() else None


def image_size(image: Path) -> tuple[int, int]:
    """Return width and height in pixels as displayed: EXIF orientations 5 to 8 swap them.

    Raises one of Pillow's many errors if the file is no image, or is not whole.
    """
    return plain_size(os.fspath(image)) or _size_by_pillow(image)


def _size_by_pillow(image: Path) -> tuple[int, int]:
    """Return what `image_size` does, of any file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF blocks warn; the orientation is then absent
        with Image.open(image) as opened:
            width, height = opened.size
            orientation = _orientation(opened)
            if isinstance(opened, TiffImageFile):  # newer versions of Pillow swap the size of these already
                width, height = opened.tag_v2[IMAGEWIDTH], opened.tag_v2[IMAGELENGTH]
            if not _has_end_marker(image, opened.format) and not (
                opened.format == "JPEG" and lacks_only_end_marker(image)
            ):
                opened.load()  # decodes it all: a file with an unusual end may be whole
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def _orientation(opened: Image.Image) -> int:
    try:
        return opened.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:  # a damaged block: the image is shown as it is
        return 1


def _has_end_marker(image: Path, image_format: str | None) -> bool:
    """Return whether a file ends with the marker of its format; False for formats without one."""
    end = END_MARKERS.get(image_format or "")
    if end is None:
        return False
    with image.open("rb") as file:
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end


def parse_rows(text: str, file: Path | str) -> tuple[np.ndarray, list[str]]:
    """Return the boxes of a label file, (k, 5), each once, in order, and problems with rows that are left out.

    A row is `class x y w h` or a polygon, `class x1 y1 x2 y2 x3 y3 ...`, normalised.
    """
    rows, problems = _parse(text, file)
    return _as_array(rows), problems


Rows = dict[tuple[float, ...], list[str]]  # class and xywh, each once, with the words of its line


def _as_array(rows: Rows) -> np.ndarray:
    return np.array(list(rows), np.float32).reshape(-1, 5)


def _outline(words: Sequence[str]) -> np.ndarray:
    """Return the points of a row's polygon, (k, 2); none of a box."""
    points = words[1:] if len(words) > 5 else ()
    return np.array(list(map(float, points)), np.float32).reshape(-1, 2)


def _parse(text: str, file: Path | str) -> tuple[Rows, list[str]]:
    """Return the rows of a label file, and problems with lines that are left out."""
    rows: Rows = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.split():
            try:
                row = _plain_box(words) or _parse_row(words)
            except ValueError as error:
                problems.append(f"{file}, line {number}: {error}; row left out")
                continue
            if row in rows:
                problems.append(f"{file}, line {number}: the same box again; row left out")
            rows.setdefault(row, words)
    return rows, problems


def _plain_box(words: Sequence[str]) -> tuple[float, ...] | None:
    """Return the row of a box with its centre in the image and sides no longer than the image's; None for others."""
    try:
        label, x, y, width, height = row = tuple(map(float, words))
    except ValueError:  # another count of words, or not all are numbers
        return None
    inside = 0 <= x <= 1 and 0 <= y <= 1 and 0 < width <= 1 and 0 < height <= 1
    return row if inside and 0 <= label == label // 1 else None


def _parse_row(words: Sequence[str]) -> tuple[float, ...]:
    """Return class and xywh of any row. Raises ValueError, which says what is wrong with it."""
    try:
        label, *values = map(float, words)
    except ValueError:
        raise ValueError("not all words are numbers") from None
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise ValueError(f"{len(words)} numbers instead of 5 (box) or an odd count from 7 (polygon)")
    if label < 0 or label != label // 1:
        raise ValueError(f"class {words[0]} is not a whole number from 0")
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
