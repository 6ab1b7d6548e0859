"""The built-in data sets: objects whose class is their shape, drawn from a seed in a few seconds.

`shapes` has boxes, `shapes_seg` the outlines of the visible parts of shapes that cover each other, and `shapes_cls` an
image of one shape per class in turn. On one machine the same seed gives the same bytes; another build of OpenCV may
round a few pixels or encode a JPEG differently. Called by data/data_yaml.py for `draw:` of a data YAML.
"""

from __future__ import annotations

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

from data.polygons import mask_outline
from utils.errors import UserError

DRAWING_VERSION = 1  # increase with every change of a pixel or a label: folders of older versions are refused
DRAWN_SPLITS = ("train", "val")  # a split's number is its index here
SIDE_PIXELS, CLS_SIDE_PIXELS = 160, 64  # height and width of every image; of `shapes_cls`
SUBPIXELS = 4  # sub-pixels per pixel along one side while a shape is drawn
FRACTION_BITS = 4  # fractional bits of OpenCV's drawing coordinates, so a vertex lies on a grid of 1/64 pixel
MIN_PIXELS, MAX_PIXELS = 8.3, 99.5  # a box's longer side; filling adds up to a sub-pixel: boxes stay within 8 to 100
CLS_MIN_PIXELS, CLS_MAX_PIXELS = 22.0, 56.0  # the same of `shapes_cls`, drawn log-uniformly
SEG_MIN_PIXELS = 14.0  # the least of `shapes_seg`: a quarter of it, at which masks are learned, shows the form
OUTLINE_TOLERANCE = 1.5  # sub-pixels
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
Drawing = tuple[np.ndarray, list[str]]  # an image, uint8 (h, w, 3) BGR, and the rows of its label file
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
    box: tuple[float, float, float, float]  # x1, y1, x2, y2 around the visible part, in steps of 1/4 pixel


def draw_stencil(rng: Rng, label: int, size: float) -> Stencil:
    """Draw shape number `label`, `size` pixels long, with a random angle, variant and offset within one pixel."""
    thick = rng.uniform(0.04, 0.07) * size if size >= OUTLINED_PIXELS and rng.random() < 0.4 else 0.0
    contours, angle = _SHAPES[NAMES[label]](rng), rng.uniform(0, 2 * np.pi)
    turned = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    contours = [points @ turned for points in contours]
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
    first, last = (SUBPIXELS * (y1 - top), SUBPIXELS * (x1 - left)), (SUBPIXELS * (y2 - top), SUBPIXELS * (x2 - left))
    fine = stencil.fine[first[0] : last[0], first[1] : last[1]]
    if np.count_nonzero(fine) < MIN_INSIDE_SHARE * np.count_nonzero(stencil.fine):
        return None
    x, y, wide, high = cv2.boundingRect(fine)
    box = (x1 + x / SUBPIXELS, y1 + y / SUBPIXELS, x1 + (x + wide) / SUBPIXELS, y1 + (y + high) / SUBPIXELS)
    mask = np.zeros((SIDE_PIXELS, SIDE_PIXELS), bool)
    mask[y1:y2, x1:x2] = stencil.fill[y1 - top : y2 - top, x1 - left : x2 - left] > 0
    return PlacedShape(stencil, left, top, mask, box)


