"""Classification data: a folder of images per class, as batches."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader, Dataset

from data.batches import Batch, loader, stacked
from data.cache import Images, open_images
from data.dataset import DataSet, identity, labels_text
from data.images import read_image
from data.labels import load_labels
from data.problems import told
from data.sampler import PLAIN, Draw, Instances, Sampling, evaluation_batches, item_generator, training_batches
from data.sources import DataSpec, images_below
from data.transforms import Augmenter, TransformSettings, centre_crop
from utils.config.hyperparameters import Recipe
from utils.config.select import select
from utils.errors import UserError
from utils.files import csv_text

STEP = 32  # pixels between the sizes of batches with --multi-scale, where --imgsz is a multiple: most models' stride


class ImageInfo(NamedTuple):
    """Where an item came from."""

    image: int  # its number in the split
    path: str
    label: int  # its class


class _Items(Dataset[tuple[Tensor, Tensor, ImageInfo]]):
    """What training and evaluation items share: pixels and classes."""

    def __init__(self, images: Images, labels: np.ndarray, classes: int) -> None:
        self.images, self.labels, self.classes = images, labels, classes

    def load(self, index: int) -> tuple[Tensor, int]:
        """An image as its file has it, uint8 (3, h, w) RGB, and its class."""
        return to_tensor(self.images.read(index)), int(self.labels[index])

    def info(self, index: int) -> ImageInfo:
        return ImageInfo(index, str(self.images.files[index]), int(self.labels[index]))


class TrainingItems(_Items):
    """Augmented items. Indexed by a `Draw`; the same draw gives the same pixels anywhere."""

    def __init__(
        self,
        images: Images,
        labels: np.ndarray,
        classes: int,
        settings: TransformSettings,
        seed: int,
        sampling: Sampling = PLAIN,
    ) -> None:
        super().__init__(images, labels, classes)
        self.seed, self.sampling = seed, sampling
        self.augmenter = Augmenter(settings, self.load, len(labels), classes)
        self.unmixed = Augmenter(replace(settings, mixup=0.0, cutmix=0.0), self.load, len(labels), classes)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, ImageInfo]:
        augmenter = self.augmenter if self.sampling.mixes(draw.epoch) else self.unmixed
        pixels, target = augmenter(draw.image, draw.shape[0], item_generator(self.seed, draw), draw.partners)
        return pixels, target, self.info(draw.image)


class EvaluationItems(_Items):
    """The middle of each image, nothing random."""

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor, ImageInfo]:
        pixels, label = self.load(draw.image)
        target = one_hot(torch.tensor(label), self.classes).float()
        return centre_crop(pixels, draw.shape[0]), target, self.info(draw.image)


def to_tensor(image: np.ndarray) -> Tensor:
    """Pixels (h, w, 3) BGR as uint8 (3, h, w) RGB."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)[::-1]))


def collate(items: Sequence[tuple[Tensor, Tensor, ImageInfo]]) -> Batch:
    """Items as a batch."""
    images, targets, infos = zip(*items, strict=True)
    return Batch(stacked(images), torch.stack(targets), infos)


@dataclass(frozen=True)
class Split:
    """The images of one split that can be read, the class of each, and sizes (n, 2), width and height in pixels."""

    images: list[Path]
    labels: np.ndarray  # int64 (n,)
    sizes: np.ndarray
    names: dict[int, str]
    problems: tuple[str, ...] = ()  # sentences about what was left out

    def identity(self) -> dict[str, str]:
        """What tells whether these are the same images of the same classes as at another time, wherever they lie."""
        return identity(self.images, self.labels.tobytes())

    def report(self, title: str) -> list[str]:
        """What was found, for people: counts, and the first few problems."""
        counts = np.bincount(self.labels, minlength=len(self.names))
        found = (
            f"{title}: {len(self.images)} images of {(counts > 0).sum()} classes, {counts.min()} to {counts.max()} each"
        )
        return [found, *told(self.problems, title)]

    def instances(self) -> Instances:
        """Each image and its class."""
        return Instances(np.arange(len(self.images)), self.labels)

    def shown(self, index: int, side: int) -> np.ndarray:
        """An image as the model is shown it in a validation, uint8 (side, side, 3) BGR."""
        pixels = centre_crop(to_tensor(read_image(self.images[index])), side)
        return np.ascontiguousarray(pixels.numpy()[::-1].transpose(1, 2, 0))


