"""Label files: checked once, in parallel, and kept in a cache that is never beside the user's files."""

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

from data.images import JPEG_END, PNG_END, lacks_its_end_alone, plain_size
from data.sources import label_file, label_name
from utils.errors import UserError
from utils.files import cache_folder, one_at_a_time, replacing

CACHE_VERSION = 3
CHUNK = 64  # files that a scanning process takes at a time
WORTH = 0.5  # seconds of work from which on another process is worth its start
LABEL_BYTES = 2**16  # that are read at once of a label file; few are longer
LEAST_SIDE = 10  # pixels; a smaller image is left out
EXIF_ORIENTATION = 0x0112
SLACK = 1e-3  # how far outside [0, 1] a coordinate may be (rounding) before its row is refused
PIXELS = 2.0  # from here on a coordinate is not a share that is a little off, but a number of pixels
ENDS = {"JPEG": JPEG_END, "PNG": PNG_END}  # what a whole file ends with


@dataclass(frozen=True)
class Polygons:
    """The outlines of a list of rows, in two flat arrays.

    points: float32 (p, 2), normalised x and y; offsets: int64 (m + 1), row j has points offsets[j] to offsets[j + 1],
    none where it is a box.
    """

    points: np.ndarray
    offsets: np.ndarray

    @classmethod
    def joined(cls, outlines: Sequence[np.ndarray]) -> Polygons:
        """From an array (k, 2) of each row."""
        points = np.concatenate([np.zeros((0, 2), np.float32), *outlines])
        return cls(points, np.cumsum([0, *map(len, outlines)], dtype=np.int64))

    def of(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The points of rows `first` up to `end`, and where those of each but the first begin among them."""
        offsets = self.offsets[first : end + 1]
        return self.points[offsets[0] : offsets[-1]], offsets[1:-1] - offsets[0]

    def keep(self, chosen: np.ndarray) -> Polygons:
        """Those of the rows where `chosen` (m,) is true."""
        counts = np.diff(self.offsets)
        return Polygons(self.points[np.repeat(chosen, counts)], np.concatenate(([0], np.cumsum(counts[chosen]))))


@dataclass(frozen=True)
class Labels:
    """The labels of a list of images, in a few flat arrays (a worker shares them instead of copying objects).

    rows: float32 (m, 5), class and normalised xywh; offsets: int64 (n + 1), image i has rows offsets[i] to
    offsets[i + 1]; sizes: int32 (n, 2), width and height in pixels as displayed, (0, 0) where the image was left out;
    problems: sentences. polygons: the outlines of the rows, where they were asked for.
    """

    rows: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    problems: tuple[str, ...]
    polygons: Polygons | None = None

    def of(self, index: int) -> np.ndarray:
        """Rows of one image, (k, 5)."""
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def counts(self) -> np.ndarray:
        """How many rows each image has, (n,)."""
        return np.diff(self.offsets)

    def keep(self, chosen: np.ndarray) -> Labels:
        """The labels of the images where `chosen` (n,) is true."""
        of_rows = np.repeat(chosen, self.counts)
        offsets = np.concatenate(([0], np.cumsum(self.counts[chosen])))
        polygons = self.polygons and self.polygons.keep(of_rows)
        return replace(self, rows=self.rows[of_rows], offsets=offsets, sizes=self.sizes[chosen], polygons=polygons)

    def as_single_class(self) -> Labels:
        """The same boxes, all of class 0."""
        rows = self.rows.copy()
        rows[:, 0] = 0
        return replace(self, rows=rows)

    def side_lengths(self, imgsz: int) -> np.ndarray:
        """Width and height of every box in pixels where the image's longer side has `imgsz` pixels, (m, 2)."""
        scale = imgsz * self.sizes / self.sizes.max(1, keepdims=True)
        return np.repeat(scale, self.counts, axis=0) * self.rows[:, 3:5]


class Scanned(NamedTuple):
    """What the scan of one image found."""

    size: tuple[int, int]
    rows: np.ndarray
    problems: list[str]
    outlines: Sequence[np.ndarray] = ()  # of each row (k, 2), where they were asked for


Scan = Callable[[Path], Scanned]


def load_labels(images: Sequence[Path], title: str, workers: int, boxes: bool = True, polygons: bool = False) -> Labels:
    """The labels of `images`, from the cache where nothing changed since, else scanned with a progress bar.

    `boxes` false looks at the images alone: there are no rows, whatever files lie beside them. `polygons` keeps the
    outlines too.
    """
    what = "polygons" if polygons else "labels" if boxes else "images"
    cached = cache_folder() / "labels" / f"{_key(images, what)}.npz"
    with one_at_a_time(cached.with_suffix(".lock")):  # of many processes one scans and the others read the cache
        found = _read_cache(cached)
        if found is None:
            scans = {"labels": scan_image, "images": scan_pixels, "polygons": scan_outlines}
            found = _scan(images, title, workers, scans[what])
            _write_cache(cached, found)
    return found


def check_classes(labels: Labels, images: Sequence[Path], classes: int, source: Path) -> None:
    """Raises `UserError` naming the first label file with a class that `names` of the data YAML does not have."""
    wrong = np.flatnonzero(labels.rows[:, 0] >= classes)
    if len(wrong):
        image = images[int(np.searchsorted(labels.offsets, wrong[0], side="right")) - 1]
        number = int(labels.rows[wrong[0], 0])
        raise UserError(
            f"{label_file(image)} has class {number}, but `names` of {source} ends at {classes - 1}; "
            f"mend the label or add the class ({len(wrong)} such rows in all)"
        )


def _key(images: Sequence[Path], what: str) -> str:
    """Changes with the list, and with the size and time of change of any image or label file; `what` is looked for."""
    names = list(map(os.fspath, images))
    digest = hashlib.sha256(f"{what} {CACHE_VERSION} {len(names)}\0".encode())
    digest.update(os.fsencode("\0".join(names)))
    digest.update(_stamps(names))
    if what != "images":
        digest.update(_stamps(map(label_name, names)))
    return digest.hexdigest()[:32]


def _stamps(files: Iterable[str]) -> bytes:
    """Size and time of change of each file in bytes and nanoseconds, as int64 (n, 2); -1 and -1 where there is none."""
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
        return None  # absent, or not one of ours: scan again


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
    chunks = [images[start : start + CHUNK] for start in range(0, len(images), CHUNK)]
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
    """What `scan` finds in each chunk, in order: by processes once it turns out that there is work enough for them."""
    start = time.monotonic()
    for done, chunk in enumerate(chunks):
        spent, left = time.monotonic() - start, len(chunks) - done
        processes = min(workers, left, int(spent * left / done / WORTH) if done else 1)
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
        Polygons.joined([one for result in results for one in result.outlines]) if scan is scan_outlines else None,
    )


