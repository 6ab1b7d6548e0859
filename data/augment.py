"""Augmentation in small pieces. Each takes and returns a `Sample`; random ones draw from the generator given.

Distributions and hyperparameter names are YOLOv5's. Boxes are corners in pixels of the sample's own image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import cv2
import numpy as np

GREY = 114  # what is outside every image
PARTNERS = 3  # other images of a mosaic
LEAST_SIDE, LEAST_AREA, MOST_ASPECT = 2, 0.1, 100  # what a warped box must keep: pixels, share, long side over short
MOST_COVERED = 0.3  # of a box there is, by a pasted one


class Sample(NamedTuple):
    """An image uint8 (h, w, 3) BGR, its boxes float32 (k, 4) xyxy in pixels, and their classes float32 (k,).

    polygons: the outline of each of the k, (p, 2) x and y in pixels, of no point where none is known; or of none at
    all, where they are not asked for. They last until objects are pasted along them.
    """

    image: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray
    polygons: tuple[np.ndarray, ...] = ()


class Placement(NamedTuple):
    """How an image came into a letterbox: the scale of each axis (x, y) and the offset of its corner (x, y), pixels."""

    scale: tuple[float, float]
    offset: tuple[int, int]


@dataclass(frozen=True)
class AugmentSettings:
    """Strengths and probabilities, named as in the hyperparameter file. All zero: nothing is changed."""

    hsv_h: float = 0.0  # largest relative change of hue, saturation, value
    hsv_s: float = 0.0
    hsv_v: float = 0.0
    degrees: float = 0.0  # largest rotation either way
    translate: float = 0.0  # largest shift as a share of the side
    scale: float = 0.0  # largest relative change of size
    shear: float = 0.0  # degrees
    perspective: float = 0.0  # 0 to 0.001
    flipud: float = 0.0  # probabilities
    fliplr: float = 0.0
    mosaic: float = 0.0
    mixup: float = 0.0
    copy_paste: float = 0.0  # probability for an object


def letterbox(sample: Sample, shape: tuple[int, int], enlarge: bool) -> tuple[Sample, Placement]:
    """Fit the image into `shape` (height, width) at one scale, centred on grey; `enlarge` false never scales up."""
    height, width = sample.image.shape[:2]
    ratio = min(shape[0] / height, shape[1] / width)
    if not enlarge:
        ratio = min(ratio, 1.0)
    new = max(round(width * ratio), 1), max(round(height * ratio), 1)
    image = sample.image if new == (width, height) else cv2.resize(sample.image, new, interpolation=cv2.INTER_LINEAR)
    spare = (shape[1] - new[0]) / 2, (shape[0] - new[1]) / 2
    left, top = round(spare[0] - 0.1), round(spare[1] - 0.1)  # an odd pixel goes to the right and the bottom
    right, bottom = round(spare[0] + 0.1), round(spare[1] + 0.1)
    if left or top or right or bottom:
        image = cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(GREY, GREY, GREY))
    boxes = sample.boxes * ratio + np.array([left, top, left, top], np.float32)
    return Sample(image, boxes, sample.classes), Placement((ratio, ratio), (left, top))


Box = tuple[float, float, float, float]  # left, top, right, bottom


def mosaic_places(sizes: Sequence[tuple[int, int]], size: int, rng: np.random.Generator) -> list[Box]:
    """Where four images of `sizes` (width, height) lie on a canvas of 2 x `size` pixels.

    They meet at a random centre: the first top left of it, then top right, bottom left, bottom right.
    """
    centre_x, centre_y = (int(v) for v in rng.uniform(size / 2, 3 * size / 2, 2))
    places: list[Box] = []
    for number, (width, height) in enumerate(sizes):
        left = centre_x if number % 2 else centre_x - width
        top = centre_y if number // 2 else centre_y - height
        places.append((left, top, left + width, top + height))
    return places


def warp_mosaic(
    places: Sequence[Box],
    load: Callable[[int], Sample],
    canvas: int,
    matrix: np.ndarray,
    scale: float,
    shape: tuple[int, int],
) -> Sample:
    """Four images at `places` on a square canvas, as `matrix` takes its pixels into `shape` (height, width).

    Each image goes straight into the result, which is all that is ever made; one that is not seen is not loaded.
    `load`: gives the image of a place, whose size may be another than the place's. `scale`: the matrix's change of it.
    """
    upright = not matrix[[0, 1, 2, 2], [1, 0, 0, 1]].any()
    result = np.full((*shape, 3), GREY, np.uint8)
    before, after, classes, polygons = [], [], [], []
    for number, place in enumerate(places):
        seen = (max(place[0], 0), max(place[1], 0), min(place[2], canvas), min(place[3], canvas))
        window = _window(seen, matrix, shape, upright) if seen[0] < seen[2] and seen[1] < seen[3] else None
        if window is None:
            continue
        sample = load(number)
        piece = _Piece(sample.image, place, seen, window)
        if upright:
            onto = _put_upright(result, piece, matrix)
            after.append((sample.boxes * onto[0] + onto[1]).clip(window[:2] * 2, window[2:] * 2))
            polygons += [(one * onto[0][:2] + onto[1][:2]).clip(window[:2], window[2:]) for one in sample.polygons]
        else:
            _put_tilted(result, piece, matrix)
            on_canvas = ((one * piece.ratio + place[:2]).clip(0, canvas) for one in sample.polygons)
            polygons += [warp_points(one, matrix).clip(0, shape[::-1]) for one in on_canvas]
        before.append((sample.boxes * (piece.ratio * 2) + place[:2] * 2).clip(0, canvas))
        classes.append(sample.classes)
    if not classes:
        return Sample(result, np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
    old = np.concatenate(before)
    new = np.concatenate(after) if upright else warp_boxes(old, matrix, shape)
    kept = worth_keeping(old * scale, new)
    outlines = tuple(compress(polygons, kept))  # cut at edges point by point, which leaves what is inside as it is
    return Sample(result, new[kept].astype(np.float32), np.concatenate(classes)[kept], outlines)


def _window(seen: Box, matrix: np.ndarray, shape: tuple[int, int], upright: bool) -> tuple[int, int, int, int] | None:
    """The upright part of the result, left, top, right, bottom, that a part of the canvas comes into; None for none."""
    if upright:
        (a, _, x), (_, d, y) = matrix[:2].tolist()
        around = [a * seen[0] + x, d * seen[1] + y, a * seen[2] + x, d * seen[3] + y]
    else:
        around = warp_boxes(np.array([seen]), matrix, shape)[0].tolist()
    height, width = shape
    left, top = max(round(around[0]), 0), max(round(around[1]), 0)
    right, bottom = min(round(around[2]), width), min(round(around[3]), height)
    return (left, top, right, bottom) if left < right and top < bottom else None


class _Piece(NamedTuple):
    """An image of a mosaic on its way into the result."""

    image: np.ndarray  # (h, w, 3)
    place: Box  # on the canvas
    seen: Box  # the part of the place that the canvas shows
    window: tuple[int, int, int, int]  # the part of the result that this comes into: left, top, right, bottom

    @property
    def ratio(self) -> tuple[float, float]:
        """Pixels of the canvas per pixel of the image, by x and y."""
        height, width = self.image.shape[:2]
        left, top, right, bottom = self.place
        return (right - left) / width, (bottom - top) / height


def _put_upright(result: np.ndarray, piece: _Piece, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill a window of the result by resizing the part of the image that falls there.

    The part is of whole pixels. Returns what takes boxes into the result as it is drawn: factors and shifts, (4,) each.
    """
    image, place, seen, window = piece
    ratio = piece.ratio
    firsts, lasts, factors, shifts = [], [], [], []
    for axis in (0, 1):
        low, high = window[axis], window[axis + 2]
        scale, shift = float(matrix[axis, axis]), float(matrix[axis, 2])
        edges = (((edge - shift) / scale - place[axis]) / ratio[axis] for edge in (low, high))
        limits = [(edge - place[axis]) / ratio[axis] for edge in (seen[axis], seen[axis + 2])]
        first, last = (round(min(max(edge, limits[0]), limits[1])) for edge in edges)
        first = min(first, image.shape[1 - axis] - 1)
        last = max(last, first + 1)
        factor = (high - low) / (last - first)
        firsts.append(first)
        lasts.append(last)
        factors.append(factor)
        shifts.append(low - first * factor)
    left, top, right, bottom = window
    part = image[firsts[1] : lasts[1], firsts[0] : lasts[0]]
    cv2.resize(part, (right - left, bottom - top), dst=result[top:bottom, left:right], interpolation=cv2.INTER_LINEAR)
    return np.array(factors * 2, np.float32), np.array(shifts * 2, np.float32)


