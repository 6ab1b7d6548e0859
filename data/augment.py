"""Augmentation for detectors: functions from `Sample` to `Sample`, and the `Augmenter` that data/detection.py calls.

Random functions draw from the generator that is passed. Distributions and hyperparameters are YOLOv5's. Boxes are xyxy
in pixels of the sample's image; a shape is (height, width).

Outlines of objects travel with the boxes: after a warp or a cut, a box is the extent of the visible part of its
outline. Without an outline it is the upright box around its warped corners, which may be larger than the object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from data.polygons import Polygons
from utils.batch import PHOTOS, PixelFormat, Placement
from utils.config.hyperparameters import Augmentation

PADDING_LEVEL = 114  # grey, 0 to 255, outside of every image
PADDING = {np.uint8: PADDING_LEVEL, np.uint16: 257 * PADDING_LEVEL}  # the same by the type of an image
MOSAIC_PARTNERS = 3  # the other images of a mosaic
MIN_BOX_PIXELS = 2  # exclusive lower bound of a warped box's sides
MIN_AREA_SHARE = 0.1  # exclusive lower bound of a warped box's area over its area before
MIN_OUTLINED_AREA_SHARE = 0.01  # the same bound for the box around the visible part of an outline
MAX_BOX_ASPECT = 100  # exclusive upper bound of a warped box's longer side over its shorter one
MAX_COVERED_SHARE = 0.3  # exclusive upper bound of the share of any box that a pasted object covers

Corners = tuple[float, float, float, float]  # left, top, right, bottom


class Sample(NamedTuple):
    """An image and its objects."""

    image: np.ndarray  # pixels, uint8 (h, w, 3) BGR, or as `read_pixels` returns them
    boxes: np.ndarray  # float32 (k, 4), xyxy in pixels
    classes: np.ndarray  # class numbers, float32 (k,)
    # The outline of each object in pixels, without points if it is unknown; None if outlines are not needed.
    polygons: Polygons | None = None

    @property
    def has_outline(self) -> np.ndarray:
        """Whether the outline of each object is known, bool (k,)."""
        return np.zeros(len(self.boxes), bool) if self.polygons is None else self.polygons.counts > 0


@contextmanager
def seed_torch(generator: np.random.Generator) -> Iterator[None]:
    """Seed torch's CPU generator from `generator` inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int(generator.integers(2**63)))
        yield


def letterbox(sample: Sample, shape: tuple[int, int], enlarge: bool, masks: bool = True) -> tuple[Sample, Placement]:
    """Fit the image into `shape` at one scale, centred on grey; scale a smaller one up only if `enlarge` is true."""
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
        form = cv2.BORDER_CONSTANT, None, (PADDING[image.dtype.type],) * 4
        image = cv2.copyMakeBorder(image, top, bottom, left, right, *form)
    boxes = sample.boxes * ratio + np.array([left, top, left, top], np.float32)
    polygons = sample.polygons
    if polygons is not None:
        # As in YOLOv5, mask outlines keep the half pixel of an odd padding: drawing truncates points to whole pixels.
        polygons = polygons.with_points(polygons.points * ratio + np.array(spare if masks else (left, top), np.float32))
    return Sample(image, boxes, sample.classes, polygons), Placement((ratio, ratio), (left, top))


def mosaic_positions(sizes: Sequence[tuple[int, int]], size: int, rng: np.random.Generator) -> list[Corners]:
    """Return the positions of four images of `sizes` (width, height) on a canvas of 2 x `size` pixels.

    They meet at a random centre: the first top left of it, then top right, bottom left, bottom right.
    """
    centre_x, centre_y = (int(v) for v in rng.uniform(size / 2, 3 * size / 2, 2))
    positions: list[Corners] = []
    for number, (width, height) in enumerate(sizes):
        left = centre_x if number % 2 else centre_x - width
        top = centre_y if number // 2 else centre_y - height
        positions.append((left, top, left + width, top + height))
    return positions


