"""The types that data sets and tasks exchange. A leaf module: it imports nothing from this repository."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

MAX_CHANNELS = 16  # of images
MASK_STRIDE = 4  # pixels of the network's image per pixel of a mask map, along each side


def box_windows(xywh: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the pixels of a mask map of `height` x `width` in each normalised box, float32 (k, 4).

    They are left, top, right, bottom (exclusive), int32 (k, 4). A pixel is inside if x1 <= column < x2 and
    y1 <= row < y2, in float32, as in YOLOv5.
    """
    sides = np.array((width, height), np.float32)
    centres, halves = xywh[:, :2], xywh[:, 2:] / 2
    corners = np.concatenate(((centres - halves) * sides, (centres + halves) * sides), 1)
    return np.ceil(corners).clip(0, np.tile(sides, 2)).astype(np.int32)


def layout(device: torch.device) -> torch.memory_format:
    """Return channels_last, in which convolutions are faster, for CPU and CUDA, else torch's default."""
    return torch.channels_last if device.type in ("cpu", "cuda") else torch.contiguous_format


def use_onednn(model: nn.Module, device: torch.device) -> None:
    """Let oneDNN compute all convolutions on a CPU: kernels of one pixel too, for which torch has a slower way, with
    other rounding, on one thread with fewer than 16 images, unless they are dilated: that changes nothing there."""
    for module in model.modules() if device.type == "cpu" else ():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (2, 2)


@dataclass(frozen=True)
class PixelFormat:
    """How pixels are read from files: the same in training, validation, detection and exports.

    Only `PHOTOS` are uint8, others uint16; an array of a single channel has no axis for it.
    """

    channels: int = 3  # 0: as many as stacked files have
    range: tuple[float, float] | None = None  # values that become 0 and 1; None: those of the files' type
    folders: tuple[str, ...] = ()  # whose files are stacked by name; the first one has the labels

    @property
    def dtype(self) -> type[np.uint8 | np.uint16]:
        return np.uint8 if self == PHOTOS else np.uint16

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        return (height, width) if self.channels == 1 else (height, width, self.channels)

    def bytes(self, pixels: int = 1) -> int:
        return pixels * self.channels * np.dtype(self.dtype).itemsize

    @classmethod
    def of_model(cls, yaml: Mapping[str, Any]) -> PixelFormat:
        """Return the format in the YAML of a model, which `model_keys` has written."""
        return cls(yaml.get("ch", 3), tuple(yaml.get("range") or ()) or None, tuple(yaml.get("folders") or ()))

    def model_keys(self) -> dict[str, Any]:
        """Return the format as keys of a model YAML."""
        return {"ch": self.channels, "range": [*(self.range or ())], "folders": [*self.folders]}

    def __str__(self) -> str:
        limits = f" in the range {self.range[0]:g} to {self.range[1]:g}" if self.range else ""
        return f"{self.channels} channel{'s' * (self.channels > 1)}{limits}"


PHOTOS = PixelFormat()


class Placement(NamedTuple):
    """The map from a file's pixels to the batch's: batch = file x scale + offset, by (x, y)."""

    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0, 0)  # whole pixels, but for windows


class ImageInfo(NamedTuple):
    """An image of a batch with boxes: its file, its placement and its labels."""

    image: int  # index in the split
    path: str
    size: tuple[int, int]  # width and height of the file's image, pixels
    placement: Placement
    rows: np.ndarray  # the labels, float32 (m, 5): class, normalised xywh in the file's image
    # The outline of each object, if segmentation is evaluated: float32 (p, 2), fractions of the file's width and height
    outlines: tuple[np.ndarray, ...] = ()
    # The part of the file's image that this is, if the image is cut (data/tiles.py): left, top, right, bottom in pixels
    window: tuple[int, int, int, int] | None = None


class ClassInfo(NamedTuple):
    """An image of a batch without boxes: its file and its class."""

    image: int  # index in the split
    path: str
    label: int


