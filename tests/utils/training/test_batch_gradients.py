"""Batches that do not fit the memory, which is simulated: the same gradients, and no process that waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.tasks.contract import LossTerms
from tests.conftest import OnProcesses
from utils.batch import Batch, ClassBatch
from utils.distributed.accelerator import start
from utils.distributed.distributed_model import DistributedModel
from utils.distributed.logical_processes import LogicalProcesses, SyncOptions
from utils.distributed.prepare import place_model, prepare
from utils.run import Run
from utils.training.batch_gradients import BatchGradients

IMAGES, CLASSES = 8, 3


class _FailsInBackward(torch.autograd.Function):
    """The identity; its backward pass lacks memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Network(nn.Module):
    """Convolutions, a BatchNorm layer if `norm`, and class scores."""

    imgsz = 8

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.norm(self.first(images)).relu().mean((2, 3)))  # type: ignore[no-any-return]


class Device:
    """A memory of `limit` images at a time, and in which pass it is exceeded; counts its failures."""

    def __init__(self, limit: int, backward: bool = False) -> None:
        self.limit, self.backward, self.failures = limit, backward, 0

    def terms(self, module: nn.Module, batch: Batch) -> LossTerms:
        scores = module(batch.images.float() / 255)
        if len(batch.images) > self.limit and (torch.is_grad_enabled() or not self.backward):
            self.failures += 1
            if not self.backward:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            scores = _FailsInBackward.apply(scores)
        # Weights that differ by image: the mean over a part is not that of the batch.
        weights = batch.targets.sum(1)
        loss = -((batch.targets * scores.log_softmax(1)).sum(1)).sum()
        return LossTerms(loss.view(1, 1), weights.sum().view(1, 1), torch.ones(1, 1))


def batch_of(seed: int, images: int = IMAGES, side: int = 8) -> ClassBatch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (images, 3, side, side), generator=generator, dtype=torch.uint8)
    return ClassBatch(pixels, torch.rand(images, CLASSES, generator=generator), tuple(range(images)))


def made(folder: Path, norm: bool = False, logical: int = 0) -> tuple[Run, DistributedModel]:
    accelerator, precision = start("cpu", "no", 60.0)
    run = Run(accelerator, precision)
    run.path = folder
    torch.manual_seed(0)
    model: Any = Network(norm)
    place_model(accelerator, model)
    options = SyncOptions(IMAGES, False, logical, "")
    LogicalProcesses.of(options, accelerator).fix_kernels(accelerator.device)
    optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader([0] * 8, batch_size=8)
    distributed, _, _ = prepare(accelerator, model, optimizer, loader, options, precision="no", clip_norm=10.0)
    distributed.train()
    return run, distributed


def objective(means: Tensor) -> Tensor:
    return means.sum() * IMAGES


def gradients_of(model: DistributedModel) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.bare.parameters() if parameter.grad is not None]


