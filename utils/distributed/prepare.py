"""Prepare a model, its optimizer and its loader for several processes. Called by utils/training/optimizer_steps.py.

In addition to Accelerate's `prepare`: layers whose result depends on the global batch, the memory format, equal weights
on all processes, logical processes, DeepSpeed's configuration, and DDP's buffers and buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from utils.distributed.deepspeed import check_autocast, configure
from utils.distributed.distributed_model import DistributedModel
from utils.distributed.logical_processes import CollateShares, LogicalProcesses, SyncOptions
from utils.distributed.sync_batchnorm import synchronise_batchnorm
from utils.distributed.sync_dropout import synchronise_dropout
from utils.memory_format import layout

if TYPE_CHECKING:
    from models.tasks.contract import Model


def place_model(accelerator: Accelerator, model: Model) -> None:
    """Move `model` to the device in place, with the main process's weights. All processes must call this together."""
    synchronise_dropout(model)
    # DeepSpeed requires contiguous weights; feature maps, which are larger, have the images' format in any case.
    by_zero = accelerator.state.deepspeed_plugin is not None
    memory_format = torch.contiguous_format if by_zero else layout(accelerator.device)
    model.to(accelerator.device, memory_format=memory_format)  # type: ignore[call-overload]
    broadcast(model.state_dict())  # in place


def prepare(
    accelerator: Accelerator,
    model: Model,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    options: SyncOptions,
    *,
    precision: str,
    clip_norm: float,
    keep_norms: bool = False,
) -> tuple[DistributedModel, Any, DataLoader]:
    """Return the model with exact BatchNorm, the optimizer and the loader, prepared by Accelerate.

    The loader then delivers lists: the batch of each logical process of this process.

    Args:
        precision: precision of autocast
        keep_norms: whether BatchNorm's statistics stay unchanged
    """
    plugin = accelerator.state.deepspeed_plugin
    logical = LogicalProcesses.of(options, accelerator)
    bare = synchronise_batchnorm(model, logical.sync_bn)
    replicas = logical.replicate(bare)
    loader.collate_fn = CollateShares(loader.collate_fn, logical.local)
    if plugin:
        local_batch = options.batch_size // accelerator.num_processes
        configure(plugin, local_batch, accelerator.gradient_accumulation_steps, clip_norm)
    if logical.exact:  # no DDP: `DistributedModel` adds the gradients
        modules = [accelerator.prepare_model(replica, evaluation_mode=True) for replica in replicas]
        optimizer, loader = accelerator.prepare(optimizer, loader)
        return DistributedModel(accelerator, logical, replicas, modules, keep_norms), optimizer, loader
    prepared, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    if plugin:
        check_autocast(prepared, precision)
    wrapper = getattr(prepared, "_orig_mod", prepared)  # torch.compile wraps DDP
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.broadcast_buffers = False  # --sync-bn or `average_statistics` makes the statistics equal
        if accelerator.num_processes > 2:  # the sum of two numbers does not depend on their order
            order_buckets(wrapper, bare.imgsz)
    return DistributedModel(accelerator, logical, [bare], [prepared], keep_norms), optimizer, loader


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
