"""The model in training on all processes, under DDP, DeepSpeed or with logical processes. Called by train.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from utils.batch import layout, use_onednn
from utils.distributed.batchnorm import InTurn, all_reduce, exact_batchnorm
from utils.distributed.deepspeed import configure
from utils.distributed.dropout import GlobalDropout, synchronise_dropout
from utils.distributed.second_thread import SecondThread, WeightGradients
from utils.distributed.tree import LogicalProcesses
from utils.errors import UserError

if TYPE_CHECKING:
    from models.tasks.contract import LossTerms, Model
    from utils.batch import Batch

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

BUCKET = 1 << 22  # numbers that processes add at once


@dataclass(eq=False)
class DistributedModel:
    """A model in training, as each logical process of this process calls it."""

    accelerator: Accelerator
    logical: LogicalProcesses
    copies: Sequence[Model]  # the model of each logical process of this process; they share all parameters
    modules: Sequence[nn.Module]  # what Accelerate made of `copies`
    freezes_batchnorm: bool = False
    in_turn: InTurn | None = None  # lets the copies meet in each BatchNorm layer (--sync-bn)
    second: SecondThread | None = None

    def __post_init__(self) -> None:
        accelerator, logical, copies = self.accelerator, self.logical, self.copies
        # Accelerate's `unwrap_model` would import deepspeed if that is installed.
        self.model, self.wrapped = copies[0], self.modules[0]
        # Listed once: every step needs them, and yolov9t has 1,400 modules.
        self.parameters = list(self.model.parameters())
        self.layers = [layer for model in copies for layer in model.modules()]  # of all copies
        self._generators: list[torch.Generator] = []  # of dropout, for each copy
        self.batches: Sequence[Batch] = ()  # while `each` computes them
        self.joined_graphs = False  # whether autograd's graphs of the copies are one
        # Parameters that no backward pass has given a gradient yet. Hooks, because ZeRO leaves no gradient in them.
        trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self._unreached = {name: weight.register_hook(partial(self._note_gradient, name)) for name, weight in trained}
        self._weight_gradients = WeightGradients(self.model, self.second) if self.second else None
        if logical.exact:
            self._trained = [[weight for weight in model.parameters() if weight.requires_grad] for model in copies]
            sizes = [weight.numel() for weight in self._trained[0]]
            # The gradients of each of the process's subtrees, one after another; the first row becomes the total.
            self._flat = self._trained[0][0].new_empty(len(logical.subtrees[logical.rank]), sum(sizes))
            forms = [(weight.shape, weight.stride()) for weight in self._trained[0]]
            rows = [zip(row.split(sizes), forms, strict=True) for row in self._flat]
            self._gradients = [[view.as_strided(*form) for view, form in row] for row in rows]
            self._accumulated: list[tuple[Tensor, ...]] = []  # of each copy, over the batches of a step
            self._generators = [torch.Generator(accelerator.device) for _ in copies]
            for number, model, generator in zip(logical.local, copies, self._generators, strict=True):
                for layer in model.modules():
                    if isinstance(layer, GlobalDropout):
                        layer.number, layer.processes, layer.generator = number, logical.count, generator

    def train(self) -> None:
        """Set the modules to training mode; with `freezes_batchnorm` BatchNorm normalises as in evaluation."""
        for module in self.modules:
            module.train()
            for layer in module.modules() if self.freezes_batchnorm else ():
                if isinstance(layer, _BatchNorm):
                    layer.eval()

    def sum(self, addends: Sequence[Tensor]) -> Tensor:
        """Return the sum over all logical processes, of which `addends` are local. All must call it together."""
        return self.logical.sum(addends) if self.logical.exact else self.accelerator.reduce(addends[0], "sum")

    def each(self, function: Callable[[nn.Module, Batch], T], batches: Sequence[Batch], seed: int) -> list[T]:
        """Return `function` of the module and the batch of each local logical process, with torch seeded alike."""
        for generator in self._generators:
            generator.manual_seed(seed)
        calls = [partial(self._call_seeded, function, *pair, seed) for pair in zip(self.modules, batches, strict=True)]
        self.batches = batches
        results = self.in_turn(calls) if self.in_turn else [call() for call in calls]
        self.batches = ()
        return results

    def _call_seeded(self, function: Callable[[nn.Module, Batch], T], module: nn.Module, batch: Batch, seed: int) -> T:
        device = self.accelerator.device
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":  # `torch.manual_seed` takes a while for devices that are absent
            torch.get_device_module(device).manual_seed(seed)
        return function(module, batch)

    def over_global_counts(self, terms: Sequence[LossTerms]) -> list[Tensor]:
        """Return the loss terms of each local logical process, (terms,) each, divided by the counts of all processes.

        Their sum over all logical processes is the mean over the global batch. All processes must call it together.
        """
        counts = self.sum([local.counts for local in terms])
        return [local.share_of_mean(counts) for local in terms]

    def backward(self, objectives: Sequence[Tensor]) -> None:
        """Add the objectives' gradients, in the last batch of a step over all processes. All must call it together.

        Raises `UserError` if a trained parameter gets no gradient in the first batch, or under DDP in any.
        """
        if self.logical.exact:
            self._backward_by_tree(objectives)
        else:  # DDP takes the mean over processes
            self.accelerator.backward(objectives[0] * self.accelerator.num_processes)
        if self._weight_gradients:
            self._weight_gradients.finish()
            for name in [name for name in self._unreached if self.model.get_parameter(name).grad is not None]:
                self._note_gradient(name)
        check_reduced(self.wrapped, [*self._unreached])

    def _note_gradient(self, name: str, gradient: Tensor | None = None) -> None:
        if hook := self._unreached.pop(name, None):  # a parameter that is used twice may come twice
            hook.remove()

    def _backward_by_tree(self, objectives: Sequence[Tensor]) -> None:
        accelerator = self.accelerator
        objectives = [objective / accelerator.gradient_accumulation_steps for objective in objectives]
        if accelerator.scaler:  # both as Accelerate does
            objectives = [accelerator.scaler.scale(objective) for objective in objectives]
        gradients = self._local_gradients(objectives)
        if self._accumulated:
            gradients = [torch._foreach_add(*pair) for pair in zip(gradients, self._accumulated, strict=True)]
        if not accelerator.sync_gradients:  # copies: the next batch may overwrite captured gradients
            self._accumulated = [torch._foreach_mul(copy_gradients, 1.0) for copy_gradients in gradients]
            return
        self._accumulated = []
        with torch.no_grad():  # torch 2.9's materialised gradients require gradients themselves
            sums = self.logical.local_sums(gradients, torch._foreach_add)
            for views, subtree_gradients in zip(self._gradients, sums, strict=True):
                torch._foreach_copy_(views, subtree_gradients)
        for bucket in self._flat.split(BUCKET, 1) if accelerator.num_processes > 1 else ():
            self.logical.sum_in_place(bucket)
        for parameter, gradient in zip(self._trained[0], self._gradients[0], strict=True):
            parameter.grad = gradient

    def _local_gradients(self, objectives: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
        """Return the gradients of each local logical process, if possible as they come. Two may be the same tensor."""
        grad = partial(torch.autograd.grad, materialize_grads=True)
        if not self.joined_graphs:
            pairs = zip(objectives, self._trained, strict=True)
            calls = [partial(grad, objective, trained) for objective, trained in pairs]
            return self.in_turn(calls) if self.in_turn else (call() for call in calls)
        count, gradients = len(self._trained[0]), grad(objectives, [*chain.from_iterable(self._trained)])
        return [gradients[first : first + count] for first in range(0, len(gradients), count)]

    @torch.no_grad()
    def average_statistics(self, averages: Sequence[nn.Module]) -> None:
        """Set BatchNorm's running statistics, and those of the EMAs, to their mean over logical processes.

        The mean is computed in float64, so that equal statistics, as with --sync-bn, do not change by a bit. All
        processes must call it together.
        """
        for models in (self.copies, averages):
            statistics = [
                [buffer for name, buffer in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
                for model in models
            ]
            if self.logical.count == 1 or not statistics[0]:
                continue
            means = self.sum([torch.cat([buffer.double() for buffer in buffers]) for buffers in statistics])
            for buffers in statistics:
                for buffer, mean in zip(buffers, means.split([len(buffer) for buffer in buffers]), strict=True):
                    buffer.copy_(mean / self.logical.count)


def replicate(model: M, count: int) -> list[M]:
    """Return `model` and `count` - 1 copies that share its parameters.

    The copies have buffers of their own, and parameters of their own on the same memory: so autograd can give the
    gradients of all copies at once.
    """
    copies = [model]
    for _ in range(1, count):
        aliases = {id(old): nn.Parameter(old.detach(), old.requires_grad) for old in model.parameters()}
        copies.append(copy.deepcopy(model, aliases))
    return copies


def check_reduced(module: nn.Module, missing: Sequence[str] = ()) -> None:
    """Raise `UserError` if the last backward pass gave a trained parameter no gradient; `missing` names known ones.

    DDP adds up a bucket of gradients once it has all of them. If one is missing, the others of its bucket stay those of
    each process, and DDP itself says so in the next forward pass only: after a wrong step.
    """
    names, ddp = list(missing), getattr(module, "_orig_mod", module)  # torch.compile wraps DDP
    if isinstance(ddp, DistributedDataParallel) and not names:
        try:
            ddp._check_reducer_finalized()
        except RuntimeError:
            trained = [(name, weight) for name, weight in ddp.module.named_parameters() if weight.requires_grad]
            names = [name for name, weight in trained if weight.grad is None] or ["a parameter on another process"]
    if names:
        raise UserError(
            "each trained parameter must get a gradient from each batch: use it in `forward`, remove it, or freeze it, "
            f"as with --freeze {names[0]}; these get none: {', '.join(names)}"
        )


# Placing and preparing


def collate_local(collate: Callable[[list[Any]], Any], local: int, items: list[Any]) -> list[Any]:
    """Return the batch of each of `local` logical processes from the items of a process; `collate` joins a batch."""
    size = len(items) // local
    return [collate(items[start : start + size]) for start in range(0, len(items), size)]


def place_model(accelerator: Accelerator, model: Model) -> None:
    """Move `model` to the device in place, with the main process's weights. All processes must call this together."""
    synchronise_dropout(model)
    # channels_last: with contiguous tensors yolov5n takes 154 ms instead of 51.4 on an H100 (docs/tried.md). DeepSpeed
    # requires contiguous weights; feature maps, which are larger, have the images' format in any case.
    by_zero = accelerator.state.deepspeed_plugin is not None
    memory_format = torch.contiguous_format if by_zero else layout(accelerator.device)
    model.to(accelerator.device, memory_format=memory_format)  # type: ignore[call-overload]
    use_onednn(model, accelerator.device)
    broadcast(model.state_dict())  # in place; DDP does it too, but after EMA and optimizer are made


