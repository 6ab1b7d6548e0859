"""Floating-point operations, computed by hand and as published."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.loading import gflops
from models.yolo import build_model


def test_a_convolution_by_hand() -> None:
    model = nn.Conv2d(3, 5, 3, padding=1)
    assert gflops(model, 10) == pytest.approx(2 * 3 * 5 * 9 * 100 / 1e9)
    assert next(model.parameters()).device.type == "cpu"
    assert model.training


@pytest.mark.parametrize(("name", "published"), [("yolov5n", 4.5), ("yolov5s", 16.5)])
def test_published_numbers(name: str, published: float) -> None:
    """They include normalisation and activations, half a percent."""
    model = build_model(f"{name}.yaml", nc=80)
    assert published - 0.1 < gflops(model, 640) < published


class Scaled(nn.Conv2d):
    """A layer with a buffer that no state dict contains."""

    def __init__(self) -> None:
        super().__init__(3, 5, 1)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * torch.stack((self.scale, self.scale)).sum()


def test_a_buffer_outside_of_the_state_dict_is_traced_too() -> None:
    model = Scaled()
    assert gflops(model, 10) == pytest.approx(2 * 3 * 5 * 100 / 1e9)
    assert model.scale == 1


class ReadsValues(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * float(images.sum())


def test_a_layer_that_cannot_be_traced_counts_as_zero() -> None:
    assert gflops(ReadsValues(), 8) == 0