@dataclass
class ClassificationData(DataSet):
    """A classification data set at one image size: its splits, checked, and loaders over them.

    Its YAML has `train:` and `val:`, each a folder with a folder of images per class; or `split:`, the share of each
    class of `train:` (else of `path:` itself) that is held out for validation. The classes are numbered as `names:`
    says, else by the folders' names in order.
    """

    def __post_init__(self) -> None:
        self.names = self.class_names(self.spec, self.single_class)

    @staticmethod
    def class_names(spec: DataSpec, single_class: bool) -> dict[int, str]:
        """What the model is to tell apart. Raises `UserError` where there is nothing of that kind."""
        if single_class:
            raise UserError("--single-cls leaves a classifier nothing to tell apart; leave it out")
        names = spec.names or dict(enumerate(_by_class(spec, "train")))
        if len(set(names.values())) < len(names):
            raise UserError(
                f"{spec.file}: two classes under `names` have one name, so no folder is the second's; mend it"
            )
        return names

    @staticmethod
    def files(spec: DataSpec) -> dict[str, list[Path]]:
        """All that training reads, by what it is."""
        return {name: [path for paths in _chosen(spec, name).values() for path in paths] for name in ("train", "val")}

    def split(self, name: str, hyp: Recipe | None = None) -> Split:
        """A split, scanned. Raises `UserError` where nothing of it is usable, or a folder is of no class; `strict`:
        where anything is to be left out. `hyp`: of a training on it, which asks for nothing more."""
        found = _chosen(self.spec, name)
        numbers = {text: number for number, text in self.names.items()}
        if unknown := [text for text in found if text not in numbers]:
            raise UserError(
                f"{self.spec.file}: `{name}:` has a folder '{unknown[0]}', which is none of the classes "
                f"{', '.join(list(numbers)[:10])}; add it to `train:` and `names:`, or move it away"
            )
        images = [path for paths in found.values() for path in paths]
        labels = np.array([numbers[text] for text, paths in found.items() for _ in paths], np.int64)
        scanned = load_labels(images, f"{name} images", self.workers, boxes=False)
        problems = scanned.problems
        if name == "train":
            seen = np.bincount(labels[scanned.sizes[:, 0] > 0], minlength=len(self.names))
            problems += tuple(
                f"{self.spec.file}: `train:` has no images of the class '{self.names[int(k)]}'; it cannot be learned"
                for k in np.flatnonzero(seen == 0)
            )
        readable = self.usable(name, scanned.sizes, problems)
        return Split(list(compress(images, readable)), labels[readable], scanned.sizes[readable], self.names, problems)

    def documents(self, train: Split, val: Split) -> dict[str, str]:
        """Text files for the run folder, by name: the number of each class, which image is in which split, counts."""
        table = [
            (name, self.names[int(k)], path)
            for name, split in (("train", train), ("val", val))
            for k, path in zip(split.labels, split.images, strict=True)
        ]
        counts = {
            name: (np.bincount(split.labels, minlength=len(self.names)),) * 2
            for name, split in (("train", train), ("val", val))
        }
        indices = {str(number): text for number, text in self.names.items()}
        return {
            "class_indices.json": json.dumps(indices, indent=2, ensure_ascii=False) + "\n",
            "split.csv": csv_text(("split", "class", "image"), table),
            "labels.csv": labels_text(self.names, counts),
        }

    @staticmethod
    def item(
        image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False
    ) -> tuple[Tensor, Tensor, ImageInfo]:
        """An image, uint8 (h, w, 3) BGR, as an item for `collate`: its middle, a square of the shorter of `sides`."""
        return centre_crop(to_tensor(image), min(sides)), torch.zeros(0), ImageInfo(0, name, 0)

    collate = staticmethod(collate)

    def train_loader(
        self, split: Split, *, batch_size: int, hyp: Recipe, seed: int, sampling: Sampling = PLAIN
    ) -> DataLoader:
        """Global batches of augmented items. Raises `UserError` for `sampling.rect`."""
        if sampling.rect:
            raise UserError("--rect is for detectors, and a classifier's images are cut to squares; leave it out")
        step = math.gcd(self.imgsz, STEP)
        batches = training_batches(
            sampling, split.instances(), split.sizes, batch_size, seed, self.imgsz, step, near=1, mixed=1
        )
        settings, images = select(TransformSettings, hyp), self._open(split, self.train_cache)
        items = TrainingItems(images, split.labels, len(self.names), settings, seed, sampling)
        return loader(items, batches, collate, self.workers)

    def evaluation_batches(self, split: Split, *, batch_size: int, square: bool) -> list[list[Draw]]:
        """The batches of an evaluation, the same for any number of processes."""
        return evaluation_batches(split.sizes, batch_size, self.imgsz, 1, square=True)

    def evaluation_loader(self, split: Split, batches: list[list[Draw]]) -> DataLoader:
        """A loader over some of the evaluation's batches: a process's share."""
        items = EvaluationItems(self._open(split, self.cache), split.labels, len(self.names))
        return loader(items, batches, collate, self.workers)

    def _open(self, split: Split, cache: str) -> Images:
        return open_images(split.images, 0, False, cache, split.sizes)