@dataclass(frozen=True)
class Batch:
    """A batch of images, as the data set's loader delivers it."""

    images: Tensor  # uint8 (b, 3, h, w), RGB; or uint16 (b, channels, h, w), by the data set's `PixelFormat`
    # float32; boxes are (m, 6): image in the batch, class, normalised xywh; classes of whole images are (b, classes):
    # shares that add up to 1
    targets: Tensor
    infos: tuple[Any, ...]  # of each image; for every task with `image`, the index in the split, and `path`

    def to(self: B, device: torch.device | str, non_blocking: bool = False) -> B:
        """Return the batch with its tensors, including a subclass's, on `device`."""
        if self.images.device.type == torch.device(device).type == "cpu":
            return self  # torch copies from cpu to cpu:0
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: B) -> B:
        """Return the batch in page-locked memory; the loader calls this."""
        return self._with_tensors(Tensor.pin_memory)

    def parts(self: B, size: int) -> list[B]:
        """Return the batch in parts of at most `size` images: the windows of an image may be more."""
        if len(self.infos) <= size:
            return [self]
        parts, number = [], self.targets[:, 0]
        for start in range(0, len(self.infos), size):
            targets, part = self.targets[(number >= start) & (number < start + size)], slice(start, start + size)
            targets = torch.cat((targets[:, :1] - start, targets[:, 1:]), 1)
            parts.append(replace(self, images=self.images[part], targets=targets, infos=self.infos[part]))
        return parts

    def _with_tensors(self: B, convert: Callable[[Tensor], Tensor]) -> B:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: convert(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class SegmentationBatch(Batch):
    """A batch of boxes with the masks of its targets, on maps of 1/`MASK_STRIDE` of the images' height and width.

    `windows` and `host_targets` stay on the host, so that shapes that follow from them are known without waiting for
    the device.
    """

    mask_pixels: Tensor  # uint8 (s,), 0 or 1: the pixels of all windows, target after target, each row by row
    # int32 (m, 4): left, top, right, bottom (exclusive) of each target's window on the map, maybe empty: the pixels in
    # the target's box, and in an evaluation all pixels of the mask
    windows: np.ndarray
    host_targets: np.ndarray  # float32 (m, 6), equal to `targets`


class Instances(NamedTuple):
    """All labelled instances of a split: the image and the class of each, int64 (m,)."""

    images: np.ndarray
    classes: np.ndarray


class Subset(NamedTuple):
    """One of the data sets that a split lists."""

    name: str
    images: range  # indices in the split
    samples: int  # samples per epoch, if the split is trained on


class PathArray(Sequence[Path]):
    """Paths in one block of memory, which loader processes share: a tenth of the memory that as many `Path`s take."""

    def __init__(self, paths: Iterable[str | Path] | np.ndarray) -> None:
        self.names = paths if isinstance(paths, np.ndarray) else np.array(list(map(os.fsencode, paths)), bytes)

    @staticmethod
    def concatenate(parts: Iterable[PathArray]) -> PathArray:
        return PathArray(np.concatenate([part.names for part in parts]))

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:  # to any sequence of the same paths
        return isinstance(other, Sequence) and path_texts(self) == path_texts(other)

    def __getitem__(self, index: Any) -> Any:  # a Path, or a PathArray for a slice or an array of indices or bools
        chosen = self.names[index]
        return Path(os.fsdecode(chosen)) if isinstance(chosen, bytes) else PathArray(chosen)


def path_texts(paths: Sequence[Path]) -> list[str]:
    """Return paths as text, those of a `PathArray` without making `Path`s, which takes three microseconds each."""
    names = paths.names.tolist() if isinstance(paths, PathArray) else paths
    return list(map(os.fsdecode, names))


class Split(ABC):
    """The usable images of one split, with their labels."""

    images: Sequence[Path]  # by image index
    sets: tuple[Subset, ...] = ()  # the data sets that the split lists, if it does
    problems: tuple[str, ...]  # sentences of the form `what is wrong; what is left out`

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Return values that change with images or labels, but not if they are moved: see `split_identity`."""

    @abstractmethod
    def report(self, title: str) -> None:
        """Log the counts of the split named `title`, and its first few problems."""

    @abstractmethod
    def instances(self) -> Instances:
        """Return the image and class of each label, from which --image-weights follows."""

    @abstractmethod
    def display_image(self, index: int, side: int) -> np.ndarray:
        """Return an image for display, uint8 (h, w, 3) BGR, with no side longer than `side` pixels."""


class BoxSplit(Split):
    """A split whose labels are boxes."""

    @abstractmethod
    def side_lengths(self, imgsz: int) -> np.ndarray:
        """Return the width and height of every box, (n, 2), in pixels of images whose longer side is `imgsz`."""


class CocoImage(NamedTuple):
    """The detections of an image, for COCO's results."""

    image: int  # index in the split
    path: str
    rows: np.ndarray  # (k, 6): xyxy in pixels of the file, confidence, class
    masks: Sequence[Mapping[str, Any]] = ()  # each detection's mask in compressed run lengths; () without masks
