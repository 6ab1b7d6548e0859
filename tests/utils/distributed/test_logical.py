"""Logical processes: which ones a process computes, their sums, masks and gradients, and the preparation of a model."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import StochasticDepth

from tests.conftest import OnProcesses
from tests.making import without_launcher
from tests.utils.test_checkpoint import same
from tests.utils.training.test_steps import steps_of
from utils.config.hyperparameters import Recipe
from utils.distributed.launch import start
from utils.distributed.logical import (
    DistributedModel,
    GlobalDropout,
    LogicalProcesses,
    check_logical_processes,
    place_model,
    prepare,
    synchronise_dropout,
    tree_sum,
    tree_sum_in_place,
    tree_sum_of_processes,
)
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.run import Run


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


# Which logical processes


@pytest.mark.parametrize(
    ("count", "processes", "batch_size", "sync_bn", "by_zero", "fits"),
    [
        (6, 2, 16, False, False, False),
        (2, 4, 16, False, False, False),
        (4, 3, 16, False, False, False),
        (4, 2, 16, True, False, False),
        (4, 2, 16, False, True, False),
        (4, 2, -1, False, False, False),
        (0, 3, -1, True, True, True),
        (4, 4, 16, True, False, True),
    ],
)
def test_what_can_be(
    count: int, processes: int, batch_size: int, sync_bn: bool, by_zero: bool, fits: bool, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(by_zero).lower())
    with nullcontext() if fits else pytest.raises(UserError, match=f"--logical-processes {count}"):
        check_logical_processes(count, batch_size, sync_bn)


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


def take_steps(folder: str, optimizer: str, precision: str, dropout: float, accumulated: int) -> dict[str, Any]:
    """Train an epoch as train.py does; return the state of the run and its means."""
    run = Run(*start("cpu", precision, 60.0))
    run.accelerator.gradient_accumulation_steps, run.path = accumulated, Path(folder)
    torch.manual_seed(ranks().rank)  # the main process's weights are those of all
    network = Network(dropout)
    torch.manual_seed(0)
    images = torch.randn(BATCH * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    hyp = Recipe(lr0=0.05, momentum=0.5, weight_decay=0.01, warmup_epochs=0.0, nbs=0)
    data = DataLoader(TensorDataset(images, torch.arange(len(images))), batch_size=BATCH)
    steps, loader = steps_of(run, network, data, hyp, optimizer=optimizer, logical_processes=COUNT)
    model, state = steps.model, steps.state
    model.train()
    for number, local in enumerate(loader):
        with run.accelerator.accumulate(model.wrapped):
            steps.schedule.apply(steps.optimizer, number)
            batches: Any = [Batch(*batch) for batch in local]
            losses = [batch.loss(module) for module, batch in model.each(batches, number)]
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


def test_the_same_bits_on_one_and_two_processes(on_processes: OnProcesses, tmp_path: Path) -> None:
    """With a step that is skipped, for an image of the third logical process."""
    job = (str(tmp_path), "AdamW", "bf16", 0.5, 2)
    (alone,) = on_processes(1, take_steps, *job)
    assert alone["skipped"] == 1
    assert len(alone["state"]["shares"]) == COUNT
    assert not same(alone["state"]["shares"][0], alone["state"]["shares"][1])
    results = on_processes(2, take_steps, *job)
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
            steps.model.backward([module(batch).sum() for module, (batch,) in steps.model.each(local, 0)])
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


# Sums by the tree, with numbers whose sum depends on the order in which they are added

LENGTH = 7  # which no number of processes divides


def addends(count: int, length: int = LENGTH) -> list[Tensor]:
    """Return vectors of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, generator=generator) * 10.0 ** (number % 5) for number in range(count)]


def by_hand(values: list[Tensor]) -> Tensor:
    (a, b, c, d), (e, f, g, h) = values[:4], values[4:]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def test_neighbours_are_added_first() -> None:
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert tree_sum([big, one, one, one]) == 2**24 + 2
    assert tree_sum([one, one, one, big]) == 2**24 + 2
    assert sum([big, one, one, one]) == 2**24  # one after another each is lost
    values = addends(8)
    assert torch.equal(tree_sum(values), by_hand(values))
    assert torch.equal(tree_sum(values[:1]), values[0])


