"""Make a model, its optimizer and its loader ready for several processes.

Called by utils/training/optimizer_steps.py. What Accelerate's `prepare` does not do is here: layers whose
result depends on the whole batch, the memory format, equal weights on all processes, DeepSpeed's configuration, and
DDP's buffers and compression.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from utils.distributed.collectives import Collectives
from utils.distributed.comm_hooks import register_comm_hook
from utils.distributed.deepspeed import configure, gathered_parameters
from utils.distributed.sync_batchnorm import average_statistics, synchronise_batchnorm
from utils.distributed.sync_dropout import synchronise_dropout
from utils.memory_format import layout

if TYPE_CHECKING:
    from models.tasks.contract import Model


@dataclass(frozen=True)
class SyncOptions:
    """The flags that say how processes work together on a batch."""

    batch_size: int  # of all processes
    sync_bn: bool
    comm_hook: str


@dataclass(frozen=True)
class DistributedModel:
    """A model in two forms. `prepared` is what Accelerate makes of `bare`: DDP's or DeepSpeed's, called in training.

    `bare` is kept, because Accelerate's `unwrap_model` imports deepspeed if that is installed.
    """

    bare: Model
    prepared: nn.Module

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are whole, although ZeRO-3 keeps a part on each process.

        All processes must enter it together.
        """
        return gathered_parameters(self.prepared)

    def average_statistics(self, ema: nn.Module) -> None:
        """Make the BatchNorm statistics of all processes equal, those of the EMA too; with --sync-bn they are."""
        average_statistics(self.prepared)
        average_statistics(ema)


def place_model(accelerator: Accelerator, model: Model) -> None:
    """Move `model` to the device, with equal weights on all processes. In place; all processes must call it."""
    synchronise_dropout(model)
    # DeepSpeed takes weights in torch's usual format only; the maps, which are larger, follow the images anyway.
    usual = accelerator.state.deepspeed_plugin is not None
    memory_format = torch.contiguous_format if usual else layout(accelerator.device)
    model.to(accelerator.device, memory_format=memory_format)  # type: ignore[call-overload]
    Collectives(accelerator).align(model)


def prepare(
    accelerator: Accelerator,
    model: Model,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    options: SyncOptions,
    *,
    clip_norm: float,
    warmup_steps: int,
) -> tuple[DistributedModel, Any, DataLoader]:
    """Return the model with exact BatchNorm, the optimizer and the loader as Accelerate prepares them.

    warmup_steps: optimizer steps whose gradients PowerSGD does not compress.
    """
    plugin = accelerator.state.deepspeed_plugin
    bare = synchronise_batchnorm(model, options.sync_bn)
    if plugin:
        local_batch = options.batch_size // accelerator.num_processes
        configure(plugin, local_batch, accelerator.gradient_accumulation_steps, clip_norm)
    prepared, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    if isinstance(prepared, DistributedDataParallel):
        prepared.broadcast_buffers = False  # not with every batch: --sync-bn or an average makes the statistics equal
        if options.comm_hook:
            register_comm_hook(prepared, options.comm_hook, warmup_steps)
    return DistributedModel(bare, prepared), optimizer, loader