def _fits(new: PlacedShape, placed: list[PlacedShape]) -> bool:
    """Return whether enough of `new` and of every placed shape stays visible, in any order of painting."""
    boxes, box = np.array([shape.box for shape in placed]).reshape(-1, 4), np.array(new.box)
    common = (np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])).clip(0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod()
    if (common / (areas - common) > MAX_BOX_IOU).any():
        return False
    hidden = np.sum([*(shape.mask for shape in placed), new.mask], axis=0, dtype=np.uint8) > 1
    masks = [*(placed[k].mask for k in np.flatnonzero(common)), new.mask]
    return all(np.count_nonzero(hidden & mask) <= MAX_HIDDEN_SHARE * np.count_nonzero(mask) for mask in masks)


def _find_room(rng: Rng, label: int, size: float, placed: list[PlacedShape], min_pixels: float) -> PlacedShape | None:
    """Place a shape, smaller if there is no room for it; return None if even the smallest size has no room."""
    while size >= min_pixels:
        stencil = draw_stencil(rng, label, size)
        overhang = 0.25 if size >= OUTLINED_PIXELS and rng.random() < CLIPPED_SHARE else 0.0  # share of the box's side
        sides = stencil.fill.shape[::-1]
        ranges = [(round(-overhang * side), round(SIDE_PIXELS - (1 - overhang) * side) + 1) for side in sides]
        for _ in range(POSITIONS_PER_SIZE):
            left, top = (int(rng.integers(*bounds)) for bounds in ranges)
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


@dataclass(frozen=True)
class DrawnSet:
    """A data set that is drawn: images with label files, or in a folder per class."""

    title: str  # name in messages, and of the file that tells how a folder was drawn
    names: tuple[str, ...]  # class names by number
    stream: tuple[int, ...]  # first numbers after the seed of each image's generator: no two sets share a generator
    draw: Callable[[Rng, int], Drawing]  # draws an image by its generator and index
    counts: tuple[int, int] = (640, 160)  # number of images of each split, unless `draw_dataset` is passed others
    by_class: bool = False  # whether image k is in the folder of class k modulo their number, and has no label file

    def draw_dataset(self, folder: Path, seed: int = 0, train: int = 0, val: int = 0) -> Path:
        """Draw the data set into `folder` unless it exists, and return `folder`.

        The images are drawn into a hidden folder beside it, which is then renamed: `folder` is complete or absent, and
        the first of several processes wins. Without numbers of images the set has the usual ones. Raises `UserError` if
        `folder` has other content, or cannot be written.
        """
        numbers = dict(zip(DRAWN_SPLITS, (train or self.counts[0], val or self.counts[1]), strict=True))
        description = {"drawing": DRAWING_VERSION, "seed": seed, **numbers, "names": list(self.names)}
        # mkdtemp would make a folder that only its owner may read, and that mode would survive the rename.
        part = folder.parent / f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
        file, marker = folder / f"{self.title}.json", json.dumps(description, indent=2) + "\n"
        if not os.path.lexists(folder):
            work = [(split, index) for split, name in enumerate(DRAWN_SPLITS) for index in range(numbers[name])]
            try:
                part.mkdir(parents=True)
                for split, index in tqdm(work, f"drawing {self.title}", unit="image", disable=None):
                    self._write(part, seed, split, index)
                (part / file.name).write_text(marker, encoding="utf-8")
                os.rename(part, folder)
            except OSError as error:
                if not os.path.lexists(folder):  # not drawn by a faster process
                    raise UserError(f"cannot write {self.title} to '{folder}' ({error.strerror})") from error
            finally:
                shutil.rmtree(part, ignore_errors=True)  # absent after the rename
        if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != marker:
            raise UserError(f"'{folder}' exists, but not as {self.title} of seed {seed}: remove it, or name another")
        return folder

    def _write(self, folder: Path, seed: int, split: int, index: int) -> None:
        image, rows = self.draw(np.random.default_rng([seed, *self.stream, split, index]), index)
        rng = np.random.default_rng([seed, *self.stream, split, index, 1])  # not the generator of the image
        _, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(70, 96))])
        name = DRAWN_SPLITS[split]
        image_folder = f"{name}/{self.names[index % len(self.names)]}" if self.by_class else f"images/{name}"
        files = {f"{image_folder}/{index:06d}.jpg": jpeg.tobytes()}
        if not self.by_class:  # an image without objects has an empty label file
            files[f"labels/{name}/{index:06d}.txt"] = "".join(rows).encode()
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def _draw_boxes(rng: Rng, index: int) -> Drawing:
    """Draw an image and the boxes of its shapes, as shares of its side."""
    image, rows = background(rng), []
    for shape in arrange(rng):
        paint(rng, image, shape.stencil, shape.left, shape.top)
        x1, y1, x2, y2 = shape.box
        box = np.array(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)) / SIDE_PIXELS
        rows.append(f"{shape.stencil.label} {' '.join(f'{value:.6f}' for value in box.astype(np.float32))}\n")
    return photograph(rng, image), rows


def _draw_outlines(rng: Rng, index: int) -> Drawing:
    """Draw an image and the outlines of the visible parts of its shapes, as shares of its side."""
    image, placed = background(rng), arrange(rng, 5, 9, SEG_MIN_PIXELS)
    on_top = np.zeros((SIDE_PIXELS * SUBPIXELS, SIDE_PIXELS * SUBPIXELS), np.uint8)  # sub-pixels: the number of a shape
    windows, rows = [], []
    for number, shape in enumerate(placed, 1):
        paint(rng, image, shape.stencil, shape.left, shape.top)
        left, top = SUBPIXELS * shape.left, SUBPIXELS * shape.top
        x1, y1, x2, y2 = (SUBPIXELS * side for side in shape.stencil.window(shape.left, shape.top, SIDE_PIXELS))
        on_top[y1:y2, x1:x2][shape.stencil.fine[y1 - top : y2 - top, x1 - left : x2 - left] > 0] = number
        windows.append((x1, y1, x2, y2))
    for number, (x1, y1, x2, y2) in enumerate(windows, 1):
        outline = mask_outline((on_top[y1:y2, x1:x2] == number).view(np.uint8), OUTLINE_TOLERANCE)
        points = [((x + x1) / SUBPIXELS, (y + y1) / SUBPIXELS) for x, y in outline]
        values = " ".join(f"{value / SIDE_PIXELS:.5f}" for point in points for value in point)
        rows.append(f"{placed[number - 1].stencil.label} {values}\n")
    return photograph(rng, image), rows


def _draw_class(rng: Rng, index: int) -> Drawing:
    """Draw an image with one whole shape, of the class of its index."""
    image = background(rng, CLS_SIDE_PIXELS)
    size = CLS_MIN_PIXELS * (CLS_MAX_PIXELS / CLS_MIN_PIXELS) ** rng.random()
    stencil = draw_stencil(rng, index % len(NAMES), size)
    height, width = stencil.fill.shape
    left, top = (int(rng.integers(CLS_SIDE_PIXELS - side + 1)) for side in (width, height))
    paint(rng, image, stencil, left, top)
    return photograph(rng, image), []


shapes = DrawnSet("shapes", NAMES, (), _draw_boxes)
shapes_cls = DrawnSet("shapes-cls", NAMES, (2,), _draw_class, (1200, 300), by_class=True)
shapes_seg = DrawnSet("shapes-seg", NAMES, (3,), _draw_outlines)
# What `draw:` of a data YAML may name.
DRAWN_SETS = {f"data.builtin.{drawn.title.replace('-', '_')}": drawn for drawn in (shapes, shapes_cls, shapes_seg)}
