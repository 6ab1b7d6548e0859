"""The built-in data set "shapes": objects told apart by shape alone, drawn from a seed in a few seconds.

Every image has its own generator, `numpy.random.default_rng([seed, split, index])`, so that any image can be drawn
again without the others. On one machine the same seed gives the same bytes; another OpenCV build may round a few pixels
or encode a JPEG otherwise.

    python -m data.shapes [--folder datasets/shapes] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from utils.errors import UserError

DRAWING = 1  # raise it with every change that alters a pixel or a label: it tells folders of older drawings apart
SIDE = 160  # pixels, height and width of every image
SPLITS = ("train", "val")  # a split's number is its place here
MARKER = "shapes.json"  # in the data set's folder: which drawing this is

_FINE = 4  # sub-pixels per pixel along one side while a shape is drawn
_SHIFT = 4  # fractional bits of OpenCV's drawing coordinates, so a vertex lies on a grid of 1/64 pixel
_SIZES = (8.3, 99.5)  # pixels, a box's longer side; filling adds up to one sub-pixel, so boxes stay within 8 to 100
_LARGER = 0.6  # 1 draws sizes log-uniformly; below 1 favours large ones, since crowding turns some of these into small
_OUTLINED = 24.0  # pixels; on smaller shapes an outline would hide the shape
_EMPTY = 0.02  # share of images without any object
_CLIPPED = 0.12  # share of objects that may reach over the image's border
_INSIDE = 0.8  # share of its own pixels that such an object must keep inside the image
_COVERED = 0.3  # share of an object's pixels that all others together may share with it, in whatever order painted
_BOX_IOU = 0.3  # largest IoU of two boxes in one image
_CONTRAST = 80.0  # grey levels; see `_contrast`
_TRIES = 30  # places tried before an object is made smaller

Rng = np.random.Generator
Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
Contours = list[np.ndarray]  # each (k, 2) float64 x, y in any unit; a pixel inside an odd number of contours is filled


def _circle(radius: float = 1.0) -> np.ndarray:
    """A circle around the origin as a polygon (64, 2), fine enough for 100 pixels."""
    angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _mirrored(corners: list[tuple[float, float]]) -> np.ndarray:
    """The outline (2k, 2) whose right half is `corners` from top to bottom, mirrored at the y axis."""
    right = np.array(corners)
    return np.concatenate([right, right[::-1] * (-1.0, 1.0)])


def _disc(rng: Rng) -> Contours:
    return [_circle() * (1.0, rng.uniform(0.85, 1.0))]


def _ring(rng: Rng) -> Contours:
    return [_circle(), _circle(rng.uniform(0.5, 0.65))]


def _square(rng: Rng) -> Contours:
    return [np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (1.0, rng.uniform(0.85, 1.0))]


def _triangle(rng: Rng) -> Contours:
    return [np.array([[0, -1], [0.866, 0.5], [-0.866, 0.5]]) * (1.0, rng.uniform(0.9, 1.2))]


def _cross(rng: Rng) -> Contours:
    a = rng.uniform(0.24, 0.34)
    return [_mirrored([(a, -1), (a, -a), (1, -a), (1, a), (a, a), (a, 1)])]


def _bar(rng: Rng) -> Contours:
    a = rng.uniform(0.3, 0.42)
    return [_mirrored([(a, -1), (a, 1)])]


_SHAPES: dict[str, Callable[[Rng], Contours]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "bar": _bar,
}
NAMES: tuple[str, ...] = tuple(_SHAPES)


@dataclass
class Stencil:
    """One shape cut to its own extent, not yet placed.

    `fine` is (4 h, 4 w) uint8 in sub-pixels, 0 or 255; `fill` and `line` are (h, w) float32, the share of each pixel
    that the whole shape and its outline cover.
    """

    label: int
    fine: np.ndarray
    fill: np.ndarray
    line: np.ndarray


@dataclass
class _Object:
    """A stencil at a whole pixel (`left`, `top`), which may lie outside the image.

    `mask` is (160, 160) bool, every pixel that the shape touches; `box` is what the image shows, in steps of 1/4 pixel.
    """

    stencil: Stencil
    left: int
    top: int
    mask: np.ndarray
    box: Box


def _fitted(contours: Contours, size: float, angle: float) -> Contours:
    """`contours` turned by `angle` radians about the origin, scaled to a box with the longer side `size`, centred."""
    cos, sin = np.cos(angle), np.sin(angle)
    turned = [points @ np.array([[cos, sin], [-sin, cos]]) for points in contours]
    every = np.concatenate(turned)
    low, high = every.min(axis=0), every.max(axis=0)
    return [(points - (low + high) / 2) * (size / (high - low).max()) for points in turned]


def draw_stencil(rng: Rng, label: int, size: float) -> Stencil:
    """Draw the shape number `label`, `size` pixels long, at a random angle, variant and offset within one pixel."""
    thick = rng.uniform(0.04, 0.07) * size if size >= _OUTLINED and rng.random() < 0.4 else 0.0
    contours = _fitted(_SHAPES[NAMES[label]](rng), size - thick, rng.uniform(0, 2 * np.pi))
    pixels = int(np.ceil(size)) + 4
    centre = _FINE * (pixels / 2 + rng.uniform(-0.5, 0.5, 2)) - 0.5  # OpenCV's whole numbers are middles of sub-pixels
    points = [np.round((c * _FINE + centre) * (1 << _SHIFT)).astype(np.int32) for c in contours]
    line = np.zeros((pixels * _FINE, pixels * _FINE), np.uint8)
    if thick:
        cv2.polylines(line, points, True, 255, max(round(thick * _FINE), 1), cv2.LINE_8, _SHIFT)
    whole = line.copy()
    cv2.fillPoly(whole, points, 255, cv2.LINE_8, _SHIFT)
    return _cut(label, whole, line)


def _cut(label: int, whole: np.ndarray, line: np.ndarray) -> Stencil:
    """Cut both drawings, (4 n, 4 n) uint8, to the pixels that the shape touches."""
    left, top, wide, high = cv2.boundingRect(whole)
    x1, y1 = left // _FINE, top // _FINE
    width, height = -(-(left + wide) // _FINE) - x1, -(-(top + high) // _FINE) - y1
    cut = np.s_[y1 * _FINE : (y1 + height) * _FINE, x1 * _FINE : (x1 + width) * _FINE]

    def coverage(drawing: np.ndarray) -> np.ndarray:
        return cv2.resize(drawing[cut].astype(np.float32) / 255, (width, height), interpolation=cv2.INTER_AREA)

    return Stencil(label, whole[cut], coverage(whole), coverage(line))


def _seen(stencil: Stencil, left: int, top: int, side: int) -> tuple[int, int, int, int]:
    """The part (x1, y1, x2, y2) of a square image, in whole pixels, that the stencil takes up at (`left`, `top`)."""
    height, width = stencil.fill.shape
    return max(left, 0), max(top, 0), min(left + width, side), min(top + height, side)


def _put(stencil: Stencil, left: int, top: int) -> _Object | None:
    """The stencil at (`left`, `top`), or None where too little of it lies inside the image. The box is what is seen."""
    x1, y1, x2, y2 = _seen(stencil, left, top, SIDE)
    fine = stencil.fine[(y1 - top) * _FINE : (y2 - top) * _FINE, (x1 - left) * _FINE : (x2 - left) * _FINE]
    if np.count_nonzero(fine) < _INSIDE * np.count_nonzero(stencil.fine):
        return None
    x, y, wide, high = cv2.boundingRect(fine)
    box = (x1 + x / _FINE, y1 + y / _FINE, x1 + (x + wide) / _FINE, y1 + (y + high) / _FINE)
    mask = np.zeros((SIDE, SIDE), bool)
    mask[y1:y2, x1:x2] = stencil.fill[y1 - top : y2 - top, x1 - left : x2 - left] > 0
    return _Object(stencil, left, top, mask, box)


def _iou(one: Box, other: Box) -> float:
    """IoU of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (one, other)]
    return width * height / (sum(areas) - width * height)


