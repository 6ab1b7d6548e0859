"""The abstract classes that the data set of a task implements, its loaders, and how the scripts open one.

A data set is a module beside this one, named in `TASKS` (models/tasks/__init__.py) as `module:class`. The scripts call
the methods below and know no data set by name. Loaders write pixels once, into memory shared with the training process.
May import utils, but nothing of models/.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.augmentations import UserAugmentations, read_augmentations
from data.cache import Images
from data.data_yaml import DataSpec, read_data
from data.sampler import GlobalBatches, SampleIndex, Sampling
from utils.batch import PHOTOS, Batch, Split, path_texts
from utils.config.hyperparameters import Recipe
from utils.console import log
from utils.distributed.failure import init_worker
from utils.errors import UserError, plural
from utils.files import csv_text
from utils.user_code import as_user_error, class_named

# Pixels (see `Batch.images`); targets; the description of the image: see `Batch`.
Item = tuple[Tensor, Tensor, Any]
PRINTED_PROBLEMS = 5  # printed problems of a split, at most
PRINTED_NAMES = 10  # printed names of classes, at most
FEW_LABELS = 10  # training labels of a class; classes with fewer are named at the start


class Items(Dataset[Item]):
    """The items of a split, by sample index."""

    images: Images  # reads the split's files

    @as_user_error()
    def __getitems__(self, samples: Sequence[SampleIndex]) -> list[Item]:
        """Return the items of a batch. The loader calls this."""
        return [self[sample] for sample in samples]


def empty_pixels(*shape: int, dtype: np.dtype[Any] | type = np.uint8) -> Tensor:
    """Return an uninitialised tensor for pixels; in a loader process it is shared with the training process."""
    pixels = torch.empty(0, dtype=getattr(torch, np.dtype(dtype).name))
    if get_worker_info() is None:
        return pixels.resize_(shape)
    memory = torch.UntypedStorage._new_shared(math.prod(shape) * pixels.itemsize, device="cpu")
    return pixels.set_(memory, 0, shape)  # type: ignore[call-overload]


def stack_in_place(images: Sequence[Tensor]) -> Tensor:
    """Stack images of one shape into a tensor (n, ...), without a copy if they are the rows of one already."""
    whole, step = images[0]._base, images[0].numel()
    if whole is not None and whole.shape == (len(images), *images[0].shape):
        start = whole.data_ptr()
        if all(image.data_ptr() == start + row * step * whole.itemsize for row, image in enumerate(images)):
            return whole
    stacked = empty_pixels(len(images), *images[0].shape, dtype=images[0].numpy().dtype)
    return torch.stack(list(images), out=stacked)


@as_user_error()
def collate_batch(collate: Callable[[Sequence[Any]], Batch], items: Sequence[Any]) -> Batch:
    return collate(items)


def first_batch(loader: Any) -> Batch:
    """Load the first batch of an epoch in this process, at the loader's largest image size."""
    items = [loader.dataset[sample] for sample in loader.batch_sampler.largest()]
    return loader.collate_fn(items)


S = TypeVar("S", bound=Split)


@dataclass(frozen=True)
class DataOptions(Sampling):
    """The flags of a data set: how images are sampled (`Sampling`), and how they are read."""

    single_cls: bool = False  # all labels are of one class
    workers: int = 0  # loader processes; 0: the training process loads
    cache: str = ""  # cache of decoded images: "ram", "disk", "val" (in memory, validation only), or "" for none
    strict: bool = False  # bad images and labels are errors instead of being left out
    mask_ratio: int = 4  # pixels of the image per pixel of the training masks, along a side (segmentation)
    no_overlap: bool = False  # each training mask has all its pixels, even where a smaller object is on top
    augmentations: str = ""  # file with the user's augmentations


