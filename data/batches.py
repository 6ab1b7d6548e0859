"""Batches and loaders of all data sets: pixels are written once, into memory shared with the training process.

Called by the data sets; the tasks are given a `Batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.sampler import SampleIndex
from utils.distributed.loader_processes import init_worker, share_temporary_folder


@dataclass(frozen=True)
class Batch:
    """images: uint8 (b, 3, h, w), RGB. targets: float32. infos: a description of each image.

    targets of a detector: (m, 6), image in the batch, class, normalised xywh; of a classifier: (b, classes), shares
    that add up to 1. An info has `image`, the index in the split, `path`, and whatever else the task needs.
    """

    images: Tensor
    targets: Tensor
    infos: tuple[Any, ...]

    def to(self: B, device: torch.device | str, non_blocking: bool = False) -> B:
        """Return the batch with its tensors, those of a subclass too, on `device`."""
        if self.images.device.type == torch.device(device).type == "cpu":
            return self  # torch copies from cpu to cpu:0
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: B) -> B:
        """Return the batch in page-locked memory; the loader calls this."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self: B, convert: Callable[[Tensor], Tensor]) -> B:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: convert(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


B = TypeVar("B", bound=Batch)


def empty_pixels(*shape: int) -> Tensor:
    """Return a tensor for pixels, uint8; in a loader process it is in memory shared with the training process."""
    pixels = torch.empty(0, dtype=torch.uint8)
    if get_worker_info() is None:
        return pixels.resize_(shape)
    return pixels.new(pixels._typed_storage()._new_shared(math.prod(shape), device="cpu")).resize_(shape)


def stacked(images: Sequence[Tensor]) -> Tensor:
    """Return images of one shape, uint8, as one tensor (n, ...): the one whose rows they are, if any, or a copy."""
    whole, step = images[0]._base, images[0].numel()
    if whole is not None and whole.shape == (len(images), *images[0].shape):
        start = whole.data_ptr()
        if all(image.data_ptr() == start + k * step for k, image in enumerate(images)):
            return whole
    return torch.stack(list(images), out=empty_pixels(len(images), *images[0].shape))


def loader(
    items: Dataset[Any], batches: Iterable[list[SampleIndex]], collate: Callable[[Sequence[Any]], Batch], workers: int
) -> DataLoader[Any]:
    """Return a loader of `batches` of `items`. workers: number of loader processes, which end with this one."""
    if workers:
        share_temporary_folder()
    return DataLoader(
        items,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=init_worker,
    )
