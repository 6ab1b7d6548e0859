"""Denoising queries: noisy copies of an image's targets, which the decoder learns to correct (DN-DETR, DINO).

Each image has the same number of slots, which its own targets fill: no shape and no number depends on another image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

LABEL_NOISE_SHARE = 0.5  # of `label_noise_ratio`: half of the drawn labels are replaced
NUMBERS = 10  # that a query draws: sizes and signs of four edges' offsets, whether its label is replaced, by which
MIX, STEP = 0x45D9F3B, 0x9E3779B  # odd, below 2^28: products with 32 bits fit into int64
NONE = -1  # row of a query without a target: the last one, of zeros, that is added to the targets
UNUSED, IMAGE = -1, -2  # group of an unused slot, and of the queries for the image
LOGIT_LIMIT = 1e-5  # nearest that a coordinate comes to 0 and 1 before its logit is taken


def mixed(bits: Tensor) -> Tensor:
    """Return a hash of whole numbers of 32 bits, int64: only whole numbers, so equal on every device."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * MIX & 0xFFFFFFFF
    return (bits >> 16) ^ bits


def uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """Return numbers from 0 to 1, float32, that are a function of `keys` and `numbers`, int64."""
    return (mixed(mixed(keys) + numbers * STEP & 0xFFFFFFFF) >> 8).float() / (1 << 24)


def corners(boxes: Tensor) -> Tensor:
    """Return boxes (..., 4) in xyxy from cxcywh."""
    centres, halves = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((centres - halves, centres + halves), -1)


def noisy(
    targets: Tensor, query: Tensor, classes: int, label_noise_ratio: float, box_noise_scale: float
) -> tuple[Tensor, Tensor]:
    """Return the labels and boxes of targets (..., 7) with the noise of the queries' numbers; odd ones are negative."""
    drawn = uniform(targets[..., 6:].long(), query[..., None] * NUMBERS + torch.arange(NUMBERS, device=query.device))
    sizes, signs, (replaced, other) = drawn[..., :4], drawn[..., 4:8], drawn[..., 8:].unbind(-1)
    new, boxes = (other * classes).long().clamp(max=classes - 1), targets[..., 2:6]
    labels = torch.where(replaced < label_noise_ratio * LABEL_NOISE_SHARE, new, targets[..., 1].long())
    # A negative query is moved by half to a whole side of its box, a positive one by at most half a side.
    offset = (sizes + query[..., None] % 2) * torch.where(signs < 0.5, -1.0, 1.0)
    edges = corners(boxes) + offset * boxes[..., 2:].repeat(1, 1, 2) * (0.5 * box_noise_scale)
    low, high = edges.clamp(0, 1).split(2, -1)
    return labels, torch.cat(((low + high) / 2, high - low), -1)


def denoising_queries(
    targets: tuple[Tensor, int],
    num_classes: int,
    num_queries: int,
    class_embed: nn.Embedding,
    num_denoising_queries: int,
    **noise: float,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the embeddings (b, 2s, c) of s positive and s negative queries, the logits of their boxes, the mask
    (b, 1, n, n) that is added to attention, and for the loss the `rows` and `used` of `Outputs`.

    It replaces transformers' function of these parameters; its `targets` are rows (m, 7), ordered by image (image,
    class, cxcywh, number of the noise), and the number of images. An image with k targets has s // k groups of queries,
    at least one; of more targets than slots the first ones are used. A query sees its group and the image's queries,
    which follow and see no others.
    """
    (table, images), slots = targets, num_denoising_queries
    image, device = table[:, 0].long(), table.device
    counts = (image == torch.arange(images, device=device)[:, None]).sum(1, keepdim=True)
    slot, least = torch.arange(slots, device=device), counts.clamp(min=1)
    used = slot < (slots // least).clamp(min=1) * counts
    rows = torch.where(used, counts.cumsum(0) - counts + slot % least, NONE)
    group = torch.where(used, slot // least, UNUSED).repeat(1, 2)
    negative = torch.arange(2 * slots, device=device) // slots
    of_query = torch.cat((table, table.new_zeros(1, 7)))[rows].repeat(1, 2, 1)
    labels, boxes = noisy(of_query, group.clamp(min=0) * 2 + negative, num_classes, **noise)
    used = used.repeat(1, 2)
    every = pad(group, (0, num_queries), value=IMAGE)
    hidden = (every[:, None] != every[:, :, None]) & (every[:, None] != IMAGE)
    mask = torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf)[:, None]
    embedded = class_embed(torch.where(used, labels, num_classes))
    return embedded, boxes.logit(LOGIT_LIMIT), mask, (torch.cat((rows, torch.full_like(rows, NONE)), 1), used)
