"""Which image is drawn when: global batches that are a pure function of (seed, epoch), whatever processes they feed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.errors import UserError

ORDER, ITEM, SIZE, PARTNERS = 1, 2, 3, 4  # what a stream of random numbers is for: the first part of its seed


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


class Instances(NamedTuple):
    """What is labelled in the images of a split: of each instance its image and its class, int64 (m,) each."""

    images: np.ndarray
    classes: np.ndarray


class Order:
    """How an epoch's images are ordered: each once, shuffled. `count`: the draws of an epoch, the same in all."""

    even = True  # does each image come once? Then those mixed with one are drawn from all, not from the order

    def __init__(self, count: int) -> None:
        self.count = count

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """The images in order, (count,)."""
        return rng.permutation(self.count)


class Weighted(Order):
    """As many draws as there are images, with replacement, in proportion to `weights` (n,)."""

    even = False

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__(len(weights))
        whole = weights.sum()
        self.shares = weights / whole if whole else None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.choice(self.count, self.count, p=self.shares)


class Repeated(Order):
    """Each image as often as its factor says, `factors` (n,) from 1, shuffled.

    Of a factor 2.3 there are two or three, by systematic sampling. Their sum is rounded to the draws of an epoch: the
    fractions are all made a little smaller, or larger, so that they add up to a whole number.
    """

    even = False

    def __init__(self, factors: np.ndarray) -> None:
        self.least = np.floor(factors).astype(np.int64)
        rest = factors - self.least
        self.some = np.flatnonzero(rest)
        rest, left = rest[self.some], len(self.some)
        whole, wanted = rest.sum(), round(rest.sum())
        if wanted > whole:
            rest = 1 - (1 - rest) * (left - wanted) / (left - whole)  # none is over 1
        elif left:
            rest = rest * wanted / whole
        self.ends = np.minimum(rest.cumsum(), wanted)
        self.ends[-1:] = wanted  # whatever the sum was rounded to
        super().__init__(int(self.least.sum()) + wanted)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        times = self.least.copy()
        times[self.some] += np.diff(np.floor(self.ends + rng.random()), prepend=0).astype(np.int64)
        return rng.permutation(np.repeat(np.arange(len(times)), times))


def image_weights(found: Instances, count: int) -> np.ndarray:
    """The weight of each of `count` images (n,): that of its instances, each 1 / how many there are of its class.

    YOLOv5's without the results so far: what is drawn must be the same after a crash, and on any machine.
    """
    worth = 1 / np.maximum(np.bincount(found.classes), 1)
    return np.bincount(found.images, weights=worth[found.classes], minlength=count)


def repeat_factors(found: Instances, count: int, threshold: float) -> np.ndarray:
    """How often each of `count` images is to be drawn in an epoch (n,): the most that one of its classes asks for.

    A class in a share f of the images asks for max(1, sqrt(threshold / f)). Gupta et al. 2019, LVIS.
    """
    classes = int(found.classes.max(initial=0)) + 1
    present = np.unique(found.images * classes + found.classes)
    images, labels = present // classes, present % classes
    shares = np.maximum(np.bincount(labels, minlength=classes), 1) / count
    factors = np.ones(count)
    np.maximum.at(factors, images, np.sqrt(threshold / shares)[labels])
    return factors


@dataclass(frozen=True)
class Sampling:
    """Which images a training draws, and at what size: train.py's flags of these names. All off: each once an epoch.

    Raises `UserError` for what cannot be together. `multi_scale`: an image is brought to the usual size first, and
    enlarged from there where its batch is larger.
    """

    rect: bool = False
    partners: str = "any"
    multi_scale: bool = False
    image_weights: bool = False
    repeat_factor: float = 0.0
    close_mosaic: int = 0
    epochs: int = 0  # of the whole training

    def __post_init__(self) -> None:
        chosen = {
            "--rect": self.rect,
            "--image-weights": self.image_weights,
            "--repeat-factor": self.repeat_factor > 0,
        }
        flags = [name for name, on in chosen.items() if on]
        if len(flags) > 1:
            raise UserError(f"{flags[0]} and {flags[1]} both say in what order images come; leave one of them out")

    @property
    def near(self) -> bool:
        """Is an image mixed with those next to it in the order?"""
        return self.partners == "near"

    def largest(self, imgsz: int) -> int:
        """The largest size of a batch, pixels, about."""
        return imgsz * 3 // 2 if self.multi_scale else imgsz

    def mixes(self, epoch: int) -> bool:
        """May an item of this epoch be mixed of several images?"""
        return not self.close_mosaic or epoch < self.epochs - self.close_mosaic

    def order(self, found: Instances, count: int) -> Order:
        """That of `count` images."""
        if self.image_weights:
            return Weighted(image_weights(found, count))
        if self.repeat_factor:
            return Repeated(repeat_factors(found, count, self.repeat_factor))
        return Order(count)

    def told(self, order: Order, images: int, sizes: Sequence[int]) -> list[str]:
        """Sentences about what is unlike the usual. `sizes`: those that a batch may have."""
        said = []
        if isinstance(order, Weighted):
            never = 0 if order.shares is None else int((order.shares == 0).sum())
            without = f"; {never:,} without labels are never drawn" if never else ""
            said.append(f"--image-weights: {order.count:,} draws an epoch of {images:,} images{without}")
        if isinstance(order, Repeated):
            said.append(f"--repeat-factor {self.repeat_factor:g}: {order.count:,} draws an epoch of {images:,} images")
        if self.multi_scale:
            said.append(f"--multi-scale: each batch at one of {len(sizes)} sizes, {sizes[0]} to {sizes[-1]} pixels")
        if self.close_mosaic:
            first = max(self.epochs - self.close_mosaic, 0) + 1
            said.append(f"--close-mosaic {self.close_mosaic}: no images mixed of several from epoch {first} on")
        return said


