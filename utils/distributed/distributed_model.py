"""The model of a run on this process's logical processes: its modules, and sums over all logical processes.

Made by prepare; called by train.py and utils/training/optimizer_steps.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from utils.distributed.deepspeed import gathered_parameters
from utils.distributed.logical_processes import LogicalProcesses
from utils.distributed.ranks import local_world_size, threads_per_process
from utils.distributed.sync_batchnorm import average_statistics
from utils.distributed.tree_sum import PartialSums, tree_sum, tree_sum_in_place, tree_sum_of_processes

if TYPE_CHECKING:
    from models.tasks.contract import Model

B = TypeVar("B")
T = TypeVar("T")


class DistributedModel:
    """A model, `bare`, as each logical process of this process calls it in training.

    modules: Accelerate's wrappers of `replicas`, the first of which is `bare`; they share all parameters. keeps_norms:
    BatchNorm normalises as in evaluation. `bare` is stored because Accelerate's `unwrap_model` imports deepspeed if
    that is installed.
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
        self._trained = [parameter for parameter in self.bare.parameters() if parameter.requires_grad]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._trained)}
        self._partial = PartialSums()
        self._accumulated: dict[int, list[Tensor]] = {}  # by logical process, over the batches of a step
        self._others: deque[tuple[int, Future[list[Tensor]]]] = deque()  # the same of this batch, not yet added
        self._pool: ThreadPoolExecutor | None = None  # on a CPU, once it is known that nothing draws random numbers
        self._threads = min(logical.local, threads_per_process(local_world_size()))
        if accelerator.device.type != "cpu":
            self._threads = 1  # kernels are queued one after another anyway
        wrapper: Any = getattr(self.prepared, "_orig_mod", self.prepared)  # torch.compile wraps DDP
        self._by_buckets = logical.exact and isinstance(wrapper, DistributedDataParallel)
        if self._by_buckets:
            wrapper.register_comm_hook(None, lambda _, bucket: self._sum_bucket(bucket))

    def train(self) -> None:
        """Set the modules to training; with `keeps_norms` BatchNorm normalises as in evaluation."""
        for module in self.modules:
            module.train()
            for layer in module.modules() if self.keeps_norms else ():
                if isinstance(layer, _BatchNorm):
                    layer.eval()

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context with unpartitioned parameters (ZeRO-3). All processes must enter it together."""
        return gathered_parameters(self.prepared)

    def sum(self, addends: Sequence[Tensor]) -> Tensor:
        """Return the sum over all logical processes; `addends` are a tensor of each of this process's.

        All processes must call it together.
        """
        if not self.logical.exact:
            return self.accelerator.reduce(addends[0], "sum")
        local = tree_sum(addends)
        return local if self.accelerator.num_processes == 1 else tree_sum_of_processes(local)

    def map(self, work: Callable[[nn.Module, B], T], batches: Sequence[B], seed: int) -> list[T]:
        """Return the results of `work` for each local logical process, from its module and its batch.

        torch is seeded for each. On a CPU they run in parallel, unless they draw random numbers.
        """
        if self._pool:
            return list(self._pool.map(work, self.modules, batches))
        results = []
        for module, batch in zip(self.modules, batches, strict=True):
            torch.manual_seed(seed)
            results.append(work(module, batch))
        if self._threads > 1:
            drawn, after_seed = torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()
            if torch.equal(drawn, after_seed):
                self._pool = ThreadPoolExecutor(self._threads, initializer=partial(torch.set_num_threads, 1))
            self._threads = 1
        return results

    def backward(self, objectives: Sequence[Tensor]) -> None:
        """Add the gradients of this process's objectives, and in the last batch of a step those of all processes.

        objectives: a scalar for each local logical process. All processes must call it together.
        """
        accelerator = self.accelerator
        if not self.logical.exact:
            accelerator.backward(objectives[0] * accelerator.num_processes)  # DDP takes the mean over processes
            return
        for number in reversed(range(1, len(objectives))):
            self._others.append((number, self._submit(self._gradients, number, objectives[number])))
            if not self._pool:
                self._add_others()
        self._submit(accelerator.backward, objectives[0]).result()  # in DDP's buckets `_sum_bucket` adds the others
        self._add_others()
        if accelerator.sync_gradients:
            if not self._by_buckets:
                gradients: Any = [parameter.grad for parameter in self._trained]
                self._partial.add_to(gradients, range(len(gradients)))
            self._partial.clear()

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._pool:
            return self._pool.submit(work, *arguments)
        done: Future[T] = Future()
        done.set_result(work(*arguments))
        return done

    def _gradients(self, number: int, objective: Tensor) -> list[Tensor]:
        """Return the gradients of a logical process other than the first, over the batches of a step so far."""
        scaled = objective / self.accelerator.gradient_accumulation_steps  # as Accelerate's `backward` does
        if self.accelerator.scaler is not None:
            scaled = self.accelerator.scaler.scale(scaled)
        gradients = torch.autograd.grad(scaled, self._trained, materialize_grads=True)
        before = self._accumulated.pop(number, None)
        return list(torch._foreach_add(gradients, before) if before else gradients)

    def _add_others(self) -> None:
        """Wait for the gradients of the other logical processes of this process, and add them in the last batch."""
        while self._others:
            number, gradients = self._others.popleft()
            if self.accelerator.sync_gradients:
                self._partial.add(gradients.result())
            else:
                self._accumulated[number] = gradients.result()

    def _sum_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket of DDP's gradients over all logical processes: DDP's communication hook."""
        self._add_others()
        parameters = bucket.parameters()
        # DDP stores each gradient in the memory format of its parameter, and returns it as if it were contiguous.
        gradients = [
            flat.as_strided(each.shape, each.stride())
            for flat, each in zip(bucket.gradients(), parameters, strict=True)
        ]
        self._partial.add_to(gradients, [self._numbers[id(each)] for each in parameters])
        tree_sum_in_place(bucket.buffer())
        summed: torch.futures.Future[Tensor] = torch.futures.Future()
        summed.set_result(bucket.buffer())
        return summed

    def average_statistics(self, averages: Sequence[nn.Module]) -> None:
        """Average BatchNorm's statistics over logical processes; with --sync-bn they are equal already.

        averages: the EMA of each local logical process, whose statistics are averaged too.
        """
        for models in (self.replicas, averages):
            average_statistics(models, self.sum, self.logical.count)
