"""Logical processes: a run computes what V processes compute, whatever the number of real processes.

Called by train.py and utils/training/optimizer_steps.py, which give the flags, and by prepare. A logical process has a
fixed share of each batch, and BatchNorm statistics, parts of dropout's masks and loss sums of its own. One tree
(tree_sum.py) adds the sums of all logical processes, so all results are the same bytes on 1, 2, 4 ... processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from utils.distributed.deepspeed import is_requested
from utils.distributed.ranks import world_size
from utils.errors import UserError

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class SyncOptions:
    """The flags of the batch and of the communication between processes."""

    batch_size: int  # images per batch, in total over all processes
    sync_bn: bool
    logical_processes: int
    comm_hook: str


@dataclass(frozen=True)
class LogicalProcesses:
    """The logical processes of a run, and the ones that this process computes.

    Without --logical-processes each process is one logical process, and an all-reduce adds the sums, rounded in an
    order that depends on the number of processes.
    """

    count: int  # number of logical processes of the run
    local: int  # number of logical processes of this process: first, first + 1 ...
    first: int
    sync_bn: bool = False  # whether BatchNorm has the statistics of all logical processes
    exact: bool = False  # whether sums are added by the tree

    @classmethod
    def of(cls, options: SyncOptions, accelerator: Accelerator) -> LogicalProcesses:
        """Return the logical processes that the flags request. Raises `UserError` for flags that exclude each other."""
        processes, count = accelerator.num_processes, options.logical_processes
        check_logical_processes(options, processes)
        if not count or (options.sync_bn and accelerator.device.type != "cpu"):
            return cls(processes, 1, accelerator.process_index, options.sync_bn and processes > 1)
        local = count // processes
        return cls(count, local, local * accelerator.process_index, options.sync_bn and count > 1, exact=True)

    def fix_kernels(self, device: torch.device) -> None:
        """Prevent kernels that are chosen by timing, or that add in an order that depends on the number of threads."""
        if not self.exact:
            return
        torch.backends.cudnn.benchmark = False
        if self.count > 1 and device.type == "cpu":
            torch.set_num_threads(1)

    def messages(self, options: SyncOptions, device: torch.device) -> list[str]:
        """Return a line for the console about what --logical-processes promises."""
        if options.logical_processes < 2:
            return []
        if not self.exact:
            return [
                "warning: --logical-processes with --sync-bn on a GPU: results are equal on other numbers of processes "
                "up to rounding only, which grows"
            ]
        counts = [str(1 << power) for power in range(self.count.bit_length())]
        numbers = f"{', '.join(counts[:-1])} or {counts[-1]}"
        kind = "CPU, one thread each," if device.type == "cpu" else "GPU"
        return [
            f"logical processes: {self.count}, {self.local} on each process; the same bytes on {numbers} processes "
            f"with this type of {kind} and these versions of torch and its libraries"
        ]

    def replicate(self, model: M) -> list[M]:
        """Return a module for each logical process of this process: `model`, and copies that share its parameters.

        The copies have buffers of their own.
        """
        shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        return [model, *(copy.deepcopy(model, dict(shared)) for _ in range(1, self.local))]


def check_logical_processes(options: SyncOptions, processes: int = 0) -> None:
    """Raise `UserError` for flags that --logical-processes excludes, and for numbers that do not fit each other.

    Args:
        processes: number of processes of the run; 0 takes the number that were launched
    """
    count, processes = options.logical_processes, processes or world_size()
    if not count:
        return
    given = f"--logical-processes {count}"
    if count & (count - 1):
        below = 1 << (count.bit_length() - 1)
        raise UserError(f"{given}: it must be a power of two; give {below} or {2 * below}")
    if processes > count:
        raise UserError(f"{given}: there are {processes} processes; start {count}, or fewer that divide it evenly")
    if count % processes:
        fewer = 1 << (processes.bit_length() - 1)
        raise UserError(f"{given} cannot be shared evenly by {processes} processes; start {fewer} or {2 * fewer}")
    if is_requested():
        raise UserError(f"{given} cannot be used with DeepSpeed, which adds gradients in an order of its own")
    if options.comm_hook:
        raise UserError(f"{given} cannot be used with --comm-hook, which rounds the gradients of real processes")
    if options.batch_size == -1:
        raise UserError(f"{given}: --batch-size -1 depends on the memory of this machine; give a number")


class CollateShares:
    """Collates the items of this process's batch as a list: the batch of each of its logical processes.

    Args:
        collate: joins the items of one batch
    """

    def __init__(self, collate: Callable[[list[Any]], Any], shares: int) -> None:
        self.collate, self.shares = collate, shares

    def __call__(self, items: list[Any]) -> list[Any]:
        size = len(items) // self.shares
        return [self.collate(items[start : start + size]) for start in range(0, len(items), size)]
