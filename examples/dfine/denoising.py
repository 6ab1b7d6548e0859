"""Denoising queries: noisy copies of an image's targets, which the decoder learns to correct (DN-DETR, DINO).

Each image has the same number of slots, which its own targets fill: no shape and no number depends on another image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LABEL_NOISE_SHARE = 0.5  # of `label_noise_ratio`: half of the drawn labels are replaced
STREAMS = 16  # numbers that a query may draw
SIZE, SIGN, REPLACED, LABEL = 0, 4, 8, 9  # first number of each purpose; sizes and signs have one for each edge
MIX = 0x45D9F3B  # odd, below 2^27: products with 32 bits fit into int64
STEP = 0x9E3779B1 >> 4


class Noisy(NamedTuple):
    """The denoising queries of a batch: s slots with a positive query each, then s slots with a negative one."""

    labels: Tensor  # int64 (b, 2s); the number of classes where a slot is not used
    boxes: Tensor  # (b, 2s, 4): cxcywh from 0 to 1
    rows: Tensor  # int64 (b, 2s): the target of a positive query, else the number of targets
    used: Tensor  # bool (b, 2s)
    groups: Tensor  # int64 (b, 2s): a query attends to those of its own group


def mixed(bits: Tensor) -> Tensor:
    """Return a hash of whole numbers of 32 bits, int64: only whole numbers, so equal on every device."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * MIX & 0xFFFFFFFF
    return (bits >> 16) ^ bits


def uniform(keys: Tensor, streams: Tensor) -> Tensor:
    """Return numbers from 0 to 1, float32, that are a function of `keys` and `streams`, int64 of one shape."""
    return (mixed(mixed(keys) + streams * STEP & 0xFFFFFFFF) >> 8).float() / (1 << 24)


def noisy_targets(targets: Tensor, images: int, slots: int, classes: int, label_noise: float, scale: float) -> Noisy:
    """Return the denoising queries of targets (m, 7): image, class, cxcywh, number of the noise.

    Targets are ordered by image. An image with n of them has slots // n groups, at least one; of more targets than
    slots the first ones are used.
    """
    image, device = targets[:, 0].long(), targets.device
    counts = (image == torch.arange(images, device=device)[:, None]).sum(1, keepdim=True)
    slot, least = torch.arange(slots, device=device), counts.clamp(min=1)
    used = slot < (slots // least).clamp(min=1) * counts
    rows = torch.where(used, counts.cumsum(0) - counts + slot % least, len(targets))
    group = torch.where(used, slot // least, -1)
    table = torch.cat((targets, targets.new_zeros(1, 7)))[rows].repeat(1, 2, 1)
    negative = (torch.arange(2 * slots, device=device) >= slots).long()[None]
    used, keys = used.repeat(1, 2), table[..., 6].long()
    first = (group.clamp(min=0).repeat(1, 2) * 2 + negative) * STREAMS

    def drawn(stream: int, count: int) -> Tensor:
        streams = first[..., None] + torch.arange(stream, stream + count, device=device)
        return uniform(keys[..., None].expand_as(streams), streams)

    labels, boxes = table[..., 1].long(), table[..., 2:6]
    other = (drawn(LABEL, 1)[..., 0] * classes).long().clamp(max=classes - 1)
    labels = torch.where(drawn(REPLACED, 1)[..., 0] < label_noise * LABEL_NOISE_SHARE, other, labels)
    # A negative query is moved by half to a whole side of its box, a positive one by at most half a side.
    offset = (drawn(SIZE, 4) + negative[..., None]) * torch.where(drawn(SIGN, 4) < 0.5, -1.0, 1.0)
    edges = corners(boxes) + offset * boxes[..., 2:].repeat(1, 1, 2) * (0.5 * scale)
    low, high = edges.clamp(0, 1).split(2, -1)
    boxes = torch.cat(((low + high) / 2, high - low), -1)
    positive = torch.cat((rows, torch.full_like(rows, len(targets))), 1)
    return Noisy(torch.where(used, labels, classes), boxes, positive, used, group.repeat(1, 2))


def corners(boxes: Tensor) -> Tensor:
    """Return boxes (..., 4) in xyxy from cxcywh."""
    centres, halves = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((centres - halves, centres + halves), -1)


def attention_mask(groups: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (b, 1, n, n) that is added to attention: the queries of images come after the denoising ones.

    Denoising queries see their group and the image's queries, which see each other only. Unused slots, of group -1, are
    apart too.
    """
    same = groups[:, :, None] == groups[:, None]
    hidden = torch.nn.functional.pad(~same, (0, queries, 0, 0), value=False)
    hidden = torch.nn.functional.pad(hidden, (0, 0, 0, queries), value=True)
    hidden[:, groups.shape[1] :, groups.shape[1] :] = False
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
