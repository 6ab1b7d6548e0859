"""The optimizer steps of a run: taken, clipped, skipped, counted, and continued from a saved state."""

from __future__ import annotations

import copy
import io
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import OnProcesses
from tests.utils.test_run import Recorder, run_in
from utils.checkpoint.training_state import Identity
from utils.config.hyperparameters import Recipe
from utils.distributed.accelerator import start
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.run import FolderOptions, Run
from utils.training.optimizer_steps import CLIP_NORM, OptimizerOptions, OptimizerSteps, prepare_training

BATCH, BATCHES = 4, 5  # of all processes; of an epoch
OPTIONS: dict[str, Any] = {
    **{"batch_size": BATCH, "sync_bn": False, "epochs": 2, "optimizer": "SGD", "cos_lr": False},
    **{
        "scale_lr": False,
        "log_interval": 2,
        "max_skips": 3,
        "wandb_id": "abc",
        "logical_processes": 0,
        "comm_hook": "",
    },
}
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


def prepared(
    run: Run, saved: dict[str, Any] | None = None, of_images: bool = False, **options: Any
) -> tuple[OptimizerSteps, DataLoader[Any]]:
    """Return the steps and the loader of a small network, of vectors or of images."""
    torch.manual_seed(0)
    model: Any = Network() if of_images else nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    batch, shape = options.get("batch_size", BATCH), (3, 8, 8) if of_images else (3,)
    images = torch.rand(batch * BATCHES, *shape, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(images), batch_size=batch)
    identity = Identity({0: "disc"}, 32, {"train": {"count": "20"}})
    flags = OptimizerOptions(**{**OPTIONS, **options})
    return prepare_training(run, model, loader, HYP, flags, ["loss"], identity, saved)


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
        with accelerator.accumulate(steps.model.prepared):
            loss = (steps.model.prepared(batch) - 1).square().mean() * scale
            loss = loss * torch.nan if number in not_finite else loss
            accelerator.backward(loss)
            taken = steps.step() if accelerator.sync_gradients else None
            steps.optimizer.zero_grad()
        steps.add_batch(loss.detach()[None, None], [[f"{number}.jpg"]])
        losses.append(loss.item())
        if taken is not None:
            steps.finish_step(taken, number + 1, len(loader))
    return losses


