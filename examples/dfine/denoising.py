"""Denoising queries: noisy copies of an image's targets, which the decoder learns to correct (DN-DETR, DINO).

Each image has the same number of slots, which its own targets fill: no shape and no number depends on another image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

LABEL_NOISE_SHARE = 0.5  # of `label_noise_ratio`: half of the drawn labels are replaced
NUMBERS = (
    10  # that a query draws: sizes and signs of the offsets of four edges, whether its label is replaced, by which
)
MIX, STEP = 0x45D9F3B, 0x9E3779B  # odd, below 2^28: products with 32 bits fit into int64
NONE = -1  # row of a query without a target: the last one, of zeros, that is added to the targets
UNUSED, IMAGE = -1, -2  # group of an unused slot, and of the queries for the image


class Noisy(NamedTuple):
    """The denoising queries of a batch: s slots with a positive query each, then s slots with a negative one."""

    labels: Tensor  # int64 (b, 2s); the number of classes where a slot is not used
    boxes: Tensor  # (b, 2s, 4): cxcywh from 0 to 1
    rows: Tensor  # int64 (b, 2s): the target of a positive query, else `NONE`
    used: Tensor  # bool (b, 2s)
    groups: Tensor  # int64 (b, 2s): a query attends to those of its own group


def mixed(bits: Tensor) -> Tensor:
    """Return a hash of whole numbers of 32 bits, int64: only whole numbers, so equal on every device."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * MIX & 0xFFFFFFFF
    return (bits >> 16) ^ bits


def uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """Return numbers from 0 to 1, float32, that are a function of `keys` and `numbers`, int64."""
    return (mixed(mixed(keys) + numbers * STEP & 0xFFFFFFFF) >> 8).float() / (1 << 24)


def noisy_targets(targets: Tensor, images: int, slots: int, classes: int, label_noise: float, scale: float) -> Noisy:
    """Return the denoising queries of targets (m, 7): image, class, cxcywh, number of the noise.

    Targets are ordered by image. An image with n of them has slots // n groups, at least one; of more targets than
    slots the first ones are used.
    """
    image, device = targets[:, 0].long(), targets.device
    counts = (image == torch.arange(images, device=device)[:, None]).sum(1, keepdim=True)
    slot, least = torch.arange(slots, device=device), counts.clamp(min=1)
    used = slot < (slots // least).clamp(min=1) * counts
    rows = torch.where(used, counts.cumsum(0) - counts + slot % least, NONE)
    group = torch.where(used, slot // least, UNUSED)
    table = torch.cat((targets, targets.new_zeros(1, 7)))[rows].repeat(1, 2, 1)
    negative = (torch.arange(2 * slots, device=device) >= slots).long()[None]
    used, keys = used.repeat(1, 2), table[..., 6].long()
    query = group.clamp(min=0).repeat(1, 2) * 2 + negative
    drawn = uniform(keys[..., None], query[..., None] * NUMBERS + torch.arange(NUMBERS, device=device))
    sizes, signs, (replaced, other) = drawn[..., :4], drawn[..., 4:8], drawn[..., 8:].unbind(-1)
    labels, boxes = table[..., 1].long(), table[..., 2:6]
    new = (other * classes).long().clamp(max=classes - 1)
    labels = torch.where(replaced < label_noise * LABEL_NOISE_SHARE, new, labels)
    # A negative query is moved by half to a whole side of its box, a positive one by at most half a side.
    offset = (sizes + negative[..., None]) * torch.where(signs < 0.5, -1.0, 1.0)
    edges = corners(boxes) + offset * boxes[..., 2:].repeat(1, 1, 2) * (0.5 * scale)
    low, high = edges.clamp(0, 1).split(2, -1)
    boxes = torch.cat(((low + high) / 2, high - low), -1)
    positive = torch.cat((rows, torch.full_like(rows, NONE)), 1)
    return Noisy(torch.where(used, labels, classes), boxes, positive, used, group.repeat(1, 2))


def corners(boxes: Tensor) -> Tensor:
    """Return boxes (..., 4) in xyxy from cxcywh."""
    centres, halves = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((centres - halves, centres + halves), -1)


def attention_mask(groups: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (b, 1, n, n) that is added to attention: `queries` for the image follow the denoising ones.

    All see the image's queries; a denoising query sees its group too.
    """
    every = pad(groups, (0, queries), value=IMAGE)
    keys = every[:, None]
    hidden = (keys != every[:, :, None]) & (keys != IMAGE)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
