"""Detection data: images with boxes, as batches. Named by `TASKS`; see data/dataset.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.augment import MOSAIC_PARTNERS, PADDING, Augmenter, Sample, letterbox
from data.augmentations import UserAugmentations
from data.cache import Images
from data.data_yaml import DataSpec
from data.dataset import DataOptions, DataSet, Item, Items, empty_pixels, log_split, split_identity, stack_in_place
from data.images import read_pixels, resize, resize_long_side
from data.labels import BOXES, POLYGONS, Labels, RowRules, check_classes, label_name, load_labels
from data.sampler import SampleIndex, evaluation_batches, images_in_use, item_generator
from data.tiles import Tiles, Windows, cut, in_file, training_windows
from utils.batch import PHOTOS, Batch, BoxSplit, ImageInfo, Instances, PathArray, PixelFormat, Placement, Subset
from utils.config.hyperparameters import Augmentation, Recipe
from utils.console import log
from utils.errors import UserError, plural
from utils.files import csv_text
from utils.plots.drawing import display_pixels
from utils.summary import evenly_spaced
from utils.user_code import as_user_error

LISTED_BOXES = 5000  # training labels in boxes.csv, at most
WARPS = ("mosaic", "degrees", "translate", "scale", "shear", "perspective")  # hyperparameters that warp or cut images
ENLARGED = 1.25  # factor above which the start says that most images are enlarged
NO_PLACEMENT = Placement((0.0, 0.0), (0, 0))  # placement of a training item: a mosaic is not part of one file


@dataclass(eq=False)
class _Items(Items):
    """Items of images and boxes, by sample index."""

    images: Images
    labels: Labels
    windows: Windows | None = field(default=None, kw_only=True)  # that the images are, if they are parts of files

    def load(self, index: int) -> Sample:
        """Return an image with its longer side at `imgsz`, and its boxes in pixels."""
        image = self.images.read(index)
        height, width = image.shape[:2]
        rows = self.labels.image_rows(index)
        sample = Sample(image, pixel_boxes(rows, width, height), rows[:, 0])
        if self.labels.polygons is None:
            return sample
        polygons = self.labels.polygons.select_range(*self.labels.offsets[index : index + 2].tolist())
        return sample._replace(polygons=polygons.with_points(polygons.points * np.array([width, height], np.float32)))

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        """Write an image into `pixels`, (channels, h, w); return them with its targets (k, 5)."""
        raise NotImplementedError

    def __getitem__(self, sample: SampleIndex) -> Item:
        return self.__getitems__([sample])[0]

    @as_user_error()
    def __getitems__(self, samples: Sequence[SampleIndex]) -> list[Item]:
        """Return the items of a batch, with the pixels written straight into the batch."""
        form = self.images.pixels
        pixels = empty_pixels(len(samples), form.channels, *samples[0].shape, dtype=form.dtype)
        return [self.item(sample, pixels[k]) for k, sample in enumerate(samples)]

    def info(self, index: int, placement: Placement) -> ImageInfo:
        width, height = (int(side) for side in self.labels.sizes[index])
        info = ImageInfo(index, self.images.name(index), (width, height), placement, self.labels.image_rows(index))
        if not self.windows:
            return info
        image, window, whole = int(self.windows.images[index]), self.windows.bounds[index].tolist(), self.windows.whole
        return in_file(info, image, tuple(whole.sizes[image].tolist()), window)._replace(rows=whole.image_rows(image))


@dataclass(eq=False)
class TrainingItems(_Items):
    """Augmented items; the same sample index gives the same pixels in any process."""

    augment: Augmentation
    seed: int
    options: DataOptions
    user: UserAugmentations
    masks: ClassVar[bool] = False  # passed to the `Augmenter`

    def __post_init__(self) -> None:
        images = self.images
        form = self.masks, images.pixels
        self.augmenter = Augmenter(self.augment, images.imgsz, len(images.names), self.load, self.size, *form)
        self.unmixed = replace(self.augmenter, settings=replace(self.augment, mosaic=0.0))

    def load(self, index: int) -> Sample:
        """Return an image as `_Items.load` does, with grey over the parts of objects that are not labels."""
        sample = super().load(index)
        if self.windows is None or not len(hidden := self.windows.hidden.image_rows(index)):
            return sample
        image, boxes = sample.image.copy(), pixel_boxes(hidden, *sample.image.shape[1::-1])
        for (x1, y1, x2, y2), is_label in [*((box, False) for box in boxes), *((box, True) for box in sample.boxes)]:
            part = np.s_[max(math.floor(y1), 0) : math.ceil(y2), max(math.floor(x1), 0) : math.ceil(x2)]
            image[part] = sample.image[part] if is_label else PADDING[image.dtype.type]
        return sample._replace(image=image)

    def size(self, index: int) -> tuple[int, int]:
        """Return width and height of an image after `load`."""
        return self.images.shape(*self.labels.sizes[index].tolist())

    def augmented(self, sample: SampleIndex) -> Sample:
        """Return the augmented image; its pixels may belong to the cache until `images.release`."""
        augmenter = self.augmenter if self.options.mixes(sample.epoch) else self.unmixed
        augmented = augmenter(sample.image, sample.shape, item_generator(self.seed, sample), sample.partners)
        if not self.user.calls:
            return augmented
        return self.user(augmented, item_generator(self.seed, sample, of_user=True), self.images.name(sample.image))

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        targets = to_tensors(self.augmented(sample), pixels)
        self.images.release()
        return *targets, self.info(sample.image, NO_PLACEMENT)


class EvaluationItems(_Items):
    """Items without augmentation; nothing is random."""

    def fitted(self, sample: SampleIndex) -> tuple[Sample, Placement]:
        """Return the letterboxed image, and its placement from the file's pixels."""
        loaded = self.load(sample.image)
        fitted, (scale, offset) = letterbox(loaded, sample.shape, enlarge=False)
        width, height = self.labels.sizes[sample.image].tolist()
        if self.images.stretched:
            return fitted, Placement((sample.shape[1] / width, sample.shape[0] / height), offset)
        # One gain for both axes, as in YOLOv5, so that COCO's metrics are comparable: the shorter side of the loaded
        # image is rounded up, by less than a pixel.
        gain = scale[0] * max(loaded.image.shape[:2]) / max(width, height)
        return fitted, Placement((gain, gain), offset)

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        fitted, placement = self.fitted(sample)
        return *to_tensors(fitted, pixels), self.info(sample.image, placement)


