"""Prepare a model, its optimizer and its loader for several processes. Called by utils/training/optimizer_steps.py.

In addition to Accelerate's `prepare`: layers whose result depends on the global batch, the memory format, equal weights
on all processes, DeepSpeed's configuration, and DDP's buffers and buckets.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from utils.distributed.collectives import Collectives
from utils.distributed.deepspeed import check_autocast, configure, gathered_parameters
from utils.distributed.gradient_buckets import order_buckets
from utils.distributed.sync_batchnorm import average_statistics, synchronise_batchnorm
from utils.distributed.sync_dropout import synchronise_dropout
from utils.memory_format import layout

if TYPE_CHECKING:
    from models.tasks.contract import Model


@dataclass(frozen=True)
class SyncOptions:
    """The flags of the batch and of the communication between processes."""

    batch_size: int  # of all processes
    sync_bn: bool


@dataclass(frozen=True)
class DistributedModel:
    """A model, `bare`, and Accelerate's wrapper of it, `prepared`, which is called in training.

    `bare` is stored because Accelerate's `unwrap_model` imports deepspeed if that is installed.
    """

    bare: Model
    prepared: nn.Module
    keeps_norms: bool = False

    def train(self) -> None:
        """Set the model to training; with `keeps_norms` BatchNorm normalises as in evaluation."""
        self.prepared.train()
        if self.keeps_norms:
            for module in self.prepared.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context with unpartitioned parameters (ZeRO-3). All processes must enter it together."""
        return gathered_parameters(self.prepared)

    def average_statistics(self, ema: nn.Module) -> None:
        """Average the BatchNorm statistics, the EMA's too, over processes; with --sync-bn they are equal already."""
        average_statistics(self.prepared)
        average_statistics(ema)


def place_model(accelerator: Accelerator, model: Model) -> None:
    """Move `model` to the device in place, with the main process's weights. All processes must call this together."""
    synchronise_dropout(model)
    # DeepSpeed requires contiguous weights; feature maps, which are larger, have the format of the images anyway.
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

    precision: of autocast. keep_norms: whether BatchNorm's statistics stay as they are.
    """
    plugin = accelerator.state.deepspeed_plugin
    bare = synchronise_batchnorm(model, options.sync_bn)
    if plugin:
        local_batch = options.batch_size // accelerator.num_processes
        configure(plugin, local_batch, accelerator.gradient_accumulation_steps, clip_norm)
    prepared, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    if plugin:
        check_autocast(prepared, precision)
    wrapper = getattr(prepared, "_orig_mod", prepared)  # torch.compile wraps DDP
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.broadcast_buffers = False  # --sync-bn or `average_statistics` makes the statistics equal
        if accelerator.num_processes > 2:  # the sum of two numbers does not depend on their order
            order_buckets(wrapper, bare.imgsz)
    return DistributedModel(bare, prepared, keep_norms), optimizer, loader
