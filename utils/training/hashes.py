"""--hashes: a row of hashes.csv per optimizer step, which `python -m utils.compare_runs` reads. Called by steps.py.

A hash is a sum of 64-bit words times odd factors that wraps around: no order of addition changes it, a bit does.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor, nn

from utils.batch import ClassInfo
from utils.compare_runs import BY_PARAMETER, COUNTERS, FORMAT, FORMAT_FILE, HASHES, read_hashes
from utils.console import log
from utils.errors import UserError
from utils.training.log import DeviceValue

if TYPE_CHECKING:
    from utils.batch import Batch
    from utils.checkpoint import Progress, TrainingState
    from utils.distributed.model import DistributedModel
    from utils.run import Run

FACTORS = (-0x61C8864680B583EB, -0x4B47D0C5A1B2E295)  # odd, with about as many ones as zeros among their 64 bits


@cache
def multipliers(count: int, device: torch.device) -> Tensor:
    """Return odd numbers that look random, int64 (count,)."""
    numbers = torch.arange(1, count + 1, device=device) * FACTORS[0]
    numbers = (numbers ^ (numbers >> 31)) * FACTORS[1]
    return (numbers ^ (numbers >> 29)) | 1


def row_hashes(values: Tensor) -> Tensor:
    """Return the hash of each row of a tensor (n, ...), int64 (n,)."""
    rows = values.contiguous().flatten(1).view(torch.uint8)
    words = nn.functional.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)  # rows filled up with zeros
    return (words * multipliers(words.shape[1], words.device)).sum(1)


class StepHashes:
    """The hashes of what each optimizer step reads and changes, after the steps that `state` has taken.

    All processes must make the same calls; the main one writes. Nothing waits for the device.
    """

    def __init__(self, run: Run, model: DistributedModel, terms: Sequence[str], state: TrainingState) -> None:
        self.run, self.model, self.device = run, model, run.accelerator.device
        names = [name for name, _ in model.model.named_parameters()]
        self.words = [(parameter.numel() + 1) // 2 for parameter in model.parameters]  # two float32 each
        self.factors = multipliers(sum(self.words), self.device)
        self.padding = torch.zeros(1, device=self.device)
        self.batches = self.gradients = torch.zeros(2 + len(terms), dtype=torch.int64, device=self.device)
        self.rows: deque[tuple[tuple[int, ...], DeviceValue]] = deque()  # not yet written
        columns = [f"{kind} {name}" for kind in BY_PARAMETER for name in names]
        header = [*COUNTERS, "pixels", "targets", *terms, *BY_PARAMETER, *columns]
        self.file: IO[str] | None = None  # on the main process
        run.on_main(lambda: self._open(header, state.progress.step))

    def _open(self, header: Sequence[str], step: int) -> None:
        rows = []
        if step and (self.run.path / HASHES).exists():
            try:
                rows = read_hashes(self.run.path)
            except UserError as error:
                log(f"warning: {error}; {HASHES} begins anew after step {step}")
        (self.run.path / FORMAT_FILE).write_text(f"format: {FORMAT}\n")
        self.file = (self.run.path / HASHES).open("w", newline="")
        csv.writer(self.file).writerows([header, *(row.values() for row in rows if int(row["step"]) <= step)])

    def add(self, losses: Tensor, batches: Sequence[Batch]) -> None:
        """Add the loss terms of a global batch, (terms,), and the batch of each local logical process to the step."""
        pixels = targets = torch.zeros((), dtype=torch.int64, device=self.device)
        for number, batch in zip(self.model.logical.local, batches, strict=True):
            count = len(batch.images)
            places = multipliers((number + 1) * count, self.device)[number * count :]  # of images in the global batch
            rows, owners = batch.targets.float(), places
            if not isinstance(batch.infos[0], ClassInfo):
                rows, owners = rows[:, 1:], places[rows[:, 0].long()]
            pixels = pixels + (row_hashes(batch.images.permute(0, 2, 3, 1)) * places).sum()
            targets = targets + (row_hashes(rows) * owners).sum()
        inputs = self.run.accelerator.reduce(torch.stack([pixels, targets]), "sum")
        self.batches = self.batches + torch.cat([inputs, row_hashes(losses.detach().float()[:, None])])

    def add_gradients(self) -> None:
        """Hash the gradients of the step, reduced and not yet clipped."""
        absent = torch.zeros_like
        self.gradients = self._by_parameter([absent(p) if p.grad is None else p.grad for p in self.model.parameters])

    def finish(self, progress: Progress) -> None:
        """Hash the weights after the step, and end its row."""
        weights = self._by_parameter(self.model.parameters)
        row = torch.cat([self.batches, self.gradients.sum(0, True), weights.sum(0, True), self.gradients, weights])
        self.rows.append(((progress.step, progress.epoch + 1, progress.batch), DeviceValue(row)))
        self.batches = torch.zeros_like(self.batches)

    def write(self, keep: int) -> None:
        """Write all rows but the last `keep`, which the device may still be computing."""
        while len(self.rows) > keep:
            counters, values = self.rows.popleft()
            row = [*counters, *(f"{number % 2**64:016x}" for number in values.read())]
            if self.file:
                csv.writer(self.file).writerow(row)
                self.file.flush()

    @torch.no_grad()
    def _by_parameter(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the hash of each parameter's tensor, in the order of its memory, int64 (parameters,)."""
        flat = []
        for tensor in tensors:
            flat.append(tensor.float().as_strided((tensor.numel(),), (1,)))  # without a copy
            if tensor.numel() % 2:
                flat.append(self.padding)
        words = torch.cat(flat).view(torch.int64).mul_(self.factors)
        return torch.stack([parameter_words.sum() for parameter_words in words.split(self.words)])