def pixel_boxes(rows: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return the boxes of label rows (k, 5) as xyxy in pixels, float32 (k, 4)."""
    half = rows[:, 3:5] / 2
    boxes = np.concatenate((rows[:, 1:3] - half, rows[:, 1:3] + half), 1)
    return boxes * np.array([width, height, width, height], np.float32)


def to_tensors(sample: Sample, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Write an image into `pixels` (channels, h, w), reversed; return them and its targets, class, xywh, (k, 5)."""
    height, width = sample.image.shape[:2]
    boxes = sample.boxes.clip(0, (width, height, width, height))
    low, high = boxes[:, :2], boxes[:, 2:]
    targets = np.concatenate((sample.classes[:, None], (low + high) / 2, high - low), 1)
    targets[:, 1:] /= (width, height, width, height)
    cv2.split(sample.image, [*pixels.numpy()[::-1]])  # in place, because the planes are contiguous
    return pixels, torch.from_numpy(targets.astype(np.float32))


def collate(items: Sequence[Item]) -> Batch:
    images, targets, infos = zip(*items, strict=True)
    numbers = torch.cat([torch.full((len(rows), 1), float(k)) for k, rows in enumerate(targets)])
    return Batch(stack_in_place(images), torch.cat((numbers, torch.cat(targets)), 1), infos)


@dataclass(frozen=True)
class DetectionSplit(BoxSplit):
    """The images of one split that can be read, and their labels."""

    images: PathArray
    labels: Labels
    problems: tuple[str, ...] = ()
    windows: Windows | None = None  # that the images are, if they are parts of files
    tiles: Tiles | None = None  # how an evaluation cuts the images
    sets: tuple[Subset, ...] = ()
    pixels: PixelFormat = PHOTOS

    def identity(self) -> dict[str, str]:
        """Return hashes of the files' names, and of the boxes and outlines of each image; and the data sets."""
        labels, polygons = self.labels, self.labels.polygons
        arrays = (labels.rows, labels.counts, *((polygons.points, polygons.offsets) if polygons else ()))
        arrays += (self.windows.bounds,) if self.windows else ()
        sets = {"data sets": repr([*map(tuple, self.sets)])} if self.sets else {}
        return split_identity(self.images, b"".join(array.tobytes() for array in arrays)) | sets

    def report(self, title: str) -> None:
        counts = self.labels.counts
        images, backgrounds = plural(len(counts), "image"), plural((counts == 0).sum(), "background")
        log_split(title, f"{images}, {backgrounds}, {plural(counts.sum(), 'instance')}", self.problems)
        texts = []
        for name, indices, samples in self.sets:
            repeats = f" (each {samples / len(indices):.1f} times an epoch)" * (samples > len(indices))
            texts.append(f"{name} {len(indices):,} images, {100 * samples / len(self.images):.0f} %{repeats}")
        log("  " + "; ".join(texts) if texts else "")

    @cached_property
    def cut(self) -> Windows | None:
        """The windows of an evaluation, and each whole image; None if images are not cut, or cut already."""
        return cut(self.labels, self.tiles, with_whole=True) if self.tiles else None

    def side_lengths(self, imgsz: int) -> np.ndarray:
        sizes = self.labels.sizes
        scale = imgsz * sizes / sizes.max(1, keepdims=True)
        return np.repeat(scale, self.labels.counts, axis=0) * self.labels.rows[:, 3:5]

    def display_image(self, index: int, side: int) -> np.ndarray:
        image = read_pixels(self.images[index], self.pixels)
        if self.windows:
            left, top, right, bottom = self.windows.bounds[index].tolist()
            image = image[top:bottom, left:right]
        return display_pixels(resize_long_side(image, min(side, max(image.shape[:2])), smooth=True))

    def instances(self) -> Instances:
        images = np.repeat(np.arange(len(self.images)), self.labels.counts)
        return Instances(images, self.labels.rows[:, 0].astype(np.int64))


def subsets(specs: Sequence[DataSpec], ends: np.ndarray) -> tuple[Subset, ...]:
    """Return the data sets that a split lists, by the index after the last image of each, with their samples."""
    counts = np.diff(ends, prepend=0).tolist()
    shares = [spec.weight or count for spec, count in zip(specs, counts, strict=False)]
    # Sums are rounded, so that the samples of all sets fill the epoch.
    samples = np.diff(np.rint(np.cumsum(shares) / sum(shares) * ends[-1]), prepend=0) if specs else ends
    ranges = map(range, [0, *ends.tolist()], ends.tolist())
    return tuple(map(Subset, (spec.name for spec in specs), ranges, samples.astype(int).tolist()))


@dataclass
class DetectionData(DataSet[DetectionSplit]):
    """A detection data set at one image size: its splits, checked, and loaders over them."""

    training_items: ClassVar[type[TrainingItems]] = TrainingItems
    evaluation_items: ClassVar[type[EvaluationItems]] = EvaluationItems
    fit: ClassVar[Literal["letterbox", "stretch"]] = "letterbox"  # as the network is trained
    has_boxes = True

    @staticmethod
    def class_names(spec: DataSpec, single_cls: bool) -> dict[int, str]:
        """Return the YAML's `names`, or `item` instead of several. Raises `UserError` if there are no `names`."""
        if not spec.names:
            raise UserError(
                f"{spec.file}: `names` must list the classes, as [person, ...]; for a folder of images per class "
                "train a classifier: add --weights yolov5s-cls.pt, or --weights '' --cfg resnet18.yaml"
            )
        return {0: "item"} if single_cls and len(spec.names) > 1 else spec.names

    @staticmethod
    def files(spec: DataSpec) -> Mapping[str, Sequence[Path]]:
        """Return the images and label files of training and validation; some label files may not exist."""
        listings = {split: spec.listing(split) for split in ("train", "val")}
        images = {split: listing.images for split, listing in listings.items()}
        return images | {f"labels of {split}": listing.label_files() for split, listing in listings.items()}

    @staticmethod
    def row_rules(hyp: Recipe | None) -> RowRules:
        """Return how the rows of label files are read: see `split`."""
        return POLYGONS if any(getattr(hyp, key, 0) for key in WARPS) else BOXES

    def split(self, name: str, hyp: Recipe | None = None) -> DetectionSplit:
        """Read and check a split, with the labels' polygons if `hyp` warps or cuts images: see `DataSet`."""
        if isinstance(hyp, Augmentation) and (self.options.rect or not hyp.mosaic):
            keys = " and ".join(key for key in ("mixup", "copy_paste") if getattr(hyp, key))
            log(f"{keys}: no effect without mosaics ({'--rect' if hyp.mosaic else 'mosaic 0'})" if keys else "")
        pixels = self.spec.pixels
        if isinstance(hyp, Augmentation) and pixels.channels != 3 and (hyp.hsv_h or hyp.hsv_s):
            log(f"hsv_h and hsv_s: no effect on images of {pixels}, which have no colours")
        specs, tiles = self.spec.sets.get(name, ()), self.spec.tiles
        rules = BOXES if tiles else self.row_rules(hyp)
        if any(spec.weight for spec in specs) and (self.options.rect or self.options.image_weights):
            fault = "--rect and --image-weights decide themselves how often an image is drawn"
            raise UserError(f"{self.spec.file}: {fault}; leave them out, or the shares of the data sets")
        parts = [replace(self, spec=replace(spec, pixels=pixels))._read(name, rules) for spec in specs or [self.spec]]
        labels = Labels.concatenate([part.labels for part in parts])
        images = PathArray.concatenate(part.images for part in parts)
        problems = tuple(problem for part in parts for problem in part.problems)
        if name == "train" and not len(labels.rows):
            raise UserError(problems[0])
        ends, windows = np.cumsum([len(part.images) for part in parts]), None
        if tiles and hyp is not None:
            windows = training_windows(labels, images, tiles)
            images, labels = images[windows.images], windows.labels
            ends = np.searchsorted(windows.images, ends)
            tiles = None
        return DetectionSplit(images, labels, problems, windows, tiles, subsets(specs, ends), pixels)

    def _read(self, name: str, rules: RowRules) -> DetectionSplit:
        """Read and check a split that lists no data sets, or one data set of another split."""
        listing, rules = self.spec.listing(name), self.spec.row_rules(rules)
        labels = load_labels(listing.images, f"{name} labels", self.options.workers, rules, listing.annotated)
        problems = (*listing.problems, *labels.problems)
        readable = self.usable(name, labels.sizes, problems)
        images, labels = listing.images[readable], labels.subset(readable)
        if not len(labels.rows):
            expected = f"the label file of {images[0]} is expected at {label_name(str(images[0]))}"
            if listing.annotated:
                expected = f"{listing.annotated[0].file} has no box of a class under `names`"
            problem = f"{self.spec.file}: no image of `{name}:` has a label; {expected}"
            if name == "train" and not self.spec.name:  # one of several data sets may be background
                raise UserError(f"{problem}{f'; the first problem: {problems[0]}' if problems else ''}")
            problems = (problem, *problems)
        if self.options.single_cls:
            labels = replace(labels, rows=labels.rows * np.array((0, 1, 1, 1, 1), np.float32))
        else:
            check_classes(labels, images, len(self.spec.names), self.spec.file, listing.annotated)
            if self.spec.classes:
                classes = np.array(self.spec.classes, np.float32)[labels.rows[:, 0].astype(np.int64)]
                labels = replace(labels, rows=np.column_stack((classes, labels.rows[:, 1:])))
        return DetectionSplit(images, labels, problems)

    def report(self, train: DetectionSplit, val: DetectionSplit) -> None:
        """Log what `DataSet` does, and whether most images are enlarged."""
        super().report(train, val)
        median = np.median(train.labels.sizes.max(1))
        size = math.ceil(median / self.stride) * self.stride
        if size * ENLARGED < self.imgsz:
            log(f"most images have at most {median:.0f} px and are enlarged: --imgsz {size} is faster")

    def documents(self, train: DetectionSplit, val: DetectionSplit) -> dict[str, str]:
        """Return what `DataSet` does, and boxes.csv, a sample of the training boxes."""
        rows, names = train.labels.rows, self.names
        listed = evenly_spaced(len(rows), LISTED_BOXES)
        boxes = [[names[int(rows[row, 0])], *(f"{value:.5g}" for value in rows[row, 1:].tolist())] for row in listed]
        columns = ("class", "x", "y", "width", "height")
        return {**super().documents(train, val), "boxes.csv": csv_text(columns, boxes)}

    @classmethod
    def item(cls, image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        """Return an image fitted into `sides`, enlarged if it is smaller, or stretched to them.

        It is padded with grey to whole strides, or to `sides` if `full` is true.
        """
        height, width = image.shape[:2]
        ratio = min(sides[0] / height, sides[1] / width)
        rows, columns = (math.ceil(max(round(side * ratio), 1) / stride) * stride for side in (height, width))
        shape = sides if full else (rows, columns)
        unlabelled = Sample(image, np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
        if cls.fit == "stretch":
            shape, placement = sides, Placement((sides[1] / width, sides[0] / height))
            fitted = unlabelled._replace(image=resize(image, sides[::-1], smooth=True))
        else:
            fitted, placement = letterbox(unlabelled, shape, enlarge=True)
        info = ImageInfo(0, name, (width, height), placement, np.zeros((0, 5), np.float32))
        return *to_tensors(fitted, empty_pixels(np.atleast_3d(image).shape[2], *shape, dtype=image.dtype)), info

    collate = staticmethod(collate)

    def train_loader(self, split: DetectionSplit, batch_size: int, hyp: Recipe, seed: int) -> DataLoader[Any]:
        """Return a loader of augmented items. With --rect there is no mosaic, because mosaics are square."""
        assert isinstance(hyp, Augmentation)  # the recipe of every task with boxes
        options, augment = self.options, replace(hyp, mosaic=0.0) if self.options.rect else hyp
        partners = MOSAIC_PARTNERS + (MOSAIC_PARTNERS + 1) * (augment.mixup > 0)
        capacity = images_in_use(batch_size, options.workers) if augment.mosaic else 0
        sizes, user, windows = split.labels.sizes, self.user_augmentations(), split.windows
        batches = options.batches(split, sizes, batch_size, seed, self.imgsz, self.stride, partners)
        form: Any = {"reduced": True, "stretched": self.fit == "stretch", "windows": windows, "pixels": split.pixels}
        images = Images(split.images, sizes, self.imgsz, **form, cache=self.train_cache, capacity=capacity)
        items = self.training_items(images, split.labels, augment, seed, options, user, windows=windows)
        return self.loader(items, batches)

    def evaluation_batches(self, split: DetectionSplit, batch_size: int, square: bool) -> list[list[SampleIndex]]:
        square = square or self.fit == "stretch"
        if windows := split.cut:  # all of an image form one batch, which one process evaluates
            order = [SampleIndex(0, k, k, (self.imgsz, self.imgsz)) for k in range(len(windows.images))]
            return [list(batch) for _, batch in groupby(order, key=lambda sample: windows.images[sample.image])]
        return evaluation_batches(split.labels.sizes, batch_size, self.imgsz, self.stride, square)

    def evaluation_loader(self, split: DetectionSplit, batches: list[list[SampleIndex]]) -> DataLoader[Any]:
        if windows := split.cut:
            split = replace(split, images=split.images[windows.images], labels=windows.labels, windows=windows)
        form: Any = {"smooth": True, "stretched": self.fit == "stretch", "windows": windows, "pixels": split.pixels}
        stored = Images(split.images, split.labels.sizes, self.imgsz, **form, cache=self.options.cache)
        items = self.evaluation_items(stored, split.labels, windows=windows)
        return self.loader(items, batches)
