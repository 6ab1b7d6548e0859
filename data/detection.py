"""Detection data: images with boxes, as batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.augment import PARTNERS, Augmenter, AugmentSettings, Placement, Sample, letterbox
from data.batches import Batch, loader, room, stacked
from data.cache import Images, open_images
from data.dataset import DataSet, identity, labels_text
from data.images import read_image, resize_long_side, scaled_shape
from data.labels import Labels, check_classes, load_labels
from data.problems import told
from data.sampler import (
    PLAIN,
    Draw,
    Instances,
    Sampling,
    evaluation_batches,
    item_generator,
    training_batches,
)
from data.sources import DataSpec, label_file
from utils.config.options import Hyperparameters, Recipe, select
from utils.errors import UserError
from utils.files import csv_text
from utils.summary import evenly_spaced

MOST_BOXES = 5000  # of the training labels that boxes.csv has
NOWHERE = Placement((0.0, 0.0), (0, 0))  # the placement of a training item: a mosaic has no way back into one file


class ImageInfo(NamedTuple):
    """Where an item came from: what scoring needs beside the pixels."""

    image: int  # its number in the split
    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    placement: Placement  # from the file's pixels into the batch's
    rows: np.ndarray  # its labels (k, 5): class, normalised xywh in the file's image


class _Items(Dataset[tuple[Tensor, Tensor, ImageInfo]]):
    """What training and evaluation items share: pixels, boxes and where they came from."""

    def __init__(self, images: Images, labels: Labels) -> None:
        self.images, self.labels = images, labels

    def load(self, index: int) -> Sample:
        """An image with its longer side at `imgsz`, and its boxes in pixels."""
        image = self.images.read(index)
        height, width = image.shape[:2]
        rows = self.labels.of(index)
        half = rows[:, 3:5] / 2
        boxes = np.concatenate((rows[:, 1:3] - half, rows[:, 1:3] + half), 1)
        sample = Sample(image, boxes * np.array([width, height, width, height], np.float32), rows[:, 0])
        if not self.labels.polygons or not len(rows):
            return sample
        points, starts = self.labels.polygons.of(*self.labels.offsets[index : index + 2].tolist())
        return sample._replace(polygons=tuple(np.split(points * np.array([width, height], np.float32), starts)))

    def item(self, draw: Draw, pixels: Tensor) -> tuple[Tensor, Tensor, ImageInfo]:
        """Pixels written into `pixels`, uint8 (3, h, w); targets (k, 5); and where they came from."""
        raise NotImplementedError

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, ImageInfo]:
        return self.item(draw, room(3, *draw.shape))

    def __getitems__(self, draws: Sequence[Draw]) -> list[tuple[Tensor, Tensor, ImageInfo]]:
        """The items of a batch: a loader calls this. Their pixels are written once, where they stay."""
        pixels = room(len(draws), 3, *draws[0].shape)
        return [self.item(draw, pixels[k]) for k, draw in enumerate(draws)]

    def info(self, index: int, placement: Placement) -> ImageInfo:
        width, height = (int(side) for side in self.labels.sizes[index])
        return ImageInfo(index, str(self.images.files[index]), (width, height), placement, self.labels.of(index))


class Recent:
    """`load` with its last `count` results kept."""

    def __init__(self, load: Callable[[int], Sample], count: int) -> None:
        self.load, self.count = load, count
        self.kept: dict[int, Sample] = {}  # the oldest first

    def __call__(self, index: int) -> Sample:
        sample = self.kept.pop(index) if index in self.kept else self.load(index)
        self.kept[index] = sample
        if len(self.kept) > self.count:
            del self.kept[next(iter(self.kept))]
        return sample


class TrainingItems(_Items):
    """Augmented items. Indexed by a `Draw`; the same draw gives the same pixels anywhere."""

    def __init__(
        self, images: Images, labels: Labels, augment: AugmentSettings, seed: int, sampling: Sampling = PLAIN
    ) -> None:
        super().__init__(images, labels)
        self.seed, self.sampling = seed, sampling
        # Neighbours share their mosaics' images, and a process loads neighbours one after another.
        load = Recent(self.load, 2 * (PARTNERS + 1))
        self.augmenter = Augmenter(augment, images.imgsz, len(images.files), load, self.size)
        self.unmixed = replace(self.augmenter, settings=replace(augment, mosaic=0.0))

    def size(self, index: int) -> tuple[int, int]:
        """Width and height of an image as `load` gives it."""
        width, height = self.labels.sizes[index].tolist()
        return scaled_shape(width, height, self.images.imgsz)

    def item(self, draw: Draw, pixels: Tensor) -> tuple[Tensor, Tensor, ImageInfo]:
        augmenter = self.augmenter if self.sampling.mixes(draw.epoch) else self.unmixed
        sample = augmenter(draw.image, draw.shape, item_generator(self.seed, draw), draw.partners)
        return *to_tensors(sample, pixels), self.info(draw.image, NOWHERE)


class EvaluationItems(_Items):
    """Letterboxed items, nothing random."""

    def item(self, draw: Draw, pixels: Tensor) -> tuple[Tensor, Tensor, ImageInfo]:
        sample = self.load(draw.image)
        fitted, (scale, offset) = letterbox(sample, draw.shape, enlarge=False)
        # One gain for both axes, as in YOLOv5, so that COCO's numbers are those of its users: of the two sides of the
        # image as it was loaded the shorter one is rounded up, by less than a pixel.
        gain = scale[0] * max(sample.image.shape[:2]) / max(self.labels.sizes[draw.image])
        placement = Placement((gain, gain), offset)
        return *to_tensors(fitted, pixels), self.info(draw.image, placement)


def to_tensors(sample: Sample, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels as RGB, written into `pixels`, uint8 (3, h, w), and targets (k, 5): class, xywh normalised, cut at the
    image's edges."""
    height, width = sample.image.shape[:2]
    boxes = sample.boxes.clip(0, (width, height, width, height))
    low, high = boxes[:, :2], boxes[:, 2:]
    targets = np.concatenate((sample.classes[:, None], (low + high) / 2, high - low), 1)
    targets[:, 1:] /= (width, height, width, height)
    red, green, blue = pixels.numpy()
    cv2.split(sample.image, [blue, green, red])  # in place, for the planes are contiguous
    return pixels, torch.from_numpy(targets.astype(np.float32))


