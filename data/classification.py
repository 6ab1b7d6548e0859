"""Classification data: a folder of images per class, as batches. Named by `TASKS`; see data/dataset.py.

torchvision is imported inside functions because it takes more than a second, which the training of a detector saves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader

from data.augment import Sample, seed_torch
from data.augmentations import UserAugmentations
from data.cache import Images
from data.data_yaml import DataSpec, hold_out
from data.dataset import DataSet, Item, Items, log_split, split_identity, stack_in_place
from data.formats import subfolders
from data.images import images_below, read_image
from data.labels import load_labels
from data.sampler import SampleIndex, Sampling, evaluation_batches, images_in_use, item_generator
from utils.batch import Batch, ClassInfo, Instances, Split
from utils.config.hyperparameters import Recipe, Transforms
from utils.errors import UserError, plural
from utils.files import csv_text

MULTI_SCALE_STEP_PIXELS = 32  # step between the sizes of batches, if --imgsz is a multiple: most models' stride
CENTRE_CROP_SHARE = 0.875  # share of the shorter side in a validation crop: 224 of 256 pixels
ERASED_RGB = (124, 116, 104)  # ImageNet's mean, 0 to 255: the colour of erased rectangles
MAX_RESIZED_ASPECT = 4  # longer over shorter side of the part that is resized for a centre crop
RANDOM_CROP_ASPECTS = (3 / 4, 4 / 3)  # smallest and largest ratio of the sides


def _steps(hyp: Transforms, side: int) -> list[torch.nn.Module]:
    from torchvision.transforms import v2

    jitter = (hyp.brightness, hyp.contrast, hyp.saturation, hyp.hue)
    steps = [
        (True, v2.RandomResizedCrop(side, scale=(hyp.crop_scale, 1.0), ratio=RANDOM_CROP_ASPECTS, antialias=True)),
        (hyp.fliplr, v2.RandomHorizontalFlip(hyp.fliplr)),
        (hyp.flipud, v2.RandomVerticalFlip(hyp.flipud)),
        (hyp.randaugment, v2.RandAugment(hyp.randaugment, hyp.randaugment_magnitude)),
        (any(jitter), v2.ColorJitter(*jitter)),
        (hyp.erasing, v2.RandomErasing(hyp.erasing, value=list(ERASED_RGB))),
    ]
    return [step for is_used, step in steps if is_used]


def centre_crop(image: Tensor, side: int) -> Tensor:
    """Return the centre of an image, uint8 (3, h, w), with 7/8 of its shorter side, as (3, side, side)."""
    from torchvision.transforms.v2 import functional

    longest = MAX_RESIZED_ASPECT * min(image.shape[-2:])  # cut the ends of a strip off before resizing
    image = functional.center_crop(image, [min(length, longest) for length in image.shape[-2:]])
    shrunk = functional.resize(image, [round(side / CENTRE_CROP_SHARE)], antialias=True)
    return functional.center_crop(shrunk, [side, side])


@dataclass(eq=False)
class _Items(Items):
    """Items of images and classes, by sample index."""

    images: Images
    labels: np.ndarray
    classes: int

    def __post_init__(self) -> None:
        import torchvision.transforms.v2  # noqa: F401  # before the loader processes, which should import nothing

    def load(self, index: int) -> tuple[Tensor, int]:
        """Return an image at the size of its file, uint8 (3, h, w) RGB, and its class."""
        return to_tensor(self.images.read(index)), int(self.labels[index])

    def info(self, index: int) -> ClassInfo:
        return ClassInfo(index, self.images.name(index), int(self.labels[index]))


@dataclass(eq=False)
class TrainingItems(_Items):
    """Items augmented by torchvision's transforms; the same sample index gives the same pixels in any process."""

    hyp: Transforms
    seed: int
    sampling: Sampling
    user: UserAugmentations
    transforms: dict[int, torch.nn.Module] = field(default_factory=dict)  # by side

    def __getitem__(self, sample: SampleIndex) -> Item:
        from torchvision.transforms import v2

        hyp, side = self.hyp, sample.shape[0]
        rng, user_rng = item_generator(self.seed, sample), item_generator(self.seed, sample, of_user=True)
        chance, drawn = rng.random(), int(rng.integers(len(self.labels)))
        if side not in self.transforms:
            self.transforms[side] = torch.nn.Sequential(*_steps(hyp, side))
        with seed_torch(rng):
            pixels, label = self._transformed(sample.image, side, user_rng)
            target = one_hot(torch.tensor(label), self.classes).float()
            if chance < hyp.mixup + hyp.cutmix and self.sampling.mixes(sample.epoch):
                mix = v2.MixUp(alpha=hyp.mixup_alpha, num_classes=self.classes)
                if chance >= hyp.mixup:
                    mix = v2.CutMix(alpha=hyp.cutmix_alpha, num_classes=self.classes)
                other, partner = self._transformed(sample.partners[0] if sample.partners else drawn, side, user_rng)
                # A batch of two, whose first image is mixed with the second: partners from the training batch would
                # depend on the number of processes.
                images, targets = mix(torch.stack((pixels, other)).float(), torch.tensor([label, partner]))
                pixels, target = images[0].round().to(torch.uint8), targets[0]
        self.images.release()
        return pixels, target, self.info(sample.image)

    def _transformed(self, index: int, side: int, user_rng: np.random.Generator) -> tuple[Tensor, int]:
        pixels, label = self.load(index)
        pixels = self.transforms[side](pixels)
        if self.user.calls:
            sample = Sample(to_array(pixels), np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
            pixels = to_tensor(self.user(sample, user_rng, self.images.name(index)).image)
        return pixels, label


class EvaluationItems(_Items):
    """Centre crops; nothing is random."""

    def __getitem__(self, sample: SampleIndex) -> Item:
        pixels, label = self.load(sample.image)
        target = one_hot(torch.tensor(label), self.classes).float()
        return centre_crop(pixels, sample.shape[0]), target, self.info(sample.image)


def to_tensor(image: np.ndarray) -> Tensor:
    """Convert pixels (h, w, 3) BGR to uint8 (3, h, w) RGB."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)[::-1]))


def to_array(pixels: Tensor) -> np.ndarray:
    """Convert pixels uint8 (3, h, w) RGB to (h, w, 3) BGR."""
    return np.ascontiguousarray(pixels.numpy()[::-1].transpose(1, 2, 0))


def collate(items: Sequence[Item]) -> Batch:
    images, targets, infos = zip(*items, strict=True)
    return Batch(stack_in_place(images), torch.stack(targets), infos)


@dataclass(frozen=True)
class ClassificationSplit(Split):
    """The readable images of one split, and their classes."""

    images: list[Path]
    labels: np.ndarray  # class of each image, int64 (n,)
    sizes: np.ndarray  # (n, 2), width and height in pixels
    names: dict[int, str]
    problems: tuple[str, ...] = ()

    def identity(self) -> dict[str, str]:
        return split_identity(self.images, self.labels.tobytes())

    def report(self, title: str) -> None:
        counts = np.bincount(self.labels, minlength=len(self.names))
        images, classes = plural(len(self.images), "image"), plural((counts > 0).sum(), "class")
        log_split(title, f"{images} of {classes}, {counts.min()} to {counts.max()} each", self.problems)

    def instances(self) -> Instances:
        return Instances(np.arange(len(self.images)), self.labels)

    def display_image(self, index: int, side: int) -> np.ndarray:
        """Return the centre crop of an image, as in an evaluation, uint8 (side, side, 3) BGR."""
        return to_array(centre_crop(to_tensor(read_image(self.images[index])), side))


@dataclass
class ClassificationData(DataSet[ClassificationSplit]):
    """A classification data set at one image size: its splits, checked, and loaders over them.

    Its YAML has `train:` and `val:`, each a folder with a folder of images per class; or `split:`, the share of each
    class of `train:` (else of `path:` itself) that is held out for validation. Classes are numbered as in `names:`,
    else by the order of the folders' names.
    """

    def __post_init__(self) -> None:
        self.stride = math.lcm(self.stride, math.gcd(self.imgsz, MULTI_SCALE_STEP_PIXELS))

    @staticmethod
    def class_names(spec: DataSpec, single_cls: bool) -> dict[int, str]:
        """Return the YAML's `names`, else the folders' names. Raises `UserError` for --single-cls or equal names."""
        if single_cls:
            raise UserError("--single-cls leaves a classifier only one class; leave it out")
        names = spec.names or dict(enumerate(_by_class(spec, "train")))
        if len(set(names.values())) < len(names):
            raise UserError(
                f"{spec.file}: two classes under `names` have the same name, so they would share a folder; rename one"
            )
        return names

    @staticmethod
    def files(spec: DataSpec) -> Mapping[str, Sequence[Path]]:
        names = ("train", "val")
        return {name: [path for paths in split_classes(spec, name).values() for path in paths] for name in names}

    def split(self, name: str, hyp: Recipe | None = None) -> ClassificationSplit:
        """Read and check a split. Raises `UserError` if no image can be used, or for a folder of an unknown class."""
        classes = split_classes(self.spec, name)
        numbers = {text: number for number, text in self.names.items()}
        if unknown := [text for text in classes if text not in numbers]:
            raise UserError(
                f"{self.spec.file}: `{name}:` has a folder '{unknown[0]}', which is not one of the classes "
                f"{', '.join(list(numbers)[:10])}; add it to `train:` and `names:`, or move it away"
            )
        images = [path for paths in classes.values() for path in paths]
        labels = np.array([numbers[text] for text, paths in classes.items() for _ in paths], np.int64)
        scanned = load_labels(images, f"{name} images", self.options.workers, rules=None)
        problems = (*self.spec.walked.get(f"problems of {name}", ()), *scanned.problems)
        if name == "train":
            counts = np.bincount(labels[scanned.sizes[:, 0] > 0], minlength=len(self.names))
            absent = [self.names[class_id] for class_id in np.flatnonzero(counts == 0).tolist()]
            fault = f"{self.spec.file}: `train:` has no images of the class"
            problems += tuple(f"{fault} '{name}'; it cannot be learned" for name in absent)
        readable = self.usable(name, scanned.sizes, problems)
        images = list(compress(images, readable))
        return ClassificationSplit(images, labels[readable], scanned.sizes[readable], self.names, problems)

    def documents(self, train: ClassificationSplit, val: ClassificationSplit) -> dict[str, str]:
        """Return what `DataSet` does, class_indices.json, and split.csv, the images of both splits."""
        splits = {"train": train, "val": val}
        table = [
            (name, self.names[int(class_id)], path)
            for name, split in splits.items()
            for class_id, path in zip(split.labels, split.images, strict=True)
        ]
        indices = {str(number): text for number, text in self.names.items()}
        return {
            **super().documents(train, val),
            "class_indices.json": json.dumps(indices, indent=2, ensure_ascii=False) + "\n",
            "split.csv": csv_text(("split", "class", "image"), table),
        }

    @staticmethod
    def item(image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        """Return the centre crop of an image, a square of the shorter of `sides`."""
        return centre_crop(to_tensor(image), min(sides)), torch.zeros(0), ClassInfo(0, name, 0)

    collate = staticmethod(collate)

    def train_loader(self, split: ClassificationSplit, batch_size: int, hyp: Recipe, seed: int) -> DataLoader[Any]:
        batches = self.options.batches(split, split.sizes, batch_size, seed, self.imgsz, self.stride, 1)
        assert isinstance(hyp, Transforms)  # the recipe of a task with this data set
        capacity = images_in_use(batch_size, self.options.workers) if hyp.mixup or hyp.cutmix else 0
        images = Images(split.images, split.sizes, 0, cache=self.train_cache, capacity=capacity)
        user = self.user_augmentations()
        items = TrainingItems(images, split.labels, len(self.names), hyp, seed, self.options, user)
        return self.loader(items, batches)

    def evaluation_batches(self, split: ClassificationSplit, batch_size: int, square: bool) -> list[list[SampleIndex]]:
        return evaluation_batches(split.sizes, batch_size, self.imgsz, 1, square=True)

    def evaluation_loader(self, split: ClassificationSplit, batches: list[list[SampleIndex]]) -> DataLoader[Any]:
        images = Images(split.images, split.sizes, 0, cache=self.options.cache)
        items = EvaluationItems(images, split.labels, len(self.names))
        return self.loader(items, batches)


Classes = dict[str, list[Path]]  # the images of each class, sorted, by its name


def split_classes(spec: DataSpec, name: str) -> Classes:
    """Return the images of a split by class. Raises `UserError` if there are none."""
    if name == "test" or not spec.holds_out:
        return _by_class(spec, name)
    classes = _by_class(spec, "train")
    if all(len(paths) < 2 for paths in classes.values()):
        raise UserError(
            f"{spec.file}: no class has two images, so `split: {spec.split:g}` leaves none to hold out; add images"
        )
    held = {text: hold_out(paths, spec.split, spec.split_seed) for text, paths in classes.items()}
    return {text: [path for path in classes[text] if (path in held[text]) == (name == "val")] for text in classes}


def _by_class(spec: DataSpec, name: str) -> Classes:
    """Return the images below the class folders of `name:`, or with `split:` of `path:` itself; searched only once."""
    if name in spec.walked:
        return spec.walked[name]
    split_path = spec.split and name == "train" and "train" not in spec.entries
    parents = [spec.locate(".", "path:")] if split_path else spec.locations(name)
    # Folders of other splits may be below `path:`, and are not classes.
    excluded = [folder for split in spec.entries if split_path for folder in spec.locations(split)]
    images: dict[str, set[Path]] = {}
    problems: list[str] = []
    for folder in (folder for parent in parents for folder in subfolders(parent, problems)):
        if not any(split_folder.is_relative_to(folder) for split_folder in excluded):
            images.setdefault(folder.name, set()).update(map(Path, images_below(folder, problems)))
    classes = {label: sorted(images[label]) for label in sorted(images) if images[label]}
    if not classes:
        searched = ", ".join(map(str, parents))
        raise UserError(
            f"{spec.file}: `{name}:` has no folders of images in {searched}; put the images of each class into a "
            "folder named after it there, or train a detector"
        )
    spec.walked.update({name: classes, f"problems of {name}": problems})
    return classes
