"""BatchNorm that is exact in any memory layout, and over several processes. Called by model.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Total = Callable[[Tensor], Tensor]  # returns the sum of all processes' tensors, which must call it together


def all_reduce(addend: Tensor) -> Tensor:
    """Return the sum of all processes' tensors. All processes must call it together."""
    distributed.all_reduce(addend)
    return addend


class InTurn:
    """Calls a function for each local logical process, so that all of them meet in each BatchNorm layer (--sync-bn).

    In the middle of its forward and its backward pass a layer needs the sums of all logical processes. Each call has a
    thread, of which one runs at a time: it passes the turn to the next one at each `total`, and at its end.
    `sum_over_all` returns the sum over all logical processes from the local addends.
    """

    def __init__(self, sum_over_all: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.sum_over_all, self.caller = sum_over_all, threading.local()
        self.turns: list[threading.Semaphore] = []
        self.addends: list[Tensor] = []
        self.error: BaseException | None = None

    def __call__(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of the calls. Raises the first error of one of them."""
        self.turns, self.addends, self.error = [threading.Semaphore(0) for _ in calls], [], None
        threads_of_torch = torch.get_num_threads()

        def run(number: int, call: Callable[[], T]) -> T:
            self.caller.number = number
            self.turns[number].acquire()
            torch.set_num_threads(threads_of_torch)  # OpenMP has a number for each calling thread
            try:
                return call()
            except BaseException as error:
                self.error = self.error or error  # the other calls only report that one has failed
                raise
            finally:
                self._pass_turn()

        self.turns[0].release()
        if len(calls) == 1:
            return [run(0, calls[0])]
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(run, *pair) for pair in enumerate(calls)]
        if self.error:
            raise self.error
        return [future.result() for future in futures]

    def _pass_turn(self) -> None:
        self.turns[(self.caller.number + 1) % len(self.turns)].release()

    def total(self, addend: Tensor) -> Tensor:
        """Return the sum over all logical processes, each of which calls it with its addend."""
        self._check()
        self.addends.append(addend)
        if len(self.addends) == len(self.turns):
            self.sum, self.addends = self.sum_over_all(self.addends), []
        random_state = torch.default_generator.get_state()
        self._pass_turn()
        self.turns[self.caller.number].acquire()
        torch.default_generator.set_state(random_state)
        self._check()
        return self.sum

    def _check(self) -> None:
        if self.error:
            raise RuntimeError("another logical process failed")


def exact_batchnorm(model: M, total: Total | None = None) -> M:
    """Replace the BatchNorm layers of `model` by exact ones with the same parameters, buffers and names.

    On the CPU the layers become `ExactBatchNorm`. On other devices they become torch's SyncBatchNorm if there is a
    `total` of the processes' statistics (--sync-bn), else they are unchanged.
    """
    if next(iter(model.state_dict().values())).device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if total else model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, ExactBatchNorm):
                module.register_module(name, ExactBatchNorm.from_layer(child, total))
    return model


class ExactBatchNorm(_BatchNorm):
    """BatchNorm with exact statistics in any memory layout.

    Input and output are (b, channels, ...). torch's CPU kernel for channels_last accumulates each channel in one
    float32: on a map of 160 x 160 the relative error of the variance is 7e-5, and depends on the number of threads.
    """

    # Adds up the sums of all processes, which then must call the layer together; None: statistics of the local batch.
    total: Total | None = None

    @classmethod
    def from_layer(cls, layer: _BatchNorm, total: Total | None = None) -> ExactBatchNorm:
        """Return an `ExactBatchNorm` with the same parameters and buffers as `layer`."""
        layer_copy = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        layer_copy._parameters, layer_copy._buffers, layer_copy.total = layer._parameters, layer._buffers, total
        return layer_copy.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        count: float | Tensor = input.numel() / input.shape[1]
        mean, variance = _local_moments(input.detach())
        dtype = mean.dtype
        if self.total:
            mean, variance = mean.double(), variance.double()  # else the sums of squares would add an error
            sums = [mean.new_tensor([count]), count * mean, count * (variance + mean**2)]
            total = self.total(torch.cat(sums))
            count = total[0]
            mean, square = (total[1:] / count).chunk(2)
            variance = (square - mean**2).clamp(min=0)
        elif count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var), momentum)
        moments = mean.to(dtype), variance.to(dtype)
        return _Normalise.apply(input, self.weight, self.bias, *moments, count, self.eps, self.total)


def _local_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, (channels,), of this process's batch, at least float32-exact."""
    values, last = input.to(torch.promote_types(input.dtype, torch.float32)), torch.channels_last
    if values.dim() == 4 and values.is_contiguous(memory_format=last) and not values.is_contiguous():
        # (b, w c, h, 1): each channel becomes w channels, so the kernel adds w times fewer numbers in one float32.
        values = values.permute(0, 2, 3, 1).flatten(2).unsqueeze(2).permute(0, 3, 1, 2)
    # BatchNorm's own kernel, without running statistics, is four times as fast as torch.var_mean on the CPU.
    moments = torch.batch_norm_update_stats(values, None, None, 0.0)
    means, variances = (parts.view(-1, input.shape[1]) for parts in moments)
    mean, between = torch.batch_norm_update_stats(means, None, None, 0.0)
    return mean, variances.mean(0).add_(between)


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, differentiated through mean and variance.

    Ioffe and Szegedy 2015, section 3: grad = weight / deviation * (g - mean(g) - x mean(g x)), with means over the
    whole batch and the normalised input x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: float | Tensor,
        eps: float,
        total: Total | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.eps, ctx.total = count, eps, total
        return nn.functional.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        # In channels_last torch's sums over the gradient are not exact: on the largest maps the relative error is 1e-5
        # in the gradients of weight and bias, and less than 1e-6 in the gradient of the input.
        backward = torch.ops.aten.native_batch_norm_backward.default
        if not ctx.total:
            mask = [True, weight is not None, weight is not None]
            statistics = (None, None, mean, (variance + ctx.eps).rsqrt())
            gradients = backward(grad, input, weight, *statistics, train=True, eps=ctx.eps, output_mask=mask)
            return *gradients, None, None, None, None, None
        gains = torch.ones_like(mean) if weight is None else weight
        statistics, mask = (mean, variance, None, None), [False, True, True]
        _, *grad_parameters = backward(grad, input, gains, *statistics, train=False, eps=ctx.eps, output_mask=mask)
        sums = ctx.total(torch.cat(grad_parameters).double())
        slope, shift = (part.to(mean) for part in (sums / ctx.count).chunk(2))  # mean(g x) and mean(g)
        scale = (variance + ctx.eps).rsqrt() * gains
        slope, shift = -scale * slope, -scale * shift
        # -scale (x slope + shift), with the normalised input x, is a normalisation too; addcmul_ adds scale g.
        grad_input = nn.functional.batch_norm(input, mean, variance, slope, shift, False, 0.0, ctx.eps)
        grad_input.addcmul_(grad, scale.view(-1, *[1] * (input.dim() - 2)).to(input.dtype))
        return grad_input, *([None, None] if weight is None else grad_parameters), None, None, None, None, None