def warp_mosaic(
    positions: Sequence[Corners],
    load: Callable[[int], Sample],
    canvas: int,
    matrix: np.ndarray,
    scale: float,
    shape: tuple[int, int],
    pixels: PixelFormat = PHOTOS,
) -> Sample:
    """Return the mosaic of four images at `positions` on a square canvas, warped into `shape`.

    The canvas is never drawn: each image is warped straight into the result; images outside of it are not loaded.

    Args:
        positions: box of each image on the canvas, pixels
        load: returns the image for a position, by its number; its size may differ from the position's
        canvas: side of the canvas in pixels
        matrix: 3x3 matrix from pixels of the canvas to pixels of the result, of the scale factor `scale`
    """
    upright = not matrix[[0, 1, 2, 2], [1, 0, 0, 1]].any()
    result = np.full(pixels.shape(*shape), PADDING[pixels.dtype], pixels.dtype)
    before, after, classes, outlines, bounds, outlined = [], [], [], [], [], []
    for number, position in enumerate(positions):
        part = (max(position[0], 0), max(position[1], 0), min(position[2], canvas), min(position[3], canvas))
        window = _window(part, matrix, shape, upright) if part[0] < part[2] and part[1] < part[3] else None
        if window is None:
            continue
        sample = load(number)
        tile = _MosaicTile(sample.image, position, part, window)
        polygons, limits = sample.polygons, window
        if upright:
            factors, shifts = _draw_upright(result, tile, matrix)
            after.append((sample.boxes * factors + shifts).clip(window[:2] * 2, window[2:] * 2))
            polygons = polygons and polygons.with_points(polygons.points * factors[:2] + shifts[:2])
        else:
            _draw_warped(result, tile, matrix)
            limits = (0, 0, *shape[::-1])
            if polygons is not None:  # cut off at the edge of the canvas
                points = polygons.points * tile.ratio + position[:2]
                polygons, _ = polygons.with_points(points).cut(np.array(part))
                polygons = polygons.with_points(warp_points(polygons.points, matrix))
        if polygons is not None:
            outlines.append(polygons)
            bounds.append(np.tile(limits, (len(polygons.counts), 1)))
        before.append((sample.boxes * (tile.ratio * 2) + position[:2] * 2).clip(0, canvas))
        outlined.append(sample.has_outline)
        classes.append(sample.classes)
    if not classes:
        return Sample(result, np.zeros((0, 4), np.float32), np.zeros(0, np.float32), Polygons.from_outlines(()))
    old, has_outline = np.concatenate(before), np.concatenate(outlined)
    new = np.concatenate(after) if upright else warp_boxes(old, matrix, shape)
    polygons = Polygons.concatenate(outlines) if outlines else None
    if polygons is not None:
        polygons, extents = polygons.cut(np.concatenate(bounds))
        new = np.where(has_outline[:, None], extents, new)
    visible = is_visible(old * scale, new, has_outline)
    polygons = polygons and polygons.subset(visible)
    return Sample(result, new[visible].astype(np.float32), np.concatenate(classes)[visible], polygons)


def _window(
    part: Corners, matrix: np.ndarray, shape: tuple[int, int], upright: bool
) -> tuple[int, int, int, int] | None:
    """Return the pixels of the result around a warped part of the canvas: left, top, right, bottom; None if outside."""
    if upright:
        (a, _, x), (_, d, y) = matrix[:2].tolist()
        around = [a * part[0] + x, d * part[1] + y, a * part[2] + x, d * part[3] + y]
    else:
        around = warp_boxes(np.array([part]), matrix, shape)[0].tolist()
    height, width = shape
    left, top = max(round(around[0]), 0), max(round(around[1]), 0)
    right, bottom = min(round(around[2]), width), min(round(around[3]), height)
    return (left, top, right, bottom) if left < right and top < bottom else None


class _MosaicTile(NamedTuple):
    """An image of a mosaic and its position."""

    image: np.ndarray  # (h, w, 3)
    position: Corners  # box on the canvas in pixels; may reach beyond the canvas
    part: Corners  # the position, clipped to the canvas
    window: tuple[int, int, int, int]  # the pixels of the result to draw into: left, top, right, bottom

    @property
    def ratio(self) -> tuple[float, float]:
        """Pixels of the canvas per pixel of the image, for x and y."""
        height, width = self.image.shape[:2]
        left, top, right, bottom = self.position
        return (right - left) / width, (bottom - top) / height


