"""Logical processes, and sums over them in one order of addition.

A run is computed by V logical processes; each of the P real ones holds a contiguous range of them. A logical process
has a fixed part of each batch, and BatchNorm statistics, dropout masks and loss sums of its own. By default V is P, and
the order in which an all-reduce adds, and so the rounding, depends on P. With --logical-processes V one binary tree
adds the sums of all logical processes, so that all results are the same bytes for any P from 1 to V.

Floating-point addition is commutative but not associative: neighbours are added, then neighbouring sums, and so on. A
process adds the whole subtrees of its range. Collective operations only copy: the sums of nodes whose children belong
to different processes are added here, in the tree's order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn

from utils.distributed.deepspeed import is_requested
from utils.distributed.ranks import world_size
from utils.errors import UserError, plural

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class Subtree(NamedTuple):
    """The sum over `leaves` logical processes from `first` on, which are all leaves below a node of the tree."""

    first: int
    leaves: int = 1
    total: Any = None


def add_siblings(subtrees: Iterable[Subtree], add: Callable[[T, T], T] = operator.add) -> list[Subtree]:
    """Return the largest whole subtrees of neighbours in rising order; two are added as soon as both are there."""
    joined: list[Subtree] = []
    for subtree in subtrees:
        first, leaves, total = subtree
        while joined and joined[-1].leaves == leaves and joined[-1].first % (2 * leaves) == 0:
            left = joined.pop()
            first, leaves, total = left.first, 2 * leaves, add(left.total, total)
        joined.append(Subtree(first, leaves, total))
    return joined


@dataclass(frozen=True)
class LogicalProcesses:
    """The logical processes of a run, and the ones that this process computes."""

    count: int  # number of logical processes of the run
    processes: int = 1  # number of real ones
    rank: int = 0  # of this process
    exact: bool = True  # whether sums are added by the tree

    @classmethod
    def create(cls, count: int, accelerator: Accelerator) -> LogicalProcesses:
        """Return the logical processes that --logical-processes requests, 0 for one per process."""
        processes = accelerator.num_processes
        return cls(count or processes, processes, accelerator.process_index, bool(count))

    def rank_range(self, rank: int) -> range:
        """Return the logical processes of a process. The lengths differ by at most one, and the longer come first."""
        length, longer = divmod(self.count, self.processes)
        first = rank * length + min(rank, longer)
        return range(first, first + length + (rank < longer))

    @property
    def local(self) -> range:
        """The logical processes of this process."""
        return self.rank_range(self.rank)

    def plan(self, batch_size: int) -> str:
        """Format how the processes share a batch."""
        lengths = [len(self.rank_range(rank)) for rank in range(self.processes)]
        if len(set(lengths)) > 1:
            *first, last = map(str, lengths)
            images = " + ".join(str(batch_size // self.count * length) for length in lengths)
            shares = f"{', '.join(first)} and {last} of {self.count} logical processes"
            return f"{self.processes} processes: {shares}, {images} images"
        split = f"{self.processes} processes x {batch_size // self.processes}" if self.processes > 1 else "1 process"
        return f"{split}, {lengths[0]} of {self.count} logical processes in each" if self.exact else split

    def fix_kernels(self, device: torch.device) -> None:
        """Prevent kernels that are chosen by timing, or that add in an order that depends on the number of threads."""
        if self.exact:
            torch.backends.cudnn.benchmark = False
        if self.exact and self.count > 1 and device.type == "cpu":
            torch.set_num_threads(1)

    # Sums

    @cached_property
    def subtrees(self) -> list[list[Subtree]]:
        """The whole subtrees of each process's range, without their sums: at most 2 log2 V."""
        ranges = map(self.rank_range, range(self.processes))
        return [add_siblings(map(Subtree, part), lambda *_: None) for part in ranges]

    def local_sums(self, addends: Iterable[T], add: Callable[[T, T], T] = operator.add) -> list[T]:
        """Return the sum of each local subtree; of L addends, added as they come, at most log2 L + 1 exist at once."""
        leaves = (Subtree(number, 1, addend) for number, addend in zip(self.local, addends, strict=True))
        return [subtree.total for subtree in add_siblings(leaves, add)]

    def root(self, sums: Iterable[Tensor]) -> Tensor:
        """Return the sum over all logical processes from the sums of all `subtrees`, process by process."""
        pairs = zip(chain(*self.subtrees), sums, strict=True)
        return add_siblings(subtree._replace(total=total) for subtree, total in pairs)[0].total

    def sum(self, addends: Sequence[Tensor]) -> Tensor:
        """Return the sum of a small tensor of each logical process; `addends` are the local ones. All must call it."""
        sums = self.local_sums(addends)
        if self.processes == 1:
            return sums[0]
        padding = [torch.zeros_like(sums[0])] * (max(map(len, self.subtrees)) - len(sums))
        local = torch.stack([*sums, *padding])
        gathered = [torch.empty_like(local) for _ in self.subtrees]
        distributed.all_gather(gathered, local)
        return self.root(chain(*(sums[: len(trees)] for sums, trees in zip(gathered, self.subtrees, strict=True))))

    def sum_in_place(self, sums: Tensor) -> None:
        """Replace row 0 by the sum over all logical processes. sums: of this process's `subtrees`, (subtrees, n).

        All processes must call it together: each adds up the chunk of its rank, then the chunks are exchanged. With one
        subtree a process sends and receives as much as in a ring, else (subtrees + 1) / 2 times as much.
        """
        rows, length = sums.shape
        chunk = -(-length // self.processes)
        padded = nn.functional.pad(sums, (0, chunk * self.processes - length))
        sent = padded.view(rows, self.processes, chunk).transpose(0, 1).reshape(-1)  # the chunks of a rank are adjacent
        sizes = [len(subtrees) * chunk for subtrees in self.subtrees]
        received = sent.new_empty(sum(sizes))
        splits = (sizes, [rows * chunk] * self.processes) if len(set(sizes)) > 1 else ()
        distributed.all_to_all_single(received, sent, *splits)
        total = padded[0]
        distributed.all_gather_into_tensor(total, self.root(received.split(chunk)).contiguous())
        sums[0] = total[:length]


def check_logical_processes(count: int, batch_size: int, sync_bn: bool) -> None:
    """Raise `UserError` if --logical-processes (0: none) does not fit; `sync_bn`: with torch's SyncBatchNorm."""
    processes = world_size()
    fits = count.bit_count() < 2 and processes <= count and (processes == count or not sync_bn)
    if count and not (fits and batch_size != -1 and not is_requested()):
        raise UserError(
            f"--logical-processes {count} on {plural(processes, 'process')}: give a power of two, and start as many "
            "processes or fewer, with --sync-bn on GPUs as many; leave out --batch-size -1 and DeepSpeed"
        )