def scan_pixels(image: Path) -> Scanned:
    """Check one image. A bad one is left out; `problems` tells."""
    nothing = np.zeros((0, 5), np.float32)
    try:
        size = image_size(image)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        return Scanned((0, 0), nothing, [f"{image}: not readable as an image ({error}); left out"])
    if min(size) < LEAST_SIDE:
        return Scanned((0, 0), nothing, [f"{image}: {size[0]}x{size[1]} pixels, smaller than {LEAST_SIDE}; left out"])
    return Scanned(size, nothing, [])


def scan_outlines(image: Path) -> Scanned:
    """`scan_image`, with the outlines of the rows."""
    return scan_image(image, outlined=True)


def scan_image(image: Path, outlined: bool = False) -> Scanned:
    """Check one image and its label file. A bad image is left out whole, a bad row alone; `problems` tells."""
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
    found, problems = _parse(text, file)
    outlines = [_outline(words) for words in found.values()] if outlined else ()
    return Scanned(size, _as_rows(found), problems, outlines)


def _read_ascii(file: str) -> str | None:
    """The content of a short file of plain ASCII text; None for all else that is there."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        content = os.read(handle, LABEL_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)
    return content.decode("ascii") if len(content) < LABEL_BYTES and content.isascii() else None


def image_size(image: Path) -> tuple[int, int]:
    """Width and height in pixels as displayed: EXIF orientations 5 to 8 lie on their side.

    Raises one of Pillow's many errors where the file is no image, or is not whole.
    """
    return plain_size(os.fspath(image)) or _size_by_pillow(image)


def _size_by_pillow(image: Path) -> tuple[int, int]:
    """`image_size` of any file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF blocks warn; the orientation is then absent
        with Image.open(image) as opened:
            width, height = opened.size
            orientation = _orientation(opened)
            if isinstance(opened, TiffImageFile):  # newer Pillow has turned the size of these already
                width, height = opened.tag_v2[IMAGEWIDTH], opened.tag_v2[IMAGELENGTH]
            if not _ends_well(image, opened.format) and not (opened.format == "JPEG" and lacks_its_end_alone(image)):
                opened.load()  # the whole decoding: what is only unusual at its end is whole all the same
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def _orientation(opened: Image.Image) -> int:
    try:
        return opened.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:  # a damaged block: the image is shown as it is
        return 1


