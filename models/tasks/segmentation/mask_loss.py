"""The cross-entropy of predicted masks inside of their targets' boxes: `mask_sums`.

Called by `SegmentationCriterion`. The host knows the matches of every target (`plan_masks`), so all shapes are known
without waiting for the device. Only the pixels of a target's box are computed. Targets with windows of similar size
share a batched matrix product of limited size, and the backward pass recomputes the logits: memory does not grow with
the number of targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MAX_GROUP_VALUES = 2**20  # numbers in the largest tensor of a group; a group takes about 20 MB in fp32
# A group's targets have numbers of matches between two of these edges; a target usually has 3 cells for each anchor.
MATCH_EDGES = (3, 6, 9, 12, 18, 27)
SPARE_VALUES = 2**14  # numbers of padding that cost less than another group
SPARE_SHARE = 0.15  # share of a group's values that may be padding
WINDOW_COLUMNS = 5


class MaskMatches(NamedTuple):
    """Pairs of a target and an output of the network, in the order of the outputs. All fields are (n,), on the host."""

    target: np.ndarray
    row: np.ndarray  # row of the coefficients
    level: np.ndarray
    weight: np.ndarray  # float32: weight of the pair's sum of cross-entropies


class Group(NamedTuple):
    """Targets that are computed together, padded to the same numbers of matches and pixels."""

    targets: slice  # rows of `MaskPlan.windows`
    matches: slice  # rows of `MaskPlan.rows` and `MaskPlan.weights`, target by target
    matches_each: int
    pixels_each: int


class MaskPlan(NamedTuple):
    """The work of `mask_sums` for t targets with matches and pixels; tensors are on the device."""

    # int32 (t, 5): index on the maps (b, h, w) of a window's first pixel, the window's width and number of pixels, the
    # index of the truth's first pixel, and the width of the truth's own window
    windows: Tensor
    rows: Tensor  # int32 (n,): row of the coefficients for each match
    weights: Tensor  # (n, levels): weight of each match on its level; 0 on other levels, and for padding
    map_width: int
    groups: list[Group]


def plan_masks(
    matches: MaskMatches,
    image: np.ndarray,
    boxes: np.ndarray,
    windows: np.ndarray,
    size: tuple[int, int],
    levels: int,
    masks: int,
    device: torch.device,
) -> MaskPlan:
    """Return the plan for a batch of m targets.

    Args:
        matches: pairs of a target and an output
        image: number (m,) of each target's image
        boxes: window (m, 4) to compute for each target
        windows: window (m, 4) that the truth covers for each target
        size: height and width of the maps
        levels: number of levels
        masks: number of coefficients
    """
    height, width = size
    cut = np.concatenate((np.maximum(boxes[:, :2], windows[:, :2]), np.minimum(boxes[:, 2:], windows[:, 2:])), 1)
    left, top, right, bottom = cut.T
    pixels = (right - left).clip(min=0) * (bottom - top).clip(min=0)
    truth_width = (windows[:, 2] - windows[:, 0]).astype(np.int64)
    truth_pixels = truth_width * (windows[:, 3] - windows[:, 1])
    truth = truth_pixels.cumsum() - truth_pixels + (top - windows[:, 1]) * truth_width + left - windows[:, 0]
    table = np.stack(((image * height + top) * width + left, right - left, pixels, truth, truth_width), 1)

    order = np.argsort(matches.target, kind="stable")
    counts = np.bincount(matches.target, minlength=len(image))
    starts = counts.cumsum() - counts
    groups, rows, weights, chosen, targets_before, matches_before = [], [], [], [], 0, 0
    for group in _similar(counts, pixels, masks):
        each = counts[group].max()
        position = np.arange(each)
        padded = position >= counts[group][:, None]
        match = order[np.where(padded, 0, starts[group][:, None] + position)]
        weight = np.zeros((*match.shape, levels), np.float32)
        np.put_along_axis(weight, matches.level[match][..., None], matches.weight[match][..., None], 2)
        weight[padded] = 0
        rows.append(matches.row[match].ravel())
        weights.append(weight.reshape(-1, levels))
        chosen.append(group)
        targets_after, matches_after = targets_before + len(group), matches_before + match.size
        groups.append(
            Group(
                slice(targets_before, targets_after),
                slice(matches_before, matches_after),
                int(each),
                int(pixels[group].max()),
            )
        )
        targets_before, matches_before = targets_after, matches_after
    if not groups:
        empty = torch.zeros(0, levels, device=device)
        return MaskPlan(empty.int(), empty.int(), empty, width, [])
    return MaskPlan(
        _on_device(table[np.concatenate(chosen)].astype(np.int32), device),
        _on_device(np.concatenate(rows).astype(np.int32), device),
        _on_device(np.concatenate(weights), device),
        width,
        groups,
    )


def _similar(counts: np.ndarray, pixels: np.ndarray, masks: int) -> Iterator[np.ndarray]:
    """Iterate over groups of targets, by index, with similar numbers of matches and pixels.

    Targets without matches or pixels are left out.

    Args:
        counts: number of matches of each target, (m,)
        pixels: number of pixels of each target, (m,)
        masks: number of coefficients
    """
    (used,) = np.nonzero((counts > 0) & (pixels > 0))
    edge = np.searchsorted(MATCH_EDGES, counts[used])
    used = used[np.lexsort((used, -pixels[used], edge))]
    edges, sizes = np.searchsorted(MATCH_EDGES, counts[used]).tolist(), pixels[used].tolist()
    most = [*MATCH_EDGES, int(counts.max(initial=0))]
    start = spare = 0
    for end in range(1, len(used) + 1):
        if end < len(used) and edges[end] == edges[start]:
            more = spare + sizes[start] - sizes[end]
            count, each = end + 1 - start, most[edges[start]]
            within = count * sizes[start] * max(each, masks) <= MAX_GROUP_VALUES
            if within and more * each <= max(SPARE_VALUES, SPARE_SHARE * count * sizes[start] * each):
                spare = more
                continue
        yield used[start:end]
        start, spare = end, 0


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, from page-locked memory, so that the host does not wait for the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def mask_sums(coefficients: Tensor, prototypes: Tensor, truth: Tensor, plan: MaskPlan) -> Tensor:
    """Return the weighted sums of each level's binary cross-entropies, (levels,).

    Both gradients are accumulated in a fixed order.

    Args:
        coefficients: weights (r, masks) of the prototypes, for each output
        prototypes: maps (b, masks, h, w), whose weighted sums are the logits of a mask
        truth: true masks, uint8, see `SegmentationBatch.mask_pixels`
    """
    pixels = prototypes.permute(0, 2, 3, 1).reshape(-1, prototypes.shape[1])
    sums: Tensor = _MaskSums.apply(coefficients, pixels, truth, plan)
    return sums


class _MaskSums(torch.autograd.Function):
    """Compute `mask_sums` with one row of prototypes per pixel, (b * h * w, masks)."""

    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, pixels: Tensor, truth: Tensor, plan: MaskPlan) -> Tensor:
        ctx.save_for_backward(coefficients, pixels, truth)
        ctx.plan = plan
        sums = coefficients.new_zeros(plan.weights.shape[1])
        for group in plan.groups:
            _, _, logits, target, valid, _ = _group_logits(coefficients, pixels, truth, plan, group)
            # Binary cross-entropy of logit x and target y is log(1 + e^x) - x y. The products add up the pixels.
            linear = logits.bmm(target[..., None])
            values = functional.softplus(logits).bmm(valid[..., None]) - linear
            sums += values.flatten() @ plan.weights[group.matches].to(values)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, pixels, truth = ctx.saved_tensors
        plan: MaskPlan = ctx.plan
        coefficient_gradient, pixel_gradient = torch.zeros_like(coefficients), torch.zeros_like(pixels)
        for group in plan.groups:
            chosen, near, logits, target, valid, index = _group_logits(coefficients, pixels, truth, plan, group)
            error = logits.sigmoid_().mul_(valid[:, None]).sub_(target[:, None])
            scale = (plan.weights[group.matches].to(gradient) @ gradient).view(len(target), -1, 1)
            by_match = (error.bmm(near) * scale).flatten(0, 1)
            by_pixel = error.transpose(1, 2).bmm(chosen * scale).flatten(0, 1)
            coefficient_gradient.index_add_(0, plan.rows[group.matches], by_match)
            pixel_gradient.index_add_(0, index, by_pixel)
        return coefficient_gradient, pixel_gradient, None, None


def _group_logits(
    coefficients: Tensor, pixels: Tensor, truth: Tensor, plan: MaskPlan, group: Group
) -> Sequence[Tensor]:
    """Return the logits of a group of n targets, and the tensors that they are computed from.

    The result is: coefficients (n, matches, masks), prototypes (n, p, masks), logits (n, matches, p), truth (n, p), 1
    for pixels and 0 for padding (n, p), and the index of each pixel on the maps (n * p,).
    """
    first, width, count, start, truth_width = plan.windows[group.targets].view(-1, WINDOW_COLUMNS, 1).unbind(1)
    position = torch.arange(group.pixels_each, dtype=torch.int32, device=pixels.device)
    valid = position < count
    position = torch.where(valid, position, 0)  # padding repeats the first pixel
    # The quotient is exact: the half keeps it further away from whole numbers than rounding can move it.
    row = ((position + 0.5) / width).int()
    column = position - row * width
    index = (first + row * plan.map_width + column).flatten()
    chosen = coefficients.index_select(0, plan.rows[group.matches]).view(len(first), group.matches_each, -1)
    near = pixels.index_select(0, index).view(len(first), group.pixels_each, -1)
    valid = valid.to(pixels.dtype)
    target = truth.index_select(0, (start + row * truth_width + column).flatten()).view_as(valid) * valid
    return chosen, near, chosen.bmm(near.transpose(1, 2)), target, valid, index
