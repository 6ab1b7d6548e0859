"""Weight files, the state of a run, and its files."""

from __future__ import annotations

import copy
import errno
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from models.weights import read_weights
from models.yolo import build_model
from tests.conftest import OnProcesses
from tests.making import tiny_detector
from utils.checkpoint import (
    STATE_FORMAT,
    Identity,
    MeasuredConfig,
    Progress,
    StateFiles,
    TrainingState,
    serialise,
    weights_content,
)
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import Recipe
from utils.distributed.model import DistributedModel
from utils.distributed.ranks import ranks
from utils.distributed.tree import LogicalProcesses
from utils.errors import UserError
from utils.files import VERSION
from utils.run import RunFolder
from utils.summary import Summary
from utils.training.optimizer import ModelEMA, build_optimizer

NAMES = {0: "disc", 1: "ring", 2: "bar"}
TRAIN, VAL = ({"count": count, "file sizes": "aaaa", "labels": "bbbb"} for count in ("28", "8"))
IDENTITY = Identity(NAMES, 96, {"train": TRAIN, "val": VAL})
MEASURED = MeasuredConfig(batch_size=8, accumulation=2, known=0.5, run_id="abc")

# Weight files


def test_weights_are_read_as_they_were_written(tmp_path: Path) -> None:
    """In half precision numbers beyond its range keep their tensor in float32, and counts stay integers."""
    model = build_model(tiny_detector())
    name = next(name for name, _ in model.named_buffers() if name.endswith("running_var"))
    model.get_buffer(name).fill_(1e6)
    for half in (False, True):
        content = weights_content(model, model.yaml, NAMES, vars(TrainOptions()), half)
        (tmp_path / "a.pt").write_bytes(serialise(content))
        weights = read_weights(tmp_path / "a.pt")
        assert (weights.source, weights.task, weights.names, weights.model) == ("lockstep", "detect", NAMES, model.yaml)
        assert weights.settings == vars(TrainOptions())
        for key, value in weights.state.items():
            torch.testing.assert_close(value, model.state_dict()[key], atol=1e-7 * half, rtol=1e-3 * half)
    stored = torch.load(tmp_path / "a.pt", weights_only=True)["state"]
    assert stored.pop(name).dtype == torch.float32
    assert {value.dtype for value in stored.values()} == {torch.float16, torch.int64}


# The state of a run


class Folder(RunFolder):
    """Stores saved states as the bytes of a file."""

    def __init__(self) -> None:
        self.states: list[memoryview] = []

    def save_state(self, state: Any, final: bool = False) -> None:
        self.states.append(serialise(state))
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
    ema = ModelEMA(model)  # type: ignore[arg-type]
    if saved:
        model.load_state_dict(saved["model"])
        ema.load_state(saved)
    parameters = [parameter for group in built.param_groups for parameter in group["params"]]
    logical = LogicalProcesses.create(0, accelerator)
    prepared = DistributedModel(accelerator, logical, [model], [model])  # type: ignore[list-item]
    state = TrainingState(IDENTITY, MEASURED, prepared, parameters, ema, accelerator.prepare(built), 2)
    state.scaler = Scaler(2.0**seed)  # type: ignore[assignment]
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
    state.save(folder.save_state)
    return folder.last()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_resumed_run_is_identical_bit_by_bit(optimizer: str) -> None:
    first = made(1, optimizer=optimizer)
    first.optimizer.param_groups[0]["lr"] = 0.025
    train(first)
    state = saved(first)
    second = made(2, state, optimizer)
    assert same(saved(second), state)
    for run in (first, second):
        train(run, seed=1)
    assert same(saved(second), saved(first))
    assert (second.optimizer.param_groups[0]["lr"], second.scaler.scale) == (0.025, 2.0)  # type: ignore[union-attr]
    assert MeasuredConfig(**state["decisions"]) == MEASURED
    second.scaler = None  # a run without one loads any state
    second.load(state)
    assert saved(second)["scaler"] is None


def test_a_run_is_saved_if_it_has_changed_and_finally_its_counters_only() -> None:
    run, folder = made(1), Folder()
    run.save(folder.save_state)
    run.progress.summary = Summary({}, 0.5, [], [])  # the summary never changes alone
    run.save(folder.save_state)
    assert len(folder.states) == 1
    run.progress.step += 1
    run.save(folder.save_state)
    assert (folder.last()["progress"]["step"], folder.final) == (1, False)
    run.progress.finished = True
    run.save(folder.save_state, keep_tensors=False)
    assert folder.final
    assert set(folder.last()) == {"format", "version", *vars(IDENTITY), "decisions", "progress"}


