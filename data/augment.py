"""Augmentation in small pieces. Each takes and returns a `Sample`; random ones draw from the generator given.

Distributions and hyperparameter names are YOLOv5's. Boxes are corners in pixels of the sample's own image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

GREY = 114  # what is outside every image
LEAST_SIDE, LEAST_AREA, MOST_ASPECT = 2, 0.1, 100  # what a warped box must keep: pixels, share, long side over short


class Sample(NamedTuple):
    """An image uint8 (h, w, 3) BGR, its boxes float32 (k, 4) xyxy in pixels, and their classes float32 (k,)."""

    image: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray


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


def mosaic(samples: Sequence[Sample], size: int, rng: np.random.Generator) -> Sample:
    """Four images around a random centre of a canvas of 2 x `size` pixels: the first top left, then top right,
    bottom left, bottom right, each cut where it leaves the canvas."""
    canvas = np.full((2 * size, 2 * size, 3), GREY, np.uint8)
    centre_x, centre_y = (int(v) for v in rng.uniform(size / 2, 3 * size / 2, 2))
    boxes = []
    for place, sample in enumerate(samples):
        height, width = sample.image.shape[:2]
        left = centre_x if place % 2 else centre_x - width
        top = centre_y if place // 2 else centre_y - height
        _paste(canvas, sample.image, left, top)
        boxes.append(sample.boxes + np.array([left, top, left, top], np.float32))
    joined = np.concatenate(boxes).clip(0, 2 * size)
    return Sample(canvas, joined, np.concatenate([sample.classes for sample in samples]))


def _paste(canvas: np.ndarray, image: np.ndarray, left: int, top: int) -> None:
    """Copy the part of `image` that lies on `canvas` when its corner is at (left, top)."""
    height, width = (
        min(have, room - at) for have, room, at in zip(image.shape, canvas.shape, (top, left), strict=False)
    )
    canvas[max(top, 0) : top + height, max(left, 0) : left + width] = image[
        max(-top, 0) : height, max(-left, 0) : width
    ]


def random_matrix(
    settings: AugmentSettings, source: tuple[int, int], target: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """A 3x3 matrix from pixels of `source` (height, width) to those of `target`, and its change of scale.

    Centre, perspective, rotation with scale, shear, translation, in that order.
    """
    perspective = rng.uniform(-settings.perspective, settings.perspective, 2)
    angle = rng.uniform(-settings.degrees, settings.degrees)
    scale = rng.uniform(1 - settings.scale, 1 + settings.scale)
    shear = np.tan(np.radians(rng.uniform(-settings.shear, settings.shear, 2)))
    shift = rng.uniform(0.5 - settings.translate, 0.5 + settings.translate, 2) * (target[1], target[0])
    centred, tilted, sheared, shifted = (np.eye(3) for _ in range(4))
    centred[:2, 2] = -source[1] / 2, -source[0] / 2
    tilted[2, :2] = perspective
    sheared[0, 1], sheared[1, 0] = shear
    shifted[:2, 2] = shift
    cos, sin = scale * math.cos(math.radians(angle)), scale * math.sin(math.radians(angle))
    turned = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    return shifted @ sheared @ turned @ tilted @ centred, scale


def random_warp(sample: Sample, settings: AugmentSettings, shape: tuple[int, int], rng: np.random.Generator) -> Sample:
    """Warp the image by a random matrix into `shape` (height, width) and drop the boxes of which too little is left."""
    matrix, scale = random_matrix(settings, sample.image.shape[:2], shape, rng)
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
    corners = np.ones((len(boxes), 4, 3))
    corners[..., :2] = boxes[:, [0, 1, 2, 3, 0, 3, 2, 1]].reshape(-1, 4, 2)
    warped = corners @ matrix.T
    points = warped[..., :2] / warped[..., 2:]
    around = np.concatenate((points.min(1), points.max(1)), 1)
    height, width = shape
    return around.clip(0, (width, height, width, height)).astype(np.float32)


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


def random_hsv(sample: Sample, settings: AugmentSettings, rng: np.random.Generator) -> Sample:
    """Hue, saturation and value times random factors; hue turns around, the others end at 255."""
    factors = 1 + rng.uniform(-1, 1, 3) * (settings.hsv_h, settings.hsv_s, settings.hsv_v)
    steps = np.arange(256)
    tables = [(steps * factors[0]) % 180, (steps * factors[1]).clip(0, 255), (steps * factors[2]).clip(0, 255)]
    channels = cv2.split(cv2.cvtColor(sample.image, cv2.COLOR_BGR2HSV))
    changed = [cv2.LUT(channel, table.astype(np.uint8)) for channel, table in zip(channels, tables, strict=True)]
    return sample._replace(image=cv2.cvtColor(cv2.merge(changed), cv2.COLOR_HSV2BGR))


def flip_left_right(sample: Sample) -> Sample:
    """Mirror left and right."""
    width = sample.image.shape[1]
    boxes = sample.boxes[:, [2, 1, 0, 3]] * np.array([-1, 1, -1, 1], np.float32) + np.array(
        [width, 0, width, 0], np.float32
    )
    return Sample(np.ascontiguousarray(sample.image[:, ::-1]), boxes, sample.classes)


def flip_up_down(sample: Sample) -> Sample:
    """Mirror top and bottom."""
    height = sample.image.shape[0]
    boxes = sample.boxes[:, [0, 3, 2, 1]] * np.array([1, -1, 1, -1], np.float32) + np.array(
        [0, height, 0, height], np.float32
    )
    return Sample(np.ascontiguousarray(sample.image[::-1]), boxes, sample.classes)


@dataclass(frozen=True)
class Augmenter:
    """The whole chain of one training item.

    `load(index)` returns an image's `Sample` with its longer side at `imgsz`; `count` is how many images partners are
    drawn from (all of them, so that no process's mosaics differ from another's).
    """

    settings: AugmentSettings
    imgsz: int
    count: int
    load: Callable[[int], Sample]

    def __call__(self, index: int, shape: tuple[int, int], rng: np.random.Generator) -> Sample:
        """The item for image `index` in `shape` (height, width). Every choice comes from `rng`, in a fixed order."""
        settings = self.settings
        if rng.random() < settings.mosaic:
            sample = self._mosaic(index, shape, rng)
            if rng.random() < settings.mixup:
                sample = mixup(sample, self._mosaic(int(rng.integers(self.count)), shape, rng), rng)
        else:
            fitted, _ = letterbox(self.load(index), shape, enlarge=True)
            sample = random_warp(fitted, settings, shape, rng)
        if settings.hsv_h or settings.hsv_s or settings.hsv_v:
            sample = random_hsv(sample, settings, rng)
        if rng.random() < settings.flipud:
            sample = flip_up_down(sample)
        if rng.random() < settings.fliplr:
            sample = flip_left_right(sample)
        return sample

    def _mosaic(self, index: int, shape: tuple[int, int], rng: np.random.Generator) -> Sample:
        """Four images, the first of them `index` (before their places are shuffled), warped into `shape`."""
        chosen = np.array([index, *rng.integers(self.count, size=3)])
        rng.shuffle(chosen)
        joined = mosaic([self.load(int(number)) for number in chosen], self.imgsz, rng)
        return random_warp(joined, self.settings, shape, rng)