def _draw_upright(result: np.ndarray, tile: _MosaicTile, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Resize the part of the image that is visible in the tile's window, in whole pixels, into the result.

    Return factors and shifts, (4,) each, which map boxes exactly from the image to the result.
    """
    image, position, part, window = tile
    ratio = tile.ratio
    spans, factors, shifts = [], [], []
    for axis in (0, 1):
        low, high = window[axis], window[axis + 2]
        scale, shift = float(matrix[axis, axis]), float(matrix[axis, 2])
        edges = (((edge - shift) / scale - position[axis]) / ratio[axis] for edge in (low, high))
        limits = [(edge - position[axis]) / ratio[axis] for edge in (part[axis], part[axis + 2])]
        first, last = (round(min(max(edge, limits[0]), limits[1])) for edge in edges)
        first = min(first, image.shape[1 - axis] - 1)
        last = max(last, first + 1)
        factor = (high - low) / (last - first)
        spans.append(slice(first, last))
        factors.append(factor)
        shifts.append(low - first * factor)
    left, top, right, bottom = window
    target = result[top:bottom, left:right]
    cv2.resize(image[spans[1], spans[0]], target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)
    return np.array(factors * 2, np.float32), np.array(shifts * 2, np.float32)


def _draw_warped(result: np.ndarray, tile: _MosaicTile, matrix: np.ndarray) -> None:
    """Warp the image into the tile's window of the result; pixels of the window outside of the image do not change."""
    image, position, part, (left, top, right, bottom) = tile
    ratio = tile.ratio
    limits = [round((part[k] - position[k % 2]) / ratio[k % 2]) for k in range(4)]
    cut = image[limits[1] : limits[3], limits[0] : limits[2]]
    if not cut.size:
        return
    to_canvas, to_window = np.diag([*ratio, 1.0]), np.eye(3)
    to_canvas[:2, 2] = [position[k] + limits[k] * ratio[k] for k in (0, 1)]
    to_window[:2, 2] = -left, -top
    target = result[top:bottom, left:right]
    _warp_image(cut, to_window @ matrix @ to_canvas, target.shape[:2], dst=target, borderMode=cv2.BORDER_TRANSPARENT)


def _warp_image(image: np.ndarray, matrix: np.ndarray, shape: tuple[int, int], **options: Any) -> np.ndarray:
    """Warp an image into `shape` by OpenCV's affine function, or its slower one for a matrix with perspective."""
    if matrix[2, :2].any():
        return cv2.warpPerspective(image, matrix, dsize=shape[::-1], **options)
    return cv2.warpAffine(image, matrix[:2], dsize=shape[::-1], **options)


def random_matrix(
    settings: Augmentation,
    source: tuple[int, int],
    target: tuple[int, int],
    rng: np.random.Generator,
    zoom: float = 1.0,
    unit: float = 1.0,
) -> tuple[np.ndarray, float]:
    """Return a random 3x3 matrix from pixels of `source` to pixels of `target`, and its scale.

    It centres, tilts (perspective), rotates and scales, shears, and shifts, in that order. The random scale is times
    `zoom`; `unit` pixels of the source count as one for perspective.
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
    rotated = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    return shifted @ sheared @ rotated @ tilted @ centred, scale


def random_warp(
    sample: Sample, settings: Augmentation, shape: tuple[int, int], rng: np.random.Generator, unit: float = 1.0
) -> Sample:
    """Warp the image by a `random_matrix` into `shape`, and drop boxes that are hardly visible; see `warp_mosaic`."""
    matrix, scale = random_matrix(settings, sample.image.shape[:2], shape, rng, 1.0, unit)
    image = sample.image
    if image.shape[:2] != shape or not np.array_equal(matrix, np.eye(3)):
        image = _warp_image(image, matrix, shape, borderValue=(PADDING[image.dtype.type],) * 4)
    boxes, polygons = warp_boxes(sample.boxes, matrix, shape), sample.polygons
    if polygons is not None:
        warped = polygons.with_points(warp_points(polygons.points, matrix).astype(np.float32))
        polygons, extents = warped.cut(np.array((0, 0, *shape[::-1])))
        boxes = np.where(sample.has_outline[:, None], extents, boxes)
    visible = is_visible(sample.boxes * scale, boxes, sample.has_outline)
    return Sample(image, boxes[visible], sample.classes[visible], polygons and polygons.subset(visible))


def warp_boxes(boxes: np.ndarray, matrix: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the axis-aligned boxes around the warped corners of `boxes` (k, 4), clipped to `shape` (height, width)."""
    points = warp_points(boxes[:, [0, 1, 2, 3, 0, 3, 2, 1]].reshape(-1, 4, 2), matrix)
    around = np.concatenate((points.min(1), points.max(1)), 1)
    height, width = shape
    return around.clip(0, (width, height, width, height)).astype(np.float32)


def warp_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Map points (..., 2), x and y, by `matrix`."""
    corners = np.ones((*points.shape[:-1], 3))
    corners[..., :2] = points
    warped = corners @ matrix.T
    return warped[..., :2] / warped[..., 2:]


def is_visible(before: np.ndarray, after: np.ndarray, has_outline: np.ndarray | bool = False) -> np.ndarray:
    """Return which warped boxes are over 2 pixels, not too thin, and keep enough of their area, less if outlined."""
    old, new = before[:, 2:] - before[:, :2], after[:, 2:] - after[:, :2]
    large = (new > MIN_BOX_PIXELS).all(1)
    min_area_shares = np.where(has_outline, MIN_OUTLINED_AREA_SHARE, MIN_AREA_SHARE).astype(old.dtype)
    enough_area = new.prod(1) > min_area_shares * old.prod(1)
    longer, shorter = new.max(1, initial=0), new.min(1, initial=np.inf)
    return large & enough_area & (longer < MAX_BOX_ASPECT * shorter)


def mixup(a: Sample, b: Sample, rng: np.random.Generator) -> Sample:
    """Blend two images of one size with a weight from Beta(32, 32), and join their boxes. Zhang et al. 2018."""
    weight = rng.beta(32.0, 32.0)
    image = cv2.addWeighted(a.image, weight, b.image, 1 - weight, 0)
    outlines = [sample.polygons for sample in (a, b) if sample.polygons is not None]
    polygons = Polygons.concatenate(outlines) if outlines else None
    return Sample(image, np.concatenate((a.boxes, b.boxes)), np.concatenate((a.classes, b.classes)), polygons)


def copy_paste(sample: Sample, chance: float, rng: np.random.Generator) -> Sample:
    """Paste mirrored copies of objects on the other side of the image, after Ghiasi et al. 2021, as in YOLOv5.

    Each object with a polygon is pasted with probability `chance`, unless it would cover 0.3 or more of any box.
    Changes the image in place.
    """
    polygons = sample.polygons
    if not chance or polygons is None or not len(polygons.points):
        return sample
    chosen = rng.random(len(polygons.counts)) < chance
    image, boxes, classes = sample.image, sample.boxes, sample.classes
    mirrored, pasted = None, []
    for number in np.flatnonzero(chosen).tolist():
        polygon = polygons.outline(number)
        if len(polygon) < 3:
            continue
        box = np.concatenate((polygon.min(0), polygon.max(0)))
        box[[0, 2]] = image.shape[1] - box[[2, 0]]
        if (box[2:] - box[:2]).min() <= MIN_BOX_PIXELS or covered_shares(boxes, box).max() >= MAX_COVERED_SHARE:
            continue
        mirrored = cv2.flip(image, 1) if mirrored is None else mirrored  # before anything is pasted
        left, top = np.floor(box[:2]).astype(int).tolist()
        right, bottom = np.ceil(box[2:]).astype(int).tolist()
        corners = np.stack((image.shape[1] - polygon[:, 0] - left, polygon[:, 1] - top), 1) - 0.5  # to pixels' centres
        mask = np.zeros((bottom - top, right - left), np.uint8)
        cv2.fillPoly(mask, [corners.round().astype(np.int32)], 1)
        cv2.copyTo(mirrored[top:bottom, left:right], mask, image[top:bottom, left:right])
        boxes = np.concatenate((boxes, box[None].astype(np.float32)))
        classes = np.append(classes, classes[number])
        pasted.append(polygon * (-1, 1) + (image.shape[1], 0))
    if pasted:
        polygons = Polygons.concatenate((polygons, Polygons.from_outlines(pasted)))
    return Sample(image, boxes, classes, polygons)


def covered_shares(boxes: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the share of each of `boxes` (k, 4) that `box` (4,) covers, (k,)."""
    shared = (np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])).clip(0).prod(1)
    return shared / (boxes[:, 2:] - boxes[:, :2]).prod(1)


