"""The Triton kernels, imported on a GPU if Triton works there: BatchNorm with SiLU in one, and suppression by batches.

Norm and activation: torch moves a map 13 times through memory for both, 5 times forward, 8 backward. These kernels do
it 8 times, and keep one map less for backward, which computes BatchNorm's output again.

A map is a matrix (rows, channels), rows = b h w. The kernels see `fold` pixels as one row, so that its width is a
multiple of COLUMNS for any number of channels: loads are aligned, of 16 bytes, and no column is idle. A program handles
one tile of TILE_ROWS x COLUMNS after another. Sums have two stages with a fixed order: results depend on the shape and
the values only.

Suppression: torchvision's `nms` takes one image, and calls for each cost the host more time than a small network's
inference.
"""

# mypy: disable-error-code=no-untyped-def
# ruff: noqa: PLR0913
from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CHANNELS = 8
COLUMNS = tl.constexpr(128)
TILE_ROWS = tl.constexpr(16)
STAGES = tl.constexpr(3)  # tiles that a program has loaded or is loading
# Settings of launches. Triton 3.10 will not fuse multiplications and additions without being asked.
TILE = {"num_warps": 4, "enable_fp_fusion": True}
SUM_PROGRAMS = 1024  # of a grid, at most: what they store is read again
MAP_PROGRAMS = 4096  # of a grid that writes a map


def can_fuse(x: Tensor, norm: nn.Module, activation: nn.Module) -> bool:
    """Return whether the kernels do the same: BatchNorm2d and SiLU in training, of a channels_last map on CUDA.

    Layers with hooks must be called: DeepSpeed's ZeRO-3 gathers parameters in them.
    """
    return (
        type(norm) is nn.BatchNorm2d
        and type(activation) is nn.SiLU
        and x.dtype in DTYPES
        and x.dim() == 4
        and x.shape[1] >= LEAST_CHANNELS
        and x.numel() > x.shape[1]  # torch refuses a single value per channel
        and x.is_contiguous(memory_format=torch.channels_last)
        and norm.affine
        and norm.weight.dtype == torch.float32
        and norm.running_mean is not None
        and norm.momentum is not None
        and not (norm._forward_pre_hooks or norm._forward_hooks or activation._forward_hooks)
    )


class Plan(NamedTuple):
    """How a map's tiles are divided among programs: the same on every device."""

    fold: int  # pixels of a row
    width: int  # fold * channels
    tiles: int  # of a program
    parts: int  # programs below each other
    even: bool  # whether all tiles are full

    @property
    def grid(self) -> tuple[int, int]:
        return self.width // COLUMNS.value, self.parts