def _fits(new: _Object, placed: list[_Object]) -> bool:
    """Whether `new` leaves enough of itself and of every placed object to see, in whatever order they are painted."""
    overlaps = [_iou(new.box, old.box) for old in placed]
    if max(overlaps, default=0.0) > _BOX_IOU:
        return False
    touched = [old.mask for old, overlap in zip(placed, overlaps, strict=True) if overlap > 0]
    if not touched:
        return True
    shared = np.sum([old.mask for old in placed] + [new.mask], axis=0, dtype=np.uint8) > 1
    return all(np.count_nonzero(shared & m) <= _COVERED * np.count_nonzero(m) for m in [*touched, new.mask])


def _place_one(rng: Rng, label: int, size: float, placed: list[_Object]) -> _Object | None:
    """Find room for one shape; it is made smaller when there is none. None where even the smallest finds no room."""
    while size >= _SIZES[0]:
        stencil = draw_stencil(rng, label, size)
        height, width = stencil.fill.shape
        over = 0.25 if size >= _OUTLINED and rng.random() < _CLIPPED else 0.0  # of the box's side
        for _ in range(_TRIES):
            left = int(rng.integers(round(-over * width), round(SIDE - (1 - over) * width) + 1))
            top = int(rng.integers(round(-over * height), round(SIDE - (1 - over) * height) + 1))
            new = _put(stencil, left, top)
            if new is not None and _fits(new, placed):
                return new
        size *= 0.6
    return None


