"""Steps of four logical processes on one, two and four processes: equal to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import OnProcesses
from utils.checkpoint.training_state import Identity
from utils.config.hyperparameters import Recipe
from utils.distributed.accelerator import start
from utils.run import Run
from utils.training.optimizer_steps import OptimizerOptions, OptimizerSteps, prepare_training

COUNT, BATCH, BATCHES = 4, 8, 6
SPOILED = 3  # the batch whose gradient is not finite in one logical process


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


def take_steps(
    folder: str, optimizer: str, precision: str, dropout: float, accumulated: int, sync_bn: bool
) -> dict[str, Any]:
    """Train an epoch as train.py does; return the state of the run and its means."""
    accelerator, chosen = start("cpu", precision, 60.0)
    accelerator.gradient_accumulation_steps = accumulated
    run = Run(accelerator, chosen)
    run.path = Path(folder)
    torch.manual_seed(0)
    model: Any = Network(dropout)
    images = torch.randn(BATCH * BATCHES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(len(images))
    loader: Any = DataLoader(TensorDataset(images, numbers), batch_size=BATCH)
    options = OptimizerOptions(
        batch_size=BATCH,
        sync_bn=sync_bn,
        logical_processes=COUNT,
        comm_hook="",
        epochs=1,
        optimizer=optimizer,
        cos_lr=False,
        scale_lr=False,
        log_interval=1,
        max_skips=3,
        wandb_id="abc",
    )
    hyp = Recipe(lr0=0.05, momentum=0.5, weight_decay=0.01, warmup_epochs=0.0, nbs=0)
    identity = Identity({0: "disc"}, 32, {"train": {"count": "20"}})
    steps, loader = prepare_training(run, model, loader, hyp, options, ["loss"], identity, None)
    steps.model.train()
    for number, shares in enumerate(loader):
        train_on(steps, number, shares, len(loader))
    steps.flush_pending()
    means = steps.model.sum(list(steps.state.loss_sums))
    before = copy.deepcopy(steps.state.state())
    steps.model.average_statistics(steps.ema.replicas)
    averaged = [buffer.clone() for replica in steps.model.replicas for buffer in replica.buffers()]
    return {"state": before, "means": means, "averaged": averaged[:3], "skipped": steps.progress.skipped}


def train_on(steps: OptimizerSteps, number: int, shares: Any, batches: int) -> None:
    def loss_of(module: nn.Module, share: Any) -> Tensor:
        images, numbers = share
        spoiled = ((numbers == SPOILED * BATCH + 5).any() * torch.inf).nan_to_num(nan=0.0)
        return (module(images) - 1).abs().mean() / COUNT * (1 + spoiled)  # type: ignore[no-any-return]

    accelerator = steps.run.accelerator
    with accelerator.accumulate(steps.model.prepared):
        steps.schedule.apply(steps.optimizer, number)
        losses = steps.model.map(loss_of, shares, seed=number)
        steps.model.backward(losses)
        taken = steps.step() if accelerator.sync_gradients else None
        steps.optimizer.zero_grad()
    steps.add_batch(torch.stack(losses).detach()[:, None], [[f"{number}.jpg"] for _ in losses])
    if taken is not None:
        steps.finish_step(taken, number + 1, batches)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize(
    ("optimizer", "precision", "dropout", "accumulated", "sync_bn", "counts"),
    [
        pytest.param("SGD", "no", 0.0, 3, False, (4,), marks=pytest.mark.long),
        ("AdamW", "bf16", 0.5, 1, True, (2,)),
        pytest.param("Adam", "no", 0.5, 2, False, (2, 4), marks=pytest.mark.long),
        pytest.param("SGD", "no", 0.5, 2, True, (2, 4), marks=pytest.mark.long),
    ],
)
def test_the_same_bits_on_any_number_of_processes(
    optimizer: str,
    precision: str,
    dropout: float,
    accumulated: int,
    sync_bn: bool,
    counts: tuple[int, ...],
    on_processes: OnProcesses,
    tmp_path: Path,
) -> None:
    """With a step that is skipped, for an image of the third logical process."""
    job = (str(tmp_path), optimizer, precision, dropout, accumulated, sync_bn)
    (alone,) = on_processes(1, take_steps, *job)
    assert alone["skipped"] == 1
    assert len(alone["state"]["shares"]) == COUNT
    assert not same(alone["state"]["shares"][0], alone["state"]["shares"][1])
    for processes in counts:
        results = on_processes(processes, take_steps, *job)
        assert same(results[0]["state"], alone["state"]), processes  # the main process's is saved
        assert all(same(result["means"], alone["means"]) for result in results)
        assert all(same(result["averaged"], alone["averaged"]) for result in results)