# One process


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("limit", "parts"), [(7, 2), (4, 2), (3, 4), (1, 8)])
def test_parts_have_the_gradient_of_the_batch(
    limit: int, parts: int, backward: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the gradient of an accumulated batch before."""
    run, model = made(tmp_path)
    results = []
    for device in (Device(IMAGES), Device(limit, backward)):
        model.bare.zero_grad()
        add = BatchGradients(run, model, device.terms, objective)
        losses = [add([batch_of(seed)], seed)[0] for seed in (1, 2)]
        results.append([*losses, *gradients_of(model)])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    printed = capsys.readouterr().out
    halvings = add.parts.bit_length() - 1
    assert printed.count("warning: out of memory: from here on each batch is computed in ") == halvings
    assert f"in {parts} parts of {IMAGES // parts} images" in printed
    assert add.parts == parts
    assert device.failures == halvings  # not again at the second batch


def test_batches_that_fit_are_the_same_bytes(tmp_path: Path) -> None:
    run, model = made(tmp_path, norm=True)
    results = []
    for retry in (True, False):
        model.bare.load_state_dict(made(tmp_path, norm=True)[1].bare.state_dict())
        model.bare.zero_grad()
        add = BatchGradients(run, model, Device(IMAGES).terms, objective, retry)
        losses = [add([batch_of(seed)], seed)[0] for seed in (1, 2, 3)]
        results.append([*losses, *gradients_of(model), *(buffer.clone() for buffer in model.bare.buffers())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_a_failed_attempt_leaves_no_trace(tmp_path: Path) -> None:
    """In BatchNorm's statistics: they have seen the parts, once each."""
    run, model = made(tmp_path, norm=True)
    fresh = {name: value.clone() for name, value in model.bare.state_dict().items()}
    BatchGradients(run, model, Device(4, backward=True).terms, objective)([batch_of(1)], 1)
    after = [buffer.clone() for buffer in model.bare.buffers()]
    model.bare.load_state_dict(fresh)
    for first in (0, 4):
        Device(IMAGES).terms(model.bare, batch_of(1).part(first, first + 4))
    for ours, expected in zip(after, model.bare.buffers(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_a_failed_attempt_leaves_no_gradient(tmp_path: Path) -> None:
    """Its first half has been added when the second does not fit."""
    run, model = made(tmp_path)
    expected, calls = gradients_after(run, model, Device(IMAGES)), []

    class LaterFull(Device):
        def terms(self, module: nn.Module, batch: Batch) -> LossTerms:
            if torch.is_grad_enabled():
                calls.append(len(batch.images))
                if calls == [8, 4, 4]:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().terms(module, batch)

    ours = gradients_after(run, model, LaterFull(4))
    assert calls == [8, 4, 4, 2, 2, 2, 2]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def gradients_after(run: Run, model: DistributedModel, device: Device) -> list[Tensor]:
    """Return the gradients of one batch."""
    model.bare.zero_grad()
    BatchGradients(run, model, device.terms, objective)([batch_of(1)], 1)
    return gradients_of(model)


def test_the_error_if_nothing_helps(tmp_path: Path) -> None:
    run, model = made(tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        BatchGradients(run, model, Device(0).terms, objective)([batch_of(1)], 1)
    with pytest.raises(torch.OutOfMemoryError):
        BatchGradients(run, model, Device(4).terms, objective, retry=False)([batch_of(1)], 1)

    def broken(module: nn.Module, batch: Batch) -> LossTerms:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        BatchGradients(run, model, broken, objective)([batch_of(1)], 1)


# Several processes


class UnreliableDevice(Device):
    """A memory that is exceeded by chance, another one on each process, while logical processes run together."""

    def __init__(self, seed: int) -> None:
        super().__init__(IMAGES)
        self.random, self.add = np.random.default_rng(seed), None

    def terms(self, module: nn.Module, batch: Batch) -> LossTerms:
        together = self.add is not None and not self.add.one_by_one
        self.limit = 0 if together and self.random.random() < 0.2 else IMAGES
        self.backward = bool(self.random.random() < 0.5)
        return super().terms(module, batch)


def tries(folder: str, count: int) -> list[list[Tensor]]:
    """Return losses and gradients of `count` batches on four logical processes, with and without failures."""
    run, model = made(Path(folder), norm=True, logical=4)
    rank, results = run.accelerator.process_index, []
    local = model.logical.local
    fresh = [[buffer.clone() for buffer in replica.buffers()] for replica in model.replicas]
    device = UnreliableDevice(rank)
    for unreliable in (False, True):
        for replica, buffers in zip(model.replicas, fresh, strict=True):
            for buffer, value in zip(replica.buffers(), buffers, strict=True):
                buffer.data.copy_(value)
        values: list[Tensor] = []
        for number in range(count):
            run.accelerator.gradient_state._set_sync_gradients(number % 2 == 1)  # two batches per step
            terms = device.terms if unreliable else Device(IMAGES).terms
            add = device.add = BatchGradients(run, model, terms, objective)  # each try begins with all at once
            shares = [batch_of(100 * number + rank * local + k, 2) for k in range(local)]
            values += add(shares, number)
            values += gradients_of(model) if number % 2 else []
        values += [buffer.clone() for replica in model.replicas for buffer in replica.buffers()]
        results.append(values)
    assert device.failures > count // 20
    return results


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("processes", [1, 2])
def test_tries_of_logical_processes(processes: int, count: int, on_processes: OnProcesses, tmp_path: Path) -> None:
    """In the forward or the backward pass, on one process or both: no byte changes, and nobody waits for ever."""
    for reliable, unreliable in on_processes(processes, tries, str(tmp_path), count):
        assert all(torch.equal(one, two) for one, two in zip(reliable, unreliable, strict=True))


def voted(folder: str, count: int) -> list[tuple[int, int, list[Tensor], list[Tensor]]]:
    """Return the images that fit this process, the agreed parts, and gradients without and with the limit, per try."""
    run, model = made(Path(folder))
    rank, results = run.accelerator.process_index, []
    random = np.random.default_rng(rank)
    for number in range(count):
        limit, gradients = int(random.integers(1, IMAGES + 1)), []
        for device in (Device(IMAGES), Device(limit, backward=bool(random.random() < 0.5))):
            model.prepared.zero_grad()
            add = BatchGradients(run, model, device.terms, objective)  # as in the first batch of a run
            for seed in (2 * number, 2 * number + 1):
                add([batch_of(10 * seed + rank)], seed)
            gradients.append(gradients_of(model))
        results.append((limit, add.parts, *gradients))
    return results


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.long)])
def test_tries_of_ddp(count: int, on_processes: OnProcesses, tmp_path: Path) -> None:
    """Processes agree before gradients are exchanged: on parts that fit the one with the smallest memory."""
    fewest_parts = {1: 8, 2: 4, 3: 4, **dict.fromkeys(range(4, IMAGES), 2), IMAGES: 1}
    for both in zip(*on_processes(2, voted, str(tmp_path), count), strict=True):
        smallest = min(limit for limit, *_ in both)
        for _, parts, whole, in_parts in both:
            assert parts == fewest_parts[smallest]
            for ours, expected in zip(in_parts, whole, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


class SmallMemory(Device):
    """A memory for the backward pass of `pixels` pixels."""

    def __init__(self, pixels: int) -> None:
        super().__init__(IMAGES, backward=True)
        self.pixels = pixels

    def terms(self, module: nn.Module, batch: Batch) -> LossTerms:
        self.limit = self.pixels // batch.images[0, 0].numel()
        return super().terms(module, batch)


def at_growing_sizes(folder: str) -> tuple[list[int], list[int], list[Tensor], list[Tensor]]:
    """Return the agreed parts and the failures so far after each batch, and gradients without and with the limit."""
    run, model = made(Path(folder))
    gradients = []
    for device in (Device(IMAGES), SmallMemory((8, 4)[run.accelerator.process_index] * 8 * 8)):
        model.prepared.zero_grad()
        add = BatchGradients(run, model, device.terms, objective)
        parts, failures = [], []
        for number, side in enumerate((4, 8, 6, 8, 16, 16)):
            add([batch_of(10 * number + run.accelerator.process_index, side=side)], number)
            parts.append(add.parts)
            failures.append(device.failures)
        gradients.append(gradients_of(model))
    return parts, failures, gradients[0], gradients[1]


def test_larger_images_are_tried_first_under_ddp(on_processes: OnProcesses, tmp_path: Path) -> None:
    """As with --multi-scale: what fits at one size may not fit at the next."""
    (first, second) = on_processes(2, at_growing_sizes, str(tmp_path))
    for parts, _, whole, in_parts in (first, second):
        assert parts == [1, 2, 2, 2, 8, 8]
        for ours, expected in zip(in_parts, whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert first[1] == [0, 0, 0, 0, 1, 1]
    assert second[1] == [0, 1, 1, 1, 3, 3]
