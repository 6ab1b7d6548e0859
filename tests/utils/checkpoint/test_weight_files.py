"""Weight files: written, and read by models/weights.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.weights import read_weights
from models.yolo import YoloModel, build_model
from tests.making import tiny_detector
from utils.checkpoint import serialised, weights_content
from utils.config.flags import TrainOptions

NAMES = {0: "disc", 1: "ring", 2: "bar"}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, YoloModel]:
    """Return a weight file and its model."""
    model = build_model(tiny_detector())
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


def test_half_precision(tmp_path: Path) -> None:
    """Numbers beyond its range keep their tensor in float32, and counts stay integers."""
    model = build_model(tiny_detector())
    name = next(name for name, _ in model.named_buffers() if name.endswith("running_var"))
    model.get_buffer(name).fill_(1e6)
    (tmp_path / "a.pt").write_bytes(serialised(weights_content(model, model.yaml, NAMES, {}, half=True)))
    stored = torch.load(tmp_path / "a.pt", weights_only=True)["state"]
    assert stored.pop(name).dtype == torch.float32
    assert {value.dtype for value in stored.values()} == {torch.float16, torch.int64}
    for key, value in read_weights(tmp_path / "a.pt").state.items():
        torch.testing.assert_close(value, model.state_dict()[key], atol=1e-7, rtol=1e-3)
