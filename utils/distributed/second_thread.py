"""A second thread that computes what may be computed at the same time, with the bytes of one. CPU, one process.

In each layer OpenMP's threads wait for each other. For small images that gains little, and beside busy programs, which
take turns with the threads, a step takes several times as long (docs/benchmarks.md). Half of the threads compute a step
of such images; the others compute the weights' gradients meanwhile, and are waited for once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from utils.console import log
from utils.distributed.launch import cores_per_process
from utils.errors import plural

T = TypeVar("T")
U = TypeVar("U")

SMALL_STEP = 2.5  # GFLOPs of the forward pass of a batch: yolov5n at 160 pixels, 8 images
OWN_PACKAGES = ("torch.", "models.", "utils.")  # a user's module may store values that calls at the same time mix up


def fix_threads(accelerator: Accelerator, model: nn.Module, gflops: float) -> None:
    """Leave half of the threads to a `SecondThread` if the forward pass of a batch has few `gflops`; 0 is unknown."""
    half = torch.get_num_threads() // 2
    if half and 0 < gflops <= SMALL_STEP and SecondThread.can_help(accelerator, model):
        torch.set_num_threads(half)
        log(f"steps are small: {plural(half, 'thread')}, and as many for the gradients of weights")


class SecondThread:
    """A thread with as many OpenMP threads as the one that makes it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "second", torch.set_num_threads, (torch.get_num_threads(),))

    @staticmethod
    def can_help(accelerator: Accelerator, model: nn.Module) -> bool:
        """Return whether all is computed by this process's threads, whose number the user has left to us."""
        is_plain = accelerator.distributed_type == DistributedType.NO and accelerator.device.type == "cpu"
        is_plain &= accelerator.mixed_precision == "no" and not os.environ.get("OMP_NUM_THREADS")
        is_plain &= accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
        return is_plain and all(type(module).__module__.startswith(OWN_PACKAGES) for module in model.modules())

    @classmethod
    def beside(cls, accelerator: Accelerator, model: nn.Module) -> SecondThread | None:
        """Return a second thread if there are cores for it."""
        has_cores = 2 * torch.get_num_threads() <= cores_per_process()
        return cls() if has_cores and cls.can_help(accelerator, model) else None

    def start(self, call: Callable[[], T]) -> Callable[[], T]:
        """Let the second thread call; return what returns its result, on this thread if it has not begun by then."""
        future = self._pool.submit(call)
        return lambda: call() if future.cancel() else future.result()

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """Yield `function` of each item, in order, two at a time."""
        iterator = iter(items)
        for item in iterator:
            second = [self.start(partial(function, other)) for other in islice(iterator, 1)]
            yield function(item)
            yield from (result() for result in second)


class WeightGradients:
    """The gradients of a model's convolutions, which the second thread computes during a backward pass."""

    def __init__(self, model: nn.Module, second: SecondThread) -> None:
        self.second = second
        self.started: list[tuple[Tensor, Callable[[], Tensor]]] = []
        layer: Any
        for layer in model.modules():
            is_plain = type(layer) is nn.Conv2d and layer.bias is None and layer.padding_mode == "zeros"
            if is_plain and layer.weight.requires_grad and not isinstance(layer.padding, str):
                layer.__class__ = OverlappedConv2d
                layer.gradients = self

    def finish(self) -> None:
        """Add the gradients of a backward pass, which has ended, to `grad` of the weights."""
        # The last ones first: the second thread began with the first ones.
        gradients = [gradient() for _, gradient in reversed(self.started)][::-1]
        sums: dict[Tensor, Tensor] = {}
        for (weight, _), gradient in zip(self.started, gradients, strict=True):
            sums[weight] = sums[weight] + gradient if weight in sums else gradient
        self.started.clear()
        for weight, total in sums.items():
            weight.grad = total if weight.grad is None else weight.grad + total


class OverlappedConv2d(nn.Conv2d):
    """A convolution whose weight gets its gradient from `WeightGradients`."""

    gradients: WeightGradients

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._conv_forward(input, weight, bias)
        output: Tensor = _Convolution.apply(input, weight, self)
        return output


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: OverlappedConv2d) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        return nn.functional.conv2d(input, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        layer, inputs = ctx.layer, (grad, *ctx.saved_tensors, None)
        form = layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups
        compute, tensors = torch.ops.aten.convolution_backward.default, [*inputs]

        def weight_gradient() -> Tensor:
            gradient: Tensor = compute(*tensors, *form, [False, True, False])[1]
            tensors.clear()  # the memory is needed before the pass ends
            return gradient

        layer.gradients.started.append((layer.weight, layer.gradients.second.start(weight_gradient)))
        return compute(*inputs, *form, [True, False, False])[0] if ctx.needs_input_grad[0] else None, None, None
