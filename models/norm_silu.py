"""BatchNorm and the activation after it, by fused kernels in training on a GPU. Called by layers.

For both, torch moves a map 13 times through memory: 5 times forward, 8 backward. The kernels of norm_silu_kernels do it
8 times, and keep one map less for backward, which computes BatchNorm's output again.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CHANNELS = 8


def norm_and_activate(x: Tensor, norm: nn.Module, activation: nn.Module) -> Tensor:
    """Return activation(norm(x)), by the fused kernels if `can_fuse`."""
    if can_fuse(x, norm, activation):
        return FusedNormSiLU.apply(x, norm.weight, norm.bias, norm)
    return activation(norm(x))


def can_fuse(x: Tensor, norm: nn.Module, activation: nn.Module) -> bool:
    """Return whether the kernels do the same: BatchNorm2d and SiLU in training, of a channels_last map on CUDA.

    Layers with hooks must be called: DeepSpeed's ZeRO-3 gathers parameters in them.
    """
    return (
        x.is_cuda
        and norm.training
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and type(x) is Tensor  # not one of FakeTensorMode
        and type(norm) is nn.BatchNorm2d
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
        and _kernels_run(x.device)
    )


@cache
def _kernels_run(device: torch.device) -> bool:
    """Return whether Triton works on the device: it needs a C compiler and Python's headers."""
    x = torch.ones(1, LEAST_CHANNELS, 2, 1, device=device).contiguous(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(LEAST_CHANNELS, device=device)
    try:
        FusedNormSiLU.apply(x, norm.weight, norm.bias, norm)
    except Exception as error:  # Triton's, of its compilers, or because there is no Triton
        warnings.warn(f"BatchNorm and SiLU are not fused, which is slower; Triton does not work: {error}", stacklevel=1)
        return False
    return True


class FusedNormSiLU(torch.autograd.Function):
    """SiLU(BatchNorm(x)) by the statistics of x (Ioffe and Szegedy 2015, section 3), which `norm` also tracks.

    With n the normalised x, y = weight n + bias and s = sigmoid(y), the gradient of y is
    g = gradient s (1 + y (1 - s)), and that of x is weight / deviation * (g - mean(g) - n mean(g n)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: Any) -> Tensor:
        from models import norm_silu_kernels  # here, because most machines without a GPU have no Triton

        statistics = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        with torch.cuda.device_of(x):
            out, moments = norm_silu_kernels.forward(x, weight, bias, statistics, norm.momentum, norm.eps)
        ctx.save_for_backward(x, weight, bias, moments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from models import norm_silu_kernels

        x, weight, bias, moments = ctx.saved_tensors
        return *norm_silu_kernels.backward(gradient, x, weight, bias, moments, ctx.needs_input_grad[0]), None
