"""The model of a run on this process's logical processes: its modules, and sums over all logical processes.

Made by prepare; called by train.py and utils/training/optimizer_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.distributed.deepspeed import gathered_parameters
from utils.distributed.local_threads import LocalThreads, Meeting
from utils.distributed.logical_processes import LogicalProcesses
from utils.distributed.ranks import local_world_size, threads_per_process
from utils.distributed.sync_batchnorm import Shares, average_statistics, normalise_together
from utils.distributed.sync_dropout import draw_masks_of
from utils.distributed.tree_sum import PartialSums, tree_sum, tree_sum_in_place, tree_sum_of_processes
from utils.errors import UserError

if TYPE_CHECKING:
    from models.tasks.contract import Model

B = TypeVar("B")
T = TypeVar("T")

BUCKET = 1 << 22  # numbers that processes add at once


class DistributedModel:
    """A model, `bare`, as each logical process of this process calls it in training.

    `bare` is stored because Accelerate's `unwrap_model` imports deepspeed if that is installed. `parameters` and
    `layers` are listed once: every step needs them, and yolov9t has 1,400 modules.

    Args:
        modules: Accelerate's wrappers of `replicas`, the first of which is `bare`; they share all parameters
        keeps_norms: whether BatchNorm normalises as in evaluation
    """

    def __init__(
        self,
        accelerator: Accelerator,
        logical: LogicalProcesses,
        replicas: Sequence[Model],
        modules: Sequence[nn.Module],
        keeps_norms: bool = False,
    ) -> None:
        self.accelerator, self.logical, self.keeps_norms = accelerator, logical, keeps_norms
        self.replicas, self.modules = replicas, modules
        self.bare, self.prepared = replicas[0], modules[0]
        self.parameters = list(self.bare.parameters())
        self.layers = [layer for replica in replicas for layer in replica.modules()]  # of all replicas
        self._threads: LocalThreads | None = None
        if logical.exact:
            self._prepare_replicas()

    def _prepare_replicas(self) -> None:
        logical, device = self.logical, self.accelerator.device
        self._trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._flat, self._gradients = flat_like(self._trained)
        self._accumulated: dict[int, list[Tensor]] = {}  # gradients by logical process, over the batches of a step
        self._generators = [torch.Generator(device) for _ in self.replicas]
        meeting = Meeting(logical.local)
        for number, (replica, generator) in enumerate(zip(self.replicas, self._generators, strict=True)):
            draw_masks_of(replica, logical.first + number, logical.count, generator)
            if logical.sync_bn:
                normalise_together(replica, Shares(self.sum, partial(meeting.together, number)))
        self._usable_threads = 1  # a GPU's kernels are queued one after another in any case
        if device.type == "cpu":
            self._usable_threads = min(logical.local, threads_per_process(local_world_size()))
            if logical.sync_bn and logical.local > 1:
                self._threads = LocalThreads(logical.local, meeting)

    def train(self) -> None:
        """Set the modules to training mode; with `keeps_norms` BatchNorm normalises as in evaluation."""
        for module in self.modules:
            module.train()
            for layer in module.modules() if self.keeps_norms else ():
                if isinstance(layer, _BatchNorm):
                    layer.eval()

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context with unpartitioned parameters (ZeRO-3). All processes must enter it together."""
        return gathered_parameters(self.parameters)

    def sum(self, addends: Sequence[Tensor]) -> Tensor:
        """Return the sum over all logical processes. All processes must call it together.

        Args:
            addends: a tensor of each logical process of this process
        """
        if not self.logical.exact:
            return self.accelerator.reduce(addends[0], "sum")
        local = tree_sum(addends)
        return local if self.accelerator.num_processes == 1 else tree_sum_of_processes(local)

    def map(self, work: Callable[[nn.Module, B], T], batches: Sequence[B], seed: int) -> list[T]:
        """Return the results of `work` for each local logical process, from its module and its batch.

        torch is seeded for each. On a CPU the calls run in parallel, unless the first batch draws random numbers.
        """
        if not self.logical.exact:
            torch.manual_seed(seed)
            return [work(self.modules[0], batches[0])]
        for generator in self._generators:
            generator.manual_seed(seed)
        torch.manual_seed(seed)
        if self._threads:
            results = list(self._threads.map(work, self.modules, batches))
            if has_drawn(seed):
                raise UserError(
                    "the model draws random numbers in training in layers other than dropout, which cannot be repeated "
                    f"here; start {self.logical.count} processes, as many as --logical-processes"
                )
            return results
        results = []
        for module, batch in zip(self.modules, batches, strict=True):
            torch.manual_seed(seed)
            results.append(work(module, batch))
        if self._usable_threads > 1 and not has_drawn(seed):
            self._threads = LocalThreads(self._usable_threads)
        self._usable_threads = 1
        return results

    def backward(self, objectives: Sequence[Tensor]) -> None:
        """Add the gradients of this process's objectives, and in the last batch of a step all processes' gradients.

        All processes must call it together.

        Args:
            objectives: a scalar for each local logical process
        """
        accelerator = self.accelerator
        if not self.logical.exact:
            accelerator.backward(objectives[0] * accelerator.num_processes)  # DDP takes the mean over processes
            return
        self.exchange(self.differentiate(objectives))

    def differentiate(self, objectives: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of this process's gradients, [] in a batch that is not the last of its step (`exact`).

        Nothing is exchanged.

        Args:
            objectives: a scalar for each local logical process
        """
        numbers = list(reversed(range(len(objectives))))
        scaled = [self._scaled(objectives[number]) for number in numbers]
        gradients = self._threads.map(self._gradients_of, scaled) if self._threads else map(self._gradients_of, scaled)
        return self._local_sums(zip(numbers, gradients, strict=True))

    def differentiate_in_turn(self, objectives: Iterable[tuple[int, Tensor]]) -> list[Tensor]:
        """Do the same as `differentiate` with one objective after another.

        Args:
            objectives: numbers of local logical processes and their scalars, as from `in_turn`
        """
        return self._local_sums((number, self._gradients_of(self._scaled(each))) for number, each in objectives)

    def in_turn(self, work: Callable[[nn.Module, B], T], batches: Sequence[B], seed: int) -> Iterator[tuple[int, T]]:
        """Yield the results of `map`, from the last logical process to the first, each with its local number.

        Each result is computed only once the previous one is no longer needed.
        """
        for number in reversed(range(len(batches))):
            self._generators[number].manual_seed(seed)
            torch.manual_seed(seed)
            yield number, work(self.modules[number], batches[number])

    def exchange(self, sums: Sequence[Tensor]) -> None:
        """Set the parameters' gradients to the sum over all processes of the result of `differentiate`, if not empty.

        All processes must call it together.
        """
        if not sums:
            return
        torch._foreach_copy_(self._gradients, list(sums))
        if self.accelerator.num_processes > 1:
            for bucket in self._flat.split(BUCKET):
                tree_sum_in_place(bucket)
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = gradient

    def _local_sums(self, gradients: Iterable[tuple[int, Sequence[Tensor]]]) -> list[Tensor]:
        partial_sums, accumulated = PartialSums(), {}
        is_last = self.accelerator.sync_gradients
        for number, each in gradients:
            if before := self._accumulated.get(number):
                each = torch._foreach_add(list(each), before)
            if is_last:
                partial_sums.add(each)
            else:
                accumulated[number] = list(each)
        self._accumulated = accumulated  # only now: a process that runs out of memory tries again
        return partial_sums.take() if is_last else []

    def _scaled(self, objective: Tensor) -> Tensor:
        scaler, objective = self.accelerator.scaler, objective / self.accelerator.gradient_accumulation_steps
        return scaler.scale(objective) if scaler else objective  # as in Accelerate's `backward`

    def _gradients_of(self, objective: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(objective, self._trained, materialize_grads=True)

    def average_statistics(self, averages: Sequence[nn.Module]) -> None:
        """Average BatchNorm's statistics over logical processes; with --sync-bn they are equal already.

        Args:
            averages: the EMA of each local logical process, whose statistics are averaged too
        """
        for models in (self.replicas, averages):
            average_statistics(models, self.sum, self.logical.count)


def has_drawn(seed: int) -> bool:
    """Return whether torch has drawn random numbers on the CPU since it was seeded."""
    return not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())


def flat_like(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a vector, and views of it with the shapes and memory formats of `parameters`, one after another."""
    vector = torch.empty(sum(each.numel() for each in parameters), device=parameters[0].device)
    parts = vector.split([each.numel() for each in parameters])
    return vector, [part.as_strided(each.shape, each.stride()) for part, each in zip(parts, parameters, strict=True)]
