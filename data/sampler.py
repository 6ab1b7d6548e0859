"""Which image is drawn when: global batches that are a pure function of (seed, epoch), whatever processes they feed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

ORDER, ITEM = 1, 2  # what a stream of random numbers is for: the first part of its seed keeps them apart


class Draw(NamedTuple):
    """One item to load. All that its random choices depend on travels with it: a worker has no state to go stale."""

    epoch: int
    position: int  # in the epoch's order, over all processes
    image: int  # its number in the split
    shape: tuple[int, int]  # height and width to deliver, pixels
    partners: tuple[int, ...] = ()  # images to be mixed with it; none: they are drawn from all


def item_generator(seed: int, draw: Draw) -> np.random.Generator:
    """The generator of every random choice of an item: the same on any worker, process and restart."""
    return np.random.default_rng((ITEM, seed, draw.epoch, draw.position))


class GlobalBatches:
    """Batches of the whole run, not of one process: lists of `batch_size` draws.

    The order is a permutation by (seed, epoch), or the images as they stand where `shapes` gives each batch its shape.
    The last batch is filled from the start of the order, so that every batch is full and divides alike. `partners`: so
    many images that follow in the order go along with each: neighbours share them, so that each is read but once.
    """

    drop_last = False  # what Accelerate asks of a batch sampler

    def __init__(self, count: int, batch_size: int, seed: int, shape: tuple[int, int], partners: int = 0) -> None:
        self.count, self.batch_size, self.seed, self.shape, self.partners = count, batch_size, seed, shape, partners
        self.epoch, self.skipped = 0, 0
        self.sampler = (
            self  # Accelerate hands `set_epoch` to a batch sampler's `sampler` where there are many processes
        )

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration gives."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Leave out the first batches of the next iteration: they are trained already."""
        self.skipped = batches

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, order = self.epoch, self.order()
        first, self.skipped = self.skipped, 0
        for batch in range(first, len(self)):
            start = batch * self.batch_size
            shape = self.batch_shape(batch)
            images = order[np.arange(start, start + self.batch_size + self.partners) % self.count].tolist()
            yield [
                Draw(epoch, start + k, images[k], shape, tuple(images[k + 1 : k + 1 + self.partners]))
                for k in range(self.batch_size)
            ]

    def order(self) -> np.ndarray:
        """The images in this epoch's order, (count,)."""
        return np.random.default_rng((ORDER, self.seed, self.epoch)).permutation(self.count)

    def batch_shape(self, batch: int) -> tuple[int, int]:
        """Height and width of a batch."""
        return self.shape


class RectangularBatches(GlobalBatches):
    """Global batches of images of like aspect ratio, in the same order every epoch, each with the least padding."""

    def __init__(self, sizes: np.ndarray, batch_size: int, seed: int, imgsz: int, stride: int) -> None:
        super().__init__(len(sizes), batch_size, seed, (imgsz, imgsz))
        self._order, self._shapes = by_aspect(sizes, batch_size, imgsz, stride, pad=0.0)

    def order(self) -> np.ndarray:
        return self._order

    def batch_shape(self, batch: int) -> tuple[int, int]:
        return self._shapes[batch]


def evaluation_batches(
    sizes: np.ndarray, batch_size: int, imgsz: int, stride: int, square: bool, pad: float = 0.5
) -> list[list[Draw]]:
    """Every image once, in batches that do not depend on the number of processes; each is dealt to a process whole."""
    if square:
        order, shapes = np.arange(len(sizes)), [(imgsz, imgsz)] * math.ceil(len(sizes) / batch_size)
    else:
        order, shapes = by_aspect(sizes, batch_size, imgsz, stride, pad)
    return [
        [Draw(0, start + k, int(index), shape) for k, index in enumerate(order[start : start + batch_size])]
        for start, shape in zip(range(0, len(sizes), batch_size), shapes, strict=True)
    ]


def by_aspect(
    sizes: np.ndarray, batch_size: int, imgsz: int, stride: int, pad: float
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Images sorted by height / width, and the shape of each run of `batch_size` of them. `sizes`: (n, 2), w and h."""
    aspects = sizes[:, 1] / sizes[:, 0]
    order = np.lexsort((-np.arange(len(aspects)), aspects))  # ties by falling index, so that every machine agrees
    runs: Sequence[np.ndarray] = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return order, [batch_shape(aspects[run], imgsz, stride, pad) for run in runs]


def batch_shape(aspects: np.ndarray, imgsz: int, stride: int, pad: float) -> tuple[int, int]:
    """Height and width of the smallest batch that holds images of these `aspects` (height / width) at `imgsz`.

    `pad` is in strides; both sides are whole strides.
    """
    lowest, highest = float(aspects.min()), float(aspects.max())
    height, width = min(highest, 1.0), min(1 / lowest, 1.0)
    sides = [math.ceil(side * imgsz / stride + pad) * stride for side in (height, width)]
    return sides[0], sides[1]