PLAIN = Sampling()


def batch_sizes(imgsz: int, stride: int) -> range:
    """The sizes of batches with --multi-scale: half to one and a half times `imgsz`, in steps of `stride`.

    Of 640 they are YOLOv5's. None is a single stride: a map of one cell has no variance.
    """
    least = max(math.ceil(imgsz / 2 / stride), 2) * stride
    return range(min(least, imgsz), imgsz * 3 // 2 + 1, stride)


class GlobalBatches:
    """Batches of the whole run, not of one process: lists of `batch_size` draws.

    The order is drawn by (seed, epoch), or is that of the images where `shapes` gives each batch its shape. The last
    batch is filled from the start of the order, so that every batch is full and divides alike. `partners`: so many
    images go along with each, any of the order, or with `near` those that follow in it: neighbours share them, so that
    each is read but once. `sizes`: those of which each batch has one, in proportion to `shape`'s longer side, by (seed,
    epoch, batch); none: all have that of `shape`.
    """

    drop_last = False  # what Accelerate asks of a batch sampler

    def __init__(
        self,
        order: Order,
        batch_size: int,
        seed: int,
        shape: tuple[int, int],
        partners: int = 0,
        near: bool = False,
        sizes: range = range(0),
        said: Sequence[str] = (),
    ) -> None:
        self._order, self.batch_size, self.seed, self.shape = order, batch_size, seed, shape
        self.count, self.partners, self.near, self.sizes, self.said = order.count, partners, near, sizes, tuple(said)
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
        epoch, order, links = self.epoch, self.order(), self._links()
        first, self.skipped = self.skipped, 0
        for batch in range(first, len(self)):
            yield self._draws(batch, epoch, order, links, self.scaled_shape(epoch, batch))

    def largest(self) -> list[Draw]:
        """The first batch, as large as any may be: what memory must hold."""
        size = max(self.sizes, default=max(self.shape))
        return self._draws(0, self.epoch, self.order(), self._links(), self._scaled(self.shape, size))

    def _draws(
        self, batch: int, epoch: int, order: np.ndarray, links: np.ndarray | None, shape: tuple[int, int]
    ) -> list[Draw]:
        positions = np.arange(batch * self.batch_size, (batch + 1) * self.batch_size)
        places = positions % self.count
        others = places[:, None] + np.arange(1, self.partners + 1) if links is None else links[places]
        numbers = zip(positions.tolist(), order[places].tolist(), order[others % self.count].tolist(), strict=True)
        return [Draw(epoch, position, image, shape, tuple(mixed)) for position, image, mixed in numbers]

    def order(self) -> np.ndarray:
        """The images in this epoch's order, (count,)."""
        return self._order.draw(np.random.default_rng((ORDER, self.seed, self.epoch)))

    def _links(self) -> np.ndarray | None:
        """The places in the order of what is mixed with the image at each place, (count, partners); None: the next."""
        if self.near or not self.partners:
            return None
        rng = np.random.default_rng((PARTNERS, self.seed, self.epoch))
        return rng.integers(self.count, size=(self.count, self.partners), dtype=np.int32)

    def batch_shape(self, batch: int) -> tuple[int, int]:
        """Height and width of a batch at the usual size."""
        return self.shape

    def scaled_shape(self, epoch: int, batch: int) -> tuple[int, int]:
        """Height and width of a batch."""
        shape = self.batch_shape(batch)
        if not self.sizes:
            return shape
        rng = np.random.default_rng((SIZE, self.seed, epoch, batch))
        return self._scaled(shape, self.sizes[int(rng.integers(len(self.sizes)))])

    def _scaled(self, shape: tuple[int, int], size: int) -> tuple[int, int]:
        """`shape` with its longer side at `size`, in whole strides."""
        unit = max(shape) * self.sizes.step
        height, width = (-(-side * size // unit) * self.sizes.step for side in shape)
        return height, width


class RectangularBatches(GlobalBatches):
    """Global batches of images of like aspect ratio, in the same order every epoch, each with the least padding."""

    def __init__(
        self,
        aspects: np.ndarray,
        batch_size: int,
        seed: int,
        imgsz: int,
        stride: int,
        sizes: range = range(0),
        said: Sequence[str] = (),
    ) -> None:
        super().__init__(Order(len(aspects)), batch_size, seed, (imgsz, imgsz), sizes=sizes, said=said)
        self._sorted, self._shapes = by_aspect(aspects, batch_size, imgsz, stride, pad=0.0)

    def order(self) -> np.ndarray:
        return self._sorted

    def batch_shape(self, batch: int) -> tuple[int, int]:
        return self._shapes[batch]


def training_batches(
    sampling: Sampling,
    found: Instances,
    native: np.ndarray,
    batch_size: int,
    seed: int,
    imgsz: int,
    stride: int,
    near: int,
    mixed: int,
) -> GlobalBatches:
    """The batches that `sampling` asks for, of images of `native` sizes (n, 2), width and height.

    near, mixed: how many others an item is made of at most, where they are its neighbours, and where they are any.
    """
    count = len(native)
    order, sizes = sampling.order(found, count), batch_sizes(imgsz, stride)
    said = sampling.told(order, count, sizes)
    sizes = sizes if sampling.multi_scale else range(0)
    if sampling.rect:
        return RectangularBatches(native, batch_size, seed, imgsz, stride, sizes, said)
    partners = near if sampling.near else 0 if order.even else mixed
    return GlobalBatches(order, batch_size, seed, (imgsz, imgsz), partners, sampling.near, sizes, said)


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