def _ends_well(image: Path, kind: str | None) -> bool:
    """Does the file end as a whole one of its kind does? False for a kind of which its end says nothing."""
    end = ENDS.get(kind or "")
    if end is None:
        return False
    with image.open("rb") as file:
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end


def parse_rows(text: str, file: Path | str) -> tuple[np.ndarray, list[str]]:
    """Rows `class x y w h` or polygons `class x1 y1 x2 y2 x3 y3 ...`, normalised, as (k, 5) boxes, each once, in order.

    A row that cannot be meant as either is left out and named in the second result.
    """
    found, problems = _parse(text, file)
    return _as_rows(found), problems


Rows = dict[tuple[float, ...], list[str]]  # class and xywh, each once, and the words that it was written as


def _as_rows(found: Rows) -> np.ndarray:
    return np.array(list(found), np.float32).reshape(-1, 5)


def _outline(words: Sequence[str]) -> np.ndarray:
    """The points of a row's polygon, (k, 2); none of a box."""
    points = words[1:] if len(words) > 5 else ()
    return np.array(list(map(float, points)), np.float32).reshape(-1, 2)


def _parse(text: str, file: Path | str) -> tuple[Rows, list[str]]:
    """What `parse_rows` does."""
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
    """What most rows are: a box with its centre in the image and sides no longer than the image's. None for others."""
    try:
        label, x, y, width, height = row = tuple(map(float, words))
    except ValueError:  # another count of words, or not all are numbers
        return None
    inside = 0 <= x <= 1 and 0 <= y <= 1 and 0 < width <= 1 and 0 < height <= 1
    return row if inside and 0 <= label == label // 1 else None


def _parse_row(words: Sequence[str]) -> tuple[float, ...]:
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
    if max(values) >= PIXELS:
        raise ValueError("coordinates in pixels; divide x and width by the image's width, y and height by its height")
    if not all(-SLACK <= value <= 1 + SLACK for value in values):
        raise ValueError("coordinates outside 0 to 1 (they are shares of the image's width and height)")
    x, y, width, height = values if len(values) == 4 else _polygon_box(values)
    if width <= 0 or height <= 0:
        raise ValueError("the box has no area")
    return label, x, y, width, height


def _polygon_box(points: Sequence[float]) -> tuple[float, float, float, float]:
    """Centre and size of the box around x1 y1 x2 y2 ..."""
    xs, ys = points[0::2], points[1::2]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    return (low_x + high_x) / 2, (low_y + high_y) / 2, high_x - low_x, high_y - low_y
