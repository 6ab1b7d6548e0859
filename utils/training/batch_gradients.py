"""Compute the gradients of a batch, or of its parts one after another if the memory is too small. Called by train.py.

No process may wait for one that retries, so who may retry depends on how gradients are exchanged:

- With --logical-processes nothing is exchanged before a process has all of its own gradients, and its logical processes
  give the same bytes together or one by one. Each process decides for itself, in any step.
- A single process may always retry.
- DDP exchanges gradients while they are computed. All processes try the first batch, and each later one whose images
  are larger than all before, without an exchange, and halve it together until it fits all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.distributed.distributed_model import DistributedModel
from utils.training.cuda_graph import record_networks
from utils.training.memory import is_out_of_memory

if TYPE_CHECKING:
    from models.tasks.contract import LossTerms
    from utils.batch import Batch
    from utils.run import Run

T = TypeVar("T")


class BatchGradients:
    """Adds the gradients of batches to the parameters' gradients.

    Args:
        terms: runs the forward pass and the loss on a logical process's batch
        objective: maps the means of the loss terms to the scalar to differentiate
        retry: whether to compute smaller parts if the memory is too small; False with --no-oom-retry
        record: whether to record the network's kernels as CUDA graphs, if that is possible
    """

    def __init__(
        self,
        run: Run,
        model: DistributedModel,
        terms: Callable[[nn.Module, Batch], LossTerms],
        objective: Callable[[Tensor], Tensor],
        retry: bool = True,
        record: bool = False,
    ) -> None:
        self.run, self.model, self.terms, self.objective = run, model, terms, objective
        self.parts = 1  # number of parts of a logical process's batch; with `one_by_one` always 1
        self.one_by_one = False  # the logical processes of this process take turns
        logical, accelerator = model.logical, run.accelerator
        processes = accelerator.num_processes
        splits = retry and not logical.exact and accelerator.state.deepspeed_plugin is None
        self._takes_turns = retry and logical.exact and not logical.sync_bn and logical.local > 1
        self._splits = splits and processes == 1
        self._rehearses = splits and processes > 1
        self.recordings = record_networks(model, run.print) if record else []
        self._with_buffers = [layer for layer in model.layers if layer._buffers]
        self._saved: list[list[Tensor]] = []  # copies of the buffers
        self._largest_tried = 0  # pixels of an image; those of a batch have one size on all processes

    def __call__(self, shares: Sequence[Batch], seed: int) -> list[Tensor]:
        """Add the gradients of a batch; return the share of each local logical process in the loss terms, (terms,).

        All processes must call it together. Raises torch's error if a part of one image does not fit.
        """
        if self._rehearses:
            self._rehearse(shares[0])
        if self._takes_turns:
            return self._in_turn(shares, seed)
        if not self._splits:
            return self._once(shares, seed)
        gradients = [(each, each.grad) for each in self.model.parameters if each.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None  # set aside while a failed attempt may have to be undone
        self._save_buffers()
        losses = self._attempt(shares, lambda: self._once(shares, seed))
        for parameter, gradient in gradients:
            if parameter.grad is not None:
                gradient += parameter.grad
            parameter.grad = gradient
        return losses

    def _buffers(self) -> list[list[Tensor]]:
        """Return the buffers of all replicas, by type: one kernel then copies many."""
        of_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in (buffer for layer in self._with_buffers for buffer in layer._buffers.values()):
            if buffer is not None:
                of_type.setdefault(buffer.dtype, []).append(buffer)
        return list(of_type.values())

    def _save_buffers(self) -> None:
        buffers = self._buffers()
        self._saved = self._saved or [[torch.empty_like(buffer) for buffer in each] for each in buffers]
        for copies, each in zip(self._saved, buffers, strict=True):
            torch._foreach_copy_(copies, each)

    def _restore_buffers(self) -> None:
        for copies, each in zip(self._saved, self._buffers(), strict=True):
            torch._foreach_copy_(each, copies)

    def _attempt(self, shares: Sequence[Batch], work: Callable[[], T]) -> T:
        """Return the result of `work`, which is repeated with less at once while the memory is too small for it.

        Before another attempt the buffers get the values that were saved.
        """
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or not self._halve(shares):
                    raise
            self._restore_buffers()
            if self._splits:
                for parameter in self.model.parameters:
                    parameter.grad = None
            clear_device_cache(garbage_collection=True)

    def _in_turn(self, shares: Sequence[Batch], seed: int) -> list[Tensor]:
        """Run the logical processes of this process, one by one if the memory is too small for all of them.

        Exchanges are outside the attempts, so no process exchanges anything twice.
        """
        model = self.model
        self._save_buffers()
        terms: list[LossTerms] = []

        def forward() -> list[Tensor]:
            terms.clear()
            if self.one_by_one:
                with torch.no_grad():
                    counts = {number: each.counts for number, each in model.in_turn(self.terms, shares, seed)}
                return [counts[number] for number in range(len(shares))]
            terms.extend(model.map(self.terms, shares, seed))
            return [each.counts for each in terms]

        counts = model.sum(self._attempt(shares, forward))

        def backward() -> tuple[dict[int, Tensor], list[Tensor]]:
            if not self.one_by_one:
                losses = dict(enumerate(each.means(counts) for each in terms))
                sums = model.differentiate([self.objective(each) for each in losses.values()])
                return {number: each.detach() for number, each in losses.items()}, sums
            terms.clear()
            self._restore_buffers()
            losses = {}

            def objectives() -> Iterator[tuple[int, Tensor]]:
                for number, each in model.in_turn(self.terms, shares, seed):
                    means = each.means(counts)
                    losses[number] = means.detach()
                    yield number, self.objective(means)

            return losses, model.differentiate_in_turn(objectives())

        losses, sums = self._attempt(shares, backward)
        model.exchange(sums)
        return [losses[number] for number in range(len(shares))]

    def _once(self, shares: Sequence[Batch], seed: int) -> list[Tensor]:
        return self._in_parts(shares[0], seed) if self.parts > 1 else self._together(shares, seed)

    def _together(self, shares: Sequence[Batch], seed: int) -> list[Tensor]:
        """Run all logical processes of this process at once."""
        model = self.model
        terms = model.map(self.terms, shares, seed)
        total = model.sum([each.counts for each in terms])
        losses = [each.means(total) for each in terms]
        model.backward([self.objective(each) for each in losses])
        return [each.detach() for each in losses]

    def _in_parts(self, batch: Batch, seed: int) -> list[Tensor]:
        """Run the parts of a batch one after another, with the counts of the whole, which a first pass adds up."""
        model, module, accelerator = self.model, self.model.modules[0], self.run.accelerator
        size = -(-len(batch.infos) // self.parts)
        parts = [batch.part(first, first + size) for first in range(0, len(batch.infos), size)]
        self._save_buffers()
        torch.manual_seed(seed)
        with torch.no_grad():
            local = sum((self.terms(module, part).counts for part in parts[1:]), self.terms(module, parts[0]).counts)
            self._restore_buffers()
        counts = model.sum([local])
        torch.manual_seed(seed)
        total: Tensor | None = None
        for number, part in enumerate(parts, 1):
            exchanged = number == len(parts) or not accelerator.sync_gradients  # `accumulate` holds back the rest
            with nullcontext() if exchanged else accelerator.no_sync(model.prepared):
                losses = self.terms(module, part).means(counts)
                model.backward([self.objective(losses)])
            total = losses.detach() if total is None else total + losses.detach()
        assert total is not None
        return [total]

    def _halve(self, shares: Sequence[Batch]) -> bool:
        """Free recorded kernels, or halve what is computed at once, and say so; return False if neither is possible."""
        if sum(recording.drop() for recording in self.recordings):
            self._say("the network's kernels are not recorded as a CUDA graph; no byte changes")
            return True
        if self._takes_turns:
            if self.one_by_one:
                return False
            self.one_by_one = True
            self._say(f"the {self.model.logical.local} logical processes of a process take turns; no byte changes")
            return True
        images = len(shares[0].infos)
        if self.parts >= images or not shares[0].can_be_parted():
            return False
        self.parts = min(2 * self.parts, images)
        self._say(
            f"each batch is computed in {self.parts} parts of {-(-images // self.parts)} images, accumulated to the "
            "same --batch-size; only BatchNorm sees the parts"
        )
        return True

    def _say(self, what: str) -> None:
        self.run.print(f"warning: out of memory: from here on {what} (--no-oom-retry ends the run instead)")

    def _rehearse(self, batch: Batch) -> None:
        """Try a batch on all processes, without an exchange of gradients, and halve it until it fits all of them.

        Does nothing unless its images are larger than all before.
        """
        pixels = batch.images[0, 0].numel()
        if pixels <= self._largest_tried:
            return
        self._largest_tried = pixels
        while any(self.run.collectives.gather([not self._fits(batch)])):
            if not all(self.run.collectives.gather([self._halve([batch])])):
                return  # the step itself will raise the error

    def _fits(self, batch: Batch) -> bool:
        """Return whether forward and backward pass of a part fit in memory. Changes neither gradients nor buffers."""
        model, part = self.model.bare, batch
        if self.parts > 1:
            part = batch.part(0, -(-len(batch.infos) // self.parts))
        layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
        for layer in layers:
            layer.eval()  # keeps its statistics, and waits for no other process
        fits = True
        try:
            terms = self.terms(model, part)
            parameters = [each for each in model.parameters() if each.requires_grad]
            torch.autograd.grad(self.objective(terms.means(terms.counts)), parameters, allow_unused=True)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        for layer in layers:
            layer.train()
        clear_device_cache(garbage_collection=True)
        return fits
