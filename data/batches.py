"""Batches and loaders of all data sets: pixels are written once, into memory shared with the training process.

Called by the data sets; the tasks receive a `Batch` (utils/batch.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.cache import Images
from data.sampler import GlobalBatches, SampleIndex
from utils.batch import Batch
from utils.distributed.failure import init_worker
from utils.user_code import explained

# Pixels, uint8 (3, h, w) RGB; targets; the description of the image: see `Batch`.
Item = tuple[Tensor, Tensor, Any]


class Items(Dataset[Item]):
    """The items of a split, by sample index.

    Attributes:
        images: reader of the split's image files
    """

    images: Images

    @explained()
    def __getitems__(self, samples: Sequence[SampleIndex]) -> list[Item]:
        """Return the items of a batch. The loader calls this."""
        return self.load_batch(samples)

    def load_batch(self, samples: Sequence[SampleIndex]) -> list[Item]:
        """Return the items of a batch."""
        return [self[sample] for sample in samples]


def empty_pixels(*shape: int) -> Tensor:
    """Return an uninitialised uint8 tensor for pixels.

    In a loader process it is in memory shared with the training process.
    """
    pixels = torch.empty(0, dtype=torch.uint8)
    if get_worker_info() is None:
        return pixels.resize_(shape)
    return pixels.new(pixels._typed_storage()._new_shared(math.prod(shape), device="cpu")).resize_(shape)


def stack_in_place(images: Sequence[Tensor]) -> Tensor:
    """Stack uint8 images of one shape into a tensor (n, ...), without a copy if they are the rows of one already."""
    whole, step = images[0]._base, images[0].numel()
    if whole is not None and whole.shape == (len(images), *images[0].shape):
        start = whole.data_ptr()
        if all(image.data_ptr() == start + k * step for k, image in enumerate(images)):
            return whole
    return torch.stack(list(images), out=empty_pixels(len(images), *images[0].shape))


@explained()
def collated(collate: Callable[[Sequence[Any]], Batch], items: Sequence[Any]) -> Batch:
    """Return the batch of some items."""
    return collate(items)


def loader(
    items: Items,
    batches: GlobalBatches | Sequence[list[SampleIndex]],
    collate: Callable[[Sequence[Any]], Batch],
    workers: int,
) -> DataLoader[Any]:
    """Return a loader of `batches` of `items`.

    Args:
        workers: number of loader processes, at most one per batch, which end with this process; 0 loads in this process
    """
    workers = min(workers, len(batches))
    if workers:
        get_temp_dir()  # the folder of multiprocessing's sockets: made here, loader processes share it and leave none
        Image.preinit()  # Pillow's formats: loader processes should import nothing
        Image.init()
    return DataLoader(
        items,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=partial(collated, collate),
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=init_worker,
    )


def first_batch(loader: Any) -> Batch:
    """Return the first batch of a training loader's epoch at its largest size, loaded by this process."""
    items = [loader.dataset[sample] for sample in loader.batch_sampler.largest()]
    batch: Batch = loader.collate_fn(items)
    return batch