Classes = dict[str, list[Path]]  # the images of each class, by its name, in order


def _chosen(spec: DataSpec, name: str) -> Classes:
    """The images of a split by class. Raises `UserError` where there are none."""
    if name == "val" and "val" not in spec.entries and not spec.split:
        raise UserError(
            f"{spec.file} has no `val:`; add a folder with a folder of images per class, or `split: 0.2` to hold out "
            "a share of each class"
        )
    if not spec.split or name == "test" or (name == "val" and "val" in spec.entries):
        return _by_class(spec, name)
    found = _by_class(spec, "train")
    if all(len(paths) < 2 for paths in found.values()):
        raise UserError(
            f"{spec.file}: no class has two images, so `split: {spec.split:g}` leaves none to hold out; add images"
        )
    held = {text: held_out(paths, spec.split, spec.split_seed) for text, paths in found.items()}
    if name == "val":
        return {text: sorted(paths) for text, paths in held.items()}
    return {text: sorted(set(paths) - held[text]) for text, paths in found.items()}


def _by_class(spec: DataSpec, name: str) -> Classes:
    """The images below the class folders of `name:`, or of `path:` itself where there is a `split:`; walked once."""
    if name not in spec.walked:
        spec.walked[name] = _walk_classes(spec, name)
    return spec.walked[name]


def _walk_classes(spec: DataSpec, name: str) -> Classes:
    whole = spec.split and name == "train" and "train" not in spec.entries
    places = [spec.root()] if whole else spec.places(name)
    others = [place for other in spec.entries if whole for place in spec.places(other)]  # below `path:`, but no classes
    found: dict[str, set[Path]] = {}
    for place in places:
        for folder in _folders(place):
            if not any(other.is_relative_to(folder) for other in others):
                found.setdefault(folder.name, set()).update(images_below(folder))
    classes = {text: sorted(found[text]) for text in sorted(found) if found[text]}
    if not classes:
        looked = ", ".join(map(str, places))
        raise UserError(
            f"{spec.file}: `{name}:` has no folders of images in {looked}; put the images of each class into a folder "
            "of its name there"
        )
    return classes


def _folders(place: Path) -> list[Path]:
    """The folders in a place, hidden ones apart, by name. Raises `UserError` where it cannot be read."""
    try:
        return sorted(one for one in place.iterdir() if one.is_dir() and not one.name.startswith("."))
    except NotADirectoryError:
        return []
    except OSError as error:
        raise UserError(f"the folder {place} cannot be read: {error.strerror}; mend its permissions") from None


def held_out(images: Sequence[Path], share: float, seed: int) -> set[Path]:
    """The images of a class that are kept for validation: at least one of several, and never all.

    They are chosen by a hash of folder, name and seed, so that more images change little, and the folder's place
    nothing.
    """
    count = min(max(round(len(images) * share), 1), len(images) - 1)
    return set(sorted(images, key=lambda path: _rank(path, seed))[:count])


def _rank(path: Path, seed: int) -> Any:
    return hashlib.sha256(f"{seed}/{path.parent.name}/{path.name}".encode()).digest(), path