def _put_tilted(result: np.ndarray, piece: _Piece, matrix: np.ndarray) -> None:
    """Warp the image into a window of the result, around what other images have there."""
    image, place, seen, (left, top, right, bottom) = piece
    ratio = piece.ratio
    limits = [round((seen[k] - place[k % 2]) / ratio[k % 2]) for k in range(4)]
    part = image[limits[1] : limits[3], limits[0] : limits[2]]
    if not part.size:
        return
    onto_canvas, into_window = np.diag([*ratio, 1.0]), np.eye(3)
    onto_canvas[:2, 2] = [place[k] + limits[k] * ratio[k] for k in (0, 1)]
    into_window[:2, 2] = -left, -top
    whole, target = into_window @ matrix @ onto_canvas, result[top:bottom, left:right]
    if matrix[2, :2].any():
        warp = cv2.warpPerspective
    else:
        warp, whole = cv2.warpAffine, whole[:2]
    warp(part, whole, dsize=target.shape[1::-1], dst=target, borderMode=cv2.BORDER_TRANSPARENT)


def random_matrix(
    settings: AugmentSettings,
    source: tuple[int, int],
    target: tuple[int, int],
    rng: np.random.Generator,
    zoom: float = 1.0,
    unit: float = 1.0,
) -> tuple[np.ndarray, float]:
    """A 3x3 matrix from pixels of `source` (height, width) to those of `target`, and its change of scale.

    Centre, perspective, rotation with scale, shear, translation, in that order. zoom: how much larger everything is in
    the target beside that; unit: pixels of the source that perspective counts as one.
    """
    perspective = rng.uniform(-settings.perspective, settings.perspective, 2)
    angle = rng.uniform(-settings.degrees, settings.degrees)
    scale = rng.uniform(1 - settings.scale, 1 + settings.scale) * zoom
    shear = np.tan(np.radians(rng.uniform(-settings.shear, settings.shear, 2)))
    shift = rng.uniform(0.5 - settings.translate, 0.5 + settings.translate, 2) * (target[1], target[0])
    centred, tilted, sheared, shifted = (np.eye(3) for _ in range(4))
    centred[:2, 2] = -source[1] / 2, -source[0] / 2
    tilted[2, :2] = perspective / unit
    sheared[0, 1], sheared[1, 0] = shear
    shifted[:2, 2] = shift
    cos, sin = scale * math.cos(math.radians(angle)), scale * math.sin(math.radians(angle))
    turned = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    return shifted @ sheared @ turned @ tilted @ centred, scale