def _objects(rng: Rng) -> list[_Object]:
    """Choose and place an image's objects, in the order in which they are painted."""
    if rng.random() < _EMPTY:
        return []
    count = int(rng.integers(6, 13))
    share = rng.random(count) ** _LARGER
    placed: list[_Object] = []
    for size in _SIZES[0] * (_SIZES[1] / _SIZES[0]) ** np.sort(share)[::-1]:  # large ones first, while there is room
        new = _place_one(rng, int(rng.integers(len(NAMES))), float(size), placed)
        if new is not None:
            placed.append(new)
    return [placed[i] for i in rng.permutation(len(placed))]


def _noise(rng: Rng, cell: float, side: int) -> np.ndarray:
    """Value noise (side, side) float32, about -1..1, that varies over `cell` pixels."""
    knots = max(int(side / cell), 1) + 1
    grid = rng.uniform(-1, 1, (knots, knots)).astype(np.float32)
    return cv2.resize(grid, (side, side), interpolation=cv2.INTER_CUBIC)


def _wave(rng: Rng, angle: float, period: float, side: int) -> np.ndarray:
    """A sine (side, side) float32 in -1..1 along `angle` radians, `period` in pixels."""
    ys, xs = np.mgrid[:side, :side].astype(np.float32)
    along = xs * np.float32(np.cos(angle)) + ys * np.float32(np.sin(angle))
    return np.sin(along * np.float32(2 * np.pi / period) + np.float32(rng.uniform(0, 2 * np.pi)))


def _pattern(rng: Rng, side: int) -> np.ndarray:
    """A background's pattern (side, side) float32 in -1..1: gradient, noise, blotches, stripes or checks."""
    kind = rng.integers(5)
    angle = rng.uniform(0, np.pi)
    if kind == 0:
        return _wave(rng, angle, rng.uniform(2, 4) * side, side)
    if kind == 1:
        coarse = 0.7 * _noise(rng, rng.uniform(20, 60), side)
        return np.clip(coarse + 0.5 * _noise(rng, rng.uniform(4, 12), side), -1, 1)
    hard = rng.uniform(1, 6)  # 1 is a smooth change, 6 nearly an edge
    if kind == 2:
        return np.clip(hard * _noise(rng, rng.uniform(15, 50), side), -1, 1)
    period = np.exp(rng.uniform(np.log(5), np.log(50)))
    wave = _wave(rng, angle, period, side)
    if kind == 4:
        wave = wave * _wave(rng, angle + np.pi / 2, period, side)
    return np.clip(hard * wave, -1, 1)


def background(rng: Rng, side: int = SIDE) -> np.ndarray:
    """An image (side, side, 3) float32 without objects, in grey levels."""
    base = (rng.uniform(45, 210) + rng.uniform(-40, 40, 3)).astype(np.float32)
    # grey levels between the pattern's middle and either end
    swing = (rng.uniform(-30, 30) + rng.uniform(-12, 12, 3)).astype(np.float32)
    grain = rng.uniform(2, 10) * _noise(rng, rng.uniform(1.5, 8), side)
    light = rng.uniform(0, 20) * _wave(rng, rng.uniform(0, 2 * np.pi), rng.uniform(2, 5) * side, side)
    image = base + _pattern(rng, side)[..., None] * swing + (grain + light)[..., None]
    return np.clip(image, 0, 255)