def state_and_shares() -> tuple[dict[str, Any], list[Any]]:
    """Return the state of two processes whose sums and statistics differ, and the share that this process loads."""
    run = made(1)
    run.loss_sums += torch.tensor([1.0, 10.0]) * (ranks().rank + 1)
    run.copies[0].get_buffer("1.running_mean").fill_(1.0 + ranks().rank)
    run.ema.model.get_buffer("1.running_mean").fill_(3.0 + ranks().rank)
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


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["shares"][0].update(totals=torch.zeros(1)),  # of a run with fewer loss terms
        lambda state: state["shares"][0].update(totals=torch.zeros(3)),
        lambda state: state["shares"][0]["model"].update({"2.running_mean": torch.zeros(4)}),
        lambda state: state.pop("shares"),
        lambda state: state["progress"].update(laps=3),
        lambda state: state.update(version="7.8.9", shares=[]),
    ],
)
def test_a_state_that_does_not_fit(change: Callable[[dict[str, Any]], object]) -> None:
    state = saved(made(1))
    assert state.pop("version") == VERSION
    change(state)
    version = state.get("version", "that wrote it")
    with pytest.raises(UserError, match=rf"^the saved state does not fit .* Lockstep version {version}, .*last\.pt$"):
        made(2, state)


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


# Its files


def state_file(number: int) -> memoryview:
    return serialise({"format": STATE_FORMAT, "number": number, "weights": torch.full((1000,), float(number))})


@pytest.fixture
def states(tmp_path: Path) -> StateFiles:
    """The files of a run after three states were written."""
    states = StateFiles(tmp_path / "checkpoint")
    for number in range(3):
        states.write(state_file(number))
    return states


def read(states: StateFiles) -> int:
    """Return the number of the state that another process reads."""
    content = StateFiles(states.folder).read()
    assert content is not None
    assert content["weights"].eq(content["number"]).all()
    return int(content["number"])


def test_the_two_newest_states_remain_or_a_final_one(states: StateFiles) -> None:
    """Files of the user's are left alone."""
    mine = [states.folder / name for name in ("1abc-x.pt", "copy of 00000003-1.pt", "00000009-note.pt", "9999-ab.pt")]
    for file in mine:
        file.write_text("mine")
    assert read(states) == 2
    assert [file.name[:8] for file in states.files()] == ["00000003", "00000002"]
    states.write(state_file(3), final=True)
    assert [file.name[:8] for file in states.files()] == ["00000004"]
    assert read(states) == 3
    assert all(file.read_text() == "mine" for file in mine)
    assert StateFiles(states.folder / "nothing").read() is None


def flip(content: bytes) -> bytes:
    return content[:-500] + bytes([content[-500] ^ 1]) + content[-499:]


@pytest.mark.parametrize(
    "damage", [lambda content: content[:1000], flip, lambda content: b"", lambda content: content + b"0"]
)
def test_a_damaged_state_is_named_and_then_removed(
    states: StateFiles, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    newest, before = states.files()
    newest.write_bytes(damage(newest.read_bytes()))
    assert read(states) == 1
    assert capsys.readouterr().out.startswith(f"warning: {newest} ")
    again = StateFiles(states.folder)
    again.read(warns=False)
    again.write(state_file(7))
    assert read(states) == 7
    assert capsys.readouterr().out == ""
    assert before in again.files()
    assert newest not in again.files()
    for file in again.files():
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=before.name):
        read(states)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(errno.errorcode.get),
        b"PK\x03\x04 no archive",
        serialise([1, 2]),
        serialise({"format": "lockstep-state-0", "version": "7.8.9"}),
    ],
)
def test_other_files_are_refused_although_their_checksums_match(content: bytes, states: StateFiles) -> None:
    states.write(memoryview(content))
    with pytest.raises(
        UserError, match=rf"^{states.files()[0]} [^\n]*{'7.8.9' if b'7.8.9' in bytes(content) else ''}[^\n]*$"
    ):
        states.read()