def of_processes(processes: int) -> tuple[Tensor, list[Tensor]]:
    distributed.init_process_group("gloo")
    small = tree_sum_of_processes(addends(processes)[ranks().rank])
    large = []
    for length in (1, LENGTH, 1000):
        large.append(addends(processes, length)[ranks().rank])
        tree_sum_in_place(large[-1])
    return small, large


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_add_by_the_same_tree(processes: int, on_processes: OnProcesses) -> None:
    for small, large in on_processes(processes, of_processes, processes):
        assert torch.equal(small, tree_sum(addends(processes)))
        for values in large:
            assert torch.equal(values, tree_sum(addends(processes, len(values))))


# Dropout with the masks of the global batch


def test_dropout_layers_are_replaced() -> None:
    """At any depth, without a change of names; not those of probability 0, or that drop by batch."""
    inner = nn.Sequential(nn.Dropout(0.25, inplace=True), StochasticDepth(0.75, "row"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), inner, nn.Dropout2d(0.5))
    model.extend([nn.Dropout(0.0), StochasticDepth(0.5, "batch")])
    names, kept = [name for name, _ in model.named_modules()], [*model[4:]]
    synchronise_dropout(model)
    assert [name for name, _ in model.named_modules()] == names
    assert [*model[4:]] == kept
    replaced = [layer for layer in model.modules() if isinstance(layer, GlobalDropout)]
    expected = [(0.5, False, False), (0.25, False, False), (0.75, True, False), (0.5, False, True)]
    assert [(layer.p, layer.rows, layer.maps) for layer in replaced] == expected


def test_evaluation_and_the_limits_of_dropout() -> None:
    values, before = torch.rand(4, 3), torch.get_rng_state()
    assert GlobalDropout(0.5).eval()(values) is values
    assert torch.equal(torch.get_rng_state(), before)
    assert GlobalDropout(1.0)(torch.ones(3, 4)).tolist() == [[0] * 4] * 3
    assert GlobalDropout(0.25)(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    dropped = GlobalDropout(0.5, maps=True)(torch.ones(50, 8, 3, 4)) == 0
    assert torch.equal(dropped.all((2, 3)), dropped.any(3).any(2))  # whole channels
    assert 0 < dropped[0].float().mean() < 1


@pytest.mark.parametrize("rows", [True, False])
def test_the_mean_stays(rows: bool) -> None:
    values = GlobalDropout(0.2, rows)(torch.full((40_000, 2, 1), 4.0))
    assert values.unique().tolist() == [0, 5]  # 4 / 0.8
    assert values.mean().item() == pytest.approx(4, abs=0.06)  # 6 standard deviations of the mean of 40000 rows
    alike = (values[:, 0] == values[:, 1]).float().mean().item()
    assert alike == pytest.approx(1 if rows else 0.8**2 + 0.2**2, abs=0.02 if not rows else 0)


def dropped_by(images: Tensor, rank: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, float]:
    """Return the output of a process for its part of the images, and its next random number."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Dropout1d(0.2), nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.25), StochasticDepth(0.5, "row")
    )
    synchronise_dropout(model)
    return model(images.tensor_split(processes)[rank]), torch.rand(1).item()


@pytest.mark.parametrize("processes", [2, 3])
def test_the_mask_does_not_depend_on_the_number_of_processes(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(12, 4, 5) + 1
    whole, number = dropped_by(images, 0, 1, monkeypatch)
    parts, numbers = zip(*(dropped_by(images, rank, processes, monkeypatch) for rank in range(processes)), strict=True)
    assert torch.equal(torch.cat(parts), whole)
    assert set(numbers) == {number}
    dropped = [part == 0 for part in parts]
    assert not torch.equal(dropped[0], dropped[1])  # of different images


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
    logical: Any = LogicalProcesses.of(0, accelerator)
    made, _, loader = prepare(accelerator, logical, model, optimizer, loader, keep_norms=keep_norms, **how)  # type: ignore[arg-type]
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
