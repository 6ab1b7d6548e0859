"""Global batches: lists of sample indices, a pure function of (seed, epoch) for any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np

from utils.batch import Instances, Split, Subset
from utils.console import log

# The first part of a generator's seed: what its numbers are for.
ORDER_STREAM, ITEM_STREAM, SIZE_STREAM, PARTNERS_STREAM, USER_STREAM = 1, 2, 3, 4, 5
# Number of positions around an item from which its partners are drawn. With partners from the whole set, as in YOLOv5,
# an image would be decoded 3.6 instead of 1.07 times per epoch, for the same scores.
PARTNERS_WINDOW = 1000
PREFETCHED_BATCHES = 2  # batches that each loader process prefetches: torch's default
EVALUATION_PAD_STRIDES = 0.5  # strides added to both sides of a batch that is not square, as in YOLOv5


class SampleIndex(NamedTuple):
    """One item to load, with everything that its random choices depend on: loader processes have no state."""

    epoch: int
    position: int  # place in the epoch's order, over all processes
    image: int  # index of the image in the split
    shape: tuple[int, int]  # height and width to deliver, pixels
    partners: tuple[int, ...] = ()  # indices of the images to mix it with; if empty, they are chosen among all images


def item_generator(seed: int, sample: SampleIndex, of_user: bool = False) -> np.random.Generator:
    """Return the generator of all random choices of an item, the same in every process and after a restart.

    The user's augmentations have their own (`of_user`), so that they change no other random choice of the item.
    """
    return np.random.default_rng((USER_STREAM if of_user else ITEM_STREAM, seed, sample.epoch, sample.position))


@dataclass(frozen=True)
class Sampling:
    """Which images an epoch has, and at which size: train.py's flags of these names. By default each image once."""

    rect: bool = False
    multi_scale: bool = False  # an image is scaled to the usual size first, and then to the size of its batch
    image_weights: bool = False
    close_mosaic: int = 0
    epochs: int = 0  # of the whole run

    def largest(self, imgsz: int) -> int:
        """Return the largest size of a batch in pixels, not rounded to strides."""
        return imgsz * 3 // 2 if self.multi_scale else imgsz

    def mixes(self, epoch: int) -> bool:
        """Return whether items of this epoch may be mixed from several images."""
        return not self.close_mosaic or epoch < self.epochs - self.close_mosaic

    def weights(self, instances: Instances, count: int) -> np.ndarray | None:
        """Return the probability of each of `count` images, None if each is drawn once.

        An image's weight is the sum over its instances of 1 / (instances of their class). Unlike YOLOv5's, weights do
        not depend on the results so far: the samples must be the same after a crash.
        """
        if not self.image_weights or not len(instances.images):
            return None
        class_weights = 1 / np.maximum(np.bincount(instances.classes), 1)
        weights = np.bincount(instances.images, weights=class_weights[instances.classes], minlength=count)
        return weights / weights.sum()

    def batches(
        self, split: Split, sizes: np.ndarray, batch_size: int, seed: int, imgsz: int, stride: int, partners: int
    ) -> GlobalBatches:
        """Return the global batches for training; `partners` images of the epoch's order are mixed into each item."""
        count, partners = len(sizes), 0 if self.rect else partners
        scales = batch_sizes(imgsz, stride) if self.multi_scale else range(0)
        weights = self.weights(split.instances(), count)
        fixed = by_aspect(sizes, batch_size, imgsz, stride, pad=0.0) if self.rect else None
        return GlobalBatches(count, batch_size, seed, (imgsz, imgsz), partners, scales, weights, fixed, split.sets)

    def report(self, instances: Instances, count: int, imgsz: int, stride: int) -> None:
        """Log what each flag that is on does to a split of `count` images."""
        if self.image_weights:
            never = count - len(np.unique(instances.images))
            log(f"--image-weights: {count:,} samples per epoch; {never:,} images have no labels")
        if self.multi_scale:
            sizes = ", ".join(map(str, batch_sizes(imgsz, stride)))
            log(f"--multi-scale: each batch at one of the sizes {sizes} pixels")
        if self.close_mosaic:
            first = max(self.epochs - self.close_mosaic, 0) + 1
            log(f"--close-mosaic {self.close_mosaic}: no mixed images from epoch {first} on")


def images_in_use(batch_size: int, workers: int) -> int:
    """Return the number of decoded images to store so that each is decoded once per epoch."""
    return PARTNERS_WINDOW + batch_size * (1 + PREFETCHED_BATCHES * workers + 1)  # batches loaded at the same time


