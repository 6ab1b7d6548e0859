"""Weight files of ours and the states of a run: written, and read again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.weights.reader import read_weights
from models.weights.transfer import transfer
from models.yolo import YoloModel, build_model
from utils.checkpoint.state_files import STATE_FORMAT, States, serialised, weights_content
from utils.config.options import TrainOptions
from utils.errors import UserError

NAMES = {0: "disc", 1: "ring", 2: "bar"}


@pytest.fixture
def written(tiny_yaml: dict[str, Any], tmp_path: Path) -> tuple[Path, YoloModel]:
    """A file, and the model that was written into it."""
    model = build_model(tiny_yaml)
    path = tmp_path / "weights" / "last.pt"
    path.parent.mkdir()
    path.write_bytes(serialised(weights_content(model, model.yaml, NAMES, vars(TrainOptions()))))
    return path, model


def test_round_trip(written: tuple[Path, YoloModel]) -> None:
    path, model = written
    weights = read_weights(path)
    assert (weights.source, weights.task) == ("lockstep", "detect")
    assert weights.names == NAMES
    assert weights.model == model.yaml
    assert weights.settings == vars(TrainOptions())
    state = model.state_dict()
    assert weights.state.keys() == state.keys()
    assert all(torch.equal(weights.state[name], value) for name, value in state.items())


def test_the_file_is_enough_to_build_the_model(written: tuple[Path, YoloModel]) -> None:
    path, model = written
    weights = read_weights(path)
    assert weights.model is not None
    again = build_model(weights.model)
    loaded, total, misfits = transfer(again, weights.state)
    assert loaded == total
    assert misfits == []
    images = torch.rand(1, 3, 32, 32)
    model.eval(), again.eval()
    for one, other in zip(model(images), again(images), strict=True):
        assert torch.equal(one, other)


def test_torch_loads_it_without_running_code(written: tuple[Path, YoloModel]) -> None:
    content = torch.load(written[0], weights_only=True)
    assert content["format"].startswith("lockstep-")
    assert not any(value.requires_grad for value in content["state"].values())


def test_a_task_of_its_own(tiny_yaml: dict[str, Any], tmp_path: Path) -> None:
    content = weights_content(build_model(tiny_yaml), {**tiny_yaml, "task": "segment"}, NAMES, {})
    (tmp_path / "a.pt").write_bytes(serialised(content))
    assert read_weights(tmp_path / "a.pt").task == "segment"


# The states of a run


def state(number: int) -> memoryview:
    return serialised({"format": STATE_FORMAT, "number": number, "weights": torch.full((1000,), float(number))})


@pytest.fixture
def states(tmp_path: Path) -> States:
    """Three states were written; two are there."""
    states = States(tmp_path / "checkpoint")
    for number in range(3):
        states.write(state(number))
    return states


def read(states: States) -> tuple[int, list[str]]:
    """The number of the state that is read, by one who comes anew, and what was said."""
    said: list[str] = []
    content = States(states.folder).read(said.append)
    assert content is not None
    assert content["weights"].eq(content["number"]).all()
    return content["number"], said


def test_the_newest_state_and_the_one_before_are_kept(states: States) -> None:
    assert read(states) == (2, [])
    assert [file.name[:8] for file in states.files()] == ["00000003", "00000002"]


def cut(content: bytes) -> bytes:
    return content[:1000]


def flip(content: bytes) -> bytes:
    return content[:-500] + bytes([content[-500] ^ 1]) + content[-499:]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b"", lambda content: content + b"0"])
def test_a_damaged_state_is_recognised(states: States, damage: Callable[[bytes], bytes]) -> None:
    newest, before = states.files()
    newest.write_bytes(damage(newest.read_bytes()))
    number, said = read(states)
    assert number == 1
    assert len(said) == 1
    assert f"{newest} is damaged" in said[0]
    before.write_bytes(damage(before.read_bytes()))
    with pytest.raises(UserError, match=r"no state in .*checkpoint is whole"):
        read(states)


def test_a_damaged_state_goes_when_two_whole_ones_are_there(states: States) -> None:
    newest, before = states.files()
    newest.write_bytes(b"")
    again = States(states.folder)
    again.read(lambda said: None)
    again.write(state(7))
    assert before in again.files()
    assert newest not in again.files()
    assert read(states) == (7, [])


def test_a_state_that_cannot_be_written_leaves_those_before(states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    files = states.files()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        states.write(state(3))
    assert sorted(states.folder.iterdir(), reverse=True) == files
    assert read(states) == (2, [])


def test_states_of_another_version(states: States) -> None:
    states.write(serialised({"format": "lockstep-state-0"}))
    with pytest.raises(UserError, match="was written by another version, as lockstep-state-0"):
        read(states)


def test_peek(states: States, tmp_path: Path) -> None:
    newest = states.files()[0]
    newest.write_bytes(cut(newest.read_bytes()))
    found = states.peek()
    assert found is not None
    assert found["number"] == 1
    assert States(tmp_path / "nothing").peek() is None
    states.clear()
    assert states.peek() is None
    assert States(states.folder).read(print) is None