def prepare(
    accelerator: Accelerator,
    logical: LogicalProcesses,
    model: Model,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    batch_size: int,
    sync_bn: bool,
    precision: str,
    clip_norm: float,
    freezes_batchnorm: bool = False,
) -> tuple[DistributedModel, Any, Any]:
    """Return the model with exact BatchNorm, the optimizer with its momentum, and the loader, prepared by Accelerate.

    In addition to Accelerate's `prepare`: a copy of the model for each logical process, DeepSpeed's configuration, and
    DDP's buffers and buckets. The loader then delivers lists: the batch of each logical process of this process.
    """
    in_turn = InTurn(logical.sum) if sync_bn and logical.exact and logical.count > 1 else None
    total = in_turn.total if in_turn else all_reduce if sync_bn and accelerator.num_processes > 1 else None
    loader.collate_fn = partial(collate_local, loader.collate_fn, len(logical.local))
    # In each copy: the locks of `InTurn` cannot be copied. torch's layers, in channels_last on a CPU, err by 7e-5.
    copies = [exact_batchnorm(replica, total) for replica in replicate(model, len(logical.local))]
    model = copies[0]
    if accelerator.state.deepspeed_plugin:
        configure(accelerator, batch_size, clip_norm, precision)
    if logical.exact:  # no DDP: `DistributedModel` adds the gradients
        modules = [accelerator.prepare_model(model, device_placement=False, evaluation_mode=True) for model in copies]
        optimizer, loader = accelerator.prepare_optimizer(optimizer), prepare_loader(accelerator, logical, loader)
    else:
        *modules, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start_momentum(optimizer)
    ddp = getattr(modules[0], "_orig_mod", modules[0])  # torch.compile wraps DDP
    if isinstance(ddp, DistributedDataParallel):
        ddp.broadcast_buffers = False  # --sync-bn or `average_statistics` makes the statistics equal
        if accelerator.num_processes > 2:  # the sum of two numbers does not depend on their order
            order_buckets(ddp, model.imgsz)
    second = None if logical.exact else SecondThread.beside(accelerator, model)
    distributed = DistributedModel(accelerator, logical, copies, modules, freezes_batchnorm, in_turn, second)
    return distributed, optimizer, loader