def collate(items: Sequence[tuple[Tensor, Tensor, ImageInfo]]) -> Batch:
    """Items of one shape as a batch."""
    images, targets, infos = zip(*items, strict=True)
    numbers = torch.cat([torch.full((len(rows), 1), float(k)) for k, rows in enumerate(targets)])
    return Batch(stacked(images), torch.cat((numbers, torch.cat(targets)), 1), infos)


@dataclass(frozen=True)
class Split:
    """The images of one split that can be read, and their labels."""

    images: list[Path]
    labels: Labels
    problems: tuple[str, ...] = ()  # sentences about what was left out

    def identity(self) -> dict[str, str]:
        """What tells whether these are the same images and labels as at another time, wherever they lie."""
        return identity(self.images, self.labels.rows.tobytes() + self.labels.counts.tobytes())

    def report(self, title: str) -> list[str]:
        """What was found, for people: counts, and the first few problems."""
        counts = self.labels.counts
        found = f"{title}: {len(counts)} images, {counts.sum()} boxes, {(counts == 0).sum()} images without any"
        return [found, *told(self.problems, title)]

    def shown(self, index: int, side: int) -> np.ndarray:
        """An image as displayed, shrunk so that no side is longer than `side`, uint8 (h, w, 3) BGR."""
        image = read_image(self.images[index])
        return resize_long_side(image, min(side, max(image.shape[:2])), smooth=True)

    def counts(self, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """In how many images each class is, and how often, (classes,) each."""
        image, labels = self.instances()
        present = np.unique(image * classes + labels) % classes
        return np.bincount(present, minlength=classes), np.bincount(labels, minlength=classes)

    def instances(self) -> Instances:
        """Image and class of every box."""
        images = np.repeat(np.arange(len(self.images)), self.labels.counts)
        return Instances(images, self.labels.rows[:, 0].astype(np.int64))


class DetectionData(DataSet):
    """A detection data set at one image size: its splits, checked, and loaders over them."""

    @staticmethod
    def class_names(spec: DataSpec, single_class: bool) -> dict[int, str]:
        """What the model is to tell apart. Raises `UserError` where the YAML does not say."""
        if not spec.names:
            raise UserError(f"{spec.file}: `names` must list the classes, as `0: person` lines or as [person, ...]")
        return {0: "item"} if single_class else spec.names

    @staticmethod
    def files(spec: DataSpec) -> dict[str, list[Path]]:
        """All that training reads, by what it is; some may not be there."""
        images = {split: spec.images(split) for split in ("train", "val")}
        return images | {f"labels of {split}": list(map(label_file, found)) for split, found in images.items()}

    def split(self, name: str, hyp: Recipe | None = None) -> Split:
        """A split, scanned. Raises `UserError` where nothing of it is usable, or a class is unknown; `strict`: where
        anything is to be left out.

        `hyp`: of a training on it, for which polygons are kept where it pastes along them.
        """
        images, unlisted = self.spec.listing(name)
        pastes = isinstance(hyp, Hyperparameters) and hyp.copy_paste > 0
        labels = load_labels(images, f"{name} labels", self.workers, polygons=pastes)
        problems = (*unlisted, *labels.problems)
        readable = self.usable(name, labels.sizes, problems)
        images, labels = list(compress(images, readable)), labels.keep(readable)
        if not len(labels.rows):
            problems = (self._unlabelled(name, images[0], problems), *problems)
        if self.single_class:
            labels = labels.as_single_class()
        else:
            check_classes(labels, images, len(self.spec.names), self.spec.file)
        return Split(images, labels, problems)

    def _unlabelled(self, name: str, image: Path, problems: Sequence[str]) -> str:
        """A sentence for a split without any label. Raises it as `UserError` where there is nothing to learn from."""
        where = f"that of {image} is looked for at {label_file(image)}"
        found = f"{self.spec.file}: no image of `{name}:` has a label; {where}"
        if name == "train":
            raise UserError(f"{found}{f'; the first problem: {problems[0]}' if problems else ''}")
        return found

    def documents(self, train: Split, val: Split) -> dict[str, str]:
        """Text files for the run folder, by name: counts of each class, and some of the training boxes."""
        names = self.class_names(self.spec, self.single_class)
        counts = {name: split.counts(len(names)) for name, split in (("train", train), ("val", val))}
        rows = train.labels.rows
        boxes = [
            (names[int(label)], *(f"{value:.5g}" for value in box))
            for label, *box in rows[evenly_spaced(len(rows), MOST_BOXES)].tolist()
        ]
        return {
            "labels.csv": labels_text(names, counts),
            "boxes.csv": csv_text(("class", "x", "y", "width", "height"), boxes),
        }

    @staticmethod
    def item(
        image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False
    ) -> tuple[Tensor, Tensor, ImageInfo]:
        """An image, uint8 (h, w, 3) BGR, as an item for `collate`: fitted into `sides` (height, width), enlarged where
        it is smaller, on the least grey that makes whole strides of its sides; `full`: on all of `sides`."""
        height, width = image.shape[:2]
        ratio = min(sides[0] / height, sides[1] / width)
        least = (math.ceil(max(round(side * ratio), 1) / stride) * stride for side in (height, width))
        shape = sides if full else (next(least), next(least))
        none = Sample(image, np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
        fitted, placement = letterbox(none, shape, enlarge=True)
        info = ImageInfo(0, name, (width, height), placement, np.zeros((0, 5), np.float32))
        return *to_tensors(fitted, room(3, *shape)), info

    collate = staticmethod(collate)

    def train_loader(
        self, split: Split, *, batch_size: int, hyp: Hyperparameters, seed: int, sampling: Sampling = PLAIN
    ) -> DataLoader:
        """Global batches of augmented items. With `sampling.rect` there is no mosaic: its batches are not square."""
        augment = select(AugmentSettings, hyp)
        if sampling.rect:
            augment = replace(augment, mosaic=0.0)
        mixed = PARTNERS + (PARTNERS + 1) * (augment.mixup > 0)
        batches = training_batches(
            sampling, split.instances(), split.labels.sizes, batch_size, seed, self.imgsz, self.stride, PARTNERS, mixed
        )
        images = self._open(split, self.train_cache, smooth=False)
        items = TrainingItems(images, split.labels, augment, seed, sampling)
        return loader(items, batches, collate, self.workers)

    def evaluation_batches(self, split: Split, *, batch_size: int, square: bool) -> list[list[Draw]]:
        """The batches of an evaluation, the same for any number of processes."""
        return evaluation_batches(split.labels.sizes, batch_size, self.imgsz, self.stride, square)

    def evaluation_loader(self, split: Split, batches: list[list[Draw]]) -> DataLoader:
        """A loader over some of the evaluation's batches: a process's share."""
        items = EvaluationItems(self._open(split, self.cache, smooth=True), split.labels)
        return loader(items, batches, collate, self.workers)

    def _open(self, split: Split, cache: str, smooth: bool) -> Images:
        return open_images(split.images, self.imgsz, smooth, cache, split.labels.sizes)
