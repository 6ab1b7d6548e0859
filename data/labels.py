"""Label files: the rules of their rows, the scan of all images in parallel, and its cache away from the data."""

from __future__ import annotations

import hashlib
import inspect
import io
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.images import image_size, read_pixels, stacked_files
from data.polygons import Polygons, part_offsets
from utils.batch import PHOTOS, PixelFormat, path_texts
from utils.console import log
from utils.errors import UserError, plural, quoted
from utils.files import cache_folder, one_at_a_time, read_regular, read_text, replacing

if TYPE_CHECKING:
    from data.formats import AnnotatedImages

CACHE_VERSION = 12
IMAGES_PER_CHUNK = 64  # images that a scanning process takes at a time
IMAGES_PER_PROCESS = 500  # with fewer, starting another process takes longer than it saves
MIN_IMAGE_SIDE_PIXELS = 10  # a smaller image is left out
COORDINATE_TOLERANCE = 1e-3  # how far outside [0, 1] a coordinate may be by rounding
OUTLINE_TOLERANCE = 0.01  # how far outside an outline's points may be; they are moved to the image's edge
MAX_CLASS = 2**20  # exclusive bound of a class, which float32 holds exactly
MIN_OUTLINE_WIDTH = 1e-5  # share of a side: an outline that is narrower is a line
NO_ROWS = np.zeros((0, 5), np.float32)
_is_folder = lru_cache(None)(os.path.isdir)  # each folder of label files is looked for once


# Rows


@dataclass(frozen=True)
class RowRules:
    """The rules by which a data set reads the rows of label files; they are part of the label cache's key."""

    noun: str = "outline"  # word for a row's points in messages
    forms: str = "5 (box) or an odd count from 7 (polygon)"  # numbers of a row, in messages
    outlines: bool = False  # whether the points are read too, not only the box around them
    by_points: bool = False  # whether an object is its points: equal rows have the same, and its box is around them
    tolerance: float = OUTLINE_TOLERANCE  # how far outside of [0, 1] the coordinates of points may be, below 1
    keypoints: int = 0  # numbers of key points that may follow a box, which are not used; if any, no row is a polygon
    boxed: bool = False  # whether a polygon may follow its own box, as in an annotation that has both
    pixels: PixelFormat = PHOTOS  # of the images

    def outline(self, values: list[float]) -> list[float]:
        """Return the coordinates x1 y1 x2 y2 ... of a row, [] for a box, moved to the edge unless nearly inside.

        Raises ValueError with the reason if the row is invalid, as are points on one line if the object is its points.
        """
        if not all(-COORDINATE_TOLERANCE <= value <= 1 + COORDINATE_TOLERANCE for value in values):
            values = [min(max(value, 0.0), 1.0) for value in values]
        if self.by_points and values:
            x, y = (as_points(values) - as_points(values)[0]).astype(np.float64).T
            farthest = np.argmax(x * x + y * y)
            across = np.abs(x * y[farthest] - y * x[farthest]).max()  # distance from the line, times the line's length
            if across < MIN_OUTLINE_WIDTH * np.hypot(x[farthest], y[farthest]):
                raise ValueError(f"the {self.noun} has no area")
        return values


BOXES = RowRules()
POLYGONS = RowRules(outlines=True)  # boxes, and the outlines of those that have one
OUTLINES = RowRules(outlines=True, by_points=True)


class Row(NamedTuple):
    """A row of a label file, normalised."""

    box: tuple[float, float, float, float, float]  # class and xywh
    points: list[float]  # x1 y1 x2 y2 ...; [] for a box


def as_points(values: Sequence[float]) -> np.ndarray:
    """Return coordinates x1 y1 x2 y2 ... as points, float32 (k, 2)."""
    return np.array(values, np.float32).reshape(-1, 2)


def parse_rows(
    text: str, file: Path | str, rules: RowRules = BOXES, ids: Sequence[Any] = ()
) -> tuple[list[Row], list[str]]:
    """Return the rows of a label file in its order, and problems with lines that are left out.

    Args:
        file: label file, or the `origin` of `ImageRows`, for messages
        ids: name of each line in messages, as in `ImageRows`, instead of its number
    """
    rows: dict[tuple[float, ...], Row] = {}
    problems = []
    for number, words in enumerate(map(str.split, text.split("\n")), 1):
        if not words:
            continue
        try:
            row = _parse_row(words, rules)
            key = (*row.box, *row.points) if rules.by_points else row.box
            if key in rows:
                raise ValueError(f"the same {rules.noun if key[5:] else 'box'} again")
            rows[key] = row
        except ValueError as error:
            source = f"{file} {ids[number - 1]}" if ids else f"{file}, line {number}"
            problems.append(f"{source}: {error}; row left out")
    return list(rows.values()), problems


