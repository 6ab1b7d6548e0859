"""Keypoint data: images, each with a label file of lines `class x y`, normalised."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.cache import Images
from data.data_yaml import DataSpec
from data.dataset import DataSet, Item, Items, log_split, split_identity, stack_in_place
from data.images import read_image, resize_long_side
from data.labels import label_name, load_labels
from data.sampler import SampleIndex, evaluation_batches, item_generator
from utils.batch import Batch, Instances, Split
from utils.config.hyperparameters import Recipe
from utils.errors import UserError


class ImageInfo(NamedTuple):
    image: int
    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    labels: np.ndarray  # float32 (m, 3): class, normalised x and y


@dataclass(frozen=True)
class HeatmapSplit(Split):
    images: Sequence[Path]
    labels: list[np.ndarray]  # (m, 3) each
    sizes: np.ndarray  # (n, 2), width and height, pixels
    problems: tuple[str, ...] = ()

    def identity(self) -> dict[str, str]:
        return split_identity(self.images, b"".join(rows.tobytes() + b";" for rows in self.labels))

    def report(self, title: str) -> None:
        log_split(title, f"{len(self.images)} images, {sum(map(len, self.labels))} points", self.problems)

    def instances(self) -> Instances:
        images = np.repeat(np.arange(len(self.images)), [len(rows) for rows in self.labels])
        return Instances(images, np.concatenate(self.labels)[:, 0].astype(np.int64))

    def display_image(self, index: int, side: int) -> np.ndarray:
        return resize_long_side(read_image(self.images[index]), side, smooth=True)


class KeypointItems(Items):
    """Images resized to squares, mirrored with probability `fliplr`."""

    def __init__(self, images: Images, split: HeatmapSplit, seed: int = 0, fliplr: float = 0.0) -> None:
        self.images, self.split, self.seed, self.fliplr = images, split, seed, fliplr

    def __getitem__(self, sample: SampleIndex) -> Item:
        image, rows = self.images.read(sample.image), self.split.labels[sample.image].copy()
        width, height = self.split.sizes[sample.image].tolist()
        info = ImageInfo(sample.image, self.images.name(sample.image), (width, height), rows.copy())
        if item_generator(self.seed, sample).random() < self.fliplr:
            image, rows[:, 1] = image[:, ::-1], 1 - rows[:, 1]
        return to_pixels(image, sample.shape), torch.from_numpy(rows), info


def read_points(file: str, classes: int) -> np.ndarray:
    """Return the rows of a label file, float32 (m, 3); none if it is absent. Raises `UserError`."""
    rows = np.loadtxt(file, np.float32, ndmin=2) if os.path.isfile(file) else np.zeros((0, 3), np.float32)
    wrong = rows.size and (rows.shape[1] != 3 or not np.isin(rows[:, 0], range(classes)).all())
    if wrong or (rows[:, 1:] < 0).any() or (rows[:, 1:] > 1).any():
        raise UserError(f"{file}: lines must be `class x y`: a class below {classes}, shares of width and height")
    return rows.reshape(-1, 3)


def to_pixels(image: np.ndarray, shape: tuple[int, int]) -> Tensor:
    """Resize pixels (h, w, 3) BGR to uint8 (3, *shape) RGB."""
    resized = cv2.resize(np.ascontiguousarray(image), shape[::-1], interpolation=cv2.INTER_LINEAR)
    return torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1)[::-1]))


@dataclass
class HeatmapData(DataSet[HeatmapSplit]):
    @staticmethod
    def class_names(spec: DataSpec, single_cls: bool) -> dict[int, str]:
        if single_cls:
            raise UserError("--single-cls is not for key points; leave it out")
        if not spec.names:
            raise UserError(f"{spec.file}: `names` must list the classes")
        return spec.names

    @staticmethod
    def files(spec: DataSpec) -> Mapping[str, Sequence[Path]]:
        images = {split: spec.images(split) for split in ("train", "val")}
        return images | {
            f"labels of {split}": [Path(label_name(str(image))) for image in files] for split, files in images.items()
        }

    def split(self, name: str, hyp: Recipe | None = None) -> HeatmapSplit:
        images, unlisted, _ = self.spec.listing(name)
        scanned = load_labels(images, f"{name} images", self.options.workers, rules=None)
        problems = (*unlisted, *scanned.problems)
        readable = self.usable(name, scanned.sizes, problems)
        images = images[readable]
        labels = [read_points(label_name(str(image)), len(self.spec.names)) for image in images]
        return HeatmapSplit(images, labels, scanned.sizes[readable], problems)

    @staticmethod
    def item(image: np.ndarray, name: str, sides: tuple[int, int], stride: int, full: bool = False) -> Item:
        height, width = image.shape[:2]
        info = ImageInfo(0, name, (width, height), np.zeros((0, 3), np.float32))
        return to_pixels(image, sides), torch.zeros(0, 3), info

    @staticmethod
    def collate(items: Sequence[Item]) -> Batch:
        images, targets, infos = zip(*items, strict=True)
        numbers = torch.cat([torch.full((len(rows), 1), float(k)) for k, rows in enumerate(targets)])
        return Batch(stack_in_place(images), torch.cat((numbers, torch.cat(targets)), 1), infos)

    def train_loader(self, split: HeatmapSplit, batch_size: int, hyp: Recipe, seed: int) -> DataLoader[Any]:
        batches = self.options.batches(split, split.sizes, batch_size, seed, self.imgsz, self.stride, 0)
        images = Images(split.images, split.sizes, 0, cache=self.train_cache)
        items = KeypointItems(images, split, seed, getattr(hyp, "fliplr", 0.0))
        return self.loader(items, batches)

    def evaluation_batches(self, split: HeatmapSplit, batch_size: int, square: bool) -> list[list[SampleIndex]]:
        return evaluation_batches(split.sizes, batch_size, self.imgsz, self.stride, square=True)

    def evaluation_loader(self, split: HeatmapSplit, batches: list[list[SampleIndex]]) -> DataLoader[Any]:
        images = Images(split.images, split.sizes, 0, cache=self.options.cache)
        return self.loader(KeypointItems(images, split), batches)
