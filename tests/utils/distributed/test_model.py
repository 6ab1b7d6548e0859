"""The model in training: logical processes, parameters without a gradient, preparation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data.sampler import GlobalBatches
from tests.conftest import OnProcesses
from tests.making import without_launcher
from tests.utils.test_checkpoint import same
from tests.utils.training.test_steps import steps_of
from utils.config.hyperparameters import Recipe
from utils.distributed.launch import start
from utils.distributed.model import DistributedModel, place_model, prepare
from utils.distributed.ranks import ranks
from utils.distributed.tree import LogicalProcesses
from utils.errors import UserError
from utils.run import Run


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


# Training

COUNT, BATCH, BATCHES = 4, 8, 6
SPOILED = 3  # the batch whose gradient is not finite in one logical process


class Batch(NamedTuple):
    """A share of the images."""

    images: Tensor
    numbers: Tensor  # of the images
    infos: tuple[Any, ...] = ()

    def loss(self, module: nn.Module) -> Tensor:
        spoiled = ((self.numbers == SPOILED * BATCH + 5).any() * torch.inf).nan_to_num(nan=0.0)
        return (module(self.images) - 1).abs().mean() / COUNT * (1 + spoiled)  # type: ignore[no-any-return]


class Network(nn.Module):
    """Convolutions whose weights are in channels_last, a frozen one, layers that depend on the batch, and two
    parameters whose gradients are one tensor."""

    imgsz = 8

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.frozen = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3).requires_grad_(False)
        self.norm, self.drop, self.last = nn.BatchNorm2d(8), nn.Dropout(dropout), nn.Linear(8, 1)
        self.one, self.two = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(self.frozen(self.first(images))).relu().mean((2, 3)) + (self.one + self.two)
        return self.last(self.drop(maps))  # type: ignore[no-any-return]


class Items(dict[int, Any]):
    """Items by the image's number, as a data set."""

    def __getitem__(self, sample: Any) -> Any:
        return super().__getitem__(sample.image)


def take_steps(folder: str, optimizer: str, precision: str, dropout: float, accumulated: int) -> dict[str, Any]:
    """Train an epoch as train.py does; return the state of the run and its means."""
    run = Run(*start("cpu", precision, 60.0))
    run.accelerator.gradient_accumulation_steps, run.path = accumulated, Path(folder)
    torch.manual_seed(ranks().rank)  # the main process's weights are those of all
    network = Network(dropout)
    torch.manual_seed(0)
    images = torch.randn(BATCH * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    hyp = Recipe(lr0=0.05, momentum=0.5, weight_decay=0.01, warmup_epochs=0.0, nbs=0)
    items = dict(enumerate(zip(images, torch.arange(len(images)), strict=True)))
    sampler = GlobalBatches(len(images), BATCH, 0, (8, 8))
    data: Any = DataLoader(Items(items), batch_sampler=sampler)
    steps, loader = steps_of(run, network, data, hyp, optimizer=optimizer, logical_processes=COUNT)
    model, state = steps.model, steps.state
    model.train()
    for number, local in enumerate(loader):
        with run.accelerator.accumulate(model.wrapped):
            steps.schedule.apply(steps.optimizer, number)
            batches: Any = [Batch(*batch) for batch in local]
            losses = model.each(lambda module, batch: batch.loss(module), batches, number)
            model.backward(losses)
            taken = steps.step() if run.accelerator.sync_gradients else None
            steps.optimizer.zero_grad()
        steps.add([loss[None] for loss in losses], batches)
        if taken is not None:
            steps.finish(taken, number + 1, BATCHES)
    steps.flush()
    means, before = model.sum(list(state.loss_sums)), copy.deepcopy(state.state())
    model.average_statistics(steps.ema.replicas)
    averaged = [buffer.clone() for buffer in model.copies[0].buffers()]
    return {"state": before, "means": means, "averaged": averaged, "skipped": steps.progress.skipped}


def test_the_same_bits_on_one_two_and_three_processes(on_processes: OnProcesses, tmp_path: Path) -> None:
    """With a step that is skipped, because of one image."""
    job = (str(tmp_path), "AdamW", "bf16", 0.5, 2)
    (alone,) = on_processes(1, take_steps, *job)
    assert alone["skipped"] == 1
    assert len(alone["state"]["shares"]) == COUNT
    assert not same(alone["state"]["shares"][0], alone["state"]["shares"][1])
    for processes in (2, 3):
        results = on_processes(processes, take_steps, *job)
        assert same(results[0]["state"], alone["state"])  # the main process's is saved
        assert all(same(result[key], alone[key]) for result in results for key in ("means", "averaged"))


# Parameters without a gradient


class Idle(Network):
    """A network that does not use a parameter in its forward pass number `idle`."""

    def __init__(self, idle: int) -> None:
        super().__init__(0.0)
        self.idle, self.calls, self.spare = idle, 0, nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images) * (1 if self.calls == self.idle else self.spare)  # type: ignore[no-any-return]