def _parse_row(words: Sequence[str], rules: RowRules) -> Row:
    """Return the row that the words of a line describe. Raises ValueError with the reason if they are invalid."""
    text = "".join(words)
    try:
        label, *values = map(float, words if text.isascii() and "_" not in text else "_")  # float reads 1_0 as 10
    except ValueError:
        raise ValueError("not all words are numbers") from None
    if rules.keypoints and len(values) == 4 + rules.keypoints:
        values = values[:4]
    box, values = (values[:4], values[4:] or values[:4]) if rules.boxed else ([], values)
    is_box, visible = len(values) == 4, values[6::3]  # is each key point visible, if they are after a box: 0, 1 or 2
    is_pose = len(values) % 3 == 1 and {*visible} <= {0, 1, 2} and not rules.keypoints
    if not is_box and (rules.keypoints or len(values) < 6 or len(values) % 2 or (is_pose and 2 in visible)):
        shape = f"; key points need `kpt_shape: [{len(visible)}, 3]` in a data YAML" * (is_pose and len(visible) > 0)
        raise ValueError(f"{len(words)} numbers instead of {rules.forms}{shape}")
    if not 0 <= label == label // 1 < MAX_CLASS:
        raise ValueError(f"class {quoted(words[0])} is not a whole number from 0")
    tolerance = COORDINATE_TOLERANCE if is_box else rules.tolerance
    if not all(-tolerance <= value <= 1 + tolerance for value in values):
        raise ValueError("coordinates outside 0 to 1 (they are shares of the image's width and height, not pixels)")
    points = rules.outline([] if is_box else values) if rules.outlines or not is_box else []
    x, y, width, height = box or (values if is_box else box_around(points))
    if width <= 0 or height <= 0:
        raise ValueError("the box has no area")
    return Row((label, x, y, width, height), points)


def box_around(points: Sequence[float]) -> Sequence[float]:
    """Return centre and size of the box around x1 y1 x2 y2 ..."""
    xs, ys = points[0::2], points[1::2]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    return (low_x + high_x) / 2, (low_y + high_y) / 2, high_x - low_x, high_y - low_y


def label_name(image: str) -> str:
    """Return the path of an image's label file: the last folder `images` becomes `labels`, and the suffix .txt.

    Without that folder `labels`, it is a file beside the image if there is one.
    """
    beside = f"{os.path.splitext(image)[0]}.txt"
    before, images, after = f"{os.sep}{beside}".rpartition(f"{os.sep}images{os.sep}")
    if not images:
        return beside
    name = f"{before}{os.sep}labels{os.sep}{after}"[len(os.sep) :]
    return name if _is_folder(os.path.dirname(name)) or not os.path.isfile(beside) else beside


# All images of a split


