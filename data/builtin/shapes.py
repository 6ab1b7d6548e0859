"""The built-in data set "shapes": objects whose class is their shape, drawn from a seed in a few seconds.

Every image has its own generator, by seed, split and index, so any image can be drawn alone. On one machine the same
seed gives the same bytes; another build of OpenCV may round a few pixels or encode a JPEG differently. Called by
data/data_yaml.py for `draw:` of a data YAML; shapes_cls.py and shapes_seg.py draw with these functions.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from utils.errors import UserError

DRAWING_VERSION = 1  # increase with every change of a pixel or a label: folders of older versions are refused
SIDE_PIXELS = 160  # height and width of every image
DRAWN_SPLITS = ("train", "val")  # a split's number is its index here
SUBPIXELS = 4  # sub-pixels per pixel along one side while a shape is drawn
FRACTION_BITS = 4  # fractional bits of OpenCV's drawing coordinates, so a vertex lies on a grid of 1/64 pixel
MIN_PIXELS, MAX_PIXELS = 8.3, 99.5  # a box's longer side; filling adds up to a sub-pixel: boxes stay within 8 to 100
SIZE_EXPONENT = 0.6  # 1 draws sizes log-uniformly; less favours large ones, as crowding shrinks some of these
OUTLINED_PIXELS = 24.0  # the outline of a smaller shape would hide it
EMPTY_SHARE = 0.02  # share of images without an object
CLIPPED_SHARE = 0.12  # share of objects that may extend beyond the image
MIN_INSIDE_SHARE = 0.8  # least share of such an object's pixels inside the image
MAX_HIDDEN_SHARE = 0.3  # largest share of an object's pixels that others touch too, in any order of painting
MAX_BOX_IOU = 0.3  # largest IoU of two boxes in one image
MIN_CONTRAST_LEVELS = 80.0  # grey levels; see `fill_colour`
POSITIONS_PER_SIZE = 30  # positions to try before an object is drawn smaller

Rng = np.random.Generator
Corners = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
Contours = list[np.ndarray]  # each (k, 2) float64 x, y in any unit; a pixel inside an odd number of contours is filled


def _bars(a: float, *corners: tuple[float, float]) -> np.ndarray:
    """Return the outline of an upright bar of half-width `a`; with `corners` on its right side, of a cross."""
    right = np.array([(a, -1), *corners, (a, 1)])
    return np.concatenate([right, right[::-1] * (-1.0, 1.0)])


_ANGLES = np.linspace(0, 2 * np.pi, 64, endpoint=False)
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)  # fine enough for 100 pixels
_SQUARE = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
_TRIANGLE = np.array([[0, -1], [0.866, 0.5], [-0.866, 0.5]])
_SHAPES: dict[str, Callable[[Rng], Contours]] = {
    "disc": lambda rng: [_CIRCLE * (1.0, rng.uniform(0.85, 1.0))],
    "ring": lambda rng: [_CIRCLE, rng.uniform(0.5, 0.65) * _CIRCLE],
    "square": lambda rng: [_SQUARE * (1.0, rng.uniform(0.85, 1.0))],
    "triangle": lambda rng: [_TRIANGLE * (1.0, rng.uniform(0.9, 1.2))],
    "cross": lambda rng: [_bars(a := rng.uniform(0.24, 0.34), (a, -a), (1, -a), (1, a), (a, a))],
    "bar": lambda rng: [_bars(rng.uniform(0.3, 0.42))],
}
NAMES: tuple[str, ...] = tuple(_SHAPES)


@dataclass
class Stencil:
    """A shape cropped to its extent, without a position."""

    label: int
    fine: np.ndarray  # (4 h, 4 w) uint8 in sub-pixels, 0 or 255
    fill: np.ndarray  # (h, w) float32, the share of each pixel that the whole shape covers
    line: np.ndarray  # (h, w) float32, the share that its outline covers

    def window(self, left: int, top: int, side: int) -> tuple[int, int, int, int]:
        """Return the part of a square image that the stencil covers at (`left`, `top`): x1, y1, x2, y2 in pixels."""
        height, width = self.fill.shape
        return max(left, 0), max(top, 0), min(left + width, side), min(top + height, side)


@dataclass
class PlacedShape:
    """A stencil at a position in an image."""

    stencil: Stencil
    left: int  # pixels, may be outside of the image
    top: int
    mask: np.ndarray  # (160, 160) bool, every pixel that the shape touches
    box: Corners  # around the visible part, in steps of 1/4 pixel


def draw_stencil(rng: Rng, label: int, size: float) -> Stencil:
    """Draw shape number `label`, `size` pixels long, with a random angle, variant and offset within one pixel."""
    thick = rng.uniform(0.04, 0.07) * size if size >= OUTLINED_PIXELS and rng.random() < 0.4 else 0.0
    contours, angle = _SHAPES[NAMES[label]](rng), rng.uniform(0, 2 * np.pi)
    cos, sin = np.cos(angle), np.sin(angle)
    contours = [points @ np.array([[cos, sin], [-sin, cos]]) for points in contours]
    low, high = np.concatenate(contours).min(axis=0), np.concatenate(contours).max(axis=0)
    contours = [(points - (low + high) / 2) * ((size - thick) / (high - low).max()) for points in contours]
    pixels = int(np.ceil(size)) + 4
    centre = SUBPIXELS * (pixels / 2 + rng.uniform(-0.5, 0.5, 2)) - 0.5  # OpenCV counts from a sub-pixel's centre
    points = [np.round((c * SUBPIXELS + centre) * (1 << FRACTION_BITS)).astype(np.int32) for c in contours]
    line = np.zeros((pixels * SUBPIXELS, pixels * SUBPIXELS), np.uint8)
    if thick:
        cv2.polylines(line, points, True, 255, max(round(thick * SUBPIXELS), 1), cv2.LINE_8, FRACTION_BITS)
    whole = line.copy()
    cv2.fillPoly(whole, points, 255, cv2.LINE_8, FRACTION_BITS)
    left, top, wide, high = cv2.boundingRect(whole)
    x1, y1 = left // SUBPIXELS, top // SUBPIXELS
    width, height = -(-(left + wide) // SUBPIXELS) - x1, -(-(top + high) // SUBPIXELS) - y1
    crop = np.s_[y1 * SUBPIXELS : (y1 + height) * SUBPIXELS, x1 * SUBPIXELS : (x1 + width) * SUBPIXELS]
    shrunk = [
        cv2.resize(d[crop] / np.float32(255), (width, height), interpolation=cv2.INTER_AREA) for d in (whole, line)
    ]
    return Stencil(label, whole[crop], *shrunk)


def place_at(stencil: Stencil, left: int, top: int) -> PlacedShape | None:
    """Place a stencil at (`left`, `top`); return None if too little of it is inside the image."""
    x1, y1, x2, y2 = stencil.window(left, top, SIDE_PIXELS)
    rows, columns = (
        slice((y1 - top) * SUBPIXELS, (y2 - top) * SUBPIXELS),
        slice((x1 - left) * SUBPIXELS, (x2 - left) * SUBPIXELS),
    )
    fine = stencil.fine[rows, columns]
    if np.count_nonzero(fine) < MIN_INSIDE_SHARE * np.count_nonzero(stencil.fine):
        return None
    x, y, wide, high = cv2.boundingRect(fine)
    box = (x1 + x / SUBPIXELS, y1 + y / SUBPIXELS, x1 + (x + wide) / SUBPIXELS, y1 + (y + high) / SUBPIXELS)
    mask = np.zeros((SIDE_PIXELS, SIDE_PIXELS), bool)
    mask[y1:y2, x1:x2] = stencil.fill[y1 - top : y2 - top, x1 - left : x2 - left] > 0
    return PlacedShape(stencil, left, top, mask, box)


def iou(one: Corners, other: Corners) -> float:
    """Return the IoU of two boxes."""
    width, height = (min(one[k + 2], other[k + 2]) - max(one[k], other[k]) for k in (0, 1))
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (sum((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (one, other)) - shared)


def _fits(new: PlacedShape, placed: list[PlacedShape]) -> bool:
    """Return whether enough of `new` and of every placed shape stays visible, in any order of painting."""
    overlaps = [iou(new.box, old.box) for old in placed]
    if max(overlaps, default=0.0) > MAX_BOX_IOU:
        return False
    touched = [old.mask for old, overlap in zip(placed, overlaps, strict=True) if overlap > 0]
    shared = np.sum([old.mask for old in placed] + [new.mask], axis=0, dtype=np.uint8) > 1
    return all(np.count_nonzero(shared & m) <= MAX_HIDDEN_SHARE * np.count_nonzero(m) for m in [*touched, new.mask])


def _find_room(rng: Rng, label: int, size: float, placed: list[PlacedShape], min_pixels: float) -> PlacedShape | None:
    """Place a shape, smaller if there is no room for it; return None if even the smallest size has no room."""
    while size >= min_pixels:
        stencil = draw_stencil(rng, label, size)
        over = 0.25 if size >= OUTLINED_PIXELS and rng.random() < CLIPPED_SHARE else 0.0  # share of the box's side
        ranges = [
            (round(-over * side), round(SIDE_PIXELS - (1 - over) * side) + 1) for side in stencil.fill.shape[::-1]
        ]
        for _ in range(POSITIONS_PER_SIZE):
            left, top = (int(rng.integers(*each)) for each in ranges)
            new = place_at(stencil, left, top)
            if new is not None and _fits(new, placed):
                return new
        size *= 0.6
    return None


def arrange(rng: Rng, fewest: int = 6, most: int = 12, min_pixels: float = MIN_PIXELS) -> list[PlacedShape]:
    """Choose and place `fewest` to `most` shapes of an image, and return them in the order of painting.

    There may be fewer shapes if there is no room, and a few images have none. `min_pixels` is the least longer side.
    """
    if rng.random() < EMPTY_SHARE:
        return []
    count = int(rng.integers(fewest, most + 1))
    share = rng.random(count) ** SIZE_EXPONENT
    placed: list[PlacedShape] = []
    for size in min_pixels * (MAX_PIXELS / min_pixels) ** np.sort(share)[::-1]:  # large ones first: they need room
        if new := _find_room(rng, int(rng.integers(len(NAMES))), float(size), placed, min_pixels):
            placed.append(new)
    return [placed[i] for i in rng.permutation(len(placed))]


def _noise(rng: Rng, cell: float, side: int) -> np.ndarray:
    """Return value noise (side, side) float32, about -1..1, that varies over `cell` pixels."""
    knots = max(int(side / cell), 1) + 1
    grid = rng.uniform(-1, 1, (knots, knots)).astype(np.float32)
    return cv2.resize(grid, (side, side), interpolation=cv2.INTER_CUBIC)


def _wave(rng: Rng, angle: float, period: float, side: int) -> np.ndarray:
    """Return a sine (side, side) float32 in -1..1 along `angle` radians, `period` in pixels."""
    ys, xs = np.mgrid[:side, :side].astype(np.float32)
    along = xs * np.float32(np.cos(angle)) + ys * np.float32(np.sin(angle))
    return np.sin(along * np.float32(2 * np.pi / period) + np.float32(rng.uniform(0, 2 * np.pi)))


def _pattern(rng: Rng, side: int) -> np.ndarray:
    """Return a background's pattern (side, side) float32 in -1..1: gradient, noise, blotches, stripes or checks."""
    pattern, angle = rng.integers(5), rng.uniform(0, np.pi)
    if pattern == 0:
        return _wave(rng, angle, rng.uniform(2, 4) * side, side)
    if pattern == 1:
        coarse = 0.7 * _noise(rng, rng.uniform(20, 60), side)
        return np.clip(coarse + 0.5 * _noise(rng, rng.uniform(4, 12), side), -1, 1)
    hard = rng.uniform(1, 6)  # 1 is a smooth change, 6 nearly an edge
    if pattern == 2:
        return np.clip(hard * _noise(rng, rng.uniform(15, 50), side), -1, 1)
    period = np.exp(rng.uniform(np.log(5), np.log(50)))
    wave = _wave(rng, angle, period, side)
    return np.clip(hard * (wave * _wave(rng, angle + np.pi / 2, period, side) if pattern == 4 else wave), -1, 1)


