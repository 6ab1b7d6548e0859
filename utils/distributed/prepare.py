"""Prepare a model, its optimizer and its loader for several processes. Called by utils/training/optimizer_steps.py.

In addition to Accelerate's `prepare`: layers whose result depends on the global batch, the memory format, equal weights
on all processes, logical processes, DeepSpeed's configuration, and DDP's buffers and buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from utils.distributed.collectives import Collectives
from utils.distributed.deepspeed import check_autocast, configure
from utils.distributed.distributed_model import DistributedModel
from utils.distributed.gradient_buckets import order_buckets
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
    Collectives(accelerator).broadcast_model(model)


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