def random_hsv(sample: Sample, settings: Augmentation, rng: np.random.Generator) -> Sample:
    """Rotate the hue, and scale saturation and value by random factors, in less than half the time of cv2's HSV.

    A channel c of a pixel whose largest channel is v becomes value * v - value * saturation * (v - c), which is what
    the factors mean in HSV until something is clipped. The hue is rotated around the axis of greys, equally for all
    colours, by up to `hsv_h` times 180 degrees.
    """
    turn, saturation, value = rng.uniform(-1, 1, 3) * (settings.hsv_h, settings.hsv_s, settings.hsv_v) + (0, 1, 1)
    cos, sin = math.cos(math.pi * turn), math.sin(math.pi * turn) / math.sqrt(3)
    around_greys = np.array([[cos, sin, -sin], [-sin, cos, sin], [sin, -sin, cos]]) + (1 - cos) / 3
    if sample.image.shape[2:] != (3,):  # without colours
        flat = sample.image.reshape(len(sample.image), -1)
        return sample._replace(image=cv2.multiply(flat, value).reshape(sample.image.shape))
    image = cv2.transform(sample.image, around_greys)
    channels = cv2.split(image)
    largest = cv2.max(cv2.max(*channels[:2]), channels[2])
    is_photo = image.dtype == np.uint8
    brightened = cv2.convertScaleAbs(largest, alpha=value) if is_photo else cv2.multiply(largest, value)
    for channel in channels:
        cv2.subtract(largest, channel, dst=channel)
        cv2.addWeighted(brightened, 1, channel, -value * saturation, 0, dst=channel)
    return sample._replace(image=cv2.merge(channels, dst=image))


