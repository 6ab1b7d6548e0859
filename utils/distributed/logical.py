"""Logical processes: what the processes of a run compute together. Called by train.py.

A run is computed by V logical processes; each real one holds an equal number of them. A logical process has a fixed
part of each batch, and BatchNorm statistics, dropout masks and loss sums of its own. By default V is the number of
processes, and an all-reduce adds up, rounded in an order that depends on that number. With --logical-processes V one
binary tree adds the sums of all logical processes, so all results are the same bytes on 1, 2, 4 ... V processes.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from utils.batch import GlobalCounts, layout
from utils.console import log
from utils.distributed.batchnorm import all_reduced, exact_batchnorm
from utils.distributed.deepspeed import configure, is_requested
from utils.distributed.ranks import ranks, world_size
from utils.errors import UserError, plural

if TYPE_CHECKING:
    from models.tasks.contract import LossTerms, Model
    from utils.batch import Batch

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

BUCKET = 1 << 22  # numbers that processes add at once


@dataclass(frozen=True)
class LogicalProcesses:
    """The logical processes of a run, and the ones that this process computes."""

    count: int  # number of logical processes of the run
    local: int  # number of logical processes of this process: first, first + 1 ...
    first: int
    exact: bool  # whether sums are added by the tree

    @classmethod
    def of(cls, count: int, accelerator: Accelerator) -> LogicalProcesses:
        """Return the logical processes that --logical-processes requests, 0 for one per process."""
        processes = accelerator.num_processes
        local = count // processes if count else 1
        return cls(count or processes, local, local * accelerator.process_index, bool(count))

    def fix_kernels(self, device: torch.device) -> None:
        """Prevent kernels that are chosen by timing, or that add in an order that depends on the number of threads."""
        if self.exact:
            torch.backends.cudnn.benchmark = False
            log(f"logical processes: {self.count}, {self.local} on each process")
        if self.exact and self.count > 1 and device.type == "cpu":
            torch.set_num_threads(1)

    def replicate(self, model: M) -> list[M]:
        """Return a module for each logical process of this process: `model`, and copies that share its parameters.

        The copies have buffers of their own, and parameters of their own on the same memory: so autograd can give the
        gradients of all copies at once.
        """
        copies = [model]
        for _ in range(1, self.local):
            aliases = {id(old): nn.Parameter(old.detach(), old.requires_grad) for old in model.parameters()}
            copies.append(copy.deepcopy(model, aliases))
        return copies


def check_logical_processes(count: int, batch_size: int, sync_bn: bool) -> None:
    """Raise `UserError` if --logical-processes `count`, 0 if it is not given, does not fit the processes or flags."""
    processes = world_size()
    fits = count.bit_count() < 2 and count % processes == 0 and not (sync_bn and processes < count)
    if count and not (fits and batch_size != -1 and not is_requested()):
        raise UserError(
            f"--logical-processes {count} on {plural(processes, 'process')}: give a power of two, and start a power of "
            "two of processes up to it, with --sync-bn as many; leave out --batch-size -1 and DeepSpeed"
        )


class DistributedModel:
    """A model in training, as each logical process of this process calls it.

    `parameters` and `layers` are listed once: every step needs them, and yolov9t has 1,400 modules.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        logical: LogicalProcesses,
        copies: Sequence[Model],
        modules: Sequence[nn.Module],
        keeps_norms: bool = False,
    ) -> None:
        self.accelerator, self.logical, self.keeps_norms = accelerator, logical, keeps_norms
        self.copies = copies  # the model of each logical process of this process; they share all parameters
        self.modules = modules  # what Accelerate made of `copies`
        # Accelerate's `unwrap_model` would import deepspeed if that is installed.
        self.model, self.wrapped = copies[0], modules[0]
        self.parameters = list(self.model.parameters())
        self.layers = [layer for model in copies for layer in model.modules()]  # of all copies
        self._generators: list[torch.Generator] = []  # of dropout, for each copy
        self.batches: Sequence[Batch] = ()  # while `each` iterates over them
        self.together = False  # whether autograd's graphs of the copies are one
        # Parameters that no backward pass has given a gradient yet. Hooks, because ZeRO leaves no gradient in them.
        trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self._unreached = {name: weight.register_hook(partial(self._note_gradient, name)) for name, weight in trained}
        if logical.exact:
            self._trained = [[weight for weight in model.parameters() if weight.requires_grad] for model in copies]
            sizes = [weight.numel() for weight in self._trained[0]]
            self._flat = self._trained[0][0].new_empty(sum(sizes))  # the gradients, one after another
            views = zip(self._flat.split(sizes), self._trained[0], strict=True)
            self._gradients = [view.as_strided(weight.shape, weight.stride()) for view, weight in views]
            self._accumulated: list[tuple[Tensor, ...]] = []  # of each copy, over the batches of a step
            self._generators = [torch.Generator(accelerator.device) for _ in copies]
            for number, (model, generator) in enumerate(zip(copies, self._generators, strict=True), logical.first):
                for layer in model.modules():
                    if isinstance(layer, GlobalDropout):
                        layer.number, layer.processes, layer.generator = number, logical.count, generator

    def train(self) -> None:
        """Set the modules to training mode; with `keeps_norms` BatchNorm normalises as in evaluation."""
        for module in self.modules:
            module.train()
            for layer in module.modules() if self.keeps_norms else ():
                if isinstance(layer, _BatchNorm):
                    layer.eval()

    def sum(self, addends: Sequence[Tensor]) -> Tensor:
        """Return the sum over all logical processes, of which `addends` are local. All must call it together."""
        if not self.logical.exact:
            return self.accelerator.reduce(addends[0], "sum")
        local = tree_sum(addends)
        return local if self.accelerator.num_processes == 1 else tree_sum_of_processes(local)

    def each(self, batches: Sequence[Batch], seed: int) -> Iterator[tuple[nn.Module, Batch]]:
        """Yield the module and the batch of each logical process of this process, with torch seeded alike for each."""
        for generator in self._generators:
            generator.manual_seed(seed)
        self.batches = batches
        device = self.accelerator.device
        for module, batch in zip(self.modules, batches, strict=True):
            torch.default_generator.manual_seed(seed)
            if device.type != "cpu":  # `torch.manual_seed` takes a while for devices that are absent
                torch.get_device_module(device).manual_seed(seed)
            yield module, batch
        self.batches = ()

    def over_global_counts(self, terms: Sequence[LossTerms]) -> list[Tensor]:
        """Return the loss terms of each local logical process, (terms,) each, divided by the counts of all processes.

        Their sum over all logical processes is the mean over the global batch. All processes must call it together.
        """
        counts = GlobalCounts(self.sum([local.counts for local in terms]))
        return [local.share_of(counts) for local in terms]

    def backward(self, objectives: Sequence[Tensor]) -> None:
        """Add the objectives' gradients, in the last batch of a step over all processes. All must call it together.

        Raises `UserError` if a trained parameter gets no gradient in the first batch, or under DDP in any.
        """
        self._backward(objectives)
        check_reduced(self.wrapped, [*self._unreached])

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        if hook := self._unreached.pop(name, None):  # a parameter that is used twice may come twice
            hook.remove()

    def _backward(self, objectives: Sequence[Tensor]) -> None:
        accelerator = self.accelerator
        if not self.logical.exact:
            accelerator.backward(objectives[0] * accelerator.num_processes)  # DDP takes the mean over processes
            return
        objectives = [objective / accelerator.gradient_accumulation_steps for objective in objectives]
        if accelerator.scaler:  # both as Accelerate does
            objectives = [accelerator.scaler.scale(objective) for objective in objectives]
        gradients = self._local_gradients(objectives)
        if self._accumulated:
            gradients = [torch._foreach_add(*pair) for pair in zip(gradients, self._accumulated, strict=True)]
        if not accelerator.sync_gradients:  # copies: the next batch may overwrite recorded gradients
            self._accumulated = [torch._foreach_mul(of_copy, 1.0) for of_copy in gradients]
            return
        self._accumulated = []
        with torch.no_grad():  # torch 2.9's materialised gradients require gradients themselves
            torch._foreach_copy_(self._gradients, tree_sum(gradients, torch._foreach_add))
        for bucket in self._flat.split(BUCKET) if accelerator.num_processes > 1 else ():
            tree_sum_in_place(bucket)
        for parameter, gradient in zip(self._trained[0], self._gradients, strict=True):
            parameter.grad = gradient

    def _local_gradients(self, objectives: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the gradients of each local logical process. Two of them may be the same tensor."""
        if not self.together:
            pairs = zip(objectives, self._trained, strict=True)
            return [torch.autograd.grad(objective, trained, materialize_grads=True) for objective, trained in pairs]
        trained, count = [parameter for of_copy in self._trained for parameter in of_copy], len(self._trained[0])
        gradients = torch.autograd.grad(objectives, trained, materialize_grads=True)
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
            names = [name for name, each in ddp.module.named_parameters() if each.requires_grad and each.grad is None]
            names = names or ["a parameter on another process"]
    if names:
        raise UserError(
            "each trained parameter must get a gradient from each batch: use it in `forward`, remove it, or freeze it, "
            f"as with --freeze {names[0]}; these get none: {', '.join(names)}"
        )


# One order of addition. Floating-point addition is commutative but not associative: neighbours are added, then
# neighbouring sums, and so on. The addends of each process are a whole subtree, so every number of processes that is a
# power of two adds in the same order.


def tree_sum(addends: Sequence[T], add: Callable[[T, T], T] = operator.add) -> T:
    """Return the sum of tensors of one shape, or of lists of tensors; their number is a power of two."""
    while len(addends) > 1:
        addends = [add(left, right) for left, right in zip(addends[::2], addends[1::2], strict=True)]
    return addends[0]


def tree_sum_of_processes(addend: Tensor) -> Tensor:
    """Return the sum of small tensors of all processes, which must call it together; each tensor is sent to all."""
    gathered = [torch.empty_like(addend) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, addend.contiguous())
    return tree_sum(gathered)


def tree_sum_in_place(flat: Tensor) -> None:
    """Replace a vector by the sum of all processes' vectors; each process sends and receives as much as in a ring.

    All processes must call it together: each adds up the chunk of its rank, then the sums are exchanged.
    """
    processes = distributed.get_world_size()
    padded = nn.functional.pad(flat, (0, -len(flat) % processes))
    received = torch.empty_like(padded)
    distributed.all_to_all_single(received, padded)
    distributed.all_gather_into_tensor(padded, tree_sum(received.chunk(processes)).contiguous())
    flat.copy_(padded[: len(flat)])


# Dropout that does not depend on the number of processes: each process draws the mask of the global batch.


def synchronise_dropout(model: nn.Module) -> None:
    """Replace the dropout and stochastic depth layers of `model`, in place, by `GlobalDropout`.

    torch's seed must be the same on all processes. The names of modules and parameters do not change.
    """
    stochastic_depth = getattr(sys.modules.get("torchvision.ops.stochastic_depth"), "StochasticDepth", ())
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # a shared layer under each of its names
            layer: Any = child
            rows = isinstance(child, stochastic_depth) and layer.mode == "row"
            maps = isinstance(child, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
            if (rows or maps or type(child) is nn.Dropout) and layer.p:
                module.register_module(name, GlobalDropout(layer.p, rows, maps).train(layer.training))


class GlobalDropout(nn.Module):
    """Dropout with probability `p` of values, of whole images (`rows`), or of channels of an image (`maps`).

    Input and output are (b, ...): the slice of process `number` of `processes` of the global batch.
    """

    generator: torch.Generator | None = None  # draws the masks; None takes torch's own generator

    def __init__(self, p: float, rows: bool = False, maps: bool = False) -> None:
        super().__init__()
        self.p, self.rows, self.maps = p, rows, maps
        self.number, self.processes = ranks()[:2]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        images = len(input)
        drawn_dims = 1 if self.rows else 2 if self.maps else input.dim()  # the mask is constant over the other axes
        shape = [images * self.processes, *input.shape[1:drawn_dims], *[1] * (input.dim() - drawn_dims)]
        mask = torch.empty(shape, device=input.device).bernoulli_(1 - self.p, generator=self.generator)
        mask = mask[images * self.number : images * (self.number + 1)]
        return input * (mask / max(1 - self.p, 1e-12)).to(input.dtype)


# Placing and preparing


def collate_local(collate: Callable[[list[Any]], Any], local: int, items: list[Any]) -> list[Any]:
    """Return the batch of each of `local` logical processes from the items of a process; `collate` joins a batch."""
    size = len(items) // local
    return [collate(items[start : start + size]) for start in range(0, len(items), size)]


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
    logical: LogicalProcesses,
    model: Model,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    batch_size: int,
    sync_bn: bool,
    precision: str,
    clip_norm: float,
    keep_norms: bool = False,
) -> tuple[DistributedModel, Any, Any]:
    """Return the model with exact BatchNorm, the optimizer with its momentum, and the loader, prepared by Accelerate.

    In addition to Accelerate's `prepare`: a copy of the model for each logical process, DeepSpeed's configuration, and
    DDP's buffers and buckets. The loader then delivers lists: the batch of each logical process of this process.
    """
    total = tree_sum_of_processes if logical.exact else all_reduced
    model = exact_batchnorm(model, total if sync_bn and accelerator.num_processes > 1 else None)
    loader.collate_fn = partial(collate_local, loader.collate_fn, logical.local)
    copies = logical.replicate(model)
    if accelerator.state.deepspeed_plugin:
        configure(accelerator, batch_size, clip_norm, precision)
    if logical.exact:  # no DDP: `DistributedModel` adds the gradients
        modules = [accelerator.prepare_model(one, device_placement=False, evaluation_mode=True) for one in copies]
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        *modules, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start_momentum(optimizer)
    ddp = getattr(modules[0], "_orig_mod", modules[0])  # torch.compile wraps DDP
    if isinstance(ddp, DistributedDataParallel):
        ddp.broadcast_buffers = False  # --sync-bn or `average_statistics` makes the statistics equal
        if accelerator.num_processes > 2:  # the sum of two numbers does not depend on their order
            order_buckets(ddp, model.imgsz)
    return DistributedModel(accelerator, logical, copies, modules, keep_norms), optimizer, loader


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