def random_warp(
    sample: Sample, settings: AugmentSettings, shape: tuple[int, int], rng: np.random.Generator, unit: float = 1.0
) -> Sample:
    """Warp the image by a random matrix into `shape` (height, width) and drop the boxes of which too little is left.

    unit: pixels that perspective counts as one.
    """
    matrix, scale = random_matrix(settings, sample.image.shape[:2], shape, rng, 1.0, unit)
    if sample.image.shape[:2] != shape or not np.array_equal(matrix, np.eye(3)):
        image = _warp_image(sample.image, matrix, shape, settings.perspective != 0)
    else:
        image = sample.image
    boxes = warp_boxes(sample.boxes, matrix, shape)
    kept = worth_keeping(sample.boxes * scale, boxes)
    return Sample(image, boxes[kept], sample.classes[kept])


def _warp_image(image: np.ndarray, matrix: np.ndarray, shape: tuple[int, int], tilted: bool) -> np.ndarray:
    size, border = (shape[1], shape[0]), (GREY, GREY, GREY)
    if tilted:
        return cv2.warpPerspective(image, matrix, dsize=size, borderValue=border)
    return cv2.warpAffine(image, matrix[:2], dsize=size, borderValue=border)


def warp_boxes(boxes: np.ndarray, matrix: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The upright boxes around the warped corners of `boxes` (k, 4), cut at the edges of `shape` (height, width)."""
    points = warp_points(boxes[:, [0, 1, 2, 3, 0, 3, 2, 1]].reshape(-1, 4, 2), matrix)
    around = np.concatenate((points.min(1), points.max(1)), 1)
    height, width = shape
    return around.clip(0, (width, height, width, height)).astype(np.float32)


def warp_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Where `matrix` takes `points` (..., 2), x and y."""
    corners = np.ones((*points.shape[:-1], 3))
    corners[..., :2] = points
    warped = corners @ matrix.T
    return warped[..., :2] / warped[..., 2:]


def worth_keeping(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Which boxes (k,) still show enough: over 2 pixels each way, over a tenth of the area, not a sliver."""
    old, new = before[:, 2:] - before[:, :2], after[:, 2:] - after[:, :2]
    big = (new > LEAST_SIDE).all(1)
    visible = new.prod(1) > LEAST_AREA * old.prod(1)
    longer, shorter = new.max(1, initial=0), new.min(1, initial=np.inf)
    return big & visible & (longer < MOST_ASPECT * shorter)


def mixup(a: Sample, b: Sample, rng: np.random.Generator) -> Sample:
    """The mean of two images of one size, weight from Beta(32, 32), with the boxes of both. Zhang et al. 2018."""
    weight = rng.beta(32.0, 32.0)
    image = cv2.addWeighted(a.image, weight, b.image, 1 - weight, 0)
    return Sample(image, np.concatenate((a.boxes, b.boxes)), np.concatenate((a.classes, b.classes)))


def copy_paste(sample: Sample, chance: float, rng: np.random.Generator) -> Sample:
    """Objects with a polygon, each with this chance, mirrored to the other side of the image with their boxes.

    One is left out where it would cover 0.3 of a box there is. After Ghiasi et al. 2021, as YOLOv5 has it. The image is
    written to.
    """
    if not chance or not any(map(len, sample.polygons)):
        return sample
    chosen = rng.random(len(sample.polygons)) < chance
    image, boxes, classes = sample.image, sample.boxes, sample.classes
    mirrored = None
    for number in np.flatnonzero(chosen).tolist():
        polygon = sample.polygons[number]
        if len(polygon) < 3:
            continue
        box = np.concatenate((polygon.min(0), polygon.max(0)))
        box[[0, 2]] = image.shape[1] - box[[2, 0]]
        if (box[2:] - box[:2]).min() <= LEAST_SIDE or covered(boxes, box).max() >= MOST_COVERED:
            continue
        mirrored = cv2.flip(image, 1) if mirrored is None else mirrored  # before anything is pasted
        _paste(image, mirrored, polygon, box)
        boxes = np.concatenate((boxes, box[None].astype(np.float32)))
        classes = np.append(classes, classes[number])
    return Sample(image, boxes, classes)


def covered(boxes: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The share of each of `boxes` (k, 4) that `box` (4,) covers, (k,)."""
    shared = (np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])).clip(0).prod(1)
    return shared / (boxes[:, 2:] - boxes[:, :2]).prod(1)