def prepare_loader(accelerator: Accelerator, logical: LogicalProcesses, loader: DataLoader[Any]) -> Any:
    """Prepare the loader to deliver this process's part of each batch, which Accelerate only cuts into equal slices."""
    if logical.count % logical.processes == 0:
        return accelerator.prepare_data_loader(loader)
    sampler: Any = loader.batch_sampler
    images, local = sampler.batch_size // logical.count, logical.local
    sampler.local = slice(images * local.start, images * local.stop)
    return prepare_data_loader(loader, accelerator.device, 1, 0, put_on_device=True, non_blocking=True)


def start_momentum(optimizer: Any) -> None:
    """Set the momentum buffers of a prepared SGD to zero before the first step: they exist even if it is skipped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in inner.param_groups if isinstance(inner, torch.optim.SGD) else ():
        for parameter in group["params"]:
            if parameter.requires_grad and group["momentum"]:
                inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def order_buckets(model: DistributedDataParallel, image_size: int) -> None:
    """Run a forward and a backward pass on one black image of `image_size` pixels, so that DDP orders its buckets.

    DDP makes its final buckets after the first backward pass, in the order in which the gradients arrive. All-reduce
    adds in an order that depends on the place in a bucket, so with three or more processes a resumed run would round
    its first step differently from the same step of the uninterrupted run. BatchNorm runs as in evaluation, because a
    batch of one image has no statistics. All processes must call it together.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    image = torch.zeros(1, 3, image_size, image_size, device=next(model.parameters()).device)
    with torch.random.fork_rng([]):  # a GPU's generator is seeded for each batch
        outputs = [leaf for leaf in tree_leaves(model(image)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    check_reduced(model)
    model.zero_grad()
