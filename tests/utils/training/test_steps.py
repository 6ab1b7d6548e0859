"""The optimizer steps of a run: taken, clipped, skipped, counted, and continued from a saved state."""

from __future__ import annotations

import io
from collections.abc import Container
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import OnProcesses, not_here
from tests.utils.test_run import run_in
from utils.checkpoint import Identity, MeasuredConfig, TrainingState
from utils.config.hyperparameters import Recipe
from utils.distributed.launch import start
from utils.distributed.model import place_model, prepare, replicate
from utils.distributed.tree import LogicalProcesses
from utils.errors import UserError
from utils.run import Run
from utils.training.optimizer import ModelEMA, Schedule, build_optimizer
from utils.training.steps import MAX_SKIPS, OptimizerSteps

BATCH, BATCHES = 4, 5  # of all processes; of an epoch
EPOCHS = 2
HYP = Recipe(lr0=0.1, momentum=0.5, weight_decay=0.0, warmup_epochs=0.0, nbs=0)


class Network(nn.Module):
    """A network for images. It makes its layers in another order than it uses them, so DDP makes its buckets anew."""

    imgsz = 8

    def __init__(self) -> None:
        super().__init__()
        self.last, self.hidden = nn.Linear(96, 1), nn.Linear(64, 96)
        self.norm, self.first = nn.BatchNorm2d(64), nn.Conv2d(3, 64, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.norm(self.first(images))
        scores: Tensor = self.last(self.hidden(maps.relu().mean((2, 3))))
        return scores


def steps_of(
    run: Run,
    model: Any,
    loader: Any,
    hyp: Recipe = HYP,
    saved: dict[str, Any] | None = None,
    optimizer: str = "SGD",
    logical_processes: int = 0,
    precision: str = "no",
) -> tuple[OptimizerSteps, DataLoader[Any]]:
    """Return the steps and the loader of a training of `model`, made as in train.py."""
    batch, accumulated = loader.batch_sampler.batch_size, run.accelerator.gradient_accumulation_steps
    logical = LogicalProcesses.of(logical_processes, run.accelerator)
    place_model(run.accelerator, model)
    built: Any = build_optimizer(model, optimizer, hyp, None, batch * accumulated)
    parameters = [parameter for group in built.param_groups for parameter in group["params"]]
    schedule, ema = Schedule.of(hyp, None, EPOCHS, len(loader), False, model), ModelEMA(model)
    if saved:
        model.load_state_dict(saved["model"])
        ema.load_state(saved)
    how: Any = {"batch_size": batch, "sync_bn": False, "precision": precision, "clip_norm": hyp.clip_norm}
    made, built, loader = prepare(run.accelerator, logical, model, built, loader, **how)
    ema.replicas = replicate(ema.model, len(logical.local))
    identity, measured = (
        Identity({0: "disc"}, 32, {"train": {"count": "20"}}),
        MeasuredConfig(batch, accumulated, None, "a"),
    )
    state = TrainingState(identity, measured, made, parameters, ema, built, 1)
    if saved:
        state.load(saved)
    return OptimizerSteps(run, made, state, schedule, ["loss"]), loader


def prepared(
    run: Run, saved: dict[str, Any] | None = None, of_images: bool = False, batch: int = BATCH, **how: Any
) -> tuple[OptimizerSteps, DataLoader[Any]]:
    """Return the steps and the loader of a small network, of vectors or of images."""
    torch.manual_seed(0)
    model = Network() if of_images else nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    shape = (3, 8, 8) if of_images else (3,)
    images = torch.rand(batch * BATCHES, *shape, generator=torch.Generator().manual_seed(1))
    return steps_of(run, model, DataLoader(TensorDataset(images), batch_size=batch), saved=saved, **how)


def train(
    steps: OptimizerSteps,
    loader: DataLoader[Any],
    not_finite: Container[int] = (),
    scale: float = 1.0,
    start: int = 0,
    stop: int = BATCHES,
) -> list[float]:
    """Train batches of an epoch as train.py does; return the losses. Batch k has one image, k.jpg."""
    accelerator, losses = steps.run.accelerator, []
    for number, ((batch,),) in enumerate(loader):
        if not start <= number < stop:
            continue
        with accelerator.accumulate(steps.model.wrapped):
            loss = (steps.model.wrapped(batch) - 1).square().mean() * scale
            loss = loss * torch.nan if number in not_finite else loss
            accelerator.backward(loss)
            taken = steps.step() if accelerator.sync_gradients else None
            steps.optimizer.zero_grad()
        infos = (SimpleNamespace(path=f"{number}.jpg"),)
        steps.add([loss[None]], [SimpleNamespace(infos=infos)])  # type: ignore[list-item]
        losses.append(loss.item())
        if taken is not None:
            steps.finish(taken, number + 1, len(loader))
    return losses


def values(steps: OptimizerSteps) -> list[Tensor]:
    """Return copies of what a step changes: weights, statistics, momentum, EMA."""
    momentum = [state["momentum_buffer"] for state in steps.optimizer.optimizer.state.values()]
    tensors = [*steps.model.model.state_dict().values(), *momentum, *steps.ema.model.state_dict().values()]
    return [tensor.clone() for tensor in tensors if tensor.is_floating_point()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# Taken, clipped and skipped steps


@pytest.mark.parametrize(("scale", "is_clipped"), [(1.0, False), (1e6, True)])
def test_gradients_are_clipped(scale: float, is_clipped: bool, tmp_path: Path) -> None:
    steps, loader = prepared(run_in(tmp_path))
    before = [parameter.detach().clone() for parameter in steps.model.model.parameters()]
    train(steps, loader, scale=scale, start=BATCHES - 1)  # one step
    norm = float(steps.log.norm)
    assert (norm > HYP.clip_norm) == is_clipped
    moved = [one - other.detach() for one, other in zip(before, steps.model.model.parameters(), strict=True)]
    length = torch.cat([difference.flatten() for difference in moved]).norm()
    nesterov = 1 + HYP.momentum  # times the gradient, in the first step
    assert float(length) == pytest.approx(HYP.lr0 * nesterov * min(norm, HYP.clip_norm), rel=1e-4)


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    """Neither does the first one, which would make the momentum."""
    first, its_loader = prepared(run_in(tmp_path))
    initial = values(first)
    train(first, its_loader, not_finite=[0], stop=1)
    assert equal(values(first), initial)
    steps, loader = prepared(run_in(tmp_path))
    losses = train(steps, loader, not_finite=[3], stop=4)[:3]
    before, progress = values(steps), steps.progress
    assert (progress.step, progress.batch, progress.taken, progress.skipped) == (4, 4, 3, 1)
    train(steps, loader, not_finite=[4], start=4)
    assert equal(values(steps), before)
    assert (progress.step, progress.batch, progress.taken, progress.skipped) == (BATCHES, BATCHES, 3, 2)
    assert (steps.log.left, steps.log.done, int(steps.ema.updates)) == (EPOCHS * BATCHES, BATCHES, 3)
    assert steps.state.loss_sums.flatten().tolist() == pytest.approx([sum(losses)])
    train(steps, loader, start=4)
    assert not equal(values(steps), before)
    assert all(tensor.isfinite().all() for tensor in values(steps))


class Counting(torch.optim.Optimizer):
    """Steps of a length by the number of steps, which it keeps in its groups; its states have shapes of their own."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "count": 0, "sum": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                norms = weight.grad.reshape(len(weight), -1).norm(dim=1)
                state["rows"] = state.get("rows", torch.zeros(len(weight), 1)) + norms[:, None]
                state["all"] = [len(state["rows"]), weight.grad.norm()]
                group["sum"] += state["all"][1]
                weight -= group["lr"] * (weight.grad + state["rows"].mean() + group["sum"]) / group["count"]


LION = "lion_pytorch:Lion"


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "NAdam", "Adafactor", "Adagrad", LION, f"{__name__}:Counting"])
def test_steps_of_each_kind_of_optimizer(optimizer: str, tmp_path: Path) -> None:
    """Fused, torch's others, a package's: one that is not finite is skipped, and a saved state continues to the bit."""
    if optimizer == LION and not find_spec("lion_pytorch"):
        not_here("lion-pytorch")
    how: Any = {"optimizer": optimizer, "of_images": True}
    steps, loader = prepared(run_in(tmp_path), **how)
    train(steps, loader, not_finite=[1], stop=1)
    before = [parameter.clone() for parameter in steps.model.parameters]
    train(steps, loader, not_finite=[1], start=1, stop=2)
    assert equal(before, steps.model.parameters)  # type: ignore[arg-type]
    train(steps, loader, start=2, stop=3)
    assert not equal(before, steps.model.parameters)  # type: ignore[arg-type]
    assert (steps.progress.taken, steps.progress.skipped) == (2, 1)
    again, loader_again = prepared(run_in(tmp_path), stored(steps), **how)
    train(steps, loader, start=3)
    train(again, loader_again, start=3)
    assert equal(steps.model.parameters, again.model.parameters)  # type: ignore[arg-type]
    assert all(parameter.isfinite().all() for parameter in steps.model.parameters)


def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    steps, loader = prepared(run)
    for _ in range(MAX_SKIPS // BATCHES - 1):
        train(steps, loader, not_finite=range(BATCHES))
        steps.progress.batch = 0
    with pytest.raises(UserError) as raised:
        train(steps, loader, not_finite=range(BATCHES))
    assert "4.jpg" in str(raised.value)
    assert str(run.path) in str(raised.value)
    assert (steps.progress.skipped, steps.progress.taken) == (MAX_SKIPS, 0)


@pytest.mark.parametrize(("optimizer", "logical"), [("SGD", 0), ("AdamW", 1)])
@pytest.mark.parametrize(("rate", "scale"), [(0.1, 1.0), (0.1, 0.0), (0.0, 1.0), (1e-9, 1.0)])
def test_a_run_that_moves_no_weight_ends(
    rate: float, scale: float, optimizer: str, logical: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it is saved; but not if the rate or the gradient is 0, or so small that rounding may hide the steps."""
    steps, loader = prepared(run_in(tmp_path), optimizer=optimizer, logical_processes=logical)
    for group in steps.optimizer.param_groups:
        group["lr"] = rate
    with monkeypatch.context() as patched:
        patched.setattr(getattr(torch.optim, optimizer), "step", lambda *_: None)
        train(steps, loader, scale=scale)
    ends = rate * scale > 1e-3
    with pytest.raises(UserError, match=f"no weight has changed, .* rate {rate:g}") if ends else nullcontext():
        steps.save()
    steps.run.files.finish_writing()
    assert (steps.run.path / "checkpoint").exists() != ends
    train(steps, loader)
    steps.end_epoch()


# Logged points and saved states


def stored(steps: OptimizerSteps) -> dict[str, Any]:
    """Return the state as it is read from a file."""
    file = io.BytesIO()
    torch.save(steps.state.state(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)  # type: ignore[no-any-return]


# Three processes: all-reduce adds numbers in an order that depends on DDP's buckets


def continued(folder: str) -> list[bool]:
    """Return whether an epoch that is resumed after its third step ends like the uninterrupted one, and trains."""
    run = Run(*start("cpu", "no", 60.0))
    run.open_folder(folder, "exp", exist_ok=False)
    options: Any = {"of_images": True, "batch": 6}
    steps, loader = prepared(run, **options)
    train(steps, loader, stop=3)
    again, loader_again = prepared(run, stored(steps), **options)
    after_three = values(again)
    train(steps, loader, start=3)
    train(again, loader_again, start=3)
    return [equal(values(steps), values(again)), not equal(values(again), after_three)]


@pytest.mark.long
def test_three_processes_continue_bit_by_bit(tmp_path: Path, on_processes: OnProcesses) -> None:
    assert on_processes(3, continued, str(tmp_path)) == [[True, True]] * 3