def background(rng: Rng, side: int = SIDE_PIXELS) -> np.ndarray:
    """Return an image (side, side, 3) float32 without objects, in grey levels."""
    base = (rng.uniform(45, 210) + rng.uniform(-40, 40, 3)).astype(np.float32)
    swing = (rng.uniform(-30, 30) + rng.uniform(-12, 12, 3)).astype(np.float32)  # of the pattern, around its mean
    grain = rng.uniform(2, 10) * _noise(rng, rng.uniform(1.5, 8), side)
    light = rng.uniform(0, 20) * _wave(rng, rng.uniform(0, 2 * np.pi), rng.uniform(2, 5) * side, side)
    image = base + _pattern(rng, side)[..., None] * swing + (grain + light)[..., None]
    return np.clip(image, 0, 255)


def fill_colour(rng: Rng, around: np.ndarray) -> np.ndarray:
    """Return a random colour (3,) that stands out against nearly all pixels of `around` (h, w, 3).

    A difference in colour alone counts a third: JPEG halves the resolution of colour, which blurs small shapes.
    """
    pixels, colours = rng.choice(around.reshape(-1, 3), 64), rng.uniform(5, 250, (16, 3))
    difference = colours[:, None] - pixels[None]
    luma = np.abs(difference @ np.array([0.114, 0.587, 0.299]))
    contrast = luma + np.abs(difference - difference.mean(axis=2, keepdims=True)).max(axis=2) / 3
    worst = np.partition(contrast, 6, axis=1)[:, 6]  # a tenth of the pixels may be a neighbour's
    enough = np.flatnonzero(worst >= MIN_CONTRAST_LEVELS)
    return colours[enough[0] if len(enough) else worst.argmax()]


