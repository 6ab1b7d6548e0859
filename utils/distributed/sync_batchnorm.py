"""BatchNorm that is exact in any memory layout, and over several processes. Called by prepare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

M = TypeVar("M", bound=nn.Module)
Total = Callable[[Tensor], Tensor]  # returns the sum over the shares of the global batch


def synchronise_batchnorm(model: M, over_processes: bool) -> M:
    """Replace the BatchNorm layers of `model` by exact ones with the same parameters, buffers and names.

    over_processes: whether the statistics are those of the global batch. On the CPU the layers are `ExactBatchNorm`, on
    other devices torch's SyncBatchNorm if `over_processes`, else unchanged.
    """
    if next(iter(model.state_dict().values())).device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if over_processes else model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, ExactBatchNorm):
                module.register_module(name, ExactBatchNorm.of(child))
    if over_processes:
        add_statistics_by(model, all_reduced)
    return model


def add_statistics_by(model: nn.Module, total: Total) -> None:
    """Let the `ExactBatchNorm` layers of `model` add the sums of the global batch by `total`."""
    for module in model.modules():
        if isinstance(module, ExactBatchNorm):
            module.total = total


def all_reduced(sums: Tensor) -> Tensor:
    """Return the sum over all processes, which must call it together."""
    distributed.all_reduce(sums)
    return sums


@torch.no_grad()
def average_statistics(
    models: Sequence[nn.Module], total: Callable[[Sequence[Tensor]], Tensor], processes: int
) -> None:
    """Set the running statistics of all BatchNorm layers to their mean over logical processes.

    Computed in float64, so that equal statistics do not change by a bit. models: of the logical processes of this
    process. total: returns the sum over all `processes` of a tensor for each of `models`.
    """
    statistics = [_running_statistics(model) for model in models]
    if processes == 1 or not statistics[0]:
        return
    means = total([torch.cat([buffer.double() for buffer in buffers]) for buffers in statistics]) / processes
    for buffers in statistics:
        for buffer, mean in zip(buffers, means.split([len(buffer) for buffer in buffers]), strict=True):
            buffer.copy_(mean)


def _running_statistics(model: nn.Module) -> list[Tensor]:
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]


class ExactBatchNorm(_BatchNorm):
    """BatchNorm with exact statistics in any memory layout.

    Input and output (b, channels, ...). total: if given, the statistics are those of the global batch; it is called
    once forward and once backward, and all processes must call the layer together.

    torch's CPU kernel for channels_last accumulates each channel in one float32: on a map of 160 x 160 the relative
    error of the variance is 7e-5, and depends on the number of threads.
    """

    total: Total | None = None

    @classmethod
    def of(cls, layer: _BatchNorm) -> ExactBatchNorm:
        """Return an `ExactBatchNorm` with the same parameters and buffers as `layer`."""
        layer_copy = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        layer_copy._parameters, layer_copy._buffers = layer._parameters, layer._buffers
        return layer_copy.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        local_count = input.numel() / input.shape[1]
        count: float | Tensor = local_count
        mean, variance = _moments(input.detach())
        if self.total:
            count, mean, variance = _global_moments(local_count, mean, variance, self.total)
        elif local_count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        self._update_running_statistics(count, mean, variance)
        precise = torch.promote_types(input.dtype, torch.float32)
        return _Normalise.apply(
            input, self.weight, self.bias, mean.to(precise), variance.to(precise), self.eps, count, self.total
        )

    @torch.no_grad()
    def _update_running_statistics(self, count: float | Tensor, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var), share)


def _widened(values: Tensor) -> Tensor:
    """Return a view (b, w c, h, 1) of channels_last values (b, c, h, w), and other values unchanged.

    Each channel becomes w channels, so the kernels add w times fewer numbers in one float32.
    """
    last = torch.channels_last
    if values.dim() != 4 or not values.is_contiguous(memory_format=last) or values.is_contiguous():
        return values
    return values.permute(0, 2, 3, 1).flatten(2).unsqueeze(2).permute(0, 3, 1, 2)


def _moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of this process's batch, at least as exact as float32."""
    wide = _widened(input.to(torch.promote_types(input.dtype, torch.float32)))
    # BatchNorm's own kernel, without running statistics: on the CPU four times as fast as torch.var_mean.
    means, variances = (part.view(-1, input.shape[1]) for part in torch.batch_norm_update_stats(wide, None, None, 0.0))
    if len(means) == 1:
        return means[0], variances[0]
    between, mean = torch.var_mean(means, 0, correction=0)
    return mean, variances.mean(0).add_(between)


def _global_moments(count: float, mean: Tensor, variance: Tensor, total: Total) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values per channel (), mean and biased variance per channel of the global batch, in float64.

    The sums of squares in float64 add a negligible error to each share's moments.
    """
    mean, variance = mean.double(), variance.double()
    sums = total(torch.cat((mean.new_full((1,), count), count * mean, count * (variance + mean**2))))
    mean, square = (sums[1:] / sums[0]).chunk(2)
    return sums[0], mean, (square - mean**2).clamp(min=0)


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, differentiated through mean and variance.

    Ioffe and Szegedy 2015, section 3: grad = weight / deviation * (g - mean(g) - x mean(g x)), the means over the whole
    batch, x the normalised input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: float | Tensor,
        total: Total | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.count, ctx.total = eps, count, total
        return nn.functional.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        deviation = (variance + ctx.eps).rsqrt()
        # In channels_last torch's sums over the gradient are not exact: relative errors of 1e-5 in the gradients of
        # weight and bias on the largest maps, and of less than 1e-6 in that of the input.
        backward = torch.ops.aten.native_batch_norm_backward.default
        if not ctx.total:
            mask = [True, weight is not None, weight is not None]
            statistics = (None, None, mean, deviation)
            gradients = backward(grad, input, weight, *statistics, train=True, eps=ctx.eps, output_mask=mask)
            return *gradients, None, None, None, None, None
        gains = torch.ones_like(mean) if weight is None else weight
        _, for_weight, for_bias = backward(
            grad, input, gains, mean, variance, None, None, train=False, eps=ctx.eps, output_mask=[False, True, True]
        )
        sums = ctx.total(torch.cat((for_weight, for_bias)).double())
        slope, shift = (part.to(mean) for part in (sums / ctx.count).chunk(2))
        scale = deviation * gains
        # -scale (x slope + shift), x the normalised input, is a normalisation too; addcmul_ adds scale g.
        for_input = nn.functional.batch_norm(input, mean, variance, -scale * slope, -scale * shift, False, 0.0, ctx.eps)
        for_input.addcmul_(grad, scale.view(-1, *[1] * (input.dim() - 2)).to(input.dtype))
        parameters = (None, None) if weight is None else (for_weight, for_bias)
        return for_input, *parameters, None, None, None, None, None