@dataclass(frozen=True)
class Labels:
    """The labels of n images in flat arrays, which loader processes share; objects would be copied into each."""

    rows: np.ndarray  # class and normalised xywh, float32 (m, 5)
    offsets: np.ndarray  # int64 (n + 1); image i has rows offsets[i] to offsets[i + 1]
    sizes: np.ndarray  # int32 (n, 2), width and height in pixels as displayed, (0, 0) if the image is left out
    problems: tuple[str, ...]  # sentences about what is left out
    polygons: Polygons | None = None  # outlines of the rows, if requested and if there are any

    @staticmethod
    def of_image(
        size: tuple[int, int],
        rows: np.ndarray = NO_ROWS,
        problems: Sequence[str] = (),
        polygons: Polygons | None = None,
    ) -> Labels:
        """Return the labels of one image; its `size` is (0, 0) if it is left out."""
        return Labels(rows, np.array((0, len(rows))), np.array([size], np.int32), tuple(problems), polygons)

    @staticmethod
    def concatenate(parts: Sequence[Labels]) -> Labels:
        """Return the labels of all images of `parts`, which must not be empty."""
        if len(parts) == 1:
            return parts[0]
        outlines = (part.polygons or Polygons.from_outlines([as_points(())] * len(part.rows)) for part in parts)
        return Labels(
            np.concatenate([part.rows for part in parts]),
            part_offsets(np.concatenate([part.counts for part in parts])),
            np.concatenate([part.sizes for part in parts]),
            tuple(problem for part in parts for problem in part.problems),
            Polygons.concatenate([*outlines]) if any(part.polygons for part in parts) else None,
        )

    def image_rows(self, index: int) -> np.ndarray:
        """Return the rows of one image, (k, 5)."""
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of rows of each image, (n,)."""
        return self.offsets[1:] - self.offsets[:-1]  # for one image faster than np.diff

    def subset(self, chosen: np.ndarray) -> Labels:
        """Return the labels of the images for which `chosen`, bool (n,), is true."""
        chosen_rows = np.repeat(chosen, self.counts)
        polygons = self.polygons and self.polygons.subset(chosen_rows)
        offsets = part_offsets(self.counts[chosen])
        return replace(self, rows=self.rows[chosen_rows], offsets=offsets, sizes=self.sizes[chosen], polygons=polygons)


class ImageRows(NamedTuple):
    """The objects of an image."""

    text: str  # rows as in a label file, or `boxed`: see `RowRules`
    size: tuple[int, int] | None  # width and height that an annotation gives, if it does
    origin: str  # label file, or start of a message about row k that `ids[k]` follows
    ids: Sequence[Any] = ()  # id of each row's annotation; () for a label file


def load_labels(
    images: Sequence[Path],
    title: str,
    workers: int,
    rules: RowRules | None = BOXES,
    annotated: Sequence[AnnotatedImages] = (),
) -> Labels:
    """Return the labels of `images` from the cache if no file has changed, else scan them. Raises `UserError`.

    Without `rules` no labels are read; those of `annotated` images are not in label files.
    """
    cached = cache_folder() / "labels" / f"{_key(images, rules, annotated)}.npz"
    with one_at_a_time(cached.with_suffix(".lock")):  # one of several processes scans, the others read the cache
        labels = _read_cache(cached)
        if labels is None:
            labels = _scan(images, title, workers, rules, annotated)
            arrays = {"rows": labels.rows, "offsets": labels.offsets, "sizes": labels.sizes}
            if labels.polygons:
                arrays |= {"points": labels.polygons.points, "ends": labels.polygons.offsets}
            try:
                with replacing(cached) as file:
                    np.savez(file, problems=np.array(labels.problems, np.str_), **arrays)  # type: ignore[arg-type]
            except OSError as error:
                log(f"warning: {cached} cannot be written ({error.strerror}): the next start checks the labels again")
    return labels


def check_classes(
    labels: Labels, images: Sequence[Path], classes: int, source: Path, annotated: Iterable[AnnotatedImages] = ()
) -> None:
    """Raise a `UserError` for the first row with a class outside of the `classes` names of the data YAML `source`."""
    wrong_rows = np.flatnonzero(labels.rows[:, 0] >= classes)
    if not len(wrong_rows):
        return
    image = os.fspath(images[int(np.searchsorted(labels.offsets, wrong_rows[0], side="right")) - 1])
    file = next((part.images[image] for part in annotated if image in part.images), label_name(image))
    class_id = int(labels.rows[wrong_rows[0], 0])
    words = (line.split()[:1] for line in read_text(file).split("\n"))
    lines = [number for number, word in enumerate(words, 1) if word in ([f"{class_id}"], [f"{class_id}.0"])]
    line = f", line {lines[0]}" if lines else ""
    fix = "fix the label or add the class"
    if labels.rows[:, 0].min() == 1 and labels.rows[:, 0].max() == classes:
        fix = "the labels count from 1, but classes count from 0: subtract 1"
    raise UserError(
        f"{file}{line} has class {class_id}, but `names` of {source} ends at {classes - 1}; "
        f"{fix} ({plural(len(wrong_rows), 'such row')} in all)"
    )


def _key(images: Sequence[Path], rules: RowRules | None, annotated: Sequence[AnnotatedImages]) -> str:
    """Return a hash of the paths, and of the `file_stamps` of every image, label and annotation file."""
    names, folders = path_texts(images), rules.pixels.folders if rules else ()
    digest = hashlib.sha256(f"{rules} {CACHE_VERSION} {len(names)}\0".encode())
    digest.update(Path(inspect.getfile(type(rules))).read_bytes() if rules else b"")  # the rules may be a user's
    digest.update(os.fsencode("\0".join(names)))
    stacked = (os.fspath(file) for image in (images if folders else ()) for file in stacked_files(image, folders)[1:])
    digest.update(file_stamps(chain(names, stacked)))
    if rules:
        for split in annotated:
            digest.update(split.stamp())
            names = [name for name in names if name not in split.images]
        digest.update(file_stamps(map(label_name, names)))
    return digest.hexdigest()[:32]


def file_stamps(paths: Iterable[str]) -> bytes:
    """Return bytes that change with the content of any of the files, which may be absent; every process has the same.

    A program may set the modification time back after an edit, but not the change time.
    """
    stamps: list[tuple[int, ...]] = []
    for path in paths:
        try:
            status = os.stat(path)
            stamps.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        except (OSError, ValueError):  # the latter for a name that no file can have
            stamps.append(())
    return repr(stamps).encode()


def _read_cache(path: Path) -> Labels | None:
    """Return cached labels, or None if the file is absent or damaged."""
    try:
        with np.load(io.BytesIO(read_regular(path)), allow_pickle=False) as file:
            arrays = dict(file)
        polygons = Polygons(arrays["points"], arrays["ends"]) if "ends" in arrays else None
        problems = tuple(map(str, arrays["problems"]))
        return Labels(arrays["rows"], arrays["offsets"], arrays["sizes"], problems, polygons)
    except Exception:  # numpy and zipfile raise many kinds for a damaged file
        return None


def _scan(
    images: Sequence[Path], title: str, workers: int, rules: RowRules | None, annotated: Sequence[AnnotatedImages]
) -> Labels:
    described: dict[str, ImageRows] = {}
    problems: list[str] = []
    for split in annotated:
        rows, split_problems = split.rows(rules or BOXES)
        described = {**rows, **described}  # if two files describe an image, the first counts
        problems += split_problems
    items = [(image, rules, described.get(os.fspath(image))) for image in images]
    chunks = [items[start : start + IMAGES_PER_CHUNK] for start in range(0, len(items), IMAGES_PER_CHUNK)]
    processes = min(workers, len(images) // IMAGES_PER_PROCESS)
    with multiprocessing.Pool(processes) if processes > 1 else nullcontext() as pool:
        scanned = pool.imap(_scan_chunk, chunks) if pool else map(_scan_chunk, chunks)
        bar: Any = {"unit": "image", "unit_scale": IMAGES_PER_CHUNK, "disable": None, "leave": False}
        labels = Labels.concatenate(list(tqdm(scanned, f"checking {title}", len(chunks), **bar)))
    if rules and rules.by_points and not labels.polygons:
        labels = replace(labels, polygons=Polygons.from_outlines([as_points(())] * len(labels.rows)))
    return replace(labels, problems=(*problems, *labels.problems))


def _scan_chunk(items: Sequence[tuple[Path, RowRules | None, ImageRows | None]]) -> Labels:
    return Labels.concatenate([scan_image(*item) for item in items])


def scan_image(image: Path, rules: RowRules | None = BOXES, described: ImageRows | None = None) -> Labels:
    """Check an image and its label file or annotations. It is left out if bad, or if it has rows but no valid one."""
    restored: list[str] = []
    pixels = rules.pixels if rules else PHOTOS
    try:
        size = image_size(image, restored.append) if pixels == PHOTOS else read_pixels(image, pixels).shape[1::-1]
    except Exception as error:  # Pillow raises many kinds for a damaged file
        reason = getattr(error, "strerror", None) or error
        fault = f"{image}: not readable as an image ({reason})" if pixels == PHOTOS else error
        return Labels.of_image((0, 0), problems=[f"{fault}; left out"])
    measured = f"{image}: {size[0]}x{size[1]} pixels"
    if min(size) < MIN_IMAGE_SIDE_PIXELS:
        return Labels.of_image((0, 0), problems=[f"{measured}, smaller than {MIN_IMAGE_SIDE_PIXELS}; left out"])
    if rules is None:
        return Labels.of_image(size, problems=restored)
    file = label_name(os.fspath(image))
    try:
        labels = described or ImageRows(read_text(file), None, file)
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return Labels.of_image(size, problems=restored)  # background
        return Labels.of_image((0, 0), problems=[f"{error}; its image is left out"])
    if labels.size and abs(size[0] * labels.size[1] - size[1] * labels.size[0]) > max(*size, *labels.size):
        annotated = f"{labels.size[0]}x{labels.size[1]}"  # another aspect ratio, by more than the rounding of a pixel
        return Labels.of_image((0, 0), problems=[f"{measured}, but its annotation is for {annotated}; left out"])
    if labels.ids:  # only label files have key points
        rules = replace(rules, keypoints=0, boxed=rules.outlines and not rules.by_points)
    rows, problems = parse_rows(labels.text, labels.origin, rules, labels.ids)
    if problems and not rows:  # it may have objects, so it is not background
        origin = f"annotations of {image}" if described else file
        return Labels.of_image((0, 0), problems=[*problems, f"{origin}: no row can be used; its image is left out"])
    boxes, outlines = np.array([row.box for row in rows], np.float32).reshape(-1, 5), None
    if rules.outlines and any(row.points for row in rows):
        outlines = Polygons.from_outlines([as_points(row.points) for row in rows])
        outlines = outlines.fitted(boxes[:, 1:]) if rules.boxed else outlines
    return Labels.of_image(size, boxes, [*restored, *problems], outlines)