def flip(sample: Sample, axis: int) -> Sample:
    """Mirror an image and its boxes along axis 0, x (left and right), or axis 1, y (top and bottom)."""
    boxes = sample.boxes.copy()
    boxes[:, [axis, axis + 2]] = sample.image.shape[1 - axis] - boxes[:, [axis + 2, axis]]
    polygons = sample.polygons
    if polygons is not None:
        points = polygons.points.copy()
        points[:, axis] = sample.image.shape[1 - axis] - points[:, axis]
        polygons = polygons.with_points(points)
    return Sample(cv2.flip(sample.image, 1 - axis), boxes, sample.classes, polygons)


@dataclass(frozen=True)
class Augmenter:
    """The augmentation of a training item. The same generator gives the same picture at every scale of `shape`."""

    settings: Augmentation
    imgsz: int  # pixels
    count: int  # images in the data set; partners are drawn from all, so mosaics do not depend on the process
    load: Callable[[int], Sample]  # returns an image by its index, its longer side at `imgsz`
    size: Callable[[int], tuple[int, int]]  # returns width and height of that image
    masks: bool = False  # for segmentation: items have outlines
    pixels: PixelFormat = PHOTOS

    def __call__(
        self, index: int, shape: tuple[int, int], rng: np.random.Generator, partners: Sequence[int] = ()
    ) -> Sample:
        """Return the item of image `index` in `shape` (height, width). Every choice comes from `rng`, in a fixed order.

        Args:
            partners: indices of the mosaic's three other images, then of the four images of a second mosaic for mixup;
                missing ones are drawn from all images
        """
        settings = self.settings
        if rng.random() < settings.mosaic:
            sample = self._mosaic([index, *partners[:MOSAIC_PARTNERS]], shape, rng)
            if rng.random() < settings.mixup:
                second = partners[MOSAIC_PARTNERS:] or [int(rng.integers(self.count))]
                sample = mixup(sample, self._mosaic(second, shape, rng), rng)
        else:
            fitted, _ = letterbox(self.load(index), shape, enlarge=True, masks=self.masks)
            sample = random_warp(fitted, settings, shape, rng, max(shape) / self.imgsz)
        if not self.masks:  # the boxes of a detector are final
            sample = sample._replace(polygons=None)
        if settings.hsv_h or settings.hsv_s or settings.hsv_v:
            sample = random_hsv(sample, settings, rng)
        if rng.random() < settings.flipud:
            sample = flip(sample, 1)
        if rng.random() < settings.fliplr:
            sample = flip(sample, 0)
        return sample

    def _mosaic(self, images: Sequence[int], shape: tuple[int, int], rng: np.random.Generator) -> Sample:
        """Return a warped mosaic of four images in random order: `images`, filled up with random ones."""
        indices = np.array([*images, *rng.integers(self.count, size=4 - len(images))])
        rng.shuffle(indices)
        positions = mosaic_positions([self.size(int(index)) for index in indices], self.imgsz, rng)
        canvas = 2 * self.imgsz
        matrix, scale = random_matrix(self.settings, (canvas, canvas), shape, rng, max(shape) / self.imgsz)
        form = canvas, matrix, scale, shape, self.pixels
        sample = warp_mosaic(positions, lambda index: self.load(int(indices[index])), *form)
        return copy_paste(sample, self.settings.copy_paste, rng)