def _paste(image: np.ndarray, mirrored: np.ndarray, polygon: np.ndarray, box: np.ndarray) -> None:
    """Fill `image` with `mirrored` where the mirrored `polygon` is, which `box` is about."""
    left, top = np.floor(box[:2]).astype(int).tolist()
    right, bottom = np.ceil(box[2:]).astype(int).tolist()
    corners = np.stack((image.shape[1] - polygon[:, 0] - left, polygon[:, 1] - top), 1) - 0.5  # to centres of pixels
    mask = np.zeros((bottom - top, right - left), np.uint8)
    cv2.fillPoly(mask, [corners.round().astype(np.int32)], 1)
    cv2.copyTo(mirrored[top:bottom, left:right], mask, image[top:bottom, left:right])


def random_hsv(sample: Sample, settings: AugmentSettings, rng: np.random.Generator) -> Sample:
    """Hue, saturation and value times random factors; hue turns around, the others end at 255."""
    factors = 1 + rng.uniform(-1, 1, 3) * (settings.hsv_h, settings.hsv_s, settings.hsv_v)
    steps = np.arange(256)
    tables = [(steps * factors[0]) % 180, (steps * factors[1]).clip(0, 255), (steps * factors[2]).clip(0, 255)]
    image = cv2.cvtColor(sample.image, cv2.COLOR_BGR2HSV)
    channels = cv2.split(image)
    for channel, table in zip(channels, tables, strict=True):
        cv2.LUT(channel, table.astype(np.uint8), dst=channel)
    cv2.merge(channels, dst=image)
    return sample._replace(image=cv2.cvtColor(image, cv2.COLOR_HSV2BGR, dst=image))


