"""Label files, checked in parallel and cached outside of the data set's folder. Called by the data sets."""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data import remote, storage
from data.coco_json import AnnotatedImages, ImageRows
from data.images import image_size
from data.label_rows import BOXES, RowRules, parse_rows, points_of
from data.polygons import Polygons, offsets_of
from utils.errors import StorageError, UserError, plural
from utils.files import cache_folder, one_at_a_time, replacing

CACHE_VERSION = 9
FILES_PER_CHUNK = 64  # images that a scanning process takes at a time
MIN_SECONDS_PER_PROCESS = 0.5  # seconds of work; with less, starting another process takes longer than it saves
MIN_IMAGE_SIDE_PIXELS = 10  # a smaller image is left out

Scanned = tuple[Path, "ImageRows | None"]  # an image, and its objects unless it has a label file


@dataclass(frozen=True)
class Labels:
    """The labels of n images in flat arrays, which loader processes share; objects would be copied into each.

    Attributes:
        rows: class and normalised xywh, float32 (m, 5)
        offsets: int64 (n + 1); image i has rows offsets[i] to offsets[i + 1]
        sizes: int32 (n, 2), width and height in pixels as displayed, (0, 0) if the image is left out
        problems: sentences about what is left out
        polygons: outlines of the rows, if requested
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


def has_outlines(rules: RowRules | None) -> bool:
    """Return whether these rules read the points of rows."""
    return rules is not None and rules.outlines


def load_labels(
    images: Sequence[Path],
    title: str,
    workers: int,
    rules: RowRules | None = BOXES,
    annotated: Sequence[AnnotatedImages] = (),
) -> Labels:
    """Return the labels of `images` from the cache if no file has changed, else scan them with a progress bar.

    Raises `UserError` for a damaged annotation file.

    Args:
        title: title of the progress bar
        workers: number of processes, at most
        rules: rules for the rows; None to read no labels
        annotated: images that annotation files describe, so that they have no label files
    """
    cached = cache_folder() / "labels" / f"{_key(images, rules, annotated)}.npz"
    with one_at_a_time(cached.with_suffix(".lock")):  # one of several processes scans, the others read the cache
        labels = _read_cache(cached, len(images), has_outlines(rules))
        if labels is None:
            labels = _scan(images, title, workers, rules, annotated)
            _write_cache(cached, labels)
    return labels


def check_classes(labels: Labels, images: Sequence[Path], classes: int, source: Path) -> None:
    """Raise a `UserError` that names the first row with a class outside of the data YAML's `names`, and its file.

    Args:
        classes: number of names
        source: the data YAML
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
        with suppress(ValueError, IndexError):  # a bad row
            if float(words[0]) == number:
                return f", line {line}"
    return ""


def _key(images: Sequence[Path], rules: RowRules | None, annotated: Sequence[AnnotatedImages]) -> str:
    """Return a hash of the paths, and of the `storage.stamps` of every image, label and annotation file."""
    names = list(map(os.fspath, images))
    digest = hashlib.sha256(f"{rules} {CACHE_VERSION} {len(names)}\0".encode())
    digest.update(Path(inspect.getfile(type(rules))).read_bytes() if rules else b"")  # the rules may be a user's
    digest.update(os.fsencode("\0".join(names)))
    digest.update(storage.stamps(names))
    if rules:
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
    images: Sequence[Path], title: str, workers: int, rules: RowRules | None, annotated: Sequence[AnnotatedImages]
) -> Labels:
    described: dict[str, ImageRows] = {}
    problems: list[str] = []
    for each in annotated:
        rows = each.rows(has_outlines(rules))
        described = {**rows.images, **described}  # if two files describe an image, the first counts
        problems += rows.problems
    items = [(image, described.get(os.fspath(image))) for image in images]
    chunks = [items[start : start + FILES_PER_CHUNK] for start in range(0, len(items), FILES_PER_CHUNK)]
    parts: list[Labels] = []
    with tqdm(total=len(images), desc=f"checking {title}", unit="image", disable=None, leave=False) as bar:
        for part in _map_chunks(partial(_scan_chunk, rules), chunks, workers):
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
    """Yield the labels of each chunk, in order. Processes are started once there proves to be enough work for them."""
    start = time.monotonic()
    for done, chunk in enumerate(chunks):
        elapsed, remaining = time.monotonic() - start, len(chunks) - done
        processes = min(workers, remaining, int(elapsed * remaining / done / MIN_SECONDS_PER_PROCESS) if done else 1)
        if processes > 1:
            with multiprocessing.Pool(processes) as pool:
                yield from pool.imap(scan, chunks[done:])
            return
        yield scan(chunk)


