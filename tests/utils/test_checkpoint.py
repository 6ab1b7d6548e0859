"""Weight files of ours: written, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.weights import read_weights, transfer
from models.yolo import Model, build_model
from utils.checkpoint import write_weights
from utils.config import TrainOptions

NAMES = {0: "disc", 1: "ring", 2: "bar"}


@pytest.fixture
def written(tiny_yaml: dict[str, Any], tmp_path: Path) -> tuple[Path, Model]:
    """A file, and the model that was written into it."""
    model = build_model(tiny_yaml)
    path = tmp_path / "weights" / "last.pt"  # a folder that is yet to be made
    write_weights(path, model, model.yaml, NAMES, vars(TrainOptions()))
    return path, model


def test_round_trip(written: tuple[Path, Model]) -> None:
    path, model = written
    weights = read_weights(path)
    assert (weights.source, weights.task) == ("lockstep", "detect")
    assert weights.names == NAMES
    assert weights.model == model.yaml
    assert weights.settings == vars(TrainOptions())
    state = model.state_dict()
    assert weights.state.keys() == state.keys()
    assert all(torch.equal(weights.state[name], value) for name, value in state.items())


def test_the_file_is_enough_to_build_the_model(written: tuple[Path, Model]) -> None:
    path, model = written
    weights = read_weights(path)
    assert weights.model is not None
    again = build_model(weights.model)
    loaded, total = transfer(again, weights.state)
    assert loaded == total
    images = torch.rand(1, 3, 32, 32)
    model.eval(), again.eval()
    for one, other in zip(model(images), again(images), strict=True):
        assert torch.equal(one, other)


def test_torch_loads_it_without_running_code(written: tuple[Path, Model]) -> None:
    content = torch.load(written[0], weights_only=True)
    assert content["format"].startswith("lockstep-")
    assert not any(value.requires_grad for value in content["state"].values())


def test_nothing_is_left_beside_it(written: tuple[Path, Model]) -> None:
    assert [file.name for file in written[0].parent.iterdir()] == ["last.pt"]


def test_a_task_of_its_own(tiny_yaml: dict[str, Any], tmp_path: Path) -> None:
    write_weights(tmp_path / "a.pt", build_model(tiny_yaml), {**tiny_yaml, "task": "segment"}, NAMES, {})
    assert read_weights(tmp_path / "a.pt").task == "segment"


def test_a_failed_write_keeps_the_old_file(written: tuple[Path, Model]) -> None:
    path, model = written
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        write_weights(path, model, model.yaml, NAMES, {"broken": lambda: None})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]
