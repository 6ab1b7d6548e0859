"""Models with BatchNorm folded into their convolutions: the same numbers from fewer layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from models.fuse import fuse
from models.weights.reader import read_weights
from models.weights.transfer import transfer
from models.yolo import YoloModel, build_model


def with_statistics(model: YoloModel) -> YoloModel:
    """The model with BatchNorm that has seen something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Of maps, relative to the largest number of each."""
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_it_computes_the_same(tiny_yaml: dict[str, Any]) -> None:
    model = with_statistics(build_model(tiny_yaml))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fused = fuse(model)
    images = torch.rand(2, 3, 32, 48)
    assert largest_difference(model(images), fused(images)) < 1e-5
    assert (norms(model), norms(fused)) == (3, 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_of_a_chain_what_stands_behind_a_convolution_is_folded() -> None:
    chain = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).eval()
    for k in (0, 2, 4):
        nn.init.uniform_(chain[k].running_var, 0.5, 2)
    fused, images = fuse(chain), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(chain(images), fused(images))
    assert [type(layer).__name__ for layer in fused] == ["BatchNorm2d", "Conv2d", "Identity", "ReLU", "BatchNorm2d"]


def test_weights_stay_as_they_lie_in_memory(tiny_yaml: dict[str, Any]) -> None:
    fused = fuse(build_model(tiny_yaml).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    assert fused.model[1].conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture
def photos_of(shared: Path) -> Tensor:
    """Four photos as images (4, 3, 320, 256) in 0 to 1."""
    files = sorted((shared / "data" / "coco128").rglob("*.jpg"))[:4]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB").resize((256, 320))) for file in files])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


@torch.no_grad()
def test_official_weights_on_photos(shared: Path, photos_of: Tensor) -> None:
    weights = read_weights(shared / "weights" / "yolov5n.pt")
    assert weights.model is not None
    model = build_model(weights.model, nc=80)
    transfer(model, weights.state)
    fused = fuse(model.eval())
    assert norms(fused) == 0
    assert largest_difference(model(photos_of), fused(photos_of)) < 1e-5
