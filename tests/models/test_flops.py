"""The work of a model, by hand and by what is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from models.flops import gflops
from models.yolo import build_model
from tests.conftest import ROOT
from utils.files import read_yaml


def test_a_convolution_by_hand() -> None:
    model = nn.Conv2d(3, 5, 3, padding=1)
    assert gflops(model, 10) == pytest.approx(2 * 3 * 5 * 9 * 100 / 1e9)
    assert next(model.parameters()).device.type == "cpu"
    assert model.training


@pytest.mark.parametrize(("name", "published"), [("yolov5n", 4.5), ("yolov5s", 16.5)])
def test_published_numbers(name: str, published: float) -> None:
    """Published are convolutions and, half a percent more, normalisation and activations."""
    model = build_model(read_yaml(Path(ROOT / "models" / f"{name}.yaml")), nc=80)
    assert published - 0.1 < gflops(model, 640) < published


class Curious(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * float(images.sum())


def test_a_layer_that_cannot_be_traced() -> None:
    assert gflops(Curious(), 8) == 0