def _scan_chunk(rules: RowRules | None, images: Sequence[Scanned]) -> Labels:
    unread = [(os.fspath(image), rows) for image, rows in images if storage.image_size(image) is None]
    labels = [storage.label_name(name) for name, rows in unread if rows is None and rules]
    storage.prefetch([*(name for name, _ in unread), *labels])
    scans = [scan_image(image, rules, described) for image, described in images]
    outlines = [outline for scan in scans for outline in scan.outlines]
    return Labels(
        np.concatenate([scan.rows for scan in scans]),
        offsets_of([len(scan.rows) for scan in scans]),
        np.array([scan.size for scan in scans], np.int32),
        tuple(problem for scan in scans for problem in scan.problems),
        Polygons.of(outlines) if has_outlines(rules) else None,
    )


class Scan(NamedTuple):
    """The result for one image and its label file; see `Labels`.

    Attributes:
        size: width and height in pixels as displayed, (0, 0) if the image is left out
        rows: class and normalised xywh, float32 (k, 5)
        problems: sentences about what is left out
        outlines: outline of each row, (points, 2), if requested
    """

    size: tuple[int, int] = (0, 0)
    rows: np.ndarray = np.zeros((0, 5), np.float32)
    problems: Sequence[str] = ()
    outlines: Sequence[np.ndarray] = ()


def scan_image(image: Path, rules: RowRules | None = BOXES, described: ImageRows | None = None) -> Scan:
    """Check one image and its label file. A bad image or row is left out and reported as a problem.

    An image is left out too if its label file cannot be read, or has rows but no valid one.

    Args:
        rules: rules for the rows; None to read no labels
        described: objects of an image without a label file
    """
    name = remote.shown_path(image)
    try:
        size = image_size(image)
    except StorageError:
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged file
        return Scan(problems=[f"{name}: not readable as an image ({error}); left out"])
    if min(size) < MIN_IMAGE_SIDE_PIXELS:
        return Scan(problems=[f"{name}: {size[0]}x{size[1]} pixels, smaller than {MIN_IMAGE_SIDE_PIXELS}; left out"])
    if rules is None:
        return Scan(size)
    try:
        labels = described or _read_label_file(image, rules)
    except FileNotFoundError:
        return Scan(size)  # background
    except (OSError, UnicodeDecodeError) as error:
        file = remote.shown_path(storage.label_name(os.fspath(image)))
        return Scan(problems=[f"{file}: cannot be read as text ({error}); its image is left out"])
    if labels.size and not _have_one_shape(size, labels.size):
        sizes = f"{size[0]}x{size[1]} pixels, but its annotation is for {labels.size[0]}x{labels.size[1]}"
        return Scan(problems=[f"{name}: {sizes}; left out"])
    row_rules = replace(rules, keypoints=0) if described else rules  # only label files have key points
    rows, problems = parse_rows(labels.text, labels.origin, row_rules, labels.ids)
    if problems and not rows:  # it may have objects, so it is not background
        file = f"annotations of {name}" if described else labels.origin
        return Scan(problems=[*problems, f"{file}: no row can be used; its image is left out"])
    outlines = [points_of(row.points) for row in rows] if rules.outlines else ()
    return Scan(size, np.array([row.box for row in rows], np.float32).reshape(-1, 5), problems, outlines)


def _read_label_file(image: Path, rules: RowRules) -> ImageRows:
    """Return the content of an image's label file. Raises OSError or UnicodeDecodeError if it cannot be read."""
    file = storage.label_name(os.fspath(image))
    storage.require_regular_file(file)
    text = storage.read_label(file, rules.outlines).decode("utf-8-sig")
    return ImageRows(text, None, remote.shown_path(file), ())


def _have_one_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two sizes have the same aspect ratio, up to the rounding of a pixel."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= max(*one, *other)