def _contrast(colours: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Contrast (c, p) in grey levels of BGR colours (c, 3) against pixels (p, 3).

    A difference in colour alone counts for a third: JPEG halves the resolution of colour, and small shapes would blur.
    """
    apart = colours[:, None] - pixels[None]
    luma = np.abs(apart @ np.array([0.114, 0.587, 0.299]))
    return luma + np.abs(apart - apart.mean(axis=2, keepdims=True)).max(axis=2) / 3


def _fill_colour(rng: Rng, around: np.ndarray) -> np.ndarray:
    """A random colour (3,) that stands out against nearly all pixels of `around` (h, w, 3)."""
    pixels = rng.choice(around.reshape(-1, 3), 64)
    colours = rng.uniform(5, 250, (16, 3))
    worst = np.partition(_contrast(colours, pixels), 6, axis=1)[:, 6]  # one pixel in ten may be closer: a neighbour's
    enough = np.flatnonzero(worst >= _CONTRAST)
    return colours[enough[0] if len(enough) else worst.argmax()]


def paint(rng: Rng, image: np.ndarray, stencil: Stencil, left: int, top: int) -> None:
    """Paint one shape at (`left`, `top`) onto the square `image` (side, side, 3) float32, in place."""
    x1, y1, x2, y2 = _seen(stencil, left, top, len(image))
    own = np.s_[y1 - top : y2 - top, x1 - left : x2 - left]
    window = image[y1:y2, x1:x2]
    colour = _fill_colour(rng, image[max(y1 - 2, 0) : y2 + 2, max(x1 - 2, 0) : x2 + 2])
    across, down = rng.uniform(-12, 12, 2)  # grey levels of shading between the shape's middle and its sides
    height, width = stencil.fill.shape
    shade = np.linspace(-across, across, width)[None, :] + np.linspace(-down, down, height)[:, None]
    fill, line = stencil.fill[own][..., None], stencil.line[own][..., None]
    edge = np.clip(colour * rng.uniform(0.3, 1.7), 0, 255)
    window += fill * (colour + shade[own][..., None] - window)
    window += line * (edge - window)


def photograph(rng: Rng, image: np.ndarray) -> np.ndarray:
    """What a camera makes of `image`: blur, change of contrast and brightness, sensor noise; as uint8."""
    image = cv2.GaussianBlur(image, (5, 5), rng.uniform(0.2, 0.7))
    image = (image - 128) * rng.uniform(0.75, 1.1) + 128 + rng.uniform(-20, 20)
    image = image + rng.uniform(0, 7) * rng.standard_normal(image.shape, np.float32)
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def encode(rng: Rng, image: np.ndarray) -> bytes:
    """`image` as a JPEG of a random quality, 70 to 95."""
    done, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(70, 96))])
    if not done:
        raise RuntimeError("OpenCV could not encode a JPEG")
    return jpeg.tobytes()


def draw_image(seed: int, split: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw one image, (160, 160, 3) uint8 BGR, and its labels, (n, 5) float32 rows of class, xc, yc, w, h in 0..1."""
    rng = np.random.default_rng([seed, split, index])
    image = background(rng)
    objects = _objects(rng)
    for new in objects:
        paint(rng, image, new.stencil, new.left, new.top)
    labels = np.zeros((len(objects), 5), np.float32)
    for row, new in zip(labels, objects, strict=True):
        x1, y1, x2, y2 = new.box
        row[:] = (new.stencil.label, (x1 + x2) / 2 / SIDE, (y1 + y2) / 2 / SIDE, (x2 - x1) / SIDE, (y2 - y1) / SIDE)
    return photograph(rng, image), labels


def _write_image(folder: Path, seed: int, split: int, index: int) -> None:
    """Draw one image and write its JPEG and its label file, which is empty for an image without objects."""
    image, labels = draw_image(seed, split, index)
    rng = np.random.default_rng([seed, split, index, 1])  # of its own: `draw_image` has no part in encoding
    name = f"{SPLITS[split]}/{index:06d}"
    (folder / "images" / f"{name}.jpg").write_bytes(encode(rng, image))
    rows = [f"{int(row[0])} " + " ".join(f"{value:.6f}" for value in row[1:]) + "\n" for row in labels]
    (folder / "labels" / f"{name}.txt").write_text("".join(rows), encoding="utf-8")


@dataclass(frozen=True)
class Kind:
    """What sets one built-in data set apart from another on disk. In a folder's path `{}` is the name of the split."""

    name: str  # what messages call it
    drawing: int
    marker: str
    images: tuple[str, ...]  # folders: image `index` lies in number `index` modulo how many there are
    labels: tuple[str, ...]  # folders of label files
    write: Callable[[Path, int, int, int], None]  # draw one image into the data set's folder by seed, split and index


def _write_all(folder: Path, kind: Kind, marker: dict[str, object], seed: int, counts: tuple[int, int]) -> None:
    """Draw every image into the new `folder`; the marker comes last."""
    for place in kind.images + kind.labels:
        for split in SPLITS:
            (folder / place.format(split)).mkdir(parents=True)
    work = [(split, index) for split, count in enumerate(counts) for index in range(count)]
    for number, index in tqdm(
        work, desc=f"drawing {kind.name}", unit="image", disable=None
    ):  # None: only on a terminal
        kind.write(folder, seed, number, index)
    (folder / kind.marker).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    os.sync()  # else a power cut soon after the rename could leave the final name on empty files


def _check(folder: Path, kind: Kind, marker: dict[str, object], counts: tuple[int, int]) -> None:
    """Raise `UserError` unless the existing `folder` holds the complete drawing that `marker` describes."""
    try:
        found = json.loads((folder / kind.marker).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"'{folder}' exists but is not a drawing of the {kind.name} data set (it has no readable {kind.marker}): "
            "remove it or name another folder"
        ) from None
    if found != marker:
        known = found if isinstance(found, dict) else {}
        keys = [key for key in marker | known if known.get(key) != marker.get(key)]
        raise UserError(
            f"'{folder}' holds another drawing of the {kind.name} data set (its {kind.marker} differs in "
            f"{', '.join(keys)}): remove it to have it drawn again, or name another folder"
        )
    for split, total in zip(SPLITS, counts, strict=True):
        for first, place in enumerate(kind.images):
            path, count = place.format(split), len(range(first, total, len(kind.images)))
            there = len(list((folder / path).glob("*.jpg")))
            if there != count:
                raise UserError(
                    f"'{folder}' is damaged ({there} instead of {count} images in {path}): "
                    "remove it to have it drawn again"
                )


def draw_kind(kind: Kind, folder: Path, seed: int, counts: tuple[int, int]) -> Path:
    """Draw `kind` into `folder`, `counts` images by split, unless it is there already, and return `folder`.

    The images are drawn into a hidden folder beside it, `.<name>-<pid>-<random>`, which is then renamed: `folder` is
    complete or absent. Of several processes the first to rename wins and the others use its drawing. A process that is
    killed leaves its hidden folder behind; nothing reads it.

    Raises `UserError` where `folder` holds anything else than this drawing, or cannot be written. Nothing that was
    there before is changed or removed.
    """
    if seed < 0:
        raise UserError(f"seed {seed} is negative: give the {kind.name} data set a seed of 0 or more")
    sizes = dict(zip(SPLITS, counts, strict=True))
    marker: dict[str, object] = {"drawing": kind.drawing, "seed": seed, **sizes, "names": list(NAMES)}
    if not os.path.lexists(folder):
        try:
            _draw_beside(folder, kind, marker, seed, counts)
        except OSError as error:
            raise UserError(
                f"cannot write the {kind.name} data set to '{folder}' ({error.strerror}): free the space or the "
                "permission that it needs, or name another folder"
            ) from error
    _check(folder, kind, marker, counts)
    return folder


def _draw_beside(folder: Path, kind: Kind, marker: dict[str, object], seed: int, counts: tuple[int, int]) -> None:
    """Draw into a temporary folder and rename it to `folder`; leave `folder` alone where another process was faster."""
    # mkdtemp would make a folder that only its owner may read, and that mode would survive the rename
    part = folder.parent / f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        _write_all(part, kind, marker, seed, counts)
        try:
            os.rename(part, folder)
        except OSError:
            if not os.path.lexists(folder):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)  # after a rename there is nothing left to remove


_KIND = Kind("shapes", DRAWING, MARKER, ("images/{}",), ("labels/{}",), _write_image)


def draw_dataset(folder: Path, seed: int = 0, train: int = 640, val: int = 160) -> Path:
    """Draw the data set into `folder` unless it is there already, and return `folder`; see `draw_kind`."""
    return draw_kind(_KIND, folder, seed, (train, val))


def main() -> None:
    """Command line: draw the data set."""
    parser = argparse.ArgumentParser(description='Draw the built-in data set "shapes".')
    parser.add_argument("--folder", type=Path, default=Path("datasets/shapes"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s; data/shapes.yaml means 0")
    arguments = parser.parse_args()
    print(draw_dataset(arguments.folder, arguments.seed))