@cache
def plan(pixels: int, channels: int, programs: int) -> Plan:
    """Divide a map among at most `programs` programs, or as many as there are columns of tiles."""
    fold = COLUMNS.value // math.gcd(channels, COLUMNS.value)
    width = fold * channels
    height = triton.cdiv(pixels, fold * TILE_ROWS.value)
    tiles = triton.cdiv(height, max(1, programs * COLUMNS.value // width))
    return Plan(fold, width, tiles, triton.cdiv(height, tiles), pixels % (fold * TILE_ROWS.value) == 0)


@triton.jit
def _tiles(part, pixels, channels, width, tiles):
    """Return where a program's tiles are: row and column of a tile's elements, their offsets from the tile's start,
    number of the first tile, and the map's end as an offset from that tile's start, at most the end of the last one."""
    row, column = tl.arange(0, TILE_ROWS)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = part.to(tl.int64) * tiles  # the offset of a tile's start may need 64 bits
    height = width * TILE_ROWS
    end = tl.minimum(pixels.to(tl.int64) * channels - first * height, tiles * height).to(tl.int32)
    return row, column, row * width + column[None, :], first, end


@triton.jit
def _inside(offsets, end, EVEN: tl.constexpr):
    """Return which elements of a tile are in the map."""
    return tl.full(offsets.shape, 1, tl.int1) if EVEN else offsets < end


@triton.jit
def _affine(moments, weight, bias, channel, channels):
    """Return the mean of a tile's columns, and what a difference from it is multiplied by and added to."""
    scale = tl.load(moments + channels + channel) * tl.load(weight + channel)
    return tl.load(moments + channel)[None, :], scale[None, :], tl.load(bias + channel)[None, :]


@triton.jit(do_not_specialize=["pixels", "tiles"])
def _column_moments(x, partial, pixels, channels, width, tiles, EVEN: tl.constexpr):
    """Store the mean of each column of a program's tiles, and the sum of squared differences from it.

    By Welford's recurrence over tiles, and by Chan's formula within a tile. partial: (2, channels, parts * fold).
    """
    part, parts, height = tl.program_id(1), tl.num_programs(1), width * TILE_ROWS
    _, column, offsets, first, end = _tiles(part, pixels, channels, width, tiles)
    mean = tl.zeros((TILE_ROWS, COLUMNS), tl.float32)
    square = tl.zeros((TILE_ROWS, COLUMNS), tl.float32)
    count = tl.cdiv(end, height)
    for tile in tl.range(0, count, num_stages=STAGES):
        inside = _inside(offsets, end - tile * height, EVEN)
        value = tl.load(x + (first + tile) * height + offsets, inside, 0.0).to(tl.float32)
        delta = tl.where(inside, value - mean, 0.0)
        move = delta * (1.0 / (tile + 1))
        mean += move
        square += delta * (delta - move)
    if EVEN:
        values = tl.zeros((TILE_ROWS, COLUMNS), tl.float32) + count
    else:
        values = tl.minimum(tl.cdiv(tl.maximum(end - offsets, 0), height), count).to(tl.float32)
    column_mean = tl.sum(values * mean, 0) / tl.maximum(tl.sum(values, 0), 1.0)
    apart = mean - column_mean[None, :]
    fold = width // channels
    place = partial + (column % channels) * (parts * fold) + part * fold + column // channels
    tl.store(place, column_mean)
    tl.store(place + channels * parts * fold, tl.sum(square + values * apart * apart, 0))


@triton.jit(do_not_specialize=["pixels", "channels", "parts", "fold", "rows", "momentum", "eps"])
def _channel_moments(
    partial, moments, running_mean, running_var, batches, pixels, channels, parts, fold, rows, momentum, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge a channel's partial moments by Chan's formula; store mean and 1 / deviation, update running statistics.

    Args:
        moments: (2, channels)
        rows: of `fold` pixels, of a program
    """
    channel, index = tl.program_id(0), tl.arange(0, BLOCK)
    inside = index < parts * fold
    # Pixels at this place of the rows, from this part's first row on, and in this part
    values = tl.cdiv(pixels - index % fold, fold) - index // fold * rows
    values = tl.where(inside, tl.minimum(tl.maximum(values, 0), rows), 0).to(tl.float32)
    source = partial + channel * parts * fold + index
    means = tl.load(source, inside, 0.0)
    squares = tl.load(source + channels * parts * fold, inside, 0.0)
    total = pixels.to(tl.float32)
    mean = tl.sum(values * means, 0) / total
    apart = means - mean
    square = tl.sum(squares + values * apart * apart, 0)
    tl.store(moments + channel, mean)
    tl.store(moments + channels + channel, tl.div_rn(1.0, tl.sqrt_rn(square / total + eps)))
    was_mean, was_var = tl.load(running_mean + channel), tl.load(running_var + channel)
    tl.store(running_mean + channel, (1.0 - momentum) * was_mean + momentum * mean)
    tl.store(running_var + channel, (1.0 - momentum) * was_var + momentum * (square / (total - 1.0)))
    if channel == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["pixels", "tiles"])
def _normalise(x, out, moments, weight, bias, pixels, channels, width, tiles, EVEN: tl.constexpr):
    """Store SiLU((x - mean) / deviation * weight + bias)."""
    # The last part first: it may be in the cache.
    part, height = tl.num_programs(1) - 1 - tl.program_id(1), width * TILE_ROWS
    _, column, offsets, first, end = _tiles(part, pixels, channels, width, tiles)
    mean, scale, shift = _affine(moments, weight, bias, column % channels, channels)
    for tile in tl.range(0, tl.cdiv(end, height), num_stages=STAGES):
        inside = _inside(offsets, end - tile * height, EVEN)
        value = tl.load(x + (first + tile) * height + offsets, inside, 0.0).to(tl.float32)
        y = (value - mean) * scale + shift
        tl.store(out + (first + tile) * height + offsets, (y * tl.sigmoid(y)).to(out.dtype.element_ty), inside)


@triton.jit
def _upstream(value, incoming, mean, scale, shift):
    """Return x - mean, and the gradient of BatchNorm's output y, by SiLU's derivative s (1 + y (1 - s))."""
    apart = value.to(tl.float32) - mean
    y = apart * scale + shift
    s = tl.sigmoid(y)
    return apart, incoming.to(tl.float32) * (s * (1.0 + y * (1.0 - s)))


@triton.jit
def _spread(column, channels, stride, VECTOR: tl.constexpr):
    """Return the offsets of columns in a row whose pixels are `stride` apart; VECTOR neighbours stay neighbours."""
    return tl.max_contiguous(tl.multiple_of(column // channels * stride + column % channels, VECTOR), VECTOR)


@triton.jit(do_not_specialize=["pixels", "tiles"])
def _column_gradients(
    x, gradient, partial, moments, weight, bias, pixels, channels, width, stride, spread, tiles,
    EVEN: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the sums of g and of g (x - mean) over each column of a program's tiles; g: gradient of BatchNorm's output.

    Args:
        gradient: of the SiLU, with pixels `stride` elements apart, and rows `spread`
        partial: (2, channels, parts * fold)
    """
    part, parts, height = tl.program_id(1), tl.num_programs(1), width * TILE_ROWS
    row, column, offsets, first, end = _tiles(part, pixels, channels, width, tiles)
    sources = row * spread + _spread(column, channels, stride, VECTOR)[None, :]
    mean, scale, shift = _affine(moments, weight, bias, column % channels, channels)
    plain = tl.zeros((TILE_ROWS, COLUMNS), tl.float32)
    product = tl.zeros((TILE_ROWS, COLUMNS), tl.float32)
    for tile in tl.range(0, tl.cdiv(end, height), num_stages=STAGES):
        inside = _inside(offsets, end - tile * height, EVEN)
        value = tl.load(x + (first + tile) * height + offsets, inside, 0.0)
        incoming = tl.load(gradient + (first + tile) * (spread * TILE_ROWS) + sources, inside, 0.0)
        apart, g = _upstream(value, incoming, mean, scale, shift)
        plain += g
        product += g * apart
    fold = width // channels
    place = partial + (column % channels) * (parts * fold) + part * fold + column // channels
    tl.store(place, tl.sum(plain, 0))
    tl.store(place + channels * parts * fold, tl.sum(product, 0))


@triton.jit(do_not_specialize=["channels", "count"])
def _channel_gradients(partial, moments, gradients, channels, count, BLOCK: tl.constexpr):
    """Add a channel's `count` partial sums. gradients: (2, channels), of weight and bias."""
    channel, index = tl.program_id(0), tl.arange(0, BLOCK)
    source = partial + channel * count + index
    plain = tl.sum(tl.load(source, index < count, 0.0), 0)
    product = tl.sum(tl.load(source + channels * count, index < count, 0.0), 0)
    tl.store(gradients + channel, product * tl.load(moments + channels + channel))
    tl.store(gradients + channels + channel, plain)


@triton.jit(do_not_specialize=["pixels", "tiles"])
def _input_gradient(
    x, gradient, out, gradients, moments, weight, bias, pixels, channels, width, stride, spread, tiles,
    EVEN: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x: weight / deviation * (g - mean(g) - n mean(g n)), n: the normalised x."""
    part, height = tl.num_programs(1) - 1 - tl.program_id(1), width * TILE_ROWS
    row, column, offsets, first, end = _tiles(part, pixels, channels, width, tiles)
    sources, channel = row * spread + _spread(column, channels, stride, VECTOR)[None, :], column % channels
    mean, scale, shift = _affine(moments, weight, bias, channel, channels)
    total = pixels.to(tl.float32)
    slope = (tl.load(gradients + channel) * tl.load(moments + channels + channel) / total)[None, :]
    constant = (tl.load(gradients + channels + channel) / total)[None, :]
    for tile in tl.range(0, tl.cdiv(end, height), num_stages=STAGES):
        inside = _inside(offsets, end - tile * height, EVEN)
        value = tl.load(x + (first + tile) * height + offsets, inside, 0.0)
        incoming = tl.load(gradient + (first + tile) * (spread * TILE_ROWS) + sources, inside, 0.0)
        apart, g = _upstream(value, incoming, mean, scale, shift)
        result = (scale * (g - constant - apart * slope)).to(out.dtype.element_ty)
        tl.store(out + (first + tile) * height + offsets, result, inside)


def _block(count: int) -> dict[str, int]:
    """Return the settings of a kernel that adds `count` partial sums."""
    block = max(1024, triton.next_power_of_2(count))
    return {**TILE, "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def _pixels(gradient: Tensor) -> tuple[Tensor, int]:
    """Return a gradient whose pixels are equally far apart, each with its channels side by side, and their distance."""
    _, channels, height, width = gradient.shape
    if not gradient.is_contiguous(memory_format=torch.channels_last):
        step = gradient.stride(3)
        if step >= channels and gradient.stride() == (height * width * step, 1, width * step, step):
            return gradient, step
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    return gradient, channels


class FusedNormSiLU(torch.autograd.Function):
    """SiLU(BatchNorm(x)) by the statistics of x (Ioffe and Szegedy 2015, section 3), which `norm` also tracks.

    With n the normalised x, (b, c, h, w) in channels_last, y = weight n + bias and s = sigmoid(y), the gradient of y is
    g = gradient s (1 + y (1 - s)), and that of x is weight / deviation * (g - mean(g) - n mean(g n)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: Any) -> Tensor:
        channels, pixels = x.shape[1], x.numel() // x.shape[1]
        sums, maps = plan(pixels, channels, SUM_PROGRAMS), plan(pixels, channels, MAP_PROGRAMS)
        out, moments = torch.empty_like(x), x.new_empty((2, channels), dtype=torch.float32)  # mean and 1 / deviation
        partial = moments.new_empty((2, channels, sums.parts * sums.fold))
        statistics = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        counts = (pixels, channels, sums.parts, sums.fold, sums.tiles * TILE_ROWS.value)
        block, layout = _block(partial.shape[2]), (pixels, channels, maps.width, maps.tiles)
        with torch.cuda.device_of(x):
            _column_moments[sums.grid](x, partial, pixels, channels, sums.width, sums.tiles, sums.even, **TILE)
            _channel_moments[(channels,)](partial, moments, *statistics, *counts, norm.momentum, norm.eps, **block)
            _normalise[maps.grid](x, out, moments, weight, bias, *layout, maps.even, **TILE)
        ctx.save_for_backward(x, weight, bias, moments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, if needed, of weight and of bias.

        `gradient` may have any layout; a slice of the channels of a channels_last map is not copied.
        """
        x, weight, bias, moments = ctx.saved_tensors
        channels, pixels = x.shape[1], x.numel() // x.shape[1]
        sums, maps = plan(pixels, channels, SUM_PROGRAMS), plan(pixels, channels, MAP_PROGRAMS)
        gradient, stride = _pixels(gradient)
        layout = (pixels, channels, sums.width, stride, stride * sums.fold)
        tile = {"VECTOR": math.gcd(channels, stride, 8), **TILE}
        out, gradients = torch.empty_like(x) if ctx.needs_input_grad[0] else None, torch.empty_like(moments)
        partial = moments.new_empty((2, channels, sums.parts * sums.fold))
        affine, count = (moments, weight, bias), partial.shape[2]
        _column_gradients[sums.grid](x, gradient, partial, *affine, *layout, sums.tiles, sums.even, **tile)
        _channel_gradients[(channels,)](partial, moments, gradients, channels, count, **_block(count))
        if out is not None:
            _input_gradient[maps.grid](x, gradient, out, gradients, *affine, *layout, maps.tiles, maps.even, **tile)
        return out, gradients[0], gradients[1], None


@triton.jit
def _unsuppressed(boxes, starts, found, iou_thres, most, max_det, SLOTS: tl.constexpr):
    """Write the numbers of one image's boxes that remain: those that overlap no earlier remaining box too much."""
    image = tl.program_id(0)
    box = tl.load(starts + image)
    end = tl.minimum(tl.load(starts + image + 1), box + most)
    slot = tl.arange(0, SLOTS)  # each has a remaining box, or the empty box
    left = tl.zeros([SLOTS], tl.float32)
    top, right, bottom = left, left, left
    count = 0
    while (box < end) & (count < max_det):
        x1, y1 = tl.load(boxes + box * 4), tl.load(boxes + box * 4 + 1)
        x2, y2 = tl.load(boxes + box * 4 + 2), tl.load(boxes + box * 4 + 3)
        width = tl.maximum(tl.minimum(right, x2) - tl.maximum(left, x1), 0.0)
        height = tl.maximum(tl.minimum(bottom, y2) - tl.maximum(top, y1), 0.0)
        shared = width * height
        areas = (right - left) * (bottom - top) + (x2 - x1) * (y2 - y1)
        meets = shared > 0  # few do, and an exact division of 0 is slow
        overlaps = (tl.div_rn(tl.where(meets, shared, 1.0), areas - shared) > iou_thres) & meets
        remains = tl.sum(overlaps.to(tl.int32)) == 0
        tl.store(found + image * max_det + count, box, mask=remains)
        taken = (slot == count) & remains
        left, top = tl.where(taken, x1, left), tl.where(taken, y1, top)
        right, bottom = tl.where(taken, x2, right), tl.where(taken, y2, bottom)
        count += remains.to(tl.int32)
        box += 1


def batch_nms(boxes: Tensor, starts: Tensor, iou_thres: float, most: int, max_det: int) -> Tensor:
    """Return the numbers of each image's first `max_det` boxes that remain, int64 (images, max_det), filled up with -1.

    The arithmetic is that of `torchvision.ops.nms` on the CPU: products and sums are not fused.

    Args:
        boxes: float32 (n, 4), xyxy, image by image, each image's in falling confidence
        starts: int64 (images + 1,): number of each image's first box; the last is n
        most: number of boxes of an image that are compared
    """
    found = torch.full((len(starts) - 1, max_det), -1, device=boxes.device)
    slots = triton.next_power_of_2(max_det)
    with torch.cuda.device_of(boxes):
        _unsuppressed[(len(found),)](boxes, starts, found, iou_thres, most, max_det, slots, enable_fp_fusion=False)
    return found