@dataclass
class DataSet(ABC, Generic[S]):
    """A data set at one image size: its splits, checked, and loaders over them."""

    spec: DataSpec
    imgsz: int  # pixels, in whole strides
    stride: int  # stride of the model; sides of an image are multiples of it
    options: DataOptions
    has_boxes: ClassVar[bool] = False  # whether splits may list data sets (`DataSpec.sets`), and have any `PixelFormat`

    @staticmethod
    @abstractmethod
    def class_names(spec: DataSpec, single_cls: bool) -> dict[int, str]:
        """Return the classes by number. Raises `UserError` if the YAML of the data set does not give them."""

    @staticmethod
    @abstractmethod
    def files(spec: DataSpec) -> Mapping[str, Sequence[Path]]:
        """Return all files that training reads, by kind, such as `labels of train`; some may not exist."""

    @abstractmethod
    def split(self, name: str, hyp: Recipe | None = None) -> S:
        """Read and check a split, to train on with `hyp` or to evaluate. Raises `UserError` if no image is usable."""

    @staticmethod
    @abstractmethod
    def item(image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        """Return an image, as `read_pixels` does, without labels as an item for `collate`, for detect.py.

        It is fitted into `sides`, height and width in pixels. Unless `full`, it may be smaller, in whole strides.
        """

    @staticmethod
    @abstractmethod
    def collate(items: Sequence[Item]) -> Batch:
        """Join items of one shape."""

    @abstractmethod
    def train_loader(self, split: S, batch_size: int, hyp: Recipe, seed: int) -> DataLoader[Any]:
        """Return a loader of augmented items over the global batches of `Sampling.batches`.

        Accelerate gives each process its part of a batch. An item may depend on its `SampleIndex`, `hyp` and `seed`
        only. Raises `UserError` for options that do not suit the data.
        """

    @abstractmethod
    def evaluation_batches(self, split: S, batch_size: int, square: bool) -> list[list[SampleIndex]]:
        """Return all batches of an evaluation, the same for any number of processes; see `sampler.evaluation_batches`.

        Unless they are `square`, with sides of `imgsz`, each has a shape of its own, with less padding.
        """

    @abstractmethod
    def evaluation_loader(self, split: S, batches: list[list[SampleIndex]]) -> DataLoader[Any]:
        """Return a loader over `batches`, a process's share of the evaluation. Nothing is random."""

    @cached_property
    def names(self) -> dict[int, str]:
        """The classes by number. Raises `UserError`."""
        return self.class_names(self.spec, self.options.single_cls)

    def loader(self, items: Items, batches: GlobalBatches | Sequence[list[SampleIndex]]) -> DataLoader[Any]:
        """Return a loader of `batches` of `items`, with at most one loader process per batch."""
        workers = min(self.options.workers, len(batches))
        if workers:
            get_temp_dir()  # the folder of multiprocessing's sockets: loader processes share it and leave none
            Image.preinit()  # Pillow's formats: loader processes should import nothing
            Image.init()
        return DataLoader(
            items,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=partial(collate_batch, self.collate),
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=init_worker,
        )

    def documents(self, train: S, val: S) -> dict[str, str]:
        """Return text files for the run folder by name, from which charts are drawn.

        labels.csv has the number of images with each class, and of its instances, in both splits.
        """
        rows, count = [], len(self.names)
        for split, (image, label) in (("train", train.instances()), ("val", val.instances())):
            present = np.unique(image * count + label) % count
            images, instances = (np.bincount(labels, minlength=count).tolist() for labels in (present, label))
            rows += [(split, name, images[class_id], instances[class_id]) for class_id, name in self.names.items()]
        return {"labels.csv": csv_text(("split", "class", "images", "instances"), rows)}

    def user_augmentations(self, named_by_user: bool = True) -> UserAugmentations:
        """Read the user's augmentations: see `read_augmentations`."""
        return read_augmentations(self.options.augmentations, len(self.names), named_by_user)

    def usable(self, name: str, sizes: np.ndarray, problems: Sequence[str]) -> np.ndarray:
        """Return which images have a size, bool (n,). Raises `UserError` for none, or with --strict for a problem."""
        bad = [problem for problem in problems if " crowds, such as " not in problem]  # COCO's rule, not a fault
        if self.options.strict and bad:
            count = plural(len(bad), "such problem")
            raise UserError(f"{bad[0].rpartition('; ')[0] or bad[0]} (--strict; {count} in {name})")
        readable: np.ndarray = sizes[:, 0] > 0
        if not readable.any():
            raise UserError(f"{self.spec.file}: no image of `{name}:` can be used; the first problem: {problems[0]}")
        return readable

    @property
    def train_cache(self) -> str:
        """The `cache` of the training images: "" if only validation images are cached."""
        return "" if self.options.cache == "val" else self.options.cache

    def uncached(self: D) -> D:
        """Return the same data set without a cache of decoded images."""
        return replace(self, options=replace(self.options, cache=""))

    def report(self, train: S, val: S) -> None:
        """Log both splits of a run, the classes and the rare ones, and how images are sampled."""
        log(*self.spec.warnings)
        train.report("train")
        val.report("val")
        names = self.names
        trained, validated = (np.bincount(split.instances().classes, minlength=len(names)) for split in (train, val))
        rising = ((names[class_id], trained[class_id]) for class_id in np.argsort(trained, kind="stable").tolist())
        texts = {
            f"{plural(len(names), 'class')}: ": list(names.values()),
            f"  fewer than {FEW_LABELS} training labels: ": [f"{name} ({n})" for name, n in rising if n < FEW_LABELS],
            "  no validation labels: ": [name for class_id, name in names.items() if not validated[class_id]],
        }
        for title, classes in texts.items():
            rest = f" and {len(classes) - PRINTED_NAMES} more" if len(classes) > PRINTED_NAMES else ""
            log(f"{title}{', '.join(classes[:PRINTED_NAMES])}{rest}" if classes else "")
        real = cache(os.path.realpath)  # each folder is resolved once, which is fast
        files = (map(os.path.split, path_texts(split.images)) for split in (train, val))
        paths = [{(real(folder), name) for folder, name in split_files} for split_files in files]
        if shared := paths[0] & paths[1]:
            count = f"{len(shared)} of the {len(val.images)} validation images are training images too"
            log(f"warning: {count}, such as {os.path.join(*min(shared))}; the metrics will look better than they are")
        self.options.report(train.instances(), len(train.images), self.imgsz, self.stride)


D = TypeVar("D", bound=DataSet[Any])


@dataclass(frozen=True)
class DataSource:
    """The YAML and the class of a data set, before there is a model."""

    spec: DataSpec
    dataset_class: type[DataSet[Any]]

    def names(self, single_cls: bool = False) -> dict[int, str]:
        """Return the classes by number. Raises `UserError`."""
        if (self.spec.sets or self.spec.pixels != PHOTOS) and not self.dataset_class.has_boxes:
            fault = "lists of data sets, `channels` and `range` are for detectors and segmenters only; leave them out"
            raise UserError(f"{self.spec.file}: {fault}")
        return self.dataset_class.class_names(self.spec, single_cls)

    def files(self) -> Mapping[str, Sequence[Path]]:
        return self.dataset_class.files(self.spec)

    def open(self, imgsz: int, stride: int, options: DataOptions) -> DataSet[Any]:
        """Return the data set for a model's images, of `imgsz` pixels in whole strides. Raises `UserError`."""
        return self.dataset_class(self.spec, imgsz, stride, options)


def data_source(data: str, import_path: str) -> DataSource:
    """Read what --data names for the class at `import_path`, as data.detection:DetectionData. Raises `UserError`."""
    return DataSource(read_data(data), class_named(import_path))


def split_identity(images: Sequence[Path], labels: bytes) -> dict[str, str]:
    """Return the number of images of a split, and hashes of their file names, of their sizes in bytes and of labels."""
    paths = path_texts(images)
    names = os.fsencode("\n".join(map(os.path.basename, paths)))
    sizes = "\n".join(str(os.stat(path).st_size) for path in paths)
    return {
        "count": str(len(images)),
        "files": hashlib.sha256(names).hexdigest(),
        "file sizes": hashlib.sha256(sizes.encode()).hexdigest(),
        "labels": hashlib.sha256(labels).hexdigest(),
    }


def log_split(title: str, summary: str, problems: Sequence[str]) -> None:
    """Log a split's counts, its first few problems, and the number of further ones."""
    log(f"{title}: {summary}", *(f"warning: {problem}" for problem in problems[:PRINTED_PROBLEMS]))
    if (unlisted := len(problems) - PRINTED_PROBLEMS) > 0:
        log(f"warning: {plural(unlisted, 'more such problem')} in {title}; problems.txt in the run folder lists all")