def paint(rng: Rng, image: np.ndarray, stencil: Stencil, left: int, top: int) -> None:
    """Paint one shape at (`left`, `top`) onto the square `image` (side, side, 3) float32, in place."""
    x1, y1, x2, y2 = stencil.window(left, top, len(image))
    inside, window = np.s_[y1 - top : y2 - top, x1 - left : x2 - left], image[y1:y2, x1:x2]
    colour = fill_colour(rng, image[max(y1 - 2, 0) : y2 + 2, max(x1 - 2, 0) : x2 + 2])
    across, down = rng.uniform(-12, 12, 2)  # grey levels of shading between the shape's centre and its sides
    height, width = stencil.fill.shape
    shade = np.linspace(-across, across, width)[None, :] + np.linspace(-down, down, height)[:, None]
    fill, line = stencil.fill[inside][..., None], stencil.line[inside][..., None]
    edge = np.clip(colour * rng.uniform(0.3, 1.7), 0, 255)
    window += fill * (colour + shade[inside][..., None] - window)
    window += line * (edge - window)


def photograph(rng: Rng, image: np.ndarray) -> np.ndarray:
    """Add a camera's blur, change of contrast and brightness, and sensor noise to an image; return uint8."""
    image = cv2.GaussianBlur(image, (5, 5), rng.uniform(0.2, 0.7))
    image = (image - 128) * rng.uniform(0.75, 1.1) + 128 + rng.uniform(-20, 20)
    image = image + rng.uniform(0, 7) * rng.standard_normal(image.shape, np.float32)
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def encode(rng: Rng, image: np.ndarray) -> bytes:
    """Encode an image as a JPEG of a random quality, 70 to 95."""
    _, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(70, 96))])
    return jpeg.tobytes()


