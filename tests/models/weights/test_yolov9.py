"""Weights of the MIT implementation of YOLOv9: plain state dicts, and Lightning's checkpoints of its training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.loading import transfer
from models.weights import read_weights
from models.yolo import build_model
from tests.models.weights.files import Call
from utils.errors import UserError
from utils.files import ROOT, read_yaml

BINS = torch.arange(16.0).view(1, 16, 1, 1, 1)


def file_content(size: str, nc: int = 80, auxiliary: bool = True) -> dict[str, Tensor]:
    """Return a state dict as that implementation names it, of zeros in few bytes."""
    yaml = read_yaml(ROOT / "models" / f"yolov9{size}.yaml")
    with torch.device("meta"):
        model = build_model(yaml if auxiliary else {**yaml, "auxiliary": []}, nc=nc)
    state = {name.removeprefix("model."): zeros(tensor) for name, tensor in model.state_dict().items()}
    return {**state, **{f"22.heads.{level}.anc2vec.anc2vec.weight": BINS for level in range(3)}}


def zeros(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@pytest.mark.parametrize("size", ["t", "s", "m", "c"])
def test_a_state_dict(size: str, file: Path) -> None:
    """The model is recognised, and takes all tensors; the classes are COCO's."""
    torch.save(content := file_content(size), file)
    weights = read_weights(file)
    assert (weights.source, weights.task) == ("yolov9", "detect")
    shipped, width = read_yaml(ROOT / "models" / f"yolov9{size}.yaml"), {"t": 128, "s": 128, "m": 240, "c": 256}[size]
    shipped["head"][-1][3] = ["nc", width]
    shipped["auxiliary"][-1][3] = ["nc", 512 if size == "c" else width]
    assert weights.model == {"task": "detect", **shipped}
    assert (len(weights.names), weights.names[0], weights.names[79]) == (80, "person", "toothbrush")
    with torch.device("meta"):
        model = build_model(weights.model)
    assert set(model.state_dict()) == set(weights.state)
    assert all(weights.state[name].shape == tensor.shape for name, tensor in model.state_dict().items())
    assert len(weights.state) == len(content) - 3


def test_a_file_without_its_auxiliary_branch_and_with_other_classes(file: Path) -> None:
    torch.save(file_content("t", nc=5, auxiliary=False), file)
    weights = read_weights(file)
    assert weights.model is not None
    assert (weights.model["nc"], weights.names) == (5, {})
    assert set(weights.class_names) == set(range(5))
    used = {key: rows for key, rows in weights.model.items() if key != "auxiliary"}
    assert transfer(model := build_model(used), weights.state)[:2] == (len(model.state_dict()),) * 2


def test_a_model_for_other_classes_takes_all_but_the_class_rows(file: Path) -> None:
    torch.save(file_content("t"), file)
    weights = read_weights(file)
    assert weights.model is not None
    model = build_model(weights.model, nc=2)
    misfits = transfer(model, weights.state).misfits
    rows = [f"model.{row}.heads.{level}.class_conv.2" for row in (22, 30) for level in range(3)]
    assert {name for name, *_ in misfits} == {f"{row}.{part}" for row in rows for part in ("weight", "bias")}


def checkpoint(size: str, **more: Any) -> dict[str, Any]:
    """Return the content of a Lightning checkpoint; the biases of its EMA are 1."""
    network = file_content(size)

    def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}

    return {"epoch": 3, "state_dict": prefixed("model.model.", network), "optimizer_states": [{}], **more}


def test_a_lightning_checkpoint(file: Path) -> None:
    torch.save(checkpoint("t", hyper_parameters={"path": Path("x")}), file)  # a Path, which torch.load refuses
    weights = read_weights(file)
    assert weights.source == "yolov9"
    assert weights.model is not None
    assert transfer(model := build_model(weights.model), weights.state)[:2] == (len(model.state_dict()),) * 2


def test_the_ema_of_a_lightning_checkpoint_counts(file: Path) -> None:
    content = checkpoint("t")
    tensors = content["state_dict"]
    ema = {name.replace("model.model.", "ema.model."): tensor + 1 for name, tensor in tensors.items()}
    torch.save({**content, "state_dict": {**tensors, **ema, "metric.count": torch.ones(1)}}, file)
    assert read_weights(file).state["model.0.conv.weight"].eq(1).all()


def test_a_checkpoint_that_would_run_code_is_refused(file: Path) -> None:
    torch.save(checkpoint("t", callbacks=Call(print, "run")), file)
    with pytest.raises(UserError, match=re.escape("was refused, and nothing in it was run: it names 'builtins.print'")):
        read_weights(file)


def test_layers_of_no_shipped_model(file: Path) -> None:
    """Their tensors are read; train.py needs --cfg."""
    content = {"0.conv.weight": torch.zeros(24, 3, 3, 3), "1.heads.0.class_conv.2.weight": torch.zeros(4, 8, 1, 1)}
    torch.save(content, file)
    weights = read_weights(file)
    assert (weights.model, list(weights.state)) == (None, [f"model.{name}" for name in content])