def batch_sizes(imgsz: int, stride: int) -> range:
    """Return the sizes of batches with --multi-scale: half to one and a half times `imgsz`, in steps of `stride`.

    For 640 they equal YOLOv5's. The smallest is two strides, because a map of one cell has no variance.
    """
    smallest = max(math.ceil(imgsz / 2 / stride), 2) * stride
    return range(min(smallest, imgsz), imgsz * 3 // 2 + 1, stride)


@dataclass(eq=False)
class GlobalBatches:
    """Batches of the whole run, for all processes together: lists of `batch_size` sample indices.

    The order depends on (seed, epoch). The last batch is filled from the start of the order, so that every batch is
    full.
    """

    count: int  # number of images, and of samples per epoch
    batch_size: int
    seed: int
    shape: tuple[int, int]  # height and width of a batch, pixels
    # How many images are mixed with each, drawn by (seed, epoch, position) from `PARTNERS_WINDOW` positions around it.
    partners: int = 0
    # Possible sizes of the longer side of `shape`, drawn by (seed, epoch, batch); if empty, all batches have `shape`.
    sizes: range = range(0)
    weights: np.ndarray | None = None  # probability of each image, drawn with replacement; None: each image once
    # An order, the same in every epoch, and the shape of each of its batches: see `by_aspect`.
    fixed: tuple[np.ndarray, list[tuple[int, int]]] | None = None
    sets: Sequence[Subset] = ()  # data sets, each with its own number of samples; if empty, each image is drawn once
    local: slice = field(default_factory=lambda: slice(None))  # part of each batch that is delivered
    epoch: int = 0
    skipped: int = 0
    drop_last: ClassVar[bool] = False  # Accelerate reads it

    @property
    def sampler(self) -> GlobalBatches:
        """This object: with several processes Accelerate calls `set_epoch` of a batch sampler's `sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Leave out the first batches of the next iteration: a resumed run has trained on them."""
        self.skipped = batches

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        epoch, order = self.epoch, self.order()
        partners = self._partners(order)
        first, self.skipped = self.skipped, 0
        for batch in range(first, len(self)):
            shape = self.fixed[1][batch] if self.fixed else self.shape
            if self.sizes:
                rng = np.random.default_rng((SIZE_STREAM, self.seed, epoch, batch))
                shape = self._scaled(shape, self.sizes[int(rng.integers(len(self.sizes)))])
            yield self._samples(batch, shape, epoch, order, partners)[self.local]

    def largest(self) -> list[SampleIndex]:
        """Return the first batch at the largest size, which must fit into memory."""
        order, size = self.order(), max(self.sizes, default=max(self.shape))
        return self._samples(0, self._scaled(self.shape, size), self.epoch, order, self._partners(order))

    def _samples(
        self, batch: int, shape: tuple[int, int], epoch: int, order: np.ndarray, partners: np.ndarray
    ) -> list[SampleIndex]:
        positions = np.arange(batch * self.batch_size, (batch + 1) * self.batch_size)
        places = positions % self.count  # full batches: Accelerate cuts them into equal slices
        numbers = zip(positions.tolist(), order[places].tolist(), partners[places].tolist(), strict=True)
        return [SampleIndex(epoch, position, image, shape, tuple(partner)) for position, image, partner in numbers]

    def order(self) -> np.ndarray:
        """Return the indices of the images in this epoch's order, (count,)."""
        if self.fixed:
            return self.fixed[0]
        rng = np.random.default_rng((ORDER_STREAM, self.seed, self.epoch))
        if self.weights is not None:
            return rng.choice(self.count, self.count, p=self.weights)
        if not self.sets:
            return rng.permutation(self.count)
        # Each image of a data set as often as any other, or once more.
        drawn = [np.resize(rng.permutation(images), samples) for _, images, samples in self.sets]
        return rng.permutation(np.concatenate(drawn))

    def _partners(self, order: np.ndarray) -> np.ndarray:
        """Return the indices of the partners at each place of the order, (count, partners)."""
        places = np.arange(self.count)[:, None]
        rng = np.random.default_rng((PARTNERS_STREAM, self.seed, self.epoch))
        window = min(PARTNERS_WINDOW, self.count)
        first = (places - window // 2).clip(0, self.count - window)
        return order[first + rng.integers(window, size=(self.count, self.partners), dtype=np.int32)]

    def _scaled(self, shape: tuple[int, int], size: int) -> tuple[int, int]:
        """Return `shape` with its longer side at `size`, in whole strides."""
        unit = max(shape) * self.sizes.step
        height, width = (-(-side * size // unit) * self.sizes.step for side in shape)
        return height, width


def evaluation_batches(
    sizes: np.ndarray, batch_size: int, imgsz: int, stride: int, square: bool
) -> list[list[SampleIndex]]:
    """Return every image once, in batches that are the same for any number of processes: a process gets whole ones.

    If they are not `square`, with sides of `imgsz`, a batch has the smallest shape that holds its images.
    """
    count = len(sizes)
    if square:
        order, shapes = np.arange(count), [(imgsz, imgsz)] * count
    else:
        order, shared = by_aspect(sizes, batch_size, imgsz, stride, EVALUATION_PAD_STRIDES)
        shapes = [shared[position // batch_size] for position in range(count)]
    samples = [SampleIndex(0, position, int(order[position]), shapes[position]) for position in range(count)]
    groups = (list(group) for _, group in groupby(samples, key=lambda sample: sample.shape))
    return [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]


def by_aspect(
    sizes: np.ndarray, batch_size: int, imgsz: int, stride: int, pad: float
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the images sorted by height / width, and the shape of each batch; see `batch_shape`."""
    aspects = sizes[:, 1] / sizes[:, 0]
    order = np.lexsort((-np.arange(len(aspects)), aspects))  # ties by falling index, so that every machine agrees
    starts = range(0, len(order), batch_size)
    return order, [batch_shape(aspects[order[start : start + batch_size]], imgsz, stride, pad) for start in starts]


def batch_shape(aspects: np.ndarray, imgsz: int, stride: int, pad: float) -> tuple[int, int]:
    """Return height and width, in whole strides, of the smallest batch for images of these ratios of height to width.

    Their longer side has `imgsz` pixels; `pad` strides are added to both sides.
    """
    height, width = min(float(aspects.max()), 1.0), min(1 / float(aspects.min()), 1.0)
    height, width = (math.ceil(side * imgsz / stride + pad) * stride for side in (height, width))
    return height, width