def values(steps: OptimizerSteps) -> list[Tensor]:
    """Return copies of what a step changes: weights, statistics, momentum, EMA."""
    momentum = [state["momentum_buffer"] for state in steps.optimizer.optimizer.state.values()]
    tensors = [*steps.model.bare.state_dict().values(), *momentum, *steps.ema.model.state_dict().values()]
    return [tensor.clone() for tensor in tensors if tensor.is_floating_point()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# Taken, clipped and skipped steps


def test_an_epoch_of_steps(tmp_path: Path) -> None:
    steps, loader = prepared(run_in(tmp_path))
    before = values(steps)
    losses = train(steps, loader)
    progress = steps.progress
    assert (progress.step, progress.batch, progress.taken, progress.skipped) == (BATCHES, BATCHES, BATCHES, 0)
    assert (steps.remaining.batches, steps.remaining.done) == (2 * BATCHES, BATCHES)
    assert int(steps.ema.updates) == BATCHES
    assert not any(torch.equal(one, other) for one, other in zip(values(steps), before, strict=True))
    assert steps.state.loss_sums.flatten().tolist() == pytest.approx([sum(losses)])


@pytest.mark.parametrize(("scale", "is_clipped"), [(1.0, False), (1e6, True)])
def test_gradients_are_clipped(scale: float, is_clipped: bool, tmp_path: Path) -> None:
    steps, loader = prepared(run_in(tmp_path))
    before = [parameter.detach().clone() for parameter in steps.model.bare.parameters()]
    train(steps, loader, scale=scale, start=BATCHES - 1)  # one step
    norm = float(steps.step_log.norm)
    assert (norm > CLIP_NORM) == is_clipped
    moved = [one - other.detach() for one, other in zip(before, steps.model.bare.parameters(), strict=True)]
    length = torch.cat([difference.flatten() for difference in moved]).norm()
    nesterov = 1 + HYP.momentum  # times the gradient, in the first step
    assert float(length) == pytest.approx(HYP.lr0 * nesterov * min(norm, CLIP_NORM), rel=1e-4)


def test_skipped_steps_are_counted_and_not_averaged(tmp_path: Path) -> None:
    steps, loader = prepared(run_in(tmp_path))
    losses = train(steps, loader, not_finite=[3, 4])[:3]
    progress = steps.progress
    assert (progress.step, progress.batch, progress.taken, progress.skipped) == (BATCHES, BATCHES, 3, 2)
    assert int(steps.ema.updates) == 3
    assert steps.state.loss_sums.flatten().tolist() == pytest.approx([sum(losses)])


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    steps, loader = prepared(run_in(tmp_path))
    train(steps, loader)
    before = values(steps)
    train(steps, loader, not_finite=[BATCHES - 1], start=BATCHES - 1)
    assert equal(values(steps), before)
    train(steps, loader, start=BATCHES - 1)
    assert not equal(values(steps), before)
    assert all(tensor.isfinite().all() for tensor in values(steps))


def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    steps, loader = prepared(run, max_skips=2)
    with pytest.raises(UserError) as raised:
        train(steps, loader, not_finite=[0, 2, 3])  # the first is followed by a taken one
    assert str(raised.value) == (
        "2 optimizer steps in a row were skipped, because the gradients were not finite; the last is step 4 (not "
        "finite: loss of the images 3.jpg); check these images and their labels, and try a lower lr0 than 0.1; the "
        f"last good state is in {run.path}"
    )
    assert (steps.progress.skipped, steps.progress.taken) == (3, 1)


def test_accumulated_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    monkeypatch.setattr(run.accelerator, "gradient_accumulation_steps", 2)
    steps, loader = prepared(run)
    train(steps, loader)
    assert (steps.progress.step, steps.progress.taken) == (3, BATCHES)  # the last batch of an epoch is a step alone


# Logged points and saved states


def test_points_of_the_step_curves(tmp_path: Path) -> None:
    run, recorder = run_in(tmp_path), Recorder()
    run.start_trackers(lambda: [recorder], {}, 0)
    steps, loader = prepared(run)
    losses = train(steps, loader)
    assert [step for _, step in recorder.points] == [2, 4, 5]  # every second step, and the last of the epoch
    assert [point["step/epoch"] for point, _ in recorder.points] == [0.4, 0.8, 1.0]
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert [point["step/loss"] for point, _ in recorder.points] == pytest.approx(means)
    assert all(point["step/gradient_norm"] > 0 for point, _ in recorder.points)


def test_without_a_tracker_there_are_no_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    monkeypatch.setattr(run, "log_point", pytest.fail)
    train(*prepared(run))


def test_steps_continue_from_a_saved_state(tmp_path: Path) -> None:
    first, loader = prepared(run_in(tmp_path))
    train(first, loader)
    first.progress.next_epoch()
    file = io.BytesIO()
    torch.save(first.state.state(), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second, loader_again = prepared(run_in(tmp_path), saved)
    assert second.progress == first.progress
    assert equal(values(second), values(first))
    assert second.remaining.batches == BATCHES
    assert second.state.wandb_id == "abc"
    assert train(second, loader_again) == train(first, loader)
    assert equal(values(second), values(first))


@pytest.mark.parametrize(("cosine", "rate"), [(False, 0.07525), (True, 0.0855)])
def test_the_schedule_depends_on_the_flags(cosine: bool, rate: float, tmp_path: Path) -> None:
    schedule = prepared(run_in(tmp_path), epochs=4, cos_lr=cosine)[0].schedule
    assert (schedule.epochs, schedule.batches, schedule.cosine, schedule.lr0) == (4, BATCHES, cosine, HYP.lr0)
    assert schedule.epoch_rate(1) == pytest.approx(rate, abs=1e-4)  # a quarter of the way from 0.1 to 0.001


# Two processes


def one_of_two(folder: str) -> list[Any]:
    """Return the outcome of steps whose loss is not finite on the second process only."""
    run = Run(*start("cpu", "no", 60.0))
    run.open_folder(FolderOptions(folder, "exp", exist_ok=False))
    steps, loader = prepared(run, scale_lr=True, max_skips=2)
    bad = [2, 3] if ranks().rank else []
    message = ""
    try:
        train(steps, loader, not_finite=bad)
    except UserError as error:
        message = str(error)
    progress = copy.copy(steps.progress)
    weights = [parameter.detach() for parameter in steps.model.bare.parameters()]
    return [message, progress.step, progress.taken, progress.skipped, steps.schedule.lr0, weights]


def test_all_processes_skip_the_same_steps(tmp_path: Path, on_processes: OnProcesses) -> None:
    (*one, weights), (*other, other_weights) = on_processes(2, one_of_two, str(tmp_path))
    assert other[1:] == one[1:] == [4, 2, 2, 0.2]  # with --scale-lr the rate is twice that of one process
    assert "not finite: loss of the images 3.jpg)" in one[0]
    assert other[0] == one[0]
    assert equal(weights, other_weights)


# Three processes: all-reduce adds numbers in an order that depends on DDP's buckets


def continued(folder: str) -> list[bool]:
    """Return whether an epoch that is resumed after its third step ends like the uninterrupted one, and trains."""
    run = Run(*start("cpu", "no", 60.0))
    run.open_folder(FolderOptions(folder, "exp", exist_ok=False))
    options = {"of_images": True, "batch_size": 6}
    steps, loader = prepared(run, **options)
    train(steps, loader, stop=3)
    file = io.BytesIO()
    torch.save(steps.state.state(), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again, loader_again = prepared(run, saved, **options)
    after_three = values(again)
    train(steps, loader, start=3)
    train(again, loader_again, start=3)
    return [equal(values(steps), values(again)), not equal(values(again), after_three)]


@pytest.mark.long
def test_three_processes_continue_bit_by_bit(tmp_path: Path, on_processes: OnProcesses) -> None:
    assert on_processes(3, continued, str(tmp_path)) == [[True, True]] * 3