def draw_image(seed: int, split: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw one image, (160, 160, 3) uint8 BGR, and its labels, (n, 5) float32 rows of class, xc, yc, w, h in 0..1."""
    rng = np.random.default_rng([seed, split, index])
    image, rows = background(rng), []
    for shape in arrange(rng):
        paint(rng, image, shape.stencil, shape.left, shape.top)
        x1, y1, x2, y2 = shape.box
        box = np.array(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)) / SIDE_PIXELS
        rows.append((shape.stencil.label, *box))
    return photograph(rng, image), np.array(rows, np.float32).reshape(-1, 5)


def write_labelled(folder: Path, split: int, index: int, jpeg: bytes, rows: Sequence[str]) -> None:
    """Write an image and its label file, which is empty for an image without objects."""
    for kind, suffix, content in (("images", "jpg", jpeg), ("labels", "txt", "".join(rows).encode())):
        file = folder / kind / DRAWN_SPLITS[split] / f"{index:06d}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def draw_builtin(
    folder: Path,
    title: str,
    names: Sequence[str],
    seed: int,
    counts: tuple[int, int],
    write: Callable[[Path, int, int, int], None],
) -> Path:
    """Draw a data set into `folder` unless it exists, and return `folder`.

    The images are drawn into a hidden folder beside it, which is then renamed: `folder` is complete or absent, and the
    first of several processes wins. Raises `UserError` if `folder` has other content, or cannot be written.

    Args:
        counts: number of images of each split
        write: draws one image into the data set's folder by seed, split and index
    """
    numbers = dict(zip(DRAWN_SPLITS, counts, strict=True))
    marker = json.dumps({"drawing": DRAWING_VERSION, "seed": seed, **numbers, "names": list(names)}, indent=2) + "\n"
    # mkdtemp would make a folder that only its owner may read, and that mode would survive the rename.
    file, part = folder / f"{title}.json", folder.parent / f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
    if not os.path.lexists(folder):
        work = [(split, index) for split, count in enumerate(counts) for index in range(count)]
        try:
            part.mkdir(parents=True)
            for split, index in tqdm(work, desc=f"drawing {title}", unit="image", disable=None):  # None: if a terminal
                write(part, seed, split, index)
            (part / file.name).write_text(marker, encoding="utf-8")
            os.rename(part, folder)
        except OSError as error:
            if not os.path.lexists(folder):  # not drawn by a faster process
                raise UserError(f"cannot write the {title} data set to '{folder}' ({error.strerror})") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)  # absent after the rename
    if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != marker:
        raise UserError(f"'{folder}' exists, but not as {title} of seed {seed}: remove it, or name another folder")
    return folder


def _write_image(folder: Path, seed: int, split: int, index: int) -> None:
    image, labels = draw_image(seed, split, index)
    rng = np.random.default_rng([seed, split, index, 1])  # not the generator of `draw_image`
    rows = [f"{int(row[0])} " + " ".join(f"{value:.6f}" for value in row[1:]) + "\n" for row in labels]
    write_labelled(folder, split, index, encode(rng, image), rows)


def draw_dataset(folder: Path, seed: int = 0, train: int = 640, val: int = 160) -> Path:
    """Draw the data set into `folder` unless it exists, and return `folder`; see `draw_builtin`."""
    return draw_builtin(folder, "shapes", NAMES, seed, (train, val), _write_image)
