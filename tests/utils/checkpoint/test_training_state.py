"""The state for --resume: saved, loaded on any number of processes, and refused for other data."""

from __future__ import annotations

import copy
import io
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.conftest import OnProcesses
from utils.checkpoint import Decisions, Identity, Progress, TrainingState, serialised
from utils.config.hyperparameters import Recipe
from utils.distributed.logical import DistributedModel, LogicalProcesses
from utils.errors import UserError
from utils.run import RunFolder
from utils.summary import Summary
from utils.training.ema import ModelEMA
from utils.training.optimizer import build_optimizer

TRAIN, VAL = ({"count": count, "file sizes": "aaaa", "labels": "bbbb"} for count in ("28", "8"))
IDENTITY = Identity({0: "disc", 1: "ring", 2: "bar"}, 96, {"train": TRAIN, "val": VAL})
KEYS = "format names imgsz splits settings decisions progress model ema updates optimizer rates scaler shares"

DECISIONS = Decisions(batch_size=8, accumulation=2, known=0.5, run_id="abc")


class Folder(RunFolder):
    """Stores saved states as the bytes of a file."""

    def __init__(self) -> None:
        self.states: list[memoryview] = []

    def save_state(self, state: Any, final: bool = False) -> None:
        self.states.append(serialised(state))
        self.final = final

    def last(self) -> dict[str, Any]:
        return torch.load(io.BytesIO(self.states[-1]), weights_only=True)


class Scaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def made(seed: int, saved: dict[str, Any] | None = None, optimizer: str = "SGD") -> TrainingState:
    """Return a run that begins or continues from `saved`, as train.py makes it."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    built = build_optimizer(model, optimizer, Recipe(lr0=0.1, momentum=0.9, weight_decay=0.01), None, 64)
    ema = ModelEMA(model)
    if saved:
        model.load_state_dict(saved["model"])
        ema.load_state(saved)
    parameters = [parameter for group in built.param_groups for parameter in group["params"]]
    logical = LogicalProcesses.of(0, accelerator)
    prepared = DistributedModel(accelerator, logical, [model], [model])  # type: ignore[list-item]
    state = TrainingState(IDENTITY, DECISIONS, prepared, parameters, ema, accelerator.prepare(built), 2)
    state.scaler = Scaler(2.0**seed)
    if saved:
        state.load(saved)
    return state


def train(state: TrainingState, seed: int = 0) -> None:
    torch.manual_seed(seed)
    loss = state.copies[0](torch.rand(8, 3)).square().sum()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.ema.update(state.copies[0])
    state.loss_sums += loss.detach()
    state.progress.step += 1


def saved(state: TrainingState) -> dict[str, Any]:
    folder = Folder()
    state.save(folder)
    return folder.last()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_resumed_run_is_identical_bit_by_bit(optimizer: str) -> None:
    first = made(1, optimizer=optimizer)
    first.optimizer.param_groups[0]["lr"] = 0.025
    train(first)
    state = saved(first)
    assert " ".join(state) == KEYS
    second = made(2, state, optimizer)
    assert same(saved(second), state)
    for run in (first, second):
        train(run, seed=1)
    assert same(saved(second), saved(first))
    assert second.optimizer.param_groups[0]["lr"] == 0.025
    assert second.scaler.scale == 2.0


def test_a_run_without_a_scaler_loads_any_state() -> None:
    state = saved(made(1))
    assert Decisions(**state["decisions"]) == DECISIONS
    without = made(2)
    without.scaler = None
    without.load(state)
    assert saved(without)["scaler"] is None
    assert made(3, {**state, "scaler": None}).scaler.scale == 8.0


def test_a_run_is_saved_if_it_has_changed_and_finally_its_counters_only() -> None:
    run, folder = made(1), Folder()
    run.save(folder)
    run.progress.summary = Summary({}, 0.5, [], [])  # the summary never changes alone
    run.save(folder)
    assert len(folder.states) == 1
    run.progress.step += 1
    run.save(folder)
    assert folder.last()["progress"]["step"] == 1
    assert not folder.final
    run.progress.finished = True
    run.save(folder, keep_tensors=False)
    assert folder.final
    assert set(folder.last()) == {"format", *vars(IDENTITY), "decisions", "progress"}


# Several processes


def state_and_shares() -> tuple[dict[str, Any], list[Any]]:
    """Return the state of two processes whose sums and statistics differ, and the share that this process loads."""
    run = made(1)
    rank = run.collectives.local_part([0, 1], 1)[0]
    run.loss_sums += torch.tensor([1.0, 10.0]) * (rank + 1)
    run.copies[0].get_buffer("1.running_mean").fill_(1.0 + rank)
    run.ema.model.get_buffer("1.running_mean").fill_(3.0 + rank)
    state = saved(run)
    return state, share(state)


def share(state: dict[str, Any]) -> list[Any]:
    """Return what a process loads of the shares in a state."""
    run = made(2, state)
    mean, average = (float(model.get_buffer("1.running_mean")[0]) for model in (run.copies[0], run.ema.model))
    return [run.loss_sums[0].tolist(), mean, average]


def test_each_process_loads_its_share(on_processes: OnProcesses) -> None:
    (state, first), (other_state, second) = on_processes(2, state_and_shares)
    assert same(state["shares"], other_state["shares"])
    assert [part["totals"].tolist() for part in state["shares"]] == [[1.0, 10.0], [2.0, 20.0]]
    assert [first, second] == [[[1.0, 10.0], 1.0, 3.0], [[2.0, 20.0], 2.0, 4.0]]
    assert share(state) == [[3.0, 30.0], 1.5, 3.5]  # one process: the whole sums, the mean statistics


def test_the_mean_of_equal_statistics_is_exact() -> None:
    run = made(1)
    train(run)
    state = saved(run)
    state["shares"] = [copy.deepcopy(state["shares"][0]) for _ in range(3)]
    again = made(2, state)
    assert same(saved(again)["model"], state["model"])
    assert torch.equal(again.loss_sums, 3 * run.loss_sums)


# Classes and images


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, ""),
        ({"names": {0: "disc", 1: "bar", 2: "ring"}}, r"the classes \(3 then, 3 now"),
        ({"names": {**IDENTITY.names, 3: "dot"}}, r"the classes \(3 then, 4 now"),
        ({"imgsz": 128}, "--imgsz"),
        ({"splits": {"train": {**TRAIN, "count": "27"}, "val": VAL}}, "count of `train:`"),
        ({"splits": {"train": {**TRAIN, "labels": "c"}, "val": VAL}}, "labels of `train:`"),
        ({"splits": {"train": TRAIN, "val": {**VAL, "file sizes": "c"}}}, "file sizes of `val:`"),
    ],
)
def test_changed_classes_sizes_images_and_labels_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) if message else nullcontext():
        Identity(**{**vars(IDENTITY), **changed}).check(vars(IDENTITY))


# Progress


@pytest.mark.parametrize(
    ("fitness", "improved", "best", "patience", "stalled"),
    [
        # a fitness of 0 is better than none; the first of equals is the best
        ([0.0, 0.2, 0.2, 0.1, 0.3], [1, 1, 0, 0, 1], 4, 2, [0, 0, 0, 1, 0]),
        ([0.1, 0.5, 0.4, 0.5, 0.3], [1, 1, 0, 0, 0], 1, 3, [0, 0, 0, 0, 1]),
        ([0.5, 0.4, 0.6, 0.5], [1, 0, 1, 0], 2, 1, [0, 1, 0, 1]),
        ([math.nan, 0.1, math.nan], [0, 1, 0], 1, 0, [0, 0, 0]),
        ([-math.inf, -math.inf, -5.0], [1, 0, 1], 2, 0, [0, 0, 0]),
    ],
)
def test_the_best_epoch_and_patience(
    fitness: list[float], improved: list[int], best: int, patience: int, stalled: list[int]
) -> None:
    progress, ways = Progress(), []
    assert not progress.stalled(1)
    for epoch, value in enumerate(fitness):
        progress.epoch = epoch
        ways.append((progress.record(Summary({}, value, [], [])), progress.stalled(patience)))
    assert ways == list(zip(map(bool, improved), map(bool, stalled), strict=True))
    assert (progress.best, progress.best_epoch, progress.validated) == (fitness[best], best, len(fitness) - 1)
    progress.epoch += 1
    assert not progress.record(None)  # not validated
    assert progress.validated == len(fitness) - 1


def test_the_next_epoch_has_no_batches() -> None:
    progress = Progress(epoch=3, batch=7, step=40, best=0.5, best_epoch=2, validated=3, skipped=1, taken=6)
    assert "after batch 7" in str(progress)
    progress.next_epoch()
    assert progress == Progress(epoch=4, step=40, best=0.5, best_epoch=2, validated=3, skipped=1)


def test_the_progress_is_stored_as_plain_values() -> None:
    """They can be read with `weights_only=True`, -inf included, the best of a run without a validation."""
    summary = Summary({"mAP_0.5": 0.25}, 0.25, ["class images", "all 8"], ["disc 8"], {"val/box_loss": 0.1}, 9.5)
    for progress in (Progress(), Progress(epoch=10, finished=True, best=0.25, summary=summary)):
        state = torch.load(io.BytesIO(serialised(progress.state())), weights_only=True)
        assert Progress.from_state(state) == progress