def flip_left_right(sample: Sample) -> Sample:
    """Mirror left and right."""
    width = sample.image.shape[1]
    boxes = sample.boxes[:, [2, 1, 0, 3]] * np.array([-1, 1, -1, 1], np.float32) + np.array(
        [width, 0, width, 0], np.float32
    )
    return Sample(cv2.flip(sample.image, 1), boxes, sample.classes)


def flip_up_down(sample: Sample) -> Sample:
    """Mirror top and bottom."""
    height = sample.image.shape[0]
    boxes = sample.boxes[:, [0, 3, 2, 1]] * np.array([1, -1, 1, -1], np.float32) + np.array(
        [0, height, 0, height], np.float32
    )
    return Sample(cv2.flip(sample.image, 0), boxes, sample.classes)


@dataclass(frozen=True)
class Augmenter:
    """The whole chain of one training item.

    `load(index)` returns an image's `Sample` with its longer side at `imgsz`, `size(index)` the width and height that
    it has then; `count` is how many images partners are drawn from (all of them, so that no process's mosaics differ
    from another's). An item whose longer side is not `imgsz` is the same picture at another scale.
    """

    settings: AugmentSettings
    imgsz: int
    count: int
    load: Callable[[int], Sample]
    size: Callable[[int], tuple[int, int]]

    def __call__(
        self, index: int, shape: tuple[int, int], rng: np.random.Generator, partners: Sequence[int] = ()
    ) -> Sample:
        """The item for image `index` in `shape` (height, width). Every choice comes from `rng`, in a fixed order.

        `partners`: the three other images of its mosaic, and the four of another one to be mixed with it; those that
        are not given are drawn from all.
        """
        settings = self.settings
        if rng.random() < settings.mosaic:
            sample = self._mosaic([index, *partners[:PARTNERS]], shape, rng)
            if rng.random() < settings.mixup:
                others = partners[PARTNERS:] or [int(rng.integers(self.count))]
                sample = mixup(sample, self._mosaic(others, shape, rng), rng)
        else:
            fitted, _ = letterbox(self.load(index), shape, enlarge=True)
            sample = random_warp(fitted, settings, shape, rng, unit=max(shape) / self.imgsz)
        if settings.hsv_h or settings.hsv_s or settings.hsv_v:
            sample = random_hsv(sample, settings, rng)
        if rng.random() < settings.flipud:
            sample = flip_up_down(sample)
        if rng.random() < settings.fliplr:
            sample = flip_left_right(sample)
        return sample

    def _mosaic(self, given: Sequence[int], shape: tuple[int, int], rng: np.random.Generator) -> Sample:
        """Four images, those given and for the rest any, with their places shuffled, warped into `shape`."""
        chosen = np.array([*given, *rng.integers(self.count, size=4 - len(given))])
        rng.shuffle(chosen)
        places = mosaic_places([self.size(int(number)) for number in chosen], self.imgsz, rng)
        canvas = 2 * self.imgsz
        matrix, scale = random_matrix(self.settings, (canvas, canvas), shape, rng, max(shape) / self.imgsz)
        sample = warp_mosaic(places, lambda number: self.load(int(chosen[number])), canvas, matrix, scale, shape)
        return copy_paste(sample, self.settings.copy_paste, rng)