def batches_before_an_error(folder: str, idle: int, logical: int, frozen: bool) -> tuple[int, str]:
    """Return the number of trained batches of six, and the error's message."""
    run, network, batches = Run(*start("cpu", "no", 60.0)), Idle(idle), 0
    run.path = Path(folder)
    network.spare.requires_grad_(not frozen)
    data = DataLoader(TensorDataset(torch.rand(36, 3, 8, 8)), 6)
    try:
        steps, loader = steps_of(run, network, data, logical_processes=logical)
        for local in loader:
            steps.model.backward(steps.model.each(lambda module, batch: module(batch[0]).sum(), local, 0))
            steps.optimizer.zero_grad()
            batches += 1
    except UserError as error:
        return batches, str(error)
    return batches, ""


@pytest.mark.parametrize(
    ("processes", "idle", "logical", "frozen", "batches"),
    [
        (1, 1, 0, False, 0),
        (1, 1, 2, False, 0),
        (2, 1, 0, False, 0),
        (2, 3, 0, False, 2),  # DDP needs all gradients in later batches too
        (2, 1, 0, True, 6),
        pytest.param(3, 1, 0, False, 0, marks=pytest.mark.long),  # by the pass that orders the buckets
    ],
)
def test_a_parameter_without_a_gradient_ends_a_run_before_the_step(
    processes: int, idle: int, logical: int, frozen: bool, batches: int, on_processes: OnProcesses, tmp_path: Path
) -> None:
    for trained, message in on_processes(processes, batches_before_an_error, str(tmp_path), idle, logical, frozen):
        assert trained == batches
        assert ("--freeze spare; these get none: spare" in message) == (not frozen)


# Preparation

SMALL_BATCH = 4  # of all processes


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5), *layers)


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2 * SMALL_BATCH, 3, 8, 8, generator=generator)


def prepared(accelerator: Any, model: nn.Module, keep_norms: bool = False) -> tuple[DistributedModel, Any]:
    """Return model and loader, prepared as in train.py."""
    place_model(accelerator, model)  # type: ignore[arg-type]
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(images()), SMALL_BATCH)
    how: Any = {"batch_size": SMALL_BATCH, "sync_bn": False, "precision": "no", "clip_norm": 10.0}
    logical: Any = LogicalProcesses.create(0, accelerator)
    made, _, loader = prepare(accelerator, logical, model, optimizer, loader, freezes_batchnorm=keep_norms, **how)  # type: ignore[arg-type]
    return made, loader


@pytest.mark.parametrize("keep_norms", [False, True])
def test_training_may_keep_the_statistics_of_batchnorm(keep_norms: bool) -> None:
    model = network()
    nn.init.uniform_(model[1].running_mean)  # type: ignore[arg-type]
    distributed, _ = prepared(Accelerator(cpu=True), model, keep_norms)
    before = copy.deepcopy(distributed.model.state_dict())
    distributed.train()
    distributed.wrapped(images()).sum().backward()
    after = distributed.model.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert changed == ([] if keep_norms else ["1.running_mean", "1.running_var", "1.num_batches_tracked"])
    assert distributed.model[2].training  # type: ignore[index]  # dropout
    assert distributed.model[1].weight.grad is not None  # type: ignore[index]


def place_and_train() -> list[list[Tensor]]:
    """Return the statistics of a process after a step on its part of the first batch, and the averages of all."""
    (accelerator, _), model = start("cpu", "no", 60.0), network()
    distributed, loader = prepared(accelerator, model)
    distributed.wrapped.train()
    ((batch,),) = next(iter(loader))
    distributed.wrapped(batch).square().sum().backward()
    statistics = distributed.model.get_buffer("1.running_mean").clone()
    ema = copy.deepcopy(distributed.model)
    ema.get_buffer("1.running_mean").fill_(1.0 + ranks().rank)
    ema.get_buffer("1.running_var").fill_(1 / 3)
    distributed.average_statistics([ema])
    averaged = [model.get_buffer("1.running_mean") for model in (distributed.model, ema)]
    return [[batch, statistics], [*averaged, ema.get_buffer("1.running_var")]]


def test_each_process_has_its_slice_and_statistics(on_processes: OnProcesses) -> None:
    """Statistics are averaged for the validation; equal ones keep their bits."""
    (first, averaged), (second, other) = on_processes(2, place_and_train)
    assert torch.equal(torch.cat((first[0], second[0])), images()[:SMALL_BATCH])
    assert not torch.equal(first[1], second[1])
    assert same(averaged, other)
    assert torch.allclose(averaged[0], (first[1] + second[1]) / 2)
    assert [averaged[1].tolist(), *averaged[2].unique()] == [[1.5] * 6, torch.tensor(1 / 3)]
