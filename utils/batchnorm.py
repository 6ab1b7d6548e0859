"""BatchNorm over several processes: exact at every step (`synchronise`), or averaged now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(model: nn.Module) -> nn.Module:
    """`model` with BatchNorm layers that see the batch of all processes; parameters, buffers and names stay.

    On CUDA they are torch's SyncBatchNorm, elsewhere `GlobalBatchNorm`. One process needs nothing of this.
    """
    if not _processes() > 1:
        return model
    if next(iter(model.state_dict().values())).is_cuda:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, GlobalBatchNorm):
                module.register_module(name, GlobalBatchNorm.of(child))
    return model


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give the BatchNorm layers of every process the mean of all processes' running statistics.

    In float64, so that what is equal already stays as it is, to the bit.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
    if not _processes() > 1 or not buffers:
        return
    means = torch.cat([buffer.double() for buffer in buffers])
    distributed.all_reduce(means)
    means /= _processes()
    for buffer, mean in zip(buffers, means.split([len(buffer) for buffer in buffers]), strict=True):
        buffer.copy_(mean)


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of the batch of all processes, on any device.

    Input and output (b, channels, ...). Each process must call it alike: one all-reduce forward, one backward.
    """

    @classmethod
    def of(cls, layer: _BatchNorm) -> GlobalBatchNorm:
        """The same layer, with the same parameters and buffers."""
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        made._parameters, made._buffers = layer._parameters, layer._buffers
        return made.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any shape will do."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        count, mean, variance = _global_moments(input.detach())
        self._follow(count, mean, variance)
        return _Normalise.apply(input, self.weight, self.bias, mean, variance, count, self.eps)

    @torch.no_grad()
    def _follow(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var), share)


def _processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _global_moments(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values per channel, their mean and their variance (over count), over all processes; in float64.

    Each process's own moments are exact to its precision; sums of squares in float64 add no error to speak of.
    """
    precise = input.to(torch.promote_types(input.dtype, torch.float32))
    # BatchNorm's own kernel, on the CPU four times as fast as torch.var_mean; without statistics to update.
    mean, variance = (moment.double() for moment in torch.batch_norm_update_stats(precise, None, None, 0.0))
    count = mean.new_full((1,), input.numel() / input.shape[1])
    sums = torch.cat((count, count * mean, count * (variance + mean**2)))
    distributed.all_reduce(sums)
    total, mean, square = sums[0], *(sums[1:] / sums[0]).chunk(2)
    return total, mean, (square - mean**2).clamp(min=0)


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, differentiated through mean and variance.

    Ioffe and Szegedy 2015, section 3: grad = weight / deviation * (g - mean(g) - x mean(g x)), the means over the whole
    batch, x the normalised input.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, count: Tensor, eps: float
    ) -> Tensor:
        precise = torch.promote_types(input.dtype, torch.float32)
        mean, variance = mean.to(precise), variance.to(precise)
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.eps = eps
        return nn.functional.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance, count = ctx.saved_tensors
        gains = torch.ones_like(mean) if weight is None else weight
        _, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            grad, input, gains, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.cat((for_weight, for_bias)).double()
        distributed.all_reduce(sums)
        slope, shift = (part.to(mean) for part in (sums / count).chunk(2))
        scale = (variance + ctx.eps).rsqrt() * gains
        # -scale (x slope + shift), x the normalised input, is a normalisation too; and one pass adds scale g
        for_input = nn.functional.batch_norm(input, mean, variance, -scale * slope, -scale * shift, False, 0.0, ctx.eps)
        for_input.addcmul_(grad, scale.view(-1, *[1] * (input.dim() - 2)).to(input.dtype))
        return for_input, *((None, None) if weight is None else (for_weight, for_bias)), None, None, None, None
