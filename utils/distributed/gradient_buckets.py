"""Give DDP its final gradient buckets before the first step. Called by prepare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


def order_buckets(model: DistributedDataParallel, image_size: int) -> None:
    """Run a forward and a backward pass on one black image of `image_size` pixels, so that DDP orders its buckets.

    All processes must call it together, before their first step. It has no other effect.

    DDP starts with buckets in the order of the parameters. In the first backward pass it records the order in which the
    gradients arrive, and before the second forward pass it makes its final buckets from that order. All-reduce adds the
    processes' numbers in an order that depends on their place in a bucket, so with three or more processes a resumed
    run would round its first step differently from the same step of the uninterrupted run. With this pass every step of
    a new or resumed run has the final buckets.

    BatchNorm runs as in evaluation, because a batch of one image has no statistics. The other layers run as in
    training, because a layer may use its parameters only there.
    """
    device = next(model.parameters()).device
    # A GPU's generator need not be restored: it is seeded for each batch.
    with _unchanged(model), torch.random.fork_rng([]), torch.enable_grad():
        model.train()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        outputs = list(_tensors(model(torch.zeros(1, 3, image_size, image_size, device=device))))
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        model.zero_grad()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the modes and buffers of all modules afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the differentiable tensors in nested lists, tuples and mappings."""
    if isinstance(outputs, Tensor) and outputs.requires_grad:
        yield outputs
    elif isinstance(outputs, (list, tuple, Mapping)):
        for output in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(output)
